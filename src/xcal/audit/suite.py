"""All attacks with their default settings, as `xcal audit` and `make test-audit` run them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from xcal import plotting
from xcal.audit.inversion import Inverted, Settings, invert_all
from xcal.audit.membership import infer_membership
from xcal.audit.onerun import audit_clients, audit_method
from xcal.audit.parts import Parts, draw_inversion, save_inverted
from xcal.config import Experiment
from xcal.data import catalog
from xcal.data.images import ImageData, Images
from xcal.errors import UserError
from xcal.experiments import make_experiment
from xcal.federation.files import write_json
from xcal.federation.folder import command, commit, versions
from xcal.methods.base import CentralMethod, clips_units
from xcal.methods.registry import METHODS, method_of

ATTACKS = ("one-run", "membership", "inversion")
OnWork = Callable[[str, str, int, int], None]
"""Told which attack is made on what, how many of its parts are done, of how many."""

# Small pictures and one client: an audit trains dozens of models.
BASE: dict[str, Any] = {
    "data": "smear",
    "network": "small",
    "pixels": 32,
    "clients": 1,
    "unit": "record",  # a canary is one image
}
# Few, large steps: gradient canaries need no learning, only many releases.
FOR_GRADIENTS: dict[str, Any] = {"expected_batch_size": 128, "rounds": 4}
# Long enough that a model without privacy learns its training set by heart.
FOR_INPUTS: dict[str, Any] = {"expected_batch_size": 32, "rounds": 15, "lr": 0.3}
FOR_MEMBERSHIP: dict[str, Any] = {"expected_batch_size": 20, "rounds": 30, "lr": 0.3}
# Short steps: the attacker takes a whole round for one gradient.
FOR_INVERSION: dict[str, Any] = {"lr": 0.001}


@dataclass(frozen=True)
class Effort:
    """How much work goes into each attack."""

    gradient_canaries: int = 2000
    benign: int = 200
    input_canaries: int = 100
    input_benign: int = 100
    client_canaries: int = 300
    models: int = 8
    pool: int = 120
    pictures: int = 4
    round_pictures: int = 2
    inversion: Settings = field(default_factory=Settings)
    levels: tuple[float | None, ...] = (None, 50.0, 5.0, 0.5)  # of inversion; None: no privacy
    confidence: float = 0.95


QUICK = Effort(
    gradient_canaries=500,
    benign=100,
    input_canaries=60,
    input_benign=60,
    client_canaries=60,
    models=4,
    pool=80,
    pictures=1,
    round_pictures=2,
    inversion=Settings(dlg_steps=100, cosine_steps=200),
    levels=(None, 5.0),
)


def audited_methods(names: Sequence[str]) -> list[str]:
    """The methods named, or all: pooling makes no difference to a client that stands alone."""
    if not names:
        return [name for name, method in METHODS.items() if not method.pooled]
    for name in names:
        method_of(make_experiment({"method": name}, "--method"))  # refuses unknown ones
    return list(names)


def _experiment(keys: Mapping[str, Any], defaults: Mapping[str, Any], method: str) -> Experiment:
    return make_experiment({**BASE, **defaults, **keys, "method": method}, "the audit's settings")


def _some(images: Images, first: int, count: int) -> Images:
    if first + count > len(images):
        raise UserError(
            f"The audit needs {first + count} training images and the data set has"
            f" {len(images)}: give a larger one, or ask for less (--quick)."
        )
    taken = images.take(np.arange(first, first + count))
    return replace(taken, groups=np.arange(count, dtype=np.int64), masks=None)


class Suite:
    """The attacks on one data set and network, and their results as plain data."""

    def __init__(
        self,
        keys: Mapping[str, Any],
        methods: Sequence[str] = (),
        effort: Effort | None = None,
        on_work: OnWork = lambda *_: None,
    ) -> None:
        self.keys = dict(keys)
        if self.keys.pop("method", None) is not None:
            raise UserError("Name the methods to audit with --method, not with --set method=….")
        self.methods = audited_methods(methods)
        self.effort = effort or Effort()
        self._on_work = on_work
        self._shown: Experiment = _experiment(self.keys, {}, self.methods[0])
        self.inverted: list[Inverted] = []
        self._parts = Parts(None, {})

    def _data(self, images: int) -> ImageData:
        # Synthetic images are drawn, so no more than needed.
        options = {"train": images} if self._shown.data == "smear" else {}
        data = catalog.load(self._shown.data, pixels=self._shown.pixels, seed=0, **options)
        if data.multi_label:
            raise UserError(
                f"The attacks know images of one class each, and {data.name} is of several findings"
                " at once: audit with another data set."
            )
        return data

    def one_run(self) -> list[dict[str, Any]]:
        """Canaries in every method: gradients, mislabeled images, whole clients."""
        effort, rows = self.effort, list[dict[str, Any]]()
        data = self._data(max(effort.benign, effort.input_benign) + effort.input_canaries)
        classes = len(data.classes)
        work = []
        for name in self.methods:
            method = method_of(_experiment(self.keys, {}, name))
            if isinstance(method, CentralMethod):
                work.append((name, "client"))
            elif clips_units(method):
                work.append((name, "gradient"))
            work.append((name, "mislabeled"))

        def canaries_in(name: str, canary: str) -> list[dict[str, Any]]:
            defaults = FOR_INPUTS if canary == "mislabeled" else FOR_GRADIENTS
            experiment = _experiment(self.keys, defaults, name)
            method = method_of(experiment)
            if canary == "client":
                assert isinstance(method, CentralMethod)
                found = audit_clients(
                    experiment,
                    method,
                    classes,
                    canaries=effort.client_canaries,
                    confidence=effort.confidence,
                )
            else:
                by_gradient = canary == "gradient"
                count = effort.gradient_canaries if by_gradient else effort.input_canaries
                benign = effort.benign if by_gradient else effort.input_benign
                pictures = None if by_gradient else _some(data.train, benign, count)
                found = audit_method(
                    experiment,
                    _some(data.train, 0, benign),
                    classes,
                    canary=canary,
                    canaries=count,
                    pictures=pictures,
                    confidence=effort.confidence,
                )
            return [{**asdict(a), "broken": a.broken} for a in found]

        for done, one in enumerate(work):
            self._on_work("one run", f"{one[0]}, {one[1]} canaries", done, len(work))
            rows += self._parts.part("one-run", one, partial(canaries_in, *one))[0]
        return rows

    def membership(self) -> list[dict[str, Any]]:
        """Loss threshold and likelihood ratio, for every method."""
        data = self._data(self.effort.pool)
        rows: list[dict[str, Any]] = []

        def members_of(name: str) -> list[dict[str, Any]]:
            found = infer_membership(
                _experiment(self.keys, FOR_MEMBERSHIP, name),
                _some(data.train, 0, self.effort.pool),
                len(data.classes),
                models=self.effort.models,
            )
            return [{**m.as_dict(), "broken": m.broken} for m in found]

        for done, name in enumerate(self.methods):
            self._on_work("membership", name, done, len(self.methods))
            rows += self._parts.part("membership", (name,), partial(members_of, name))[0]
        return rows

    def inversion(self) -> list[dict[str, Any]]:
        """Both attacks on one step and on a whole round: without privacy and at each ε."""
        effort = self.effort
        count = max(effort.pictures, effort.round_pictures)
        networks = {32: "xcal.audit.networks:lenet32", 64: "xcal.audit.networks:lenet64"}
        smooth = networks.get(self._shown.pixels)
        if smooth is None:
            raise UserError("Gradient inversion is measured at pixels = 32 or 64.")
        data = self._data(max(count, 60))
        base = _experiment(self.keys, FOR_INVERSION, "fl")
        tried = [(smooth, effort.levels)]
        if None in effort.levels:
            tried.append(("small", (None,)))
        total = sum(2 * len(levels) * (effort.pictures + 1) for _, levels in tried)
        done = 0

        def attacked(number: int) -> None:
            nonlocal done
            done += number
            self._on_work("inversion", "reconstructing", done, total)

        for network, epsilons in tried:
            for epsilon in epsilons:
                attack = partial(
                    invert_all,
                    base,
                    _some(data.train, 0, effort.pictures),
                    _some(data.train, 0, effort.round_pictures),
                    len(data.classes),
                    network=network,
                    epsilons=(epsilon,),
                    settings=effort.inversion,
                    on_attack=attacked,
                )
                found, kept = self._parts.part("inversion", (network, epsilon), attack)
                self.inverted += found
                if kept:
                    attacked(2 * (effort.pictures + 1))
        return [r.summary() for r in self.inverted]

    def run(self, attacks: Sequence[str], out: Path | None = None) -> dict[str, Any]:
        """The attacks named, in the usual order; results also written into `out`.

        What an earlier call with the same code and settings finished there before it was
        interrupted is taken over.
        """
        for attack in attacks:
            if attack not in ATTACKS:
                raise UserError(f"Unknown attack {attack!r}: choose {', '.join(ATTACKS)}.")
        if out is not None and "inversion" in (attacks or ATTACKS):
            plotting.require()  # a picture goes with it
        result: dict[str, Any] = {
            "command": command(),
            "commit": commit(),
            "versions": versions(),
            "settings": {**BASE, **self.keys},
            "effort": asdict(self.effort),
        }
        folder = None if out is None else out / "parts"
        # Not by the command: asked for in another order, a part is the same part.
        self._parts = Parts(folder, {k: v for k, v in result.items() if k != "command"})
        result["seconds"] = {}
        runs = (self.one_run, self.membership, self.inversion)
        for attack, run in zip(ATTACKS, runs, strict=True):
            if attack in (attacks or ATTACKS):
                before = self._parts.seconds
                result[attack] = run()
                result["seconds"][attack] = round(self._parts.seconds - before, 1)
        rows = [*result.get("one-run", ()), *result.get("membership", ())]
        result["broken"] = sorted({row["method"] for row in rows if row["broken"]})
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            write_json(out / "audit.json", result)
            if self.inverted:
                save_inverted(self.inverted, out / "inversion.npz")
                draw_inversion(self.inverted, out / "inversion.png")
            self._parts.remove()
        return result
