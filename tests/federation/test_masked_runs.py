"""`trust = "masked"` from what the user types: the model, the ledgers, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import xcal
from commands import xcal_process
from support import ROOT, TINY, sets
from xcal.dp.accounting import reference_cost
from xcal.dp.distributed import ChargedShare, DistributedGrid
from xcal.dp.ledger.rows import charges_of, read_rows, runs_of, verify
from xcal.errors import UserError
from xcal.experiments import make_experiment
from xcal.federation import masked, masks
from xcal.federation.exchange import Question
from xcal.federation.files import read_tensors
from xcal.federation.masked import MaskedRounds
from xcal.federation.masks import MaskKeys
from xcal.federation.setup import prepare

KEYS: dict[str, Any] = {
    **TINY,
    "method": "fl-dp",
    "trust": "masked",
    "rounds": 3,
    "road_images": 0,
    "road_test_images": 0,
}


def model_of(folder: Path) -> dict[str, torch.Tensor]:
    found = read_tensors(folder / "checkpoint.safetensors")
    assert found is not None
    return {k: v for k, v in found[0].items() if k.startswith("global/")}


def same(one: Path, other: Path) -> bool:
    a, b = model_of(one), model_of(other)
    return all(torch.equal(a[k], b[k]) for k in a) and set(a) == set(b)


def ledgers(folder: Path) -> list[Path]:
    return sorted((folder / "clients").glob("*/ledger.sqlite"))


def charges(folder: Path) -> list[int]:
    found = []
    for path in ledgers(folder):
        rows = read_rows(path)
        found.append(sum(len(charges_of(rows, run)) for run in runs_of(rows)))
    return found


class Spy:
    """What sites gave and sent, before and under their masks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: list[np.ndarray] = []
        self.sent: list[tuple[masks.Attempt, DistributedGrid, masks.Masked]] = []
        contribute, mask = ChargedShare.contribute, MaskKeys.mask

        def spying(charged: ChargedShare, *values: Any, **options: Any) -> np.ndarray:
            numbers = contribute(charged, *values, **options)
            self.given.append(numbers)
            return numbers

        def masking(
            keys: MaskKeys, attempt: Any, grid: Any, numbers: Any, *keep: Any
        ) -> masks.Masked:
            message = mask(keys, attempt, grid, numbers, *keep)
            self.sent.append((attempt, grid, message))
            return message

        monkeypatch.setattr(ChargedShare, "contribute", spying)
        monkeypatch.setattr(MaskKeys, "mask", masking)


@pytest.mark.slow
def test_a_run_under_masks_is_the_run_without_them_and_paid_for_once_a_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        spy = Spy(patch)
        result = xcal.run(tmp_path / "masked", **KEYS)
    # The same noise, and no masks at all: the same model to the bit.
    with monkeypatch.context() as patch:
        patch.setattr(
            MaskKeys, "_stream", lambda self, attempt, grid, peer: np.zeros(grid.size, np.uint64)
        )
        plain = Spy(patch)
        xcal.run(tmp_path / "plain", **KEYS)
    assert same(tmp_path / "masked", tmp_path / "plain")
    assert all(np.array_equal(a, b) for a, b in zip(spy.given, plain.given, strict=True))
    attempt, grid, _ = spy.sent[-1]
    assert attempt.round == 2 and grid.honest == 2 and grid.sites == 3
    # What travels is uniform, all of it together and each site's; what was given is not.
    seen = np.frombuffer(b"".join(m.numbers for _, _, m in spy.sent), dtype=np.uint8)
    assert stats.chisquare(np.bincount(seen, minlength=256)).pvalue > 1e-6
    for round_number in range(3):
        parts = [(g, m) for a, g, m in spy.sent if a.round == round_number]
        total = sum(g.unpack(m.numbers) for g, m in parts) & grid.mask
        given = sum(spy.given[3 * round_number : 3 * round_number + 3])
        assert np.array_equal(total, grid.wrap(given))
    # Ledgers: one charge a round, at a whole order, recomputed by dp-accounting alone.
    assert charges(tmp_path / "masked") == [3, 3, 3]
    for path in ledgers(tmp_path / "masked"):
        assert verify(path).ok
        rows = read_rows(path)
        (run,) = runs_of(rows).values()
        assert run.honest == 2 and run.order == int(run.order) and run.accountant == "renyi"
        for charge in charges_of(rows, run.run):
            (release,) = charge.releases
            assert release.noise / release.sensitivity == pytest.approx(charge.sigma)
            assert 1.0 < release.sensitivity < 1.002  # C and what rounding may add
            assert charge.cost >= reference_cost(charge.rate, charge.sigma, run.order) * (1 - 1e-9)
    # Another guarantee: columns of its own, and a statement that says what it rests on.
    assert result["epsilon_target"] is None
    assert (result["epsilon_masked"], result["honest"]) == (8.0, 2)
    assert all(0 < c["epsilon_spent"] <= 8.0 for c in result["clients"])
    statement = json.loads((tmp_path / "masked" / "statement.json").read_text())
    assert (statement["trust"], statement["sites"], statement["honest"]) == ("masked", 3, 2)
    assert "2 honest ones of 3" in statement["promise"]
    assert not list((tmp_path / "masked").rglob(masks.KEY))  # the run's secrets are gone


@pytest.mark.slow
def test_each_step_is_the_sum_over_the_expected_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = Spy(monkeypatch)
    steps: list[tuple[Any, Any]] = []
    original = MaskedRounds._step

    def stepping(rounds: MaskedRounds, weights: Any, *rest: Any) -> Any:
        after, clip = original(rounds, weights, *rest)
        steps.append((weights, after))
        return after, clip

    monkeypatch.setattr(MaskedRounds, "_step", stepping)
    xcal.run(tmp_path / "run", **KEYS)
    assert len(steps) == 3
    for number, (before, after) in enumerate(steps):
        grid = spy.sent[3 * number][1]
        total = sum(spy.given[3 * number : 3 * number + 3]) / grid.fineness(grid.parts[0])
        flat = torch.cat([before[n].reshape(-1) for n in sorted(before)]).double()
        expected = flat - 0.5 * torch.from_numpy(total) / (3 * 10)
        found = torch.cat([after[n].reshape(-1) for n in sorted(after)]).double()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    kept = model_of(tmp_path / "run")
    for name, value in steps[-1][1].items():
        assert torch.equal(kept[f"global/{name}"], value)


class Stop(Exception):
    """As if the machine went away."""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["before", "after"])
def test_a_run_cut_off_in_mid_attempt_ends_as_if_it_never_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Two of three sites have answered; the third has paid, and its message is sent or not."""
    xcal.run(tmp_path / "whole", **KEYS)
    mask, calls = MaskKeys.mask, [0]

    def failing(keys: MaskKeys, *rest: Any) -> masks.Masked:
        calls[0] += 1
        if calls[0] == 6 and where == "before":
            raise Stop
        message = mask(keys, *rest)
        if calls[0] == 6:
            raise Stop
        return message

    with monkeypatch.context() as patch:
        patch.setattr(MaskKeys, "mask", failing)
        with pytest.raises(Stop):
            xcal.run(tmp_path / "cut", **KEYS)
    xcal.run(tmp_path / "cut", resume=True)
    assert same(tmp_path / "whole", tmp_path / "cut")
    assert charges(tmp_path / "cut") == [3, 3, 3]
    assert all(verify(path).ok for path in ledgers(tmp_path / "cut"))


@pytest.mark.slow
def test_secure_noise_pays_again_for_what_was_lost_and_never_sends_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {**KEYS, "noise": "secure"}
    mask, calls = MaskKeys.mask, [0]

    def failing(own: MaskKeys, *rest: Any) -> masks.Masked:
        calls[0] += 1
        if calls[0] == 3:
            raise Stop
        return mask(own, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(MaskKeys, "mask", failing)
        with pytest.raises(Stop):
            xcal.run(tmp_path / "run", **keys)
    assert charges(tmp_path / "run") == [1, 1, 1]
    spy = Spy(monkeypatch)
    result = xcal.run(tmp_path / "run", resume=True)
    # Sites 0 and 1 gave their stored messages again; site 2 paid for a second draw, and its budget
    # ends a round early: the last sum is void, and whoever was asked for it has paid.
    assert len({(a.context, m.site) for a, _, m in spy.sent}) == len(spy.sent)
    assert charges(tmp_path / "run") == [3, 3, 3]
    assert [c["halted"] for c in result["clients"]] == [True, True, True]
    assert all(verify(path).ok for path in ledgers(tmp_path / "run"))
    records = [json.loads(x) for x in (tmp_path / "run/rounds.jsonl").read_text().splitlines()]
    assert [r["answered"] for r in records] == [3, 3, 0]


class Patchy:
    """A transport that loses a site's answer at one attempt."""

    def __init__(self, inner: Any, lost: str) -> None:
        self._inner, self._lost = inner, lost

    def ask(self, t: int, questions: list[Question], timeout: float | None) -> dict[str, Any]:
        answers = dict(self._inner.ask(t, questions, timeout))
        if t == 1 and self._lost in answers:
            answers[self._lost] = None
        return answers

    def late(self) -> list[str]:
        return []


@pytest.mark.slow
def test_without_a_site_the_attempt_is_void_and_the_rest_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {**KEYS, "clients": 4, "honest": 3, "batch": 5, "rounds": 2}
    spy = Spy(monkeypatch)
    init = MaskedRounds.__init__

    def patchy(rounds: MaskedRounds, inner: Any, *rest: Any, **options: Any) -> None:
        init(rounds, Patchy(inner, "3"), *rest, **options)

    monkeypatch.setattr(MaskedRounds, "__init__", patchy)
    # Two charges in two rounds are planned: with a void attempt between, those who were asked
    # twice have nothing left, and the round is not made.
    xcal.run(tmp_path / "run", **keys)
    records = [json.loads(x) for x in (tmp_path / "run/rounds.jsonl").read_text().splitlines()]
    assert [(r["answered"], r["missing"]) for r in records] == [(4, []), (0, ["3"])]
    assert charges(tmp_path / "run") == [2, 2, 2, 2]
    assert [(a.round, a.number, len(a.sites)) for a, _, _ in spy.sent] == [
        (0, 0, 4),
        (0, 0, 4),
        (0, 0, 4),
        (0, 0, 4),
        (1, 0, 4),
        (1, 0, 4),
        (1, 0, 4),
        (1, 0, 4),
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "xcal-steered"}, "choose fl-dp"),
        ({"method": "adaptive-clip", "level": "client"}, "choose fl-dp"),
        ({"method": "adap-dpfl"}, "choose fl-dp, agp-dp, adaptive-clip, xcal, or trust"),
        ({"method": "xcal-paper"}, "choose fl-dp"),
        ({"method": "dp-fedavg"}, "choose fl-dp"),
        ({"method": "fl"}, "choose fl-dp"),
        ({"clients": 2}, "at least 3 clients"),
        ({"honest": 1}, "more than half"),
        ({"honest": 3}, "not all"),
        ({"participants": 2}, "leave participants out"),
        ({"quorum": 1}, "leave quorum out"),
        ({"local_epochs": 2}, "leave local_epochs out"),
        ({"optimizer": "adam"}, "leave optimizer out"),
        ({"aggregation": "median"}, "leave aggregation out"),
        ({"average_steps": 0.5}, "leave average_steps out"),
        ({"trust": "site", "honest": 2}, "leave it out"),
        ({"trust": "server"}, "trust"),
    ],
)
def test_what_masks_do_not_carry_is_refused_in_a_sentence(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=words):
        xcal.run(tmp_path / "run", **{**KEYS, **changes})
    assert not (tmp_path / "run").exists()


def test_sites_given_by_path_are_refused_before_anything_is_made() -> None:
    with pytest.raises(UserError, match="simulations"):
        prepare(make_experiment({**KEYS, "sites": ["a", "b", "c"]}))


def test_keys_of_older_runs_stay_what_they_were() -> None:
    plain = make_experiment(TINY)
    assert not {"trust", "honest"} & (set(plain.resolved()) | set(plain.identity()))
    assert make_experiment(KEYS).identity()["trust"] == "masked"


@pytest.mark.slow
def test_the_command_refuses_with_code_2_and_leaves_nothing(tmp_path: Path) -> None:
    words = sets(**{k: v for k, v in KEYS.items() if TINY.get(k) != v}, clients=2)
    found = xcal_process("run", "--out", str(tmp_path / "run"), *words, cwd=ROOT)
    assert found.returncode == 2
    assert "at least 3 clients" in " ".join(found.stderr.split())
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_site_refuses_a_sum_with_less_noise_than_it_plans_or_of_other_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, refused = masked.SumRequest, []
    changes: list[Any] = [
        lambda s: replace(s, sigma=s.sigma * 0.99),  # also: terms of another sum
        lambda s: replace(s, units=10),
        lambda s: replace(s, attempt=replace(s.attempt, terms="0" * 64)),
        lambda s: replace(s, attempt=replace(s.attempt, sites=("0", "1"))),
        lambda s: replace(s, attempt=replace(s.attempt, round=7)),
    ]
    for number, change in enumerate(changes):
        with monkeypatch.context() as patch:
            patch.setattr(masked, "SumRequest", lambda *v, change=change: change(begun(*v)))
            with pytest.raises(UserError) as error:
                xcal.run(tmp_path / f"{number}", **KEYS)
            refused.append(str(error.value))
        assert charges(tmp_path / f"{number}") in ([0, 0, 0], [1, 1, 0])
    assert len(refused) == len(changes)


def noise_seen(honest: int, sites: int, share_of: int) -> float:
    """The deviation of what is left of all noise once colluders took theirs off, over σC."""
    from xcal.dp.distributed import Part
    from xcal.dp.noise import NoiseKey, SecureNoise

    grid = DistributedGrid((Part("gradient", 20_000, 1.0, 2.0),), sites, share_of, 100)
    noise = SecureNoise()
    total = sum(
        noise.discrete_normals(NoiseKey("", "", 0, k, "share"), grid.size, grid.scale)
        for k in range(honest)
    )
    return float(np.std(total)) / grid.fineness(grid.parts[0]) / 2.0


def test_server_and_colluders_see_the_noise_that_was_charged_and_by_n_they_would_not() -> None:
    sites, honest = 9, 5
    assert noise_seen(honest, sites, honest) == pytest.approx(1.0, rel=0.03)
    mutant = noise_seen(honest, sites, sites)  # a share by N
    assert mutant == pytest.approx(math.sqrt(honest / sites), rel=0.03)
    assert mutant < 0.8


@pytest.mark.slow
def test_mutants_a_key_for_all_attempts_and_a_grid_after_the_noise_would_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A key for all attempts: two messages would differ by the difference of what was given.
    original = MaskKeys._stream

    def reused(keys: MaskKeys, attempt: Any, grid: Any, peer: str) -> Any:
        return original(keys, replace(attempt, round=0, number=0, terms=""), grid, peer)

    with monkeypatch.context() as patch:
        patch.setattr(MaskKeys, "_stream", reused)
        spy = Spy(patch)
        xcal.run(tmp_path / "mutant", **KEYS)
        grid = spy.sent[0][1]
        leak = grid.unpack(spy.sent[3][2].numbers) - grid.unpack(spy.sent[0][2].numbers)
        assert np.array_equal(leak & grid.mask, grid.wrap(spy.given[3] - spy.given[0]))
    spy = Spy(monkeypatch)
    xcal.run(tmp_path / "run", **KEYS)
    leak = grid.unpack(spy.sent[3][2].numbers) - grid.unpack(spy.sent[0][2].numbers)
    assert not np.array_equal(leak & grid.mask, grid.wrap(spy.given[3] - spy.given[0]))
    data = np.frombuffer(grid.pack(leak & grid.mask), np.uint8)
    assert stats.chisquare(np.bincount(data, minlength=256)).pvalue > 1e-6
    # All that is given are whole numbers: noise in floats with a grid behind it could not be.
    assert all(numbers.dtype == np.int64 for numbers in spy.given)
