"""Which map explains a run's model: chosen once on public images, and remembered beside the run."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from xcal.errors import UserError
from xcal.explain.choosing import AUTO, CANDIDATES, CHOSEN_ON, MapChoice, kinds_for
from xcal.federation.evaluation import OnImages
from xcal.federation.files import read_json, write_json
from xcal.federation.outcome import map_for
from xcal.federation.setup import validation_is_public
from xcal.report.runs import LoadedRun, load_data

REMEMBERED = "maps.json"
UNUSABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError, UserError)


def map_of_run(
    run: LoadedRun, wanted: str = AUTO, on_images: OnImages = lambda *_: None
) -> MapChoice:
    """The map asked for, or for `auto` the one of the highest ROAD on public validation images.

    What the run itself chose at its end holds. Another choice is written into the run's folder,
    where it may be, and read from there the next time.
    Only what was measured is remembered: agreement to measure may come later.
    """
    path = None if run.folder is None else run.folder / REMEMBERED
    of = _of(run) if wanted == AUTO and path is not None else {}
    if path is not None and of:
        found = _read(path, of) or _of_the_run(run)
        if found is not None:
            return found
    choice = map_for(
        run.experiment, run.model, lambda: load_data(run).validation, wanted, on_images
    )
    if path is not None and choice.road:
        # In a folder that only may be read it is chosen anew the next time.
        with contextlib.suppress(OSError, UserError):
            write_json(path, {"of": of, "choice": choice.as_dict()})
    return choice


def _of(run: LoadedRun) -> dict[str, Any]:
    """What a choice was made of: another model or another list of maps asks for another."""
    assert run.folder is not None
    weights = hashlib.sha256((run.folder / "model.safetensors").read_bytes()).hexdigest()
    return {"model": weights, "candidates": list(CANDIDATES), "images": CHOSEN_ON}


def _of_the_run(run: LoadedRun) -> MapChoice | None:
    """What the run chose among the kinds that there are today, of the model that is still there."""
    assert run.folder is not None
    try:
        result, model = (run.folder / name for name in ("result.json", "model.safetensors"))
        newer = model.stat().st_mtime_ns > result.stat().st_mtime_ns
        if newer or not validation_is_public(run.experiment):
            return None
        kept = read_json(result)["explanations"]["choice"]
        return _checked(kept) if set(kept["road"]) == set(kinds_for(run.model)) else None
    except UNUSABLE:
        return None


def _read(path: Path, of: dict[str, Any]) -> MapChoice | None:
    """What was remembered of this very model; None where nothing usable was."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["of"] != of:
            return None
        return _checked(kept["choice"])
    except UNUSABLE:
        return None


def _checked(kept: dict[str, Any]) -> MapChoice:
    choice = MapChoice(**kept)
    choice.sentence()  # fails where something is missing
    return choice
