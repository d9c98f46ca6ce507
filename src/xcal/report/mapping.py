"""Which map explains a run's model: chosen once on public images, and remembered beside the run."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from xcal.errors import UserError
from xcal.explain.choosing import AUTO, CANDIDATES, CHOSEN_ON, MapChoice
from xcal.federation.evaluation import OnImages
from xcal.federation.files import write_json
from xcal.federation.outcome import map_for
from xcal.report.runs import LoadedRun, load_data

REMEMBERED = "maps.json"


def map_of_run(
    run: LoadedRun, wanted: str = AUTO, on_images: OnImages = lambda *_: None
) -> MapChoice:
    """The map asked for, or for `auto` the one of the highest ROAD on public validation images.

    A choice is written into the run's folder, where it may be, and read from there the next time.
    Only what was measured is remembered: agreement to measure may come later.
    """
    path = None if run.folder is None else run.folder / REMEMBERED
    of = _of(run) if wanted == AUTO and path is not None else {}
    if path is not None and of:
        found = _read(path, of)
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


def _read(path: Path, of: dict[str, Any]) -> MapChoice | None:
    """What was remembered of this very model; None where nothing usable was."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["of"] != of:
            return None
        choice = MapChoice(**kept["choice"])
        choice.sentence()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError, UserError):
        return None
    return choice
