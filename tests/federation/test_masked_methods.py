"""Methods whose step is one sum, under masks: what is summed, charged and made of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import xcal
from federation.test_masked_runs import KEYS, Spy, Stop, charges, ledgers, model_of, same
from xcal.dp.accounting import reference_cost
from xcal.dp.distributed import ChargedShare
from xcal.dp.ledger.rows import charges_of, read_rows, runs_of, verify
from xcal.federation.masked import MaskedRounds
from xcal.federation.masks import MaskKeys
from xcal.methods.adaptive_clip import QuantileRule

CHANNELS = {"protected": 0.25, "protection": 4.0}
METHODS: dict[str, dict[str, Any]] = {"adaptive-clip": {}, "agp-dp": CHANNELS, "xcal": {}}


def trace_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(x) for x in (folder / "trace.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_masked_run_of_it_is_the_run_without_masks_and_its_ledger_is_recomputed(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {**KEYS, "method": method, **METHODS[method]}
    result = xcal.run(tmp_path / "masked", **keys)
    with monkeypatch.context() as patch:
        patch.setattr(
            MaskKeys, "_stream", lambda self, attempt, grid, peer: np.zeros(grid.size, np.uint64)
        )
        xcal.run(tmp_path / "plain", **keys)
    assert same(tmp_path / "masked", tmp_path / "plain")
    assert (result["epsilon_masked"], result["honest"]) == (8.0, 2)
    assert charges(tmp_path / "masked") == [3, 3, 3]
    for path in ledgers(tmp_path / "masked"):
        assert verify(path).ok
        rows = read_rows(path)
        (run,) = runs_of(rows).values()
        assert run.order == int(run.order) and run.accountant == "renyi" and run.honest == 2
        for charge in charges_of(rows, run.run):
            names = [r.name for r in charge.releases]
            assert names == ["gradient", "count"][: 2 if method == "adaptive-clip" else 1]
            # all parts together, from what the ledger says of each
            joint = sum((r.sensitivity / r.noise) ** 2 for r in charge.releases) ** -0.5
            assert joint == pytest.approx(charge.sigma, rel=1e-9)
            assert charge.cost >= reference_cost(charge.rate, joint, run.order) * (1 - 1e-9)


@pytest.mark.slow
def test_the_clipping_norm_follows_the_sum_of_all_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {**KEYS, "method": "adaptive-clip", "rounds": 4}
    spy = Spy(monkeypatch)
    xcal.run(tmp_path / "run", **keys)
    clip, rule = 1.0, QuantileRule()
    for number in range(4):
        used = {r["clip"] for r in trace_of(tmp_path / "run") if r["round"] == number}
        assert used == {clip}  # one C at all sites
        grid = spy.sent[3 * number][1]
        assert [p.sensitivity for p in grid.parts] == [clip, 0.5]
        total = sum(int(v[-1]) for v in spy.given[3 * number : 3 * number + 3])
        share = 0.5 + total / grid.fineness(grid.parts[1]) / (3 * 10)
        clip = rule.following(clip, share)
    assert clip != 1.0


@pytest.mark.slow
@pytest.mark.parametrize("call", [5, 6])
def test_a_run_cut_off_goes_on_with_the_clipping_norm_of_its_round(
    call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In mid-attempt of the second round, or after its sum and before its checkpoint."""
    keys = {**KEYS, "method": "adaptive-clip"}
    xcal.run(tmp_path / "whole", **keys)
    mask, step, calls = MaskKeys.mask, MaskedRounds._step, [0]

    def failing(own: MaskKeys, *rest: Any) -> Any:
        calls[0] += 1
        if calls[0] == call == 5:
            raise Stop
        return mask(own, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(MaskKeys, "mask", failing)
        if call == 6:
            from xcal.federation import coordinator

            save = coordinator.save_checkpoint

            def unsaved(folder: Any, state: Any) -> None:
                if state.rounds == 2:
                    raise Stop
                save(folder, state)

            patch.setattr(coordinator, "save_checkpoint", unsaved)
        with pytest.raises(Stop):
            xcal.run(tmp_path / "cut", **keys)
    assert step is MaskedRounds._step
    xcal.run(tmp_path / "cut", resume=True)
    assert same(tmp_path / "whole", tmp_path / "cut")
    assert [r["clip"] for r in trace_of(tmp_path / "cut")] == [
        r["clip"] for r in trace_of(tmp_path / "whole")
    ]
    assert charges(tmp_path / "cut") == [3, 3, 3]


@pytest.mark.slow
def test_channels_get_less_noise_where_the_geometry_says_and_one_scale_in_whole_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nothing drawn the step is noise alone: σC/d on the sum of every block."""
    contribute = ChargedShare.contribute

    def nobody(charged: ChargedShare, values: Any, **options: Any) -> Any:
        return contribute(charged, {k: v * 0 for k, v in values.items()}, **options)

    monkeypatch.setattr(ChargedShare, "contribute", nobody)
    steps: list[tuple[Any, Any]] = []
    original = MaskedRounds._step

    def stepping(rounds: MaskedRounds, weights: Any, *rest: Any) -> Any:
        after, clip = original(rounds, weights, *rest)
        steps.append((weights, after))
        return after, clip

    monkeypatch.setattr(MaskedRounds, "_step", stepping)
    keys = {**KEYS, "method": "agp-dp", **CHANNELS, "rounds": 30, "lr": 1.0}
    spy = Spy(monkeypatch)
    xcal.run(tmp_path / "run", **keys)
    grid = spy.sent[0][1]
    # Of 8 channels two are spared: d = low for the others, 4·low for them.
    low = math.sqrt(0.75 + 0.25 / 16)
    moved = [(b["conv.weight"] - a["conv.weight"]).reshape(8, -1) for b, a in steps]
    noise = torch.stack([m.std(dim=1) for m in moved]).sort(dim=1).values.mean(dim=0)
    # Three of three sites add theirs, and two are counted on: √(3/2) of σC.
    one = grid.sigma * math.sqrt(3 / 2) / 30
    assert noise[2:].mean() == pytest.approx(one / low, rel=0.05)
    assert noise[:2].mean() == pytest.approx(one / (4 * low), rel=0.1)
    shares = np.stack(spy.given).astype(float).std(axis=0)
    assert shares.mean() == pytest.approx(grid.scale, rel=0.05)  # one deviation everywhere
    assert model_of(tmp_path / "run")
