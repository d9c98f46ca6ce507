"""The tables of docs/recipes.md, from the rows under `benchmarks/results/recipes`.

python benchmarks/recipe_tables.py            prints them
python benchmarks/recipe_tables.py --write    puts them into the page
"""

from __future__ import annotations

import csv
import re
import statistics
import sys
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "recipes"
PAGE = HERE.parent / "docs" / "recipes.md"
SHOWN = "epsilon head_reads train pixels images batch rounds lr clip average".split()


def rows_of(pattern: str) -> list[dict[str, str]]:
    found = []
    for path in sorted(RESULTS.glob(pattern)):
        with open(path, newline="") as file:
            found += list(csv.DictReader(file))
    return found


def spread(values: list[float]) -> str:
    mean = statistics.mean(values)
    return f"{mean:.3f} ± {statistics.stdev(values):.3f}" if len(values) > 1 else f"{mean:.3f}"


def table(rows: list[dict[str, str]], columns: tuple[str, ...]) -> str:
    """One line a setting, the best of a set and ε first; spread over the seeds."""
    groups: dict[tuple[str, ...], list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        row["images"] = row["train_images"]
        groups[(row["data"], row["method"], *(row[k] for k in SHOWN))].append(row)

    def rank(item: tuple[tuple[str, ...], list[dict[str, str]]]) -> tuple[str, float, float]:
        key, found = item
        return key[0], float(key[2]), -statistics.mean(float(r[columns[0]]) for r in found)

    if not rows:
        return "Nothing yet."
    heads = ["data", "method", *SHOWN, "seeds", *(c.replace("_", " ") for c in columns)]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for key, found in sorted(groups.items(), key=rank):
        seeds = " ".join(sorted(r["seed"] for r in found))
        values = [spread([float(r[c]) for r in found]) for c in columns]
        lines.append(f"| {' | '.join([*key, seeds, *values])} |")
    return "\n".join(lines)


def tables() -> dict[str, str]:
    tried = [r for r in rows_of("*.csv") if not r["test_macro_f1"]]
    tested = rows_of("*-test.csv")
    seconds = sum(float(r["seconds"]) for r in tried + tested)
    return {
        "test": table(tested, ("test_macro_f1", "validation_macro_f1")),
        "tried": table(tried, ("validation_macro_f1",)),
        "compute": f"{len(tried)} settings and seeds tried, {len(tested)} tested, in"
        f" {seconds / 60:.0f} minutes of wall time on one thread of a busy machine, beside what"
        " the frozen backbone took.",
    }


def page() -> str:
    text = PAGE.read_text()
    for name, found in tables().items():
        text = re.sub(
            rf"(<!-- {name} -->\n).*?(<!-- end -->)",
            lambda match, found=found: f"{match[1]}\n{found}\n\n{match[2]}",
            text,
            flags=re.DOTALL,
        )
    return text


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page())
    else:
        print("\n\n".join(tables().values()))
