"""Which of Kaggle's blood-cell files are copies of one picture, found from the images themselves.

    python -m venv with-opencv
    with-opencv/bin/pip install numpy opencv-python-headless
    with-opencv/bin/python benchmarks/recover_pictures.py $XCAL_DATA/blood-cells.zip

The set holds rotated, sheared, shifted and mirrored copies of a few hundred photographs, and its
file names do not say which. Two files are taken for copies of one photograph if one affine map,
found by RANSAC, carries at least ENOUGH of the SIFT key points of one (or of its mirror image) onto
those of the other. Within a class (TRAIN, TEST and TEST_SIMPLE together) a picture is grown from a
seed: all files are compared with the seed, and those still without a picture also with the members
that agreed with it least.

Some photographs overlap: they show the same cells, moved, turned or focused anew, now and then
under another class. Those count as one picture. So the two widest views of every picture are then
compared with those of all others of all classes, by more key points, and pictures that agree in
TOUCHING of them are joined. All agreements are printed as histograms, of files of one picture and
of strangers: one sees whether both bounds lie in a gap.

Writes the table that the import reads, `src/xcal/data/blood_cells.csv.gz`; its bytes follow from
what was found alone. Tens of minutes on two cores; with `--keep`, a second run starts from the
pictures that the first one grew. Only this script needs OpenCV.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import time
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

# One thread a process: the classes are what is shared out.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray

OUT = Path(__file__).parents[1] / "src" / "xcal" / "data" / "blood_cells.csv.gz"
NAME = re.compile(r"(?:.*/)?((TRAIN|TEST|TEST_SIMPLE)/([A-Z]+)/_\d+_\d+\.jpe?g)")

ENOUGH = 15  # inliers that make two files copies of one picture
POINTS = 200  # key points kept of a file
RATIO = 0.8  # a match must be this much nearer than the second best in the same file
APART = 4.0  # pixels by which a mapped point may miss
FEW = 8  # matches below which no map is sought
AXES = 40  # of the descriptors' 128, those along which they vary most
TOGETHER = 25  # files compared at a time: what a cache holds
AGAIN = 3  # members in turn that look for files the seed missed, while they find any

# The second comparison, of few files that may have no more than an edge in common.
TOUCHING = 10  # inliers that make two pictures one
MORE_POINTS = 500
FAINT = 0.012  # contrast down to which key points are taken, where it is 0.02 for the copies
UPRIGHT = 1.7  # by which a map between two wide views may stretch or shrink

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Points:
    """Key points and their descriptors; rows beyond `count` are zero and match nothing."""

    places: Floats  # (points, 2)
    looks: Floats  # (points, 128), of length one
    count: int


@dataclass
class Found:
    """The pictures of one class."""

    cell: str
    names: list[str]
    picture: list[int]
    within: list[int] = field(default_factory=list)
    """Inliers of every file with the member of its picture that found it."""
    seed_within: list[int] = field(default_factory=list)
    """Inliers of every file with the seed of its own picture, also where they were too few."""
    between: list[tuple[int, str, str]] = field(default_factory=list)
    """Inliers of seeds and files of other pictures, wherever a map was found."""
    joined: list[tuple[int, str, str]] = field(default_factory=list)
    """Seeds that agreed with files already placed: their pictures were made one."""


def key_points(gray: NDArray[np.uint8], points: int = POINTS, contrast: float = 0.02) -> Points:
    """SIFT, away from the black borders that the copying left; square roots of the histograms."""
    import cv2

    shown = (cv2.medianBlur(gray, 5) > 20).astype(np.uint8)
    shown = cv2.copyMakeBorder(shown, 1, 1, 1, 1, cv2.BORDER_CONSTANT, value=0)
    shown = np.ascontiguousarray(cv2.erode(shown, np.ones((15, 15), np.uint8))[1:-1, 1:-1])
    # SIFT counts before it masks, and about a fifth of a copy is border.
    sift = cv2.SIFT_create(nfeatures=points * 6 // 5, contrastThreshold=contrast)
    found, raw = sift.detectAndCompute(gray, shown)
    places, looks = np.zeros((points, 2), np.float32), np.zeros((points, 128), np.float32)
    best = sorted(range(len(found)), key=lambda i: -found[i].response)[:points]
    if best:
        places[: len(best)] = [found[i].pt for i in best]
        histograms = raw[best]
        looks[: len(best)] = np.sqrt(histograms / histograms.sum(1, keepdims=True))
    return Points(places, looks, len(best))


def read_gray(archive: zipfile.ZipFile, name: str) -> NDArray[np.uint8]:
    import cv2

    return cv2.imdecode(np.frombuffer(archive.read(name), np.uint8), cv2.IMREAD_GRAYSCALE)


def agreement(
    query: Points,
    places: Floats,
    partner: NDArray[np.intp],
    good: NDArray[np.bool_],
    stretched: float,
) -> int:
    """Inliers of the best affine map from the query's matched points onto their partners."""
    import cv2

    chosen = np.flatnonzero(good)
    # Each point of the file once: a spot that many points resemble says nothing.
    _, first = np.unique(partner[chosen], return_index=True)
    chosen = chosen[first]
    if len(chosen) < FEW:
        return 0
    matrix, inliers = cv2.estimateAffine2D(
        query.places[chosen],
        places[partner[chosen]],
        method=cv2.RANSAC,
        ransacReprojThreshold=APART,
        maxIters=2000,
        confidence=0.999,
    )
    if matrix is None:
        return 0
    stretch = np.linalg.svd(matrix[:, :2], compute_uv=False)
    # The copies are turned and sheared, never blown up: other maps are accidents.
    if stretch[0] > stretched or stretch[1] < 1 / stretched:
        return 0
    return int(inliers.sum())


def compare(
    query: Sequence[Points], places: Floats, looks: Floats, stretched: float = 2.5
) -> NDArray[np.int64]:
    """Inliers of the query (as it is and mirrored, the better) with every file.

    `looks` are on the axes that `reduce_looks` chose, and so must the query's be.
    """
    together = np.concatenate([q.looks[: q.count] for q in query])
    bounds = np.cumsum([0, *(q.count for q in query)])
    best = np.zeros(len(looks), np.int64)
    for start in range(0, len(looks), TOGETHER):
        part = looks[start : start + TOGETHER]
        alike = (together @ part.reshape(-1, part.shape[-1]).T).reshape(
            len(together), *part.shape[:2]
        )
        partner = alike.argmax(2)
        nearest = np.take_along_axis(alike, partner[..., None], 2)[..., 0]
        np.put_along_axis(alike, partner[..., None], -1, 2)
        second = alike.max(2)
        good = (1 - nearest) < RATIO**2 * (1 - second)
        for q, (low, high) in zip(query, pairwise(bounds), strict=True):
            enough = np.flatnonzero(good[low:high].sum(0) >= FEW)
            for i in enough:
                matched = partner[low:high, i], good[low:high, i]
                count = agreement(q, places[start + i], *matched, stretched)
                best[start + i] = max(best[start + i], count)
    return best


def main_axes(looks: Floats) -> Floats:
    """The axes that keep most of the descriptors' length; comparing on them is quicker."""
    flat = looks.reshape(-1, looks.shape[-1])
    return np.linalg.eigh(flat.T @ flat)[1][:, -AXES:].astype(np.float32)


def reduce_looks(looks: Floats, axes: Floats) -> Floats:
    reduced = looks @ axes
    length = np.linalg.norm(reduced, axis=-1, keepdims=True)
    return np.divide(reduced, length, out=np.zeros_like(reduced), where=length > 0)


def both_ways(
    archive: zipfile.ZipFile, name: str, axes: Floats, points: int = POINTS, contrast: float = 0.02
) -> list[Points]:
    """A file's key points as it is and mirrored, which SIFT cannot see through."""
    gray = read_gray(archive, name)
    mirrored = np.ascontiguousarray(gray[:, ::-1])
    both = [key_points(image, points, contrast) for image in (gray, mirrored)]
    return [Points(p.places, reduce_looks(p.looks, axes), p.count) for p in both]


def pictures_of_class(task: tuple[str, str, list[str]]) -> Found:
    """All files of one class, each with the number of its picture."""
    import cv2

    source, cell, names = task
    cv2.setNumThreads(1)
    began = time.monotonic()
    with zipfile.ZipFile(source) as archive:
        points = [key_points(read_gray(archive, name)) for name in names]
        places = np.stack([p.places for p in points])
        looks = np.stack([p.looks for p in points])
        axes = main_axes(looks)
        looks = reduce_looks(looks, axes)
        fewest = min(p.count for p in points)
        print(f"{cell}: {len(names)} files, at least {fewest} key points each", flush=True)
        picture = np.full(len(names), -1)
        found = Found(cell, names, [])
        seeds: list[tuple[int, NDArray[np.int64]]] = []
        while (picture < 0).any():
            number = len(seeds)
            seed = int(np.flatnonzero(picture < 0)[0])
            counts = compare(both_ways(archive, names[seed], axes), places, looks)
            seeds.append((seed, counts))
            met = (counts >= ENOUGH) & (picture >= 0)
            new = (counts >= ENOUGH) & (picture < 0)
            new[seed] = False
            picture[seed] = number
            picture[new] = number
            found.within += counts[new].tolist()
            asked = {seed}
            agreed = counts.copy()
            for _ in range(AGAIN):
                members = [int(i) for i in np.flatnonzero(picture == number) if i not in asked]
                free = np.flatnonzero(picture < 0)
                if not members or not len(free):
                    break
                member = min(members, key=lambda i: (agreed[i], i))
                asked.add(member)
                more = compare(both_ways(archive, names[member], axes), places[free], looks[free])
                agreed[free] = np.maximum(agreed[free], more)
                picture[free[more >= ENOUGH]] = number
                found.within += more[more >= ENOUGH].tolist()
                if more.max() < ENOUGH:
                    break
            for other in sorted(set(picture[met].tolist())):
                i = max(np.flatnonzero(met & (picture == other)), key=lambda i: counts[i])
                found.joined.append((int(counts[i]), names[seed], names[int(i)]))
                picture[picture == number] = other
                number = other
            done = int((picture >= 0).sum())
            spent = time.monotonic() - began
            if len(seeds) % 10 == 0:
                left = spent * (len(names) - done) / done
                print(f"{cell}: {done} files placed, about {left:.0f} s to go", flush=True)
    for seed, counts in seeds:
        own = picture == picture[seed]
        own[seed] = False
        found.seed_within += counts[own].tolist()
        own[seed] = True
        for i in np.flatnonzero(~own & (counts > 0)):
            found.between.append((int(counts[i]), names[seed], names[int(i)]))
    found.picture = picture.tolist()
    return found


def wide_views(task: tuple[str, list[str]]) -> list[str]:
    """The file of a picture that shows most of it, and the one that agrees with that one least.

    The second is sought in the wider half; of a picture with two overlapping photographs it is
    one of the other photograph.
    """
    source, names = task
    with zipfile.ZipFile(source) as archive:
        gray = {name: read_gray(archive, name) for name in names}
        names = sorted(names, key=lambda name: -int((gray[name] > 20).sum()))
        points = [key_points(gray[name]) for name in names[: max(2, len(names) // 2)]]
        looks = np.stack([p.looks for p in points])
        axes = main_axes(looks)
        query = both_ways(archive, names[0], axes)
        counts = compare(query, np.stack([p.places for p in points]), reduce_looks(looks, axes))
    return [names[0], names[1 + int(counts[1:].argmin())]]


def compare_views(task: tuple[str, list[str], int, int]) -> list[tuple[int, int, int]]:
    """Inliers of every view, from the first in the given steps, with all after it."""
    source, views, first, step = task
    met = []
    with zipfile.ZipFile(source) as archive:
        points = [key_points(read_gray(archive, name), MORE_POINTS, FAINT) for name in views]
        places = np.stack([p.places for p in points])
        looks = np.stack([p.looks for p in points])
        axes = main_axes(looks)
        looks = reduce_looks(looks, axes)
        for i in range(first, len(views) - 1, step):
            query = both_ways(archive, views[i], axes, MORE_POINTS, FAINT)
            counts = compare(query, places[i + 1 :], looks[i + 1 :], UPRIGHT)
            met += [(int(counts[j]), i, i + 1 + int(j)) for j in np.flatnonzero(counts)]
            if i // step % 50 == 0:
                print(f"wide views: {i} of {len(views)} compared with all after them", flush=True)
    return met


def overlaps(
    source: str, members: Sequence[list[str]], pool: ProcessPoolExecutor, processes: int
) -> tuple[list[int], list[tuple[int, str, str]], list[tuple[int, str, str]]]:
    """Which pictures overlap with which: a number for each, equal where they are one.

    Also the inliers of the views of the pictures that were joined, and of all others.
    """
    views, owner = [], []
    for i, pair in enumerate(pool.map(wide_views, [(source, names) for names in members])):
        views += pair
        owner += [i] * len(pair)
    tasks = [(source, views, first, 2 * processes) for first in range(2 * processes)]
    met = sorted(entry for found in pool.map(compare_views, tasks) for entry in found)
    number = list(range(len(members)))
    for count, i, j in met:
        one, other = sorted((number[owner[i]], number[owner[j]]))
        if count >= TOUCHING:
            number = [one if n == other else n for n in number]
    joined, strangers = [], []
    for count, i, j in met:
        if owner[i] != owner[j]:
            same = number[owner[i]] == number[owner[j]]
            (joined if same else strangers).append((count, views[i], views[j]))
    return number, joined, strangers


def histogram(counts: Iterable[int]) -> str:
    edges = [0, 1, 4, 5, 6, 7, 8, 10, 12, 15, 20, 30, 50, 100, 150, 201]
    filled, _ = np.histogram(list(counts), edges)
    return "  ".join(
        f"{low}–{high - 1}: {n}" if high - low > 1 else f"{low}: {n}"
        for low, high, n in zip(edges, edges[1:], filled, strict=False)
        if n
    )


def short(name: str) -> str:
    match = NAME.fullmatch(name)
    assert match is not None
    return match[1]


def report_growth(classes: Sequence[Found]) -> None:
    for found in classes:
        print(f"\n{found.cell}: {len(set(found.picture))} pictures")
        print(f"  with the member that found it: {histogram(found.within)}")
        print(f"  with the seed of its picture:  {histogram(found.seed_within)}")
        print(f"  seeds with strangers:          {histogram(c for c, *_ in found.between)}")
        for count, one, other in sorted(found.between, reverse=True)[:5]:
            print(f"    {count}: {short(one)} and {short(other)}")
        for count, one, other in found.joined:
            print(f"  joined by {count}: {short(one)} and {short(other)}")


def report_pictures(
    pictures: Sequence[list[str]],
    joined: Sequence[tuple[int, str, str]],
    strangers: Sequence[tuple[int, str, str]],
) -> None:
    print(f"\nviews of pictures that were joined: {histogram(c for c, *_ in joined)}")
    for count, one, other in sorted(joined, reverse=True):
        print(f"    {count}: {short(one)} and {short(other)}")
    print(f"views of other pictures: {histogram(c for c, *_ in strangers)}")
    for count, one, other in sorted(strangers, reverse=True)[:5]:
        print(f"    {count}: {short(one)} and {short(other)}")
    print(f"\n{len(pictures)} pictures")
    folders = [{short(name).rpartition("/")[0] for name in names} for names in pictures]
    for folder in sorted(set().union(*folders)):
        sizes = Counter(
            sum(short(name).startswith(f"{folder}/") for name in names)
            for names, here in zip(pictures, folders, strict=True)
            if folder in here
        )
        print(f"  {folder}: {sizes.total()} pictures, files of each {sorted(sizes.items())}")
    for names, here in zip(pictures, folders, strict=True):
        shown = {folder for folder in here if not folder.startswith("TEST_SIMPLE")}
        if len(shown) != 1:
            counts = Counter(short(name).rpartition("/")[0] for name in names)
            print(f"  in several folders: {dict(sorted(counts.items()))}")


def table(pictures: Sequence[list[str]]) -> bytes:
    """The table as it is kept: TRAIN and TEST, sorted, pictures numbered as they come."""
    picture_of = {short(name): i for i, names in enumerate(pictures) for name in names}
    numbers: dict[int, int] = {}
    lines = [
        "# Pictures that the files of Kaggle's Blood Cell Images (TRAIN and TEST) are copies of,",
        "# found from the images by benchmarks/recover_pictures.py; overlapping ones count as one.",
        "file,picture",
    ]
    for name in sorted(picture_of):
        if not name.startswith("TEST_SIMPLE/"):
            lines.append(f"{name},{numbers.setdefault(picture_of[name], len(numbers))}")
    return gzip.compress(("\n".join(lines) + "\n").encode(), mtime=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", help="blood-cells.zip")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="JSON to keep the grown pictures in")
    given = parser.parse_args()
    by_cell: dict[str, list[str]] = defaultdict(list)
    with zipfile.ZipFile(given.source) as archive:
        for name in sorted(archive.namelist()):
            if match := NAME.fullmatch(name):
                by_cell[match[3]].append(name)
    tasks = [(given.source, cell, names) for cell, names in sorted(by_cell.items())]
    with ProcessPoolExecutor(given.processes) as pool:
        if given.keep and given.keep.exists():
            classes = [Found(**values) for values in json.loads(given.keep.read_text())]
        else:
            classes = list(pool.map(pictures_of_class, tasks))
        if given.keep:
            given.keep.write_text(json.dumps([vars(found) for found in classes]))
        report_growth(classes)
        grown: dict[tuple[str, int], list[str]] = defaultdict(list)
        for found in classes:
            for name, i in zip(found.names, found.picture, strict=True):
                grown[found.cell, i].append(name)
        members = list(grown.values())
        number, joined, strangers = overlaps(given.source, members, pool, given.processes)
    whole: dict[int, list[str]] = defaultdict(list)
    for names, i in zip(members, number, strict=True):
        whole[i] += names
    report_pictures(list(whole.values()), joined, strangers)
    given.out.write_bytes(table(list(whole.values())))
    print(f"\nwrote {given.out}")


if __name__ == "__main__":
    main()
