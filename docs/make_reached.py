"""What static noise reached on the public sets, for `xcal plan`: python docs/make_reached.py

Reads the committed results and writes src/xcal/cli/reached.csv.
"""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("privacy-utility", "units")
TARGET = ROOT / "src" / "xcal" / "cli" / "reached.csv"
NETWORKS = {
    "small": "all, from scratch",
    "efficientnet_b0": "last stages",
    "probe": "linear head",
}
HEAD = (
    "network,data,epsilon,unit,units,rounds,batch,noise,seeds,macro_f1,lowest,highest,auroc"
).split(",")


def table() -> str:
    found: dict[tuple[str, ...], dict[str, dict[str, str]]] = defaultdict(dict)
    for source in SOURCES:
        with open(ROOT / "results" / f"{source}-laptop.csv", newline="") as file:
            for row in csv.DictReader(file):
                plain = row["variant"] in ("", "unit = group") and row["status"] == "finished"
                if plain and row["method"] == "fl-dp":
                    key = tuple(row[k] for k in ("network", "data", "epsilon", "unit"))
                    found[key][row["seed"]] = row
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(HEAD)
    for (network, data, epsilon, unit), runs in sorted(found.items()):
        one = next(iter(runs.values()))
        batch, rounds = int(one["batch"]), int(one["rounds"])
        steps = int(one["steps"]) / int(one["clients"]) / rounds
        f1 = [float(run["macro_f1"]) for run in runs.values()]
        sigma = mean(float(run["mean_sigma"]) for run in runs.values())
        auroc = mean(float(run["auroc"]) for run in runs.values())
        about = f"~{round(steps * batch, -2 if steps * batch > 500 else -1):g}"
        numbers = (f"{sigma / batch:.4f}", len(f1), f"{mean(f1):.4f}")
        ends = (f"{min(f1):.4f}", f"{max(f1):.4f}", f"{auroc:.4f}")
        name = NETWORKS[network]
        writer.writerow((name, data, epsilon, unit, about, rounds, batch, *numbers, *ends))
    return out.getvalue()


if __name__ == "__main__":
    TARGET.write_text(table(), encoding="utf-8")
    print(f"Wrote {TARGET.relative_to(ROOT)}.")
