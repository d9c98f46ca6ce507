"""What a site keeps of one run: its last answer, the round it began, the last step it saved.

reply.safetensors      the last answer, given again to the very same request
begun.json             the round begun last, and the newest one answered
progress.safetensors   a step within the round; may be lost at any time
room                   place on the disk, kept for the answer until it is written
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from xcal.config import Experiment
from xcal.dp.clipping.named import trainable
from xcal.dp.distributed import BYTES
from xcal.errors import UserError
from xcal.federation.exchange import (
    ClientReport,
    RoundReply,
    RoundRequest,
    Weights,
    load_weights,
    shape_of,
)
from xcal.federation.files import read_as, read_tensors, write_json, write_tensors
from xcal.federation.masks import Masked
from xcal.federation.request_refusals import Refused, naming
from xcal.methods.base import Method, save_state
from xcal.methods.context import Optimizer, StepAverage, StepRecord
from xcal.plugins import OwnCodeError

# How a client computes, and not what: what older versions left out of a progress's fingerprint.
_MACHINE = frozenset(("threads", "workers", "chunk", "device", "feature_cache_mb", "log"))
_MASKED = "masked"  # the numbers that were sent under masks
_STEP_BYTES = 400  # at most, of one step in an answer's text


@dataclass(frozen=True)
class StoredReply:
    """An answer as it was given, and the method's state after it."""

    round: int
    request: str  # digest of the request it answers
    state: dict[str, Any] | None
    reply: RoundReply
    attempt: int = 0  # at the round's sum


@dataclass(frozen=True)
class Begun:
    """The round begun last, after which answer, the rounds given up since, the newest answered.

    `attempt`: the one begun last, in a round of masked sums.
    """

    round: int
    after: int
    given_up: tuple[int, ...]
    answered: int = -1
    attempt: int = sys.maxsize  # which one, older versions do not say


class RunMemory:
    """One run's files in a client's site. Whatever is wrong with them is a sentence."""

    def __init__(self, folder: Path, request: RoundRequest, digest: str) -> None:
        self._folder = folder
        self._request = request
        self._digest = digest
        self._can_save = True

    # --- the last answer --------------------------------------------------------------------------

    def last_reply(self) -> StoredReply | None:
        path = self._folder / "reply.safetensors"
        found = read_tensors(path)
        if found is None and not path.exists():
            return None
        stored = None if found is None else _stored(*found)
        if stored is None:
            raise Refused("site", f"{path} cannot be read: it is damaged. Restore the newest one.")
        if found is not None and found[1].get("run", self._request.run) != self._request.run:
            raise Refused("site", f"{path} belongs to another run: put this run's own back.")
        return stored

    def save_reply(self, state: Any, reply: RoundReply) -> None:
        """Durably, before it can leave."""
        about = {
            "run": self._request.run,
            "round": self._request.round,
            "request": self._digest,
            "state": save_state(state),
            "report": asdict(reply.report),
            "trace": [asdict(r) for r in reply.trace],
        }
        tensors = reply.weights or {}
        if self._request.sum is not None:
            about["attempt"] = self._request.sum.attempt.number
        if reply.masked is not None:
            sent = reply.masked
            told = {"site": sent.site, "context": sent.context, "signature": sent.signature.hex()}
            about["masked"] = told
            tensors = {_MASKED: torch.frombuffer(bytearray(sent.numbers), dtype=torch.uint8)}
        (self._folder / "room").unlink(missing_ok=True)
        write_tensors(self._folder / "reply.safetensors", tensors, about)
        begun = self._folder / "begun.json"
        if begun.exists():
            # An older answer put back would else make this round one that was never answered.
            write_json(begun, {**asdict(self._begun()), "answered": self._request.round})
        (self._folder / "progress.safetensors").unlink(missing_ok=True)

    def hold_room(self, weights: Weights, steps: int) -> None:
        """Take the disk space of the answer now: a full disk must not cost a round's budget."""
        least = 0 if self._request.sum is None else BYTES
        size = sum(v.numel() * max(v.element_size(), least) for v in weights.values())
        size += (1 << 16) + _STEP_BYTES * steps
        path = self._folder / "room"
        try:
            handle = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
            try:
                os.posix_fallocate(handle, 0, size)
            finally:
                os.close(handle)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                return  # a file system that cannot promise anything
            with contextlib.suppress(OSError):
                path.unlink()
            raise Refused(
                "site", f"There is no disk space for an answer in {self._folder}: {error.strerror}."
            ) from error

    # --- which rounds were begun ------------------------------------------------------------------

    def begin(
        self, ledger: Path, paid: Collection[int], remembered: int, last: tuple[int, int]
    ) -> None:
        """Write down that this round begins; refuse where the ledger knows forgotten rounds.

        A round that was begun and never answered, because the client died in it and the server went
        on without, is no such round: the site wrote down that it began it, and after which answer.

        `last`: round and step paid for last. Under masks a step is an attempt, begun here before it
        is paid for: one that was paid for and not begun may have been sent, and what is drawn anew
        would go out under the masks of what was.
        """
        now = self._request.round
        attempt = 0 if self._request.sum is None else self._request.sum.attempt.number
        known = (self._folder / "begun.json").exists()
        begun = self._begun() if known else Begun(remembered, remembered, (), attempt=0)
        given_up = list(begun.given_up) if begun.after == remembered else []
        if begun.after == remembered and remembered < begun.round < now:
            given_up.append(begun.round)
        forgotten = any(r > now or (remembered < r < now and r not in given_up) for r in paid)
        if self._request.sum is not None:
            forgotten |= last > (begun.round, begun.attempt)
        if forgotten or remembered not in (begun.after, begun.round) or remembered < begun.answered:
            raise Refused(
                "site",
                f"The ledger {ledger} knows rounds of this run that its site does not"
                " remember: restore the site, or start a new run.",
            )
        if begun.round == now:  # never backwards: an older attempt asked for forgets no newer one
            attempt = max(attempt, begun.attempt)
        after = Begun(now, remembered, tuple(given_up), begun.answered, attempt)
        if after != begun or not known:
            write_json(self._folder / "begun.json", asdict(after))

    def _begun(self) -> Begun:
        with naming("site"):
            return read_as(Begun, self._folder / "begun.json")

    # --- a step within the round ------------------------------------------------------------------

    def save_progress(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        tail: StepAverage,
        state: Any,
        trace: Sequence[StepRecord],
    ) -> bool:
        """Keep a step, if there is room: without it a round that is cut off only begins again."""
        if not self._can_save:
            return False
        tensors = {f"model/{k}": v.detach() for k, v in trainable(model).items()}
        tensors |= {f"optimizer/{k}": v for k, v in optimizer.state().items()}
        tensors |= {f"tail/{k}": v for k, v in tail.state().items()}
        about = {
            "request": self._digest,
            "experiment": _fingerprint(self._request.experiment),
            "state": save_state(state),
            "trace": [asdict(r) for r in trace],
        }
        try:
            write_tensors(self._folder / "progress.safetensors", tensors, about, sync=False)
        except UserError:
            self._can_save = False
        return self._can_save

    def restore(
        self, method: Method, model: nn.Module, optimizer: Optimizer, tail: StepAverage
    ) -> tuple[Any, list[StepRecord]] | None:
        """Put model, optimizer and average as they were saved; None: begin with the first step.

        Progress of another request or experiment, or that cannot be used, is none; the model is
        then as it was.
        """
        saved = read_tensors(self._folder / "progress.safetensors")
        if saved is None:
            return None
        tensors, about = saved

        def part(kind: str) -> Weights:
            return {k.removeprefix(kind): v for k, v in tensors.items() if k.startswith(kind)}

        try:
            if about["request"] != self._digest:
                return None
            asked = self._request.experiment
            if about["experiment"] not in (_fingerprint(asked), _old_fingerprint(asked)):
                return None
            trace = [StepRecord(**r) for r in about["trace"]]
            state = method.load_state(about["state"])
            load_weights(model, part("model/"))  # refuses before it changes anything
        except OwnCodeError:
            raise  # a method that is to be repaired: what was saved is worth keeping
        except (UserError, LookupError, TypeError, ValueError, AttributeError):
            return None
        optimizer.load(part("optimizer/"))
        tail.load(part("tail/"))
        return state, trace


def _stored(tensors: dict[str, Tensor], about: dict[str, Any]) -> StoredReply | None:
    """A file that could be read as an answer; None if it does not say what an answer says."""
    try:
        masked = None
        if "masked" in about:
            told, numbers = about["masked"], tensors.pop(_MASKED).numpy().tobytes()
            masked = Masked(
                told["site"], told["context"], numbers, bytes.fromhex(told["signature"])
            )
        reply = RoundReply(
            ClientReport(**about["report"]),
            tensors or None,
            tuple(StepRecord(**r) for r in about["trace"]),
            masked,
        )
        return StoredReply(
            int(about["round"]),
            str(about["request"]),
            about["state"],
            reply,
            int(about.get("attempt", 0)),
        )
    except (TypeError, LookupError, ValueError, AttributeError):
        return None


def _fingerprint(experiment: Experiment) -> str:
    """Of all that shapes what is trained: progress goes on under another engine or machine."""
    return hashlib.sha256(shape_of(experiment).encode()).hexdigest()


def _old_fingerprint(experiment: Experiment) -> str:
    """As versions wrote it that hashed every key, also those that differ between engines."""
    kept = {k: v for k, v in experiment.resolved().items() if k not in _MACHINE}
    return hashlib.sha256(repr(sorted(kept.items())).encode()).hexdigest()
