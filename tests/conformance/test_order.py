"""Pay, then draw, then release, in every step of every method; and all at one and the same rate."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import xcal
import xcal.dp.distributed
import xcal.dp.mechanism
from method_cases import BASE, CASES
from support import ROOT
from xcal.dp.ledger.ledger import Ledger
from xcal.dp.ledger.rows import Charge, read_rows
from xcal.federation.files import read_json
from xcal.methods.client_data import LocalData


@pytest.mark.parametrize(("method", "options"), CASES)
def test_a_step_is_paid_for_then_drawn_then_released(
    method: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, str, Any]] = []
    charge, draw = Ledger.charge, LocalData.draw
    mechanism = xcal.dp.mechanism
    tensors, scalar = mechanism.release_tensors, mechanism.release_scalar

    def pays(self: Ledger, charged: Charge) -> None:
        charge(self, charged)
        # Another reader sees it: it is on disk before anything is drawn.
        last = read_rows(self.path)[-1]
        assert (last.kind, last.body["round"], last.body["step"]) == (
            "charge",
            charged.round,
            charged.step,
        )
        events.append(("pay", self.path.parent.name, charged))

    def draws(self: LocalData, rate: float, noise: Any, key: Any) -> Any:
        events.append(("draw", key.client, (rate, key.round, key.step)))
        return draw(self, rate, noise, key)

    def lets_go(real: Any) -> Any:
        def release(value: Any, scale: float, noise: Any, key: Any) -> Any:
            events.append(("release", key.client, (key.block, scale, key.round, key.step)))
            return real(value, scale, noise, key)

        return release

    def whole(value: Any, part: Any, grid: Any, noise: Any, key: Any) -> Any:
        deviation = grid.scale / grid.fineness(part)
        events.append(("release", key.client, (key.block, deviation, key.round, key.step)))
        return in_whole_numbers(value, part, grid, noise, key)

    in_whole_numbers = xcal.dp.distributed.release_whole
    monkeypatch.setattr(xcal.dp.distributed, "release_whole", whole)
    monkeypatch.setattr(Ledger, "charge", pays)
    monkeypatch.setattr(LocalData, "draw", draws)
    monkeypatch.setattr(mechanism, "release_tensors", lets_go(tensors))
    monkeypatch.setattr(mechanism, "release_scalar", lets_go(scalar))
    keys = {**BASE, **options, "data": "support:tiny", "noise": "seeded"}
    xcal.run(tmp_path / "run", method=method, **keys)
    plans = read_json(tmp_path / "run" / "plans.json")
    assert {who for _, who, _ in events} == {"0", "1"}
    for client in ("0", "1"):
        mine = [(what, value) for what, who, value in events if who == client]
        starts = [k for k, (what, _) in enumerate(mine) if what == "pay"]
        assert starts[0] == 0
        for first, after in zip(starts, [*starts[1:], len(mine)], strict=True):
            (_, paid), *rest = mine[first:after]
            assert [what for what, _ in rest] == ["draw"] + ["release"] * len(paid.releases)
            rate, *when = rest[0][1]
            assert rate == paid.rate == plans[client]["sample_rate"]
            assert tuple(when) == (paid.round, paid.step)
            released = {name: scale for _, (name, scale, *_) in rest[1:]}
            declared = {r.name: r.noise for r in paid.releases}
            assert released.keys() == declared.keys()
            assert all(released[name] >= declared[name] for name in declared)
            if method != "xcal-paper":  # which may add more noise than it paid for
                assert released == declared


def test_only_the_mechanism_and_what_has_no_guarantee_call_the_release_functions() -> None:
    source = ROOT / "src" / "xcal"
    callers = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "xcal.dp.noise"
        if {alias.name for alias in node.names} & {"release_tensors", "release_scalar"}
    }
    # The demo times a step on made-up pixels: nobody is promised anything there.
    assert callers == {"dp/mechanism.py", "methods/agp.py", "cli/demo_speed.py"}
