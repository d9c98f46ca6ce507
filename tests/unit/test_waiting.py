"""Silence has a reason, which is said in good time and not too often."""

from __future__ import annotations

from xcal.federation.waiting import Waiting, listed


def test_who_is_waited_for_is_said_after_ten_seconds_and_less_and_less_often() -> None:
    now, said = [100.0], list[tuple[float, str]]()
    waiting = Waiting(lambda text: said.append((now[0] - 100, text)), clock=lambda: now[0])
    while now[0] < 100 + 1300:
        waiting.look("Round 3 waits for clinic-b")
        now[0] += 0.5
    assert [at for at, _ in said] == [10, 20, 40, 80, 160, 320, 620, 920, 1220]
    assert said[1][1] == "Round 3 waits for clinic-b (20 s so far)."


def test_many_names_are_counted() -> None:
    assert listed(["a", "b"]) == "a, b"
    assert listed([str(i) for i in range(50)]) == "0, 1, 2, 3, 4 and 45 more"
