"""How far covering cells of the map and covering pixels of the image give the same signal.

    XCAL_DATA=… XCAL_FEATURES=… python benchmarks/cover_agreement.py

`cover = "pixels"` is the paper's: the salient part of the image is covered, and the image goes
through the network once more. `cover = "cells"` takes the same cells out of the map that the head
reads, which is arithmetic. One model a set and ε is trained with static noise as at the scale
`probe`; both signals are taken of the same public validation images. Writes
benchmarks/results/cover-agreement.md.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from reproduce.__main__ import _published
from reproduce.declared import make_cell
from reproduce.fast import fill_features
from reproduce.scales import get_scale
from xcal.data.normalize import to_tensor
from xcal.explain.gradcam import forward_with_features
from xcal.explain.signal import SignalSettings, image_components, scores
from xcal.federation.constants import with_constants
from xcal.federation.files import read_tensors
from xcal.federation.folder import RunFolder, commit
from xcal.federation.local import run_experiment
from xcal.federation.outcome import public_subset
from xcal.federation.setup import prepare
from xcal.models.model_registry import build_network
from xcal.studies.grid import PROBE

RESULT = Path(__file__).parent / "results" / "cover-agreement.md"
HEAD = (
    "| set | ε | mean u, pixels | mean u, cells | rank correlation | u > 0 in both or neither"
    " | decision turns alike | ms an image, pixels | ms, cells |"
)


def trained(data: str, epsilon: float | None, folder: Path) -> tuple[torch.nn.Module, Any]:
    """A model of the scale `probe` and its federation."""
    scale = get_scale("probe")
    method = "fl" if epsilon is None else "fl-dp"
    cell = make_cell("probe", scale.values(method, data, PROBE, epsilon, 0), 0)
    experiment = with_constants(cell.experiment({"weights": str(_published(None))}))
    federation = prepare(experiment)
    fill_features(federation)
    run = RunFolder.create(folder, federation.experiment, sorted(cell.keys))
    run_experiment(run, None, federation, workers=1)
    model = build_network(federation.experiment, len(federation.data.classes))
    found = read_tensors(run.path / "model.safetensors")
    assert found is not None
    model.load_state_dict(found[0])
    return model.eval(), federation


def row(data: str, epsilon: float | None, images: int) -> str:
    with tempfile.TemporaryDirectory() as place:
        model, federation = trained(data, epsilon, Path(place) / "run")
    public = public_subset(federation.data.validation, images)
    assert public is not None
    shown = to_tensor(np.asarray(public.pixels))
    with torch.no_grad():
        parts = [forward_with_features(model, some) for some in shown.split(32)]
    logits, features = (torch.cat(each) for each in zip(*parts, strict=True))
    found, turned, took = {}, {}, {}
    for cover in ("pixels", "cells"):
        settings = SignalSettings(cover=cover)
        began = time.process_time()
        three = image_components(model, shown, logits, features, settings)
        took[cover] = 1000 * (time.process_time() - began) / len(shown)
        found[cover] = scores(three, 1.0, 1.0, 1.0).numpy()
        turned[cover] = (three.margin > 0).numpy()
    pixels, cells = found["pixels"], found["cells"]
    ranks = stats.spearmanr(pixels, cells).statistic
    both = np.mean((pixels > 0) == (cells > 0))
    alike = np.mean(turned["pixels"] == turned["cells"])
    told = "∞" if epsilon is None else f"{epsilon:g}"
    return (
        f"| {data} | {told} | {pixels.mean():.3f} | {cells.mean():.3f} | {ranks:.2f} | {both:.0%}"
        f" | {alike:.0%} | {took['pixels']:.1f} | {took['cells']:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--data", nargs="+", default=["blood-cells", "ham10000", "chest-xray14"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for data in options.data:
        for epsilon in (0.5, 5.0, None):
            rows.append(row(data, epsilon, options.images))
            print(rows[-1], flush=True)
    RESULT.write_text(
        "# Covering cells of the map beside covering pixels of the image\n\n"
        f"`python benchmarks/cover_agreement.py --images {options.images}`, commit {commit()}.\n"
        f"At most {options.images} public validation images a set; one model each, seed 0, scale\n"
        "`probe`; α = β = γ = 1, q = 0.2. The same cells are covered both ways. Decision turns\n"
        "alike: whether another class comes first once they are covered. Times are processor time\n"
        "of one thread, beside other work.\n\n" + "\n".join([HEAD, "|" + "---|" * 9, *rows]) + "\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
