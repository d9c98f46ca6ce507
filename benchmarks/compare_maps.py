"""Which map says best what a private model uses: ROAD of every kind, and checks apart from it.

    python benchmarks/compare_maps.py RUN … [--images 48] [--kinds gradcam occlusion …]

RUN is a finished run's folder. For each map of its model, on a fixed sample of the set's test
images: ROAD as it is, and of logits divided by a temperature that was fitted on public validation
images (models of unlike confidence are then on one scale); insertion and deletion with a constant
color, which neither ROAD nor occlusion uses; pointing game and mass inside the true region where
the set has one; and how alike the map is once all weights are scrambled. Each image's numbers
go to `benchmarks/results/maps/NAME.json`; what is there is not computed again, so that a run that
was cut off goes on. `--write` puts the table, with bootstrap intervals over groups, into
docs/maps.md.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from xcal.data.images import Images
from xcal.data.normalize import to_tensor
from xcal.explain.choosing import added, choose_map, make_maps, parts_of, title_of
from xcal.explain.faithfulness import insertion_deletion, randomisation_check
from xcal.explain.inference import predict_logits
from xcal.explain.localization import localization
from xcal.explain.road import RoadSettings, road
from xcal.federation.folder import RunFolder, commit
from xcal.federation.outcome import public_subset
from xcal.metrics.temperature import confidences, fit_temperature
from xcal.report.runs import load_data, load_run

ROOT = Path(__file__).parent
RESULTS = ROOT / "results" / "maps"
PAGE = ROOT.parent / "docs" / "maps.md"
KINDS = (
    "gradcam gradcam++ layercam cell-occlusion occlusion occlusion+gradcam rise gradient-input"
    " random"
).split()
MEASURES = ["road", "place", "curves", "scrambled"]
SCRAMBLED = 8  # images of the sanity check
FITTED = 96  # public validation images of the temperature
RESAMPLES = 2000
COVER = 0.0  # ImageNet's mean color, in the units of the images: neither a blur nor an imputation


class Recorded(nn.Module):
    """A network that keeps what it answered."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.logits: list[Tensor] = []

    def forward(self, images: Tensor) -> Tensor:
        answer: Tensor = self.model(images)
        self.logits.append(answer.detach())
        return answer


def road_scores(
    model: nn.Module, images: Tensor, maps: Tensor, temperature: float
) -> tuple[list[float], list[float]]:
    """ROAD of each image as it is, and by confidences at the temperature, from the same passes."""
    recorded, settings = Recorded(model), RoadSettings()
    found = road(recorded, images, maps, settings)
    answers = torch.cat(recorded.logits)[len(images) :].double().numpy()
    levels = len(settings.levels)
    classes = np.repeat(found.classes, 2 * levels)
    at = confidences(answers, temperature)[np.arange(len(answers)), classes]
    most, least = np.split(at.reshape(len(images), 2 * levels), 2, axis=1)
    return found.scores.tolist(), ((least - most).mean(axis=1) / 2).tolist()


class Maps:
    """The maps of one model's test images; each kind is made once, and added from its parts."""

    def __init__(self, model: nn.Module, images: Tensor, place: Path) -> None:
        self.model, self.images = model, images
        self._place = place
        self._made: dict[str, Tensor] = {}

    def of(self, kind: str) -> Tensor:
        kinds = parts_of(kind)
        if len(kinds) > 1:
            return added([self.of(part) for part in kinds])
        if kind not in self._made:
            path = self._place / f"{kind}.npy"
            if not path.exists():
                self._place.mkdir(parents=True, exist_ok=True)
                began = time.process_time()
                made = make_maps(self.model, self.images, method=kind).numpy()
                seconds = time.process_time() - began
                path.with_suffix(".seconds").write_text(f"{seconds:.2f}")
                np.save(path, made)
            self._made[kind] = torch.from_numpy(np.load(path))
        return self._made[kind]

    def seconds(self, kind: str) -> float:
        """Processor time that the maps took."""
        read = (self._place / f"{part}.seconds" for part in parts_of(kind))
        return round(sum(float(path.read_text()) for path in read), 1)


def measured(
    measure: str, maps: Maps, test: Images, kind: str, temperature: float, steps: int
) -> dict[str, Any]:
    """One measure of one kind of map, image by image."""
    if measure == "road":
        raw, matched = road_scores(maps.model, maps.images, maps.of(kind), temperature)
        return {"map_seconds": maps.seconds(kind), "road": raw, "road_matched": matched}
    if measure == "curves":
        found = insertion_deletion(
            maps.model, maps.images, maps.of(kind), steps=steps, fill=COVER, base=COVER
        )
        return {"deletion": found.deletion_auc.tolist(), "insertion": found.insertion_auc.tolist()}
    if measure == "place":
        if test.masks is None:
            return {}
        place = localization(maps.of(kind), torch.from_numpy(test.masks))
        return {name: getattr(place, name).tolist() for name in ("pointing", "inside", "area")}
    last = randomisation_check(maps.model, maps.images[:SCRAMBLED], stages=1, method=kind)[-1]
    return {"scrambled": last.agreement.rank_correlation.tolist()}


def compare(folder: Path, given: argparse.Namespace) -> None:
    run = load_run(folder)
    path = RESULTS / f"{folder.name}.json"
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"kinds": {}}
    data = load_data(run)
    test = public_subset(data.test, given.images)
    validation = public_subset(data.validation, FITTED)
    assert test is not None and validation is not None
    inputs = to_tensor(np.asarray(test.pixels))

    def save() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.with_suffix(".tmp")
        whole.write_text(json.dumps(kept) + "\n")
        whole.rename(path)

    if "temperature" not in kept:
        logits = predict_logits(run.model, to_tensor(np.asarray(validation.pixels))).double()
        answers = predict_logits(run.model, inputs).argmax(dim=1)
        keys = "method data network head_reads train train_images pixels epsilon seed".split()
        kept |= {
            "keys": {k: run.experiment.resolved()[k] for k in keys},
            "trained_by": (RunFolder.find(folder).result or {}).get("commit"),
            "measured_by": commit(),
            "temperature": fit_temperature(logits.numpy(), validation.labels),
            "groups": np.unique(test.groups, return_inverse=True)[1].tolist(),
            "right": (answers.numpy() == test.labels).tolist(),
        }
        save()
    maps = Maps(run.model, inputs, given.scratch / f"{folder.name}-{len(test)}")
    for measure in given.measures:
        for kind in given.kinds:
            of = kept["kinds"].setdefault(kind, {"measures": []})
            if measure in of["measures"]:
                continue
            found = measured(measure, maps, test, kind, kept["temperature"], given.steps)
            of |= found
            of["measures"].append(measure)
            save()
            told = {k: round(float(np.nanmean(v)), 3) for k, v in found.items()}
            print(f"{time.strftime('%X')} {folder.name}: {kind} {told}", flush=True)
    if given.choose and "choice" not in kept:
        shown = to_tensor(np.asarray(validation.pixels[: given.choose]))
        groups = validation.groups[: given.choose]
        kept["choice"] = choose_map(run.model, shown, groups, candidates=given.kinds).as_dict()
        save()


def bootstrap(values: NDArray[np.float64], groups: list[Any]) -> tuple[float, float, float]:
    """Mean and 95 % interval, groups drawn with replacement."""
    _, place = np.unique(np.asarray(groups), return_inverse=True)
    sums, counts = np.bincount(place, weights=values), np.bincount(place)
    drawn = np.random.default_rng(0).integers(len(sums), size=(RESAMPLES, len(sums)))
    means = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(values.mean()), float(low), float(high)


def _text(found: tuple[float, float, float], sign: str = "") -> str:
    mean, low, high = (f"{value:{sign}.3f}".replace("-", "−") for value in found)
    return f"{mean} [{low}, {high}]"


def table(kept: dict[str, Any]) -> str:
    """One model's maps as a table of Markdown."""
    keys, groups, kinds = kept["keys"], kept["groups"], kept["kinds"]
    first = kinds["gradcam"]
    columns = ["ROAD", "ROAD matched", "matched − Grad-CAM"]
    checks = [c for c in ("deletion", "insertion") if all(c in k for k in kinds.values())]
    columns += [{"deletion": "deletion ↓", "insertion": "insertion ↑"}[c] for c in checks]
    placed = [c for c in ("pointing", "inside") if c in first]
    columns += [*placed, "scrambled", "seconds"]
    lines = [
        f"**{keys['data']}, ε = {keys['epsilon']:g}**, `{keys['network']}` at {keys['pixels']} px,"
        f" {keys['train_images'] or 'all'} training images, seed {keys['seed']}:"
        f" {len(groups)} test images of {len(set(groups))} groups, {np.mean(kept['right']):.2f} of"
        f" them answered rightly; temperature {kept['temperature']:.2f}; models of commit"
        f" `{str(kept['trained_by'])[:7]}`, maps of `{str(kept['measured_by'])[:7]}`.",
        "",
        f"| map | {' | '.join(columns)} |",
        f"|{'---|' * (len(columns) + 1)}",
    ]
    for kind, found in kinds.items():
        matched = np.array(found["road_matched"])
        gain = bootstrap(matched - np.array(first["road_matched"]), groups)
        row = [
            title_of(kind),
            _text(bootstrap(np.array(found["road"]), groups)),
            _text(bootstrap(matched, groups)),
            "–" if kind == "gradcam" else _text(gain, "+"),
        ]
        row += [_text(bootstrap(np.array(found[c]), groups)) for c in checks]
        row += [f"{np.nanmean(found[c]):.2f}" for c in placed]
        alike = f"{np.mean(found['scrambled']):+.2f}" if "scrambled" in found else "–"
        row.append(alike.replace("-", "−"))
        row.append(f"{found['map_seconds']:.0f}")
        lines.append(f"| {' | '.join(row)} |")
    if "choice" in kept:
        chosen = kept["choice"]
        on = f"{chosen['images']} public validation images"
        lines += ["", f"`auto`, on {on}: {title_of(chosen['method'])}."]
    return "\n".join(lines)


def write() -> None:
    tables = [table(json.loads(path.read_text())) for path in sorted(RESULTS.glob("*.json"))]
    text = PAGE.read_text()
    part = "<!-- maps -->\n\n" + "\n\n".join(tables) + "\n\n<!-- end -->"
    PAGE.write_text(re.sub(r"<!-- maps -->.*?<!-- end -->", lambda _: part, text, flags=re.DOTALL))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="*")
    parser.add_argument("--images", type=int, default=48)
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    parser.add_argument("--steps", type=int, default=10, help="of insertion and deletion")
    parser.add_argument("--measures", nargs="+", default=MEASURES, choices=MEASURES)
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "maps")
    parser.add_argument("--choose", type=int, default=0, help="images that `auto` chooses on")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/maps.md")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for folder in given.runs:
        compare(folder, given)
    if given.write:
        write()


if __name__ == "__main__":
    main()
