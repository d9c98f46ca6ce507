"""The carrier between the coordinator and FLARE's tasks: deadlines, dead sites, odd answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nvflare", reason="the extra nvflare is not installed")

from nvflare.apis.controller_spec import TaskCompletionStatus
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable, make_reply

from xcal.errors import UserError
from xcal.federation.nvflare.executor import MESSAGE
from xcal.federation.nvflare.flare_carrier import FlareCarrier, Stopped
from xcal.federation.nvflare.rejoin import Lost, lost_in, note_lost


class Tasks:
    """What the carrier needs of FLARE's controller: tasks go to scripted sites."""

    fl_ctx = None

    def __init__(self, sites: dict[str, Callable[[bytes], Any]]) -> None:
        self.sites = sites
        self.canceled: list[str] = []

    def send(self, task: Any, fl_ctx: Any, targets: list[str]) -> None:
        task.site = targets[0]
        answer = self.sites[targets[0]]

        def work() -> None:
            result = answer(task.data[MESSAGE])
            if result is not None:
                task.result_received_cb(SimpleNamespace(result=result), fl_ctx)

        threading.Thread(target=work, daemon=True).start()

    def cancel_task(self, task: Any, fl_ctx: Any) -> None:
        self.canceled.append(task.site)


def result(data: Any) -> Shareable:
    made = Shareable()
    made[MESSAGE] = data
    return made


def carrier(sites: dict[str, Callable[[bytes], Any]], stopped: bool = False) -> FlareCarrier:
    made = FlareCarrier(Tasks(sites), lambda: stopped)  # type: ignore[arg-type]
    made.sites = {name[-1]: name for name in sites}
    return made


def test_answers_come_back_by_client() -> None:
    ends = {f"site-{c}": lambda data, c=c: result(data + c.encode()) for c in "ab"}
    assert carrier(ends).exchange(0, {"a": b"x", "b": b"y"}, 5) == {"a": b"xa", "b": b"yb"}


@pytest.mark.parametrize(
    "odd",
    [
        lambda _: result("text"),
        lambda _: result(None),
        lambda _: Shareable(),
        lambda _: make_reply(ReturnCode.EXECUTION_EXCEPTION),
    ],
)
def test_what_is_no_answer_is_none(odd: Callable[[bytes], Any]) -> None:
    ends = {"site-a": odd, "site-b": lambda _: result(b"y")}
    began = time.monotonic()
    assert carrier(ends).exchange(0, {"a": b"", "b": b""}, 30) == {"b": b"y"}
    assert time.monotonic() - began < 10  # it came, so nobody waits for it


def test_a_silent_site_costs_the_timeout_and_no_more() -> None:
    made = carrier({"site-a": lambda _: None, "site-b": lambda _: result(b"y")})
    began = time.monotonic()
    assert made.exchange(0, {"a": b"", "b": b""}, 1.0) == {"b": b"y"}
    assert 0.9 < time.monotonic() - began < 6
    assert "site-a" in made._controller.canceled
    made.too_late("site-a")
    assert made.late() == ["a"]
    assert made.late() == []


def test_nobody_waits_for_a_site_that_is_gone() -> None:
    made = carrier({"site-a": lambda _: None, "site-b": lambda _: result(b"y")})
    threading.Timer(0.3, made.gone, ["site-a"]).start()
    began = time.monotonic()
    assert made.exchange(0, {"a": b"", "b": b""}, 60) == {"b": b"y"}
    assert made.exchange(1, {"a": b"", "b": b""}, 60) == {"b": b"y"}
    assert time.monotonic() - began < 20
    made.back("site-a")
    assert made.exchange(2, {"a": b""}, 0.3) == {}


def test_a_lost_site_is_waited_for_where_the_quorum_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = threading.Event()

    def slow(_: bytes) -> Any:
        late.wait(20)
        return result(b"x")

    made = carrier({"site-a": slow, "site-b": lambda _: result(b"y")})
    made.quorum = 2
    made.gone("site-a")
    threading.Timer(0.5, late.set).start()
    assert made.exchange(0, {"a": b"", "b": b""}, 60) == {"a": b"x", "b": b"y"}

    # Nobody starts it again, or the time for it is over: the round ends short of its quorum.
    began = time.monotonic()
    late.clear()
    made.gone("site-a", for_good=True)
    assert made.exchange(1, {"a": b"", "b": b""}, 60) == {"b": b"y"}
    monkeypatch.setattr("xcal.federation.nvflare.flare_carrier.COMES_BACK", 0.3)
    made.gone("site-a")
    assert made.exchange(2, {"a": b"", "b": b""}, 60) == {"b": b"y"}
    assert time.monotonic() - began < 20
    late.set()


def test_who_could_not_make_up_the_quorum_is_not_waited_for() -> None:
    made = carrier({f"site-{c}": (lambda _: None) for c in "abc"})
    made.quorum = 3
    made.gone("site-a", for_good=True)
    made.gone("site-b")
    assert made._expected(["a", "b", "c"], 0) == ["c"]
    made.quorum = 2
    assert made._expected(["a", "b", "c"], 0) == ["b", "c"]
    assert made._expected(["a", "b"], 1) == ["b"]
    assert made._expected(["a", "b"], 2) == []


def test_an_aborted_job_stops_asking() -> None:
    with pytest.raises(Stopped):
        carrier({"site-a": lambda _: None}, stopped=True).exchange(0, {"a": b""}, 60)


def test_a_timeout_is_always_set() -> None:
    with pytest.raises(UserError, match="round_timeout"):
        carrier({"site-a": lambda _: None}).exchange(0, {"a": b""}, None)


def test_a_site_whose_question_was_dropped_is_asked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLARE gives up what it asked of a site that it takes for dead; the site may be back."""
    monkeypatch.setattr("xcal.federation.nvflare.flare_carrier.ASK_AGAIN", 0.0)
    asked: list[bytes] = []

    def comes_back(data: bytes) -> Any:
        asked.append(data)
        return None if len(asked) == 1 else result(b"a")

    made, said = carrier({"site-a": comes_back}), list[str]()
    made.say = said.append
    send = made._controller.send

    def dropping(task: Any, fl_ctx: Any, targets: list[str]) -> None:
        send(task, fl_ctx, targets)
        if len(asked) <= 1:
            task.completion_status = TaskCompletionStatus.CLIENT_DEAD

    monkeypatch.setattr(made._controller, "send", dropping)
    assert made.exchange(0, {"a": b"x"}, 30) == {"a": b"a"}
    assert asked[:2] == [b"x", b"x"]


def test_notes_of_lost_workers_are_per_job(tmp_path: Path) -> None:
    assert lost_in(tmp_path, "job") == {}
    note_lost(tmp_path, "job", "a", 1, gone=True)
    note_lost(tmp_path, "job", "b", 2, gone=False)
    assert lost_in(tmp_path, "job") == {"a": Lost(1, True), "b": Lost(2, False)}
    assert lost_in(tmp_path, "another") == {}


def test_what_happened_is_said_by_name() -> None:
    assert Lost(1, True).text("b") == "b's worker died; the round goes on with its quorum."
    assert Lost(2, False, "site").text("b") == (
        "b was lost (2 times); it was started again and takes part."
    )
    assert Lost(0, False, "site").text("b") == "b came later and takes part from now on."
