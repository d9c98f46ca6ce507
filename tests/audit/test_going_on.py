"""An interrupted audit goes on where it stopped, and only where it is the same audit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from xcal.audit import suite as module
from xcal.audit.inversion import Inverted
from xcal.audit.suite import QUICK, Suite

METHODS = ["fl", "fl-dp", "xcal-steered"]


class _Member:
    broken = False

    def __init__(self, method: str) -> None:
        self.method = method

    def as_dict(self) -> dict[str, Any]:
        return {"method": self.method, "attack": "loss"}


class _Attacker:
    """Stands for the attack itself, which is slow; is interrupted when it comes to `stops_at`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, commit: str = "0a1b2c") -> None:
        self.asked: list[Any] = []
        self.stops_at: Any = None
        monkeypatch.setattr(module, "infer_membership", self._members)
        monkeypatch.setattr(module, "invert_all", self._invert)
        monkeypatch.setattr(module, "draw_inversion", lambda *_: None)
        monkeypatch.setattr(module, "commit", lambda: commit)

    def _come_to(self, what: Any) -> None:
        if what == self.stops_at:
            raise KeyboardInterrupt
        self.asked.append(what)

    def _members(self, experiment: Any, *_: Any, **__: Any) -> list[_Member]:
        self._come_to(experiment.method)
        return [_Member(experiment.method)]

    def _invert(self, *_: Any, **keys: Any) -> list[Inverted]:
        (epsilon,) = keys["epsilons"]
        self._come_to((keys["network"], epsilon))
        picture = torch.full((1, 3, 4, 4), 0.5)
        one = ("one step", keys["network"], epsilon, "dlg", (12.345678,), (0.5,))
        return [Inverted(*one, originals=picture, found=picture)]


def test_what_was_found_before_an_interruption_is_not_worked_on_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attacker = _Attacker(monkeypatch)
    attacker.stops_at = "xcal-steered"
    with pytest.raises(KeyboardInterrupt):
        Suite({}, METHODS, QUICK).run(["membership"], tmp_path)
    assert attacker.asked == ["fl", "fl-dp"]
    assert not (tmp_path / "audit.json").exists()

    attacker.stops_at, attacker.asked = None, []
    found = Suite({}, METHODS, QUICK).run(["membership"], tmp_path)
    assert attacker.asked == ["xcal-steered"]
    assert [row["method"] for row in found["membership"]] == METHODS
    assert not (tmp_path / "parts").exists()

    attacker.asked = []  # a finished audit is begun anew
    again = Suite({}, METHODS, QUICK).run(["membership"], tmp_path)
    assert attacker.asked == METHODS
    assert again["membership"] == found["membership"]


def test_reconstructions_are_kept_with_their_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attacker = _Attacker(monkeypatch)
    attacker.stops_at = ("small", None)
    with pytest.raises(KeyboardInterrupt):
        Suite({}, [], QUICK).run(["inversion"], tmp_path)
    first = list(attacker.asked)
    assert [epsilon for _, epsilon in first] == list(QUICK.levels)

    attacker.stops_at, attacker.asked = None, []
    shares: list[float] = []
    suite = Suite({}, [], QUICK, lambda _, __, done, total: shares.append(done / total))
    found = suite.run(["inversion"], tmp_path)
    assert attacker.asked == [("small", None)]
    assert [(r["network"], r["epsilon"]) for r in found["inversion"]] == [*first, ("small", None)]
    assert suite.inverted[0].psnr == (12.345678,)
    assert shares == sorted(shares) and shares[-1] <= 1


@pytest.mark.parametrize("change", ["settings", "effort", "commit", "edited", "damaged"])
def test_another_audit_takes_nothing_over(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attacker = _Attacker(monkeypatch, "0a1b2c+changes" if change == "edited" else "0a1b2c")
    attacker.stops_at = "fl-dp"
    with pytest.raises(KeyboardInterrupt):
        Suite({}, METHODS, QUICK).run(["membership"], tmp_path)
    keys: dict[str, Any] = {"lr": 0.2} if change == "settings" else {}
    effort = replace(QUICK, models=6) if change == "effort" else QUICK
    if change == "commit":
        attacker = _Attacker(monkeypatch, "ffffff")
    if change == "damaged":
        for path in (tmp_path / "parts").iterdir():
            path.write_text("{")
    attacker.stops_at, attacker.asked = None, []
    Suite(keys, METHODS, effort).run(["membership"], tmp_path)
    assert attacker.asked == METHODS
