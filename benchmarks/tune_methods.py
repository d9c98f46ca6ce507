"""The same tuning for every method: learning rate × clipping norm, same seeds, on `smear`.

    python benchmarks/tune_methods.py               # run what is missing
    python benchmarks/tune_methods.py --table       # print the tables of docs/methods.md
    python benchmarks/tune_methods.py --write       # put them there

Every finished cell is one line of `benchmarks/results/tuning/smear.csv`; a cell that is there is
not run again, so an interrupted search goes on where it stood. The best cell is chosen on public
*validation* images; the test images stand beside it and choose nothing.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from xcal.config import Experiment
from xcal.errors import UserError
from xcal.experiments import make_experiment
from xcal.federation.folder import RunFolder, command, commit
from xcal.federation.local import run_experiment
from xcal.federation.setup import Federation, prepare
from xcal.methods.registry import METHODS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "tuning" / "smear.csv"
PAGE = ROOT / "docs" / "methods.md"
BEGIN, END = "<!-- tuning: begin -->", "<!-- tuning: end -->"

LEARNING_RATES = (0.3, 1.0, 3.0)
CLIPS = (0.3, 1.0, 3.0)
SEEDS = (0, 1)
# Smaller than the defaults, so that the whole search takes some twenty minutes of one core.
SETTINGS: dict[str, Any] = {
    "data": "smear",
    "unit": "record",
    "network": "small",
    "pixels": 32,
    "train_images": 1500,
    "clients": 3,
    "rounds": 4,
    "epsilon": 5.0,
    "delta": 1e-5,
    "accountant": "renyi",  # one for all methods
    "validation_images": 300,
    "road_images": 0,
    "road_test_images": 0,
    "threads": 1,
}
# A method by its keys; the name is what the tables call it.
VARIANTS: dict[str, dict[str, Any]] = {
    "adaptive-clip, level client": {"method": "adaptive-clip", "level": "client"},
    "xcal-steered + importance": {"method": "xcal-steered", "geometry": "importance"},
    "xcal-steered + quantile": {"method": "xcal-steered", "clipping": "quantile"},
}
FIELDS = (
    "method lr clip seed validation_f1 test_f1 halted seconds epsilon rounds train_images pixels"
    " commit command"
).split()


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of the grid. `clip = None`: the method clips nothing."""

    method: str
    lr: float
    clip: float | None
    seed: int

    @property
    def key(self) -> tuple[str, ...]:
        shown = "" if self.clip is None else f"{self.clip:g}"
        return (self.method, f"{self.lr:g}", shown, str(self.seed))


def keys_of(name: str) -> dict[str, Any]:
    return {**SETTINGS, **VARIANTS.get(name, {"method": name})}


def names() -> list[str]:
    """Every method of the package, and the variants whose keys make a difference to it."""

    def known(keys: dict[str, Any]) -> bool:
        method = METHODS.get(keys["method"])
        return method is not None and set(keys) <= method.uses

    return [*METHODS, *(n for n, keys in VARIANTS.items() if known(keys))]


def cells(chosen: list[str], seeds: Sequence[int] = SEEDS) -> Iterator[Cell]:
    """One seed of all methods before the next, so that a search cut short compares them all."""
    for seed in seeds:
        for name in chosen:
            clips: tuple[float | None, ...] = CLIPS
            if "max_grad_norm" not in METHODS[keys_of(name)["method"]].uses:
                clips = (None,)
            for lr in LEARNING_RATES:
                for clip in clips:
                    yield Cell(name, lr, clip, seed)


def read() -> dict[tuple[str, ...], dict[str, str]]:
    if not RESULTS.exists():
        return {}
    with open(RESULTS, newline="") as file:
        rows = list(csv.DictReader(file))
    return {(r["method"], r["lr"], r["clip"], r["seed"]): r for r in rows}


def append(cell: Cell, found: dict[str, Any]) -> None:
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    new = not RESULTS.exists()
    with open(RESULTS, "a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        if new:
            writer.writeheader()
        name, lr, clip, seed = cell.key
        own = {"method": name, "lr": lr, "clip": clip, "seed": seed}
        shared = {k: SETTINGS[k] for k in ("epsilon", "rounds", "train_images", "pixels")}
        writer.writerow({**own, **shared, **found, "commit": commit(), "command": command()})


def run(cell: Cell, base: Federation) -> dict[str, Any]:
    """Train one cell; data, partition and plans depend on neither lr nor C and are taken over."""
    keys = {**keys_of(cell.method), "seed": cell.seed, "lr": cell.lr}
    if cell.clip is not None:
        keys["max_grad_norm"] = cell.clip
    experiment: Experiment = make_experiment(keys)
    with tempfile.TemporaryDirectory() as scratch:
        folder = RunFolder.create(Path(scratch) / "run", experiment, sorted(keys))
        try:
            result = run_experiment(folder, None, dataclasses.replace(base, experiment=experiment))
        except UserError:  # diverged: a result like any other
            return {"validation_f1": "", "test_f1": "", "halted": "", "seconds": ""}
        last = folder.read_lines("rounds.jsonl")[-1]
    return {
        "validation_f1": f"{last['validation_macro_f1']:.4f}",
        "test_f1": f"{result['macro_f1']:.4f}",
        "halted": sum(c["halted"] for c in result["clients"]),
        "seconds": f"{result['seconds']:.1f}",
    }


def search(chosen: list[str], seeds: Sequence[int]) -> None:
    done = read()
    missing = [c for c in cells(chosen, seeds) if c.key not in done]
    bases: dict[tuple[str, int], Federation] = {}
    for number, cell in enumerate(missing, start=1):
        place = (cell.method, cell.seed)
        if place not in bases:
            bases.clear()  # one at a time is enough
            bases[place] = prepare(make_experiment({**keys_of(cell.method), "seed": cell.seed}))
        found = run(cell, bases[place])
        append(cell, found)
        print(f"{number}/{len(missing)} {' '.join(cell.key)}: {found['validation_f1']}", flush=True)


def _mean(rows: list[dict[str, str]], field: str) -> float | None:
    values = [float(r[field]) for r in rows if r[field]]
    return statistics.fmean(values) if values and len(values) == len(rows) else None


def table() -> str:
    """Validation F1 of every cell, and the best cell of every method with its test F1."""
    done = read()
    lines = [
        f"Public validation macro F1, mean over seeds {', '.join(map(str, SEEDS))} (a figure in"
        " parentheses stands on fewer); – where a run diverged, blank where it has not run."
        f" `smear` at {SETTINGS['pixels']} pixels, {SETTINGS['train_images']:,} training images"
        f" over {SETTINGS['clients']} clients, `small`, {SETTINGS['rounds']} rounds, ε ="
        f" {SETTINGS['epsilon']:g}, δ = {SETTINGS['delta']:g}. Made by"
        " `python benchmarks/tune_methods.py`; every cell is a line of"
        " `benchmarks/results/tuning/smear.csv`.",
        "",
    ]
    heads = [f"{lr:g}, {c:g}" for lr in LEARNING_RATES for c in CLIPS]
    lines += [f"| lr, C | {' | '.join(heads)} | best | test F1 |"]
    lines += ["|---" + "|---:" * (len(heads) + 2) + "|"]
    order = list(dict.fromkeys(key[0] for key in done))
    for name in sorted(order, key=lambda n: (names().index(n) if n in names() else 99, n)):
        shown, best = [], None
        for lr in LEARNING_RATES:
            for clip in CLIPS:
                free = (name, f"{lr:g}", "")
                key = free if (*free, str(SEEDS[0])) in done else (name, f"{lr:g}", f"{clip:g}")
                rows = [done[(*key, str(s))] for s in SEEDS if (*key, str(s)) in done]
                value = _mean(rows, "validation_f1")
                if not rows or (key == free and clip != CLIPS[0]):
                    shown.append("")
                    continue
                text = "–" if value is None else f"{value:.3f}"
                shown.append(text if len(rows) == len(SEEDS) else f"({text})")
                if value is not None and (best is None or value > best[0]):
                    at = f"{lr:g}" if key == free else f"{lr:g}, {clip:g}"
                    best = (value, at, _mean(rows, "test_f1"))
        chosen, test = ("–", None) if best is None else (best[1], best[2])
        tested = "–" if test is None else f"{test:.3f}"
        lines.append(f"| {name} | {' | '.join(shown)} | {chosen} | {tested} |")
    return "\n".join(lines) + "\n"


def write() -> None:
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table()}{END}{after}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("methods", nargs="*", help="only these; all if none is given")
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS, help="only these")
    parser.add_argument("--table", action="store_true", help="print the tables and run nothing")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/methods.md")
    given = parser.parse_args()
    if given.table:
        print(table(), end="")
    elif given.write:
        write()
    else:
        search(given.methods or names(), given.seeds)
