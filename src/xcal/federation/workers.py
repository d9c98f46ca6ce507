"""The clients of one machine side by side, in forked worker processes.

A worker is a copy of this process with its data in memory; a question goes to it and its answer
comes back through a pipe. Which worker trains which client is fixed by their steps alone. Where
whole clients do not spread evenly, one of them is set aside in the middle of its round and taken up
by the next worker, through the same saved step from which a round that was cut off goes on. So
models, traces and ledgers are the same to the bit, however many workers there are.

No noise is ever copied: a worker makes its own sources, after the fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

import torch

from xcal.errors import UserError
from xcal.federation.coordinator import Answer
from xcal.federation.exchange import Question, RoundReply, Weights
from xcal.federation.rounds import OnStep, SetAside

Responder = Callable[[Question, OnStep], Answer]

_UNEVEN = 1.1  # how much longer than the shortest time whole clients may take before one is shared
_GRACE = 10.0  # seconds in which a worker that is told to stop may end its step and save it
_PR_SET_PDEATHSIG = 1  # of Linux' prctl


def cores() -> int:
    """The processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def worker_count(wanted: int | None, threads: int, clients: int) -> int:
    """How many workers a run gets: one a core if none are asked for, and at most one a client.

    1, which is this process itself, where processes cannot be forked safely: on other systems than
    Linux, where torch has several threads, and where it drives a GPU, which it does with threads:
    none of them live on in a fork.
    """
    if not sys.platform.startswith("linux") or threads > 1 or torch.cuda.is_available():
        return 1
    return max(1, min(wanted or cores(), clients))


@dataclass(frozen=True)
class Leg:
    """A client's round, or the beginning of one: `steps` of them, then it is set aside."""

    client: str
    steps: int | None = None


def share_out(work: Mapping[str, int], workers: int) -> list[list[Leg]]:
    """Who trains whom, in order, so that all end at about the same time. `work`: steps by client.

    The longest first, each to the worker with the least to do. Where that is uneven, as with three
    equal clients for two workers, McNaughton's rule: workers are filled up one after the other, and
    a client that does not fit begins as the first at the next one and ends as the last here.
    """
    shortest = max(-(-sum(work.values()) // workers), *work.values())
    loads = [0] * workers
    found: list[list[Leg]] = [[] for _ in range(workers)]
    for client in sorted(work, key=lambda c: -work[c]):
        least = loads.index(min(loads))
        loads[least] += work[client]
        found[least].append(Leg(client))
    if max(loads) <= _UNEVEN * shortest:
        return found
    found, here, load = [[] for _ in range(workers)], 0, 0
    for client, steps in work.items():
        room = shortest - load
        if steps <= room:
            found[here].append(Leg(client))
            load += steps
            continue
        if room:
            found[here].append(Leg(client))
            found[here + 1].append(Leg(client, steps - room))
        else:
            found[here + 1].append(Leg(client))
        here, load = here + 1, steps - room
    return found


@dataclass
class _Worker:
    pid: int
    pipe: Connection
    legs: deque[Leg] = field(default_factory=deque)  # of this round, not begun yet
    at: Leg | None = None
    held: list[str] = field(default_factory=list)  # whose rounds it had in this round
    has: Weights | None = None  # the weights that were sent last


class Workers:
    """A transport to clients in worker processes of this one, which end with it.

    `open_clients` is called in each worker, and gives what answers for its clients there. `steps`
    are those that a client makes in a round.
    """

    def __init__(
        self,
        open_clients: Callable[[], Responder],
        steps: Mapping[str, int],
        count: int,
        on_step: OnStep,
    ) -> None:
        self._steps, self._on_step = steps, on_step
        self._stop = mmap.mmap(-1, 1)  # shared with the workers: set aside what you do
        self._workers: list[_Worker] = []
        try:
            for _ in range(count):
                self._workers.append(self._fork(open_clients))
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def _fork(self, open_clients: Callable[[], Responder]) -> _Worker:
        ours, theirs = Pipe()
        parent = os.getpid()
        # A Ctrl-C is this process's to answer, also one that comes now.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with warnings.catch_warnings():
                # That other threads do not live on in it (a progress bar's) is what is wanted.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                for pipe in (ours, *(w.pipe for w in self._workers)):
                    pipe.close()
                _work(theirs, open_clients, self._stop, parent)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        theirs.close()
        return _Worker(pid, ours)

    def late(self) -> list[str]:
        return []

    def ask(
        self, round_number: int, questions: Sequence[Question], timeout: float | None
    ) -> dict[str, Answer]:
        asked = {q.client: q for q in questions}
        plan = share_out({c: max(self._steps[c], 1) for c in asked}, len(self._workers))
        for worker, legs in zip(self._workers, plan, strict=True):
            worker.legs, worker.held = deque(legs), [leg.client for leg in legs]
        answers: dict[str, Answer] = {}
        errors: dict[str, BaseException] = {}
        until: float | None = None  # once there is an error: others may end their step
        while True:
            if not errors:
                self._hand_out(asked, answers)
            busy = {w.pipe: w for w in self._workers if w.at is not None}
            if not busy or (until is not None and time.monotonic() > until):
                break
            for pipe in wait(list(busy), None if until is None else _GRACE):
                self._hear(busy[pipe], answers, errors)  # type: ignore[index]  # as given
            if errors and until is None:
                until = time.monotonic() + _GRACE
                self._stop[0] = 1
        if errors:  # as one worker would have met them: the first client's
            raise next(errors[c] for c in asked if c in errors)
        return answers

    def _hand_out(self, asked: Mapping[str, Question], answers: Mapping[str, Answer]) -> None:
        """Give every worker without work its next leg, unless the client is at another's."""
        begun = {w.at.client for w in self._workers if w.at is not None}
        # A beginning is always the first that a worker does: nobody waits for what waits itself.
        begun |= {leg.client for w in self._workers for leg in w.legs if leg.steps is not None}
        for worker in self._workers:
            while worker.at is None and worker.legs:
                leg = worker.legs[0]
                if (
                    leg.client in answers
                ):  # ended where it began: the budget was, or no room to save
                    worker.legs.popleft()
                    continue
                if leg.steps is None and leg.client in begun:
                    break
                worker.at = worker.legs.popleft()
                question = asked[leg.client]
                new = question.weights if question.weights is not worker.has else None
                worker.has = question.weights
                with contextlib.suppress(OSError):  # it is gone: that is heard of right after
                    _send(worker.pipe, (replace(question, weights={}), new, leg.steps))

    def _hear(
        self, worker: _Worker, answers: dict[str, Answer], errors: dict[str, BaseException]
    ) -> None:
        assert worker.at is not None
        client = worker.at.client
        try:
            kind, value = pickle.loads(worker.pipe.recv_bytes())
        except (EOFError, OSError):
            errors[client] = self._gone(worker)
            worker.at = None
            return
        if kind == "step":
            self._on_step(value)
            return
        worker.at = None
        if kind == "answer":
            answers[client] = value
        elif kind == "error":
            errors[client] = _unpacked(*value)

    def _gone(self, worker: _Worker) -> UserError:
        """A worker that ended by itself or was killed, in one sentence."""
        assert worker.at is not None
        code = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        self._workers.remove(worker)
        worker.pipe.close()
        how = f"exit code {code}"
        if code < 0:
            how = f"signal {-code} ({signal.Signals(-code).name}, code {code})"
        short = ", as systems do where memory runs out" if code == -signal.SIGKILL else ""
        others = [c for c in worker.held if c != worker.at.client]
        held = f", which also held {_named(others)}," if others else ""
        return UserError(
            f"The worker process that trained {_named([worker.at.client])}{held} ended with"
            f" {how}{short}. Nothing is lost: resume the run, with --workers 1 if memory is short."
        )

    def close(self) -> None:
        """End all workers: whoever trains may save its step first."""
        self._stop[0] = 1
        for worker in self._workers:
            worker.pipe.close()
        until = time.monotonic() + _GRACE
        left = [worker.pid for worker in self._workers]
        self._workers = []
        try:
            while left and time.monotonic() < until:
                left = [pid for pid in left if os.waitpid(pid, os.WNOHANG)[0] == 0]
                if left:
                    time.sleep(0.005)
        finally:  # also at an impatient second Ctrl-C
            for pid in left:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _named(clients: Sequence[str]) -> str:
    return f"client{'s' if len(clients) > 1 else ''} {', '.join(clients)}"


# --- in the worker --------------------------------------------------------------------------------


def _work(
    pipe: Connection,
    open_clients: Callable[[], Responder],
    stop: mmap.mmap,
    parent: int,
) -> NoReturn:
    """All that a worker ever does; it never returns into what its parent was doing."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # a live display is the parent's
        _end_with(parent)
        torch.set_num_threads(1)
        respond = open_clients()
        with contextlib.suppress(EOFError, OSError):  # nobody asks any more
            _answer_all(pipe, respond, stop)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _end_with(parent: int) -> None:
    """Have the system kill this process when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:  # it ended before that
        os._exit(1)


def _answer_all(pipe: Connection, respond: Responder, stop: mmap.mmap) -> None:
    weights: Weights = {}
    while True:
        question, new, steps = pickle.loads(pipe.recv_bytes())
        weights = weights if new is None else new
        made = 0

        def step(count: int, steps: int | None = steps) -> None:
            nonlocal made
            made += count
            try:
                _send(pipe, ("step", count))
            except OSError:
                raise SetAside from None  # nobody is there any more
            if stop[0] or made == steps:
                raise SetAside

        said: tuple[str, Any]
        try:
            said = ("answer", _own(respond(replace(question, weights=weights), step)))
        except SetAside:
            said = ("aside", None)
        except BaseException as error:
            said = ("error", _packed(error))
        _send(pipe, said)


def _own(answer: Answer) -> Answer:
    """An answer whose tensors hold nothing but their own numbers, to be sent."""
    if not isinstance(answer, RoundReply) or answer.weights is None:
        return answer
    return replace(answer, weights={k: v.detach().clone() for k, v in answer.weights.items()})


def _send(pipe: Connection, value: Any) -> None:
    pipe.send_bytes(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))


def _packed(error: BaseException) -> tuple[Any, str]:
    """An error that arrives as its own type, with its text and what it carries."""
    where = "".join(traceback.format_exception(error))
    plain: tuple[Any, ...] = (RuntimeError, (repr(error),), {})
    for form in (error, (type(error), error.args, error.__dict__), plain):
        with contextlib.suppress(Exception):
            if str(_unpacked(pickle.loads(pickle.dumps(form)), where)) == str(error):
                return form, where
    return plain, where


def _unpacked(form: Any, where: str) -> BaseException:
    """The error again; pickle itself fails where its class is not made of its `args`."""
    if isinstance(form, BaseException):
        error = form
    else:
        kind, args, values = form
        error = kind.__new__(kind)
        error.args = args
        error.__dict__.update(values)
    if not isinstance(error, UserError):
        error.add_note(f"In a worker process:\n{where}")
    return error
