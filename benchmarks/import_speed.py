"""How long an import takes beside what Pillow alone needs for the same images on all cores.

    python benchmarks/import_speed.py $XCAL_DATA/blood-cells.zip

Pillow's part reads every image that the import keeps straight from the zip, decodes it, makes it
RGB and resizes it as the import does, one process a core, and throws the result away. The import is
the real command in a fresh site: it also looks for broken files, hashes the source, finds the
groups and writes the cache. Both are repeated in turn, so that a busy machine meets both alike;
writes `benchmarks/results/import.md`.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from PIL import Image

from xcal.federation.folder import commit, versions

OUT = Path(__file__).parent / "results" / "import.md"
IMAGE_ENDINGS = (".jpeg", ".jpg", ".png")


def decode(task: tuple[str, list[str], int]) -> int:
    source, names, pixels = task
    with zipfile.ZipFile(source) as archive:
        for name in names:
            with Image.open(io.BytesIO(archive.read(name))) as picture:
                picture.draft(None, (pixels, pixels))
                small = picture.convert("RGB")
                small.resize((pixels, pixels), Image.Resampling.BICUBIC, reducing_gap=3.0)
    return len(names)


def pillow_seconds(source: str, names: list[str], pixels: int, cores: int) -> float:
    pieces = [(source, names[start :: 4 * cores], pixels) for start in range(4 * cores)]
    began = time.perf_counter()
    with ProcessPoolExecutor(cores) as pool:
        assert sum(pool.map(decode, pieces)) == len(names)
    return time.perf_counter() - began


def import_seconds(source: str, pixels: int) -> float:
    with tempfile.TemporaryDirectory() as site_dir:
        began = time.perf_counter()
        words = [sys.executable, "-m", "xcal", "data", "import", source, "--pixels", str(pixels)]
        subprocess.run(
            words, env=os.environ | {"XCAL_HOME": site_dir}, check=True, stdout=subprocess.DEVNULL
        )
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", help="a zip of images")
    parser.add_argument("--pixels", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with zipfile.ZipFile(given.source) as archive:
        names = [
            entry
            for entry in archive.namelist()
            # what the import leaves aside is left aside here too
            if entry.lower().endswith(IMAGE_ENDINGS) and "TEST_SIMPLE" not in entry
        ]
    cores = os.cpu_count() or 1
    pillow, ours = [], []
    for _ in range(given.rounds):
        pillow.append(pillow_seconds(given.source, names, given.pixels, cores))
        ours.append(import_seconds(given.source, given.pixels))
        print(f"Pillow {pillow[-1]:.1f} s, import {ours[-1]:.1f} s", flush=True)
    ratio = statistics.median(b / a for a, b in zip(pillow, ours, strict=True))
    lines = [
        "| images | pixels | cores | Pillow alone, s | import, s | ratio, median |",
        "|---:|---:|---:|---|---|---:|",
        f"| {len(names):,} | {given.pixels} | {cores} | {', '.join(f'{s:.1f}' for s in pillow)} |"
        f" {', '.join(f'{s:.1f}' for s in ours)} | {ratio:.2f} |",
    ]
    name = Path(given.source).name
    made = ", ".join(f"{k} {v}" for k, v in versions().items())
    print("\n".join(lines))
    OUT.write_text(
        f"# Import\n\nBy `python benchmarks/import_speed.py {name}`, commit {commit()}; {made}.\n\n"
        + "\n".join(lines)
        + "\n"
    )


if __name__ == "__main__":
    main()
