"""A client as its owner holds it: data, site, noise; and how often its state is saved."""

from __future__ import annotations

import ctypes
import hashlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from xcal.config import Experiment
from xcal.dp.clipping import ClippingEngine
from xcal.dp.clipping.losses import Loss
from xcal.dp.ledger.ledger import Ledger
from xcal.dp.ledger.rows import Charge, Head
from xcal.dp.noise import NoiseSource
from xcal.federation.exchange import shape_of
from xcal.federation.files import read_as, write_bytes, write_json
from xcal.federation.masks import MaskKeys
from xcal.federation.partition_record import PartitionRecord
from xcal.methods.client_data import LocalData
from xcal.methods.context import ReplayKey

# Not in `runs/`, where a server chooses the names; nor named like the ledger's own files, with
# which it would be put back.
_REMEMBERED = "answered.json"
REPLAYED = "2:"  # begins a digest of inputs that only what shapes the answer went into


def remembered_head(site_dir: Path) -> Head | None:
    """The newest head that a site answered with, whatever the run; None: it never did.

    An older ledger that is put back, with its own head file, would forget what was released.
    """
    path = site_dir / _REMEMBERED
    if not path.exists():
        path = site_dir / "runs" / "ledger.seen"  # where it was before
        if not path.is_file():
            return None
    return read_as(Head, path)


def remember_head(site_dir: Path, head: Head) -> None:
    """Durably: what an answer cost is not forgotten once it has left."""
    write_json(site_dir / _REMEMBERED, asdict(head))


@dataclass
class LoadedSite:
    """A client as its owner holds it: data, site, noise. The server sees none of it."""

    client: str
    site_dir: Path
    data: LocalData
    noise: NoiseSource
    build_model: Callable[[], nn.Module]
    # Who clips and sums. An audit puts its canaries in here; nothing else replaces it.
    make_engine: Callable[..., ClippingEngine] = ClippingEngine
    expected_head: Head | None = None
    sigma_floor: float = 0.0  # the owner's lowest noise multiplier
    dealt: bool = False  # whether its images were dealt out, and one unit less moves others
    loss: Loss | None = None  # one number per image; None: cross-entropy
    partition: PartitionRecord | None = None  # which images of the data set these are
    masks: MaskKeys | None = None  # its side of a run's masks, once it has met its peers
    # What the owner says of the run once its ledger is held, and no other can reserve; may refuse.
    admit: Callable[[Ledger], None] | None = None
    _digest: list[str] = field(default_factory=list, repr=False)  # made once, for all copies

    def __post_init__(self) -> None:
        self.site_dir.mkdir(parents=True, exist_ok=True)

    @property
    def ledger_path(self) -> Path:
        return self.site_dir / "ledger.sqlite"

    def folder(self, run: str) -> Path:
        """Where one run's state is kept: two runs on one site never see each other's."""
        folder = self.site_dir / "runs" / run
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def replay_key(self, experiment: Experiment, recorded: Sequence[Charge]) -> ReplayKey | None:
        """Of a round's steps.

        A run whose `recorded` charges hash every key, as older versions did, goes on so.
        """
        older = any(c.inputs is not None and not c.inputs.startswith(REPLAYED) for c in recorded)

        def inputs() -> tuple[Any, ...]:
            if not self._digest:
                self._digest.append(self.data.digest())
            if older:
                return self._digest[0], experiment.identity()
            return self._digest[0], shape_of(experiment, to_the_bit=True), torch.get_num_threads()

        return replay_key(self.noise, self.site_dir, inputs, "" if older else REPLAYED)


def replay_key(
    noise: NoiseSource, site_dir: Path, inputs: Callable[[], tuple[Any, ...]], mark: str = ""
) -> ReplayKey | None:
    """Only seeded noise can be replayed, so only then inputs are compared."""
    if noise.name != "seeded":
        return None
    path = site_dir / "replay.key"
    if not path.exists():
        write_bytes(path, secrets.token_bytes(32))
    context = repr((*inputs(), torch.__version__, np.__version__))
    return ReplayKey(path.read_bytes(), hashlib.sha256(context.encode()).hexdigest(), mark)


class Held(NamedTuple):
    """What a client has for an experiment: itself, and what its network must fit."""

    site: LoadedSite
    classes: int
    side: int  # of its images, in pixels


_TRIM, _PAD, _MAP = -1, -2, -3  # glibc's numbers of what mallopt sets
_LARGEST = 32 * 2**20  # the most it takes as the size from which memory is mapped anew


@cache
def keep_freed_memory() -> bool:
    """Have this process reuse the memory it frees; whether that could be arranged.

    glibc gives large blocks back at once and asks for them anew in the next layer: a quarter of a
    network's forward pass went into the system's handing out of empty pages
    (`benchmarks/freed_memory.py`). Results stay the same to the bit; the process holds what it
    needed most until it ends.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # another C library, another system
        return False
    return all([mallopt(_MAP, _LARGEST), mallopt(_TRIM, 2**31 - 1), mallopt(_PAD, 2 * _LARGEST)])


@contextmanager
def torch_threads(count: int) -> Iterator[int]:
    """torch with `count` threads (0: as it is), and as before afterwards."""
    before = torch.get_num_threads()
    wanted = count or before
    torch.set_num_threads(wanted)
    try:
        yield wanted
    finally:
        torch.set_num_threads(before)


class Pace:
    """Save as often as costs little: saving takes at most about a twentieth of the time."""

    def __init__(self) -> None:
        self._last_end = time.monotonic()
        self._cost = 0.0
        self._start = 0.0

    def due(self) -> bool:
        self._start = time.monotonic()
        return self._start - self._last_end >= 20 * self._cost

    def done(self) -> None:
        self._last_end = time.monotonic()
        self._cost = self._last_end - self._start
