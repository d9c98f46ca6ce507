"""What goes wrong in a masked run: who pays for it, and whether the run goes on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import xcal
from federation.test_masked_runs import KEYS, Patchy, Spy, charges, ledgers, same
from xcal.dp.ledger.rows import verify
from xcal.errors import UserError
from xcal.federation.exchange import Question
from xcal.federation.masked import MaskedRounds
from xcal.federation.masks import MaskKeys


def rounds_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(x) for x in (folder / "rounds.jsonl").read_text().splitlines()]


class Once(Patchy):
    """Loses the site's answer to the first attempt of the round, and later ones not."""

    def __init__(self, inner: Any, lost: str) -> None:
        super().__init__(inner, lost)
        self.times = 0

    def ask(self, t: int, questions: list[Question], timeout: float | None) -> dict[str, Any]:
        self.times += t == 1
        if self.times == 1:
            return super().ask(t, questions, timeout)
        return dict(self._inner.ask(t, questions, timeout))


@pytest.mark.slow
def test_the_rest_make_the_round_without_the_site_that_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four sites, one answer lost in the second of three rounds: it is made by three."""
    keys = {**KEYS, "clients": 4, "honest": 3, "batch": 5, "rounds": 3}
    spy, init = Spy(monkeypatch), MaskedRounds.__init__

    def patchy(rounds: MaskedRounds, inner: Any, *rest: Any, **options: Any) -> None:
        init(rounds, Once(inner, "3"), *rest, **options)

    monkeypatch.setattr(MaskedRounds, "__init__", patchy)
    xcal.run(tmp_path / "run", **keys)
    asked = sorted({(a.round, a.number, a.sites) for a, _, _ in spy.sent})
    assert asked[:3] == [
        (0, 0, ("0", "1", "2", "3")),
        (1, 0, ("0", "1", "2", "3")),
        (1, 1, ("0", "1", "2")),
    ]
    # The third round's charge of those who were asked twice went into the second.
    assert [r["answered"] for r in rounds_of(tmp_path / "run")] == [4, 3, 0]
    assert rounds_of(tmp_path / "run")[1]["missing"] == ["3"]
    assert charges(tmp_path / "run") == [3, 3, 3, 3]
    assert all(verify(path).ok for path in ledgers(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["seeded", "secure"])
def test_a_site_killed_after_its_message_was_written_down_pays_for_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noise: str
) -> None:
    """Killed between the last durable write and the sending: the same message goes out later."""
    keys = {**KEYS, "noise": noise}
    mask, calls = MaskKeys.mask, [0]

    def dying(own: MaskKeys, *rest: Any, **options: Any) -> Any:
        message = mask(own, *rest, **options)
        calls[0] += 1
        if calls[0] == 5:
            os.kill(os.getpid(), 9)
        return message

    child = os.fork()
    if child == 0:
        monkeypatch.setattr(MaskKeys, "mask", dying)
        xcal.run(tmp_path / "run", **keys)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -9
    assert charges(tmp_path / "run") == [2, 2, 1]
    spy = Spy(monkeypatch)
    xcal.run(tmp_path / "run", resume=True)
    assert charges(tmp_path / "run") == [3, 3, 3]  # one for each message sent, and no more
    assert [(a.round, m.site) for a, _, m in spy.sent][:1] == [(1, "2")]
    assert [r["answered"] for r in rounds_of(tmp_path / "run")] == [3, 3, 3]
    assert all(verify(path).ok for path in ledgers(tmp_path / "run"))
    if noise == "seeded":
        xcal.run(tmp_path / "whole", **keys)
        assert same(tmp_path / "whole", tmp_path / "run")


@pytest.mark.slow
def test_a_quorum_of_all_waits_for_the_site_that_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {**KEYS, "clients": 4, "honest": 3, "batch": 5, "rounds": 2, "quorum": 4}
    xcal.run(tmp_path / "whole", **keys)
    init = MaskedRounds.__init__

    def patchy(rounds: MaskedRounds, inner: Any, *rest: Any, **options: Any) -> None:
        init(rounds, Once(inner, "3"), *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(MaskedRounds, "__init__", patchy)
        with pytest.raises(UserError, match="no answer from 3"):
            xcal.run(tmp_path / "run", **keys)
    xcal.run(tmp_path / "run", resume=True)  # the stored messages, and the one that was lost
    assert same(tmp_path / "whole", tmp_path / "run")
    assert charges(tmp_path / "run") == [2, 2, 2, 2]
