"""Runs of objects: networks and data sets that a script hands over instead of naming them.

An object gets a made-up name that begins with `given:`, under which everything that takes
`package.module:name` finds it while the run lasts. The name is new for every run, so that nothing
remembered of one object is taken for another's.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xcal.config import Experiment
from xcal.data.given_data import image_data
from xcal.data.images import ImageData
from xcal.errors import UserError
from xcal.experiments import make_experiment, names_of_today
from xcal.federation.constants import with_constants
from xcal.federation.folder import RunFolder
from xcal.federation.local import Progress, run_experiment
from xcal.federation.loggers import Logger
from xcal.federation.setup import prepare
from xcal.models.given_network import builder_of
from xcal.plugins import GIVEN, given

_KEYS = {"model": "network", "data": "data", "loss": "loss"}
"""The experiment's key for each argument of `xcal.run` that takes an object."""


def run_given(
    out: Path,
    objects: Mapping[str, Any],
    keys: dict[str, Any],
    progress: Progress | None,
    *,
    resume: bool,
    logger: str | Logger | None = None,
) -> dict[str, Any]:
    """`xcal.run`: train into `out`, or go on there. `objects` by the names of its arguments."""
    objects = {name: value for name, value in objects.items() if value is not None}
    for name, key in _KEYS.items():
        if isinstance(objects.get(name), str):
            keys = {**keys, key: objects.pop(name)}
    if resume:
        workers = make_experiment({"workers": keys.pop("workers", None)}, "xcal.run").workers
        if keys:
            raise UserError("A resumed run keeps its configuration: give no keys with resume.")
        folder = RunFolder.find(out)
        with given(objects_of(folder.experiment, objects)):
            return run_experiment(folder, progress, workers=workers, logger=logger)
    keys = names_of_today(keys)
    _check(objects, keys)
    chosen: dict[str, Any] = {}
    if "model" in objects:
        chosen["network"] = _made_up_name(objects["model"])
    if "loss" in objects:
        chosen["loss"] = _made_up_name(objects["loss"])
    if "data" in objects:
        chosen["data"] = _made_up_name("data")
        objects["data"] = _data_of(objects, keys.get("pixels"))
        chosen["pixels"] = objects["data"].train.pixels.shape[1]
    experiment = make_experiment({**keys, **chosen}, "xcal.run")
    with given(objects_of(experiment, objects)):
        federation = prepare(with_constants(experiment))  # refuse before DIR is made
        folder = RunFolder.create(out, federation.experiment, sorted({**keys, **chosen}))
        return run_experiment(folder, progress, federation, logger=logger)


def objects_of(experiment: Experiment, objects: Mapping[str, Any]) -> dict[str, Any]:
    """The objects under the names that the experiment has for them."""
    found: dict[str, Any] = {}
    for name, key in _KEYS.items():
        wanted = getattr(experiment, key) or "cross-entropy"
        if objects.get(name) is None:
            continue
        if not wanted.startswith(GIVEN):
            raise UserError(
                f"The run's {key} is {wanted!r}, which is found by its name: leave out {name}."
            )
        if name == "loss":
            found[wanted] = objects["loss"]
        elif name == "model":
            found[wanted] = builder_of(objects["model"], objects.get("layer"))
        else:
            data = _data_of(objects, experiment.pixels)
            found[wanted] = lambda data=data, **_: data
    return found


def _data_of(objects: Mapping[str, Any], pixels: int | None) -> ImageData:
    return image_data(
        objects["data"],
        classes=objects.get("classes"),
        groups=objects.get("groups"),
        pixels=pixels,
    )


def _check(objects: Mapping[str, Any], keys: Mapping[str, Any]) -> None:
    for name, needed in (("layer", "model"), ("groups", "data"), ("classes", "data")):
        if name in objects and needed not in objects:
            raise UserError(
                f"{name} belongs to {needed} given as an object: give both, or neither."
            )
    if "model" in objects and "network" in keys:
        raise UserError("model and network are two ways to say which network: give one of them.")
    named = [name for name in _KEYS if name in objects]
    if named and keys.get("sites") is not None:
        raise UserError(
            f"Sites take no {named[0]} as an object: give it by name ({_KEYS[named[0]]} ="
            " 'package.module:name'), or leave out sites."
        )


def _made_up_name(of: Any) -> str:
    shown = of if isinstance(of, str) else getattr(of, "__name__", type(of).__name__)
    plain = "".join(c if c.isalnum() else "-" for c in shown)
    return f"{GIVEN}{plain}-{secrets.token_hex(4)}"
