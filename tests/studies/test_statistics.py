"""The paired comparison: exact where it can be checked, honest where it cannot be sure."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from xcal.metrics.classification import auroc, macro_f1
from xcal.studies.statistics import (
    compare,
    group_weights,
    macro_f1_of_counts,
    summarize,
    weighted_auroc,
)
from xcal.studies.store import ROAD_STEP, CellResult, TestSet, pack, rank_images, unpack


def pictures(groups: int = 40, each: int = 5, classes: int = 4) -> TestSet:
    group = np.repeat(np.arange(groups), each)
    return TestSet("t", tuple("abcd"[:classes]), "picture", group % classes, group)


def result(test: TestSet, right: float, rng: np.random.Generator, **road: float) -> CellResult:
    """A cell that answers rightly for this share of the *groups*."""
    classes = len(test.classes)
    known = rng.random(int(test.groups.max()) + 1) < right
    answer = np.where(known[test.groups], test.labels, (test.labels + 1) % classes)
    scores = rng.normal(road.get("road", 0.1), 0.02, len(test.labels)).clip(-0.5, 0.5)
    values: dict[str, Any] = {
        "id": "x",
        "status": "finished",
        "keys": {},
        "macro_f1": float(macro_f1(test.labels, answer, classes)),
        "road": float(scores.mean()),
        "predicted": pack(answer.astype(np.uint8)),
        "road_images": pack(np.arange(len(answer), dtype=np.int32)),
        "road_scores": pack(np.round(scores / ROAD_STEP).astype(np.int16)),
    }
    return CellResult(values)


def test_packing_loses_nothing() -> None:
    values = np.array([3, -2, 500, 0], dtype=np.int16)
    assert unpack(pack(values)).tolist() == values.tolist()


def test_macro_f1_is_the_one_of_the_metrics() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        labels, answers = rng.integers(0, 4, 50), rng.integers(0, 4, 50)
        counts = np.zeros((4, 4))
        np.add.at(counts, (labels, answers), 1)
        assert macro_f1_of_counts(counts) == pytest.approx(macro_f1(labels, answers, 4))


@pytest.mark.parametrize("classes", [2, 4])
def test_auroc_of_kept_ranks_is_the_one_of_the_metrics(classes: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(10):
        labels = rng.integers(0, classes, 60)
        scores = rng.integers(1, 9, (60, classes)).astype(float)  # many ties
        if classes == 2:
            scores[:, 0] = 10 - scores[:, 1]  # as two probabilities are
        scores /= scores.sum(axis=1, keepdims=True)
        ranks = rank_images(scores)
        assert ranks.dtype == np.uint16 and len(ranks) == (1 if classes == 2 else classes)
        even = np.ones((1, 60))
        found = [
            weighted_auroc(row, labels == k, np.arange(60), even)[0]
            for row, k in zip(ranks, [1] if classes == 2 else range(classes), strict=True)
        ]
        assert np.mean(found) == pytest.approx(auroc(labels, scores))


def test_a_weight_counts_an_image_so_often() -> None:
    rng = np.random.default_rng(1)
    ranks, positive = rng.integers(0, 9, 30), rng.random(30) < 0.4
    weights = rng.integers(0, 4, 30)
    often = np.repeat(np.arange(30), weights)
    found = weighted_auroc(ranks, positive, np.arange(30), weights[None].astype(float))
    every = np.arange(len(often))
    again = weighted_auroc(ranks[often], positive[often], every, np.ones((1, len(often))))
    assert found == pytest.approx(again)


def test_ranks_tell_models_apart_that_give_one_class_to_all() -> None:
    test, rng = pictures(classes=2), np.random.default_rng(2)
    one_class = np.zeros(len(test.labels), dtype=np.uint8)

    def ranked(noise: float) -> CellResult:
        """All far from the threshold, but some of the class a little less so."""
        chance = 0.1 + 0.01 * (test.labels + noise * rng.normal(size=len(test.labels)))
        both = np.stack([1 - chance, chance], axis=1)
        values = {
            "predicted": pack(one_class),
            "macro_f1": float(macro_f1(test.labels, one_class, 2)),
            "auroc": float(auroc(test.labels, both)),
            "ranks": pack(rank_images(both)),
        }
        return CellResult(values)

    sharp, dull = [ranked(0.5) for _ in range(3)], [ranked(2.0) for _ in range(3)]
    assert compare(sharp, dull, test).verdict == "no difference shown"
    found = compare(sharp, dull, test, "auroc")
    assert found.verdict == "better" and found.low < found.mean < found.high
    assert compare(dull, sharp, test, "auroc").mean == pytest.approx(-found.mean)


def test_every_draw_holds_as_many_groups_of_each_class() -> None:
    test = pictures()
    weights = group_weights(test, 50)
    for k in range(4):
        assert (weights[:, np.arange(40) % 4 == k].sum(axis=1) == 10).all()


def test_a_large_difference_is_seen_and_its_sign_is_right() -> None:
    rng, test = np.random.default_rng(1), pictures()
    good = [result(test, 0.9, rng, road=0.2) for _ in range(5)]
    poor = [result(test, 0.4, rng, road=0.1) for _ in range(5)]
    for measure in ("macro_f1", "road"):
        found = compare(good, poor, test, measure)  # type: ignore[arg-type]
        assert found.verdict == "better" and found.wins == 5 and found.losses == 0
        assert found.low < found.mean < found.high
        assert compare(poor, good, test, measure).verdict == "worse"  # type: ignore[arg-type]


def test_a_method_does_not_beat_itself() -> None:
    rng, test = np.random.default_rng(2), pictures()
    cells = [result(test, 0.7, rng) for _ in range(3)]
    found = compare(cells, cells, test)
    assert (found.mean, found.low, found.high) == (0, 0, 0)
    assert found.verdict == "no difference shown"


def test_one_seed_is_never_a_verdict() -> None:
    rng, test = np.random.default_rng(3), pictures()
    assert compare([result(test, 1, rng)], [result(test, 0, rng)], test).verdict == "one seed"


def test_a_difference_that_is_not_there_is_rarely_claimed() -> None:
    """Both methods are equally good; at 95 % confidence few comparisons may say otherwise."""
    test, claims, trials = pictures(), 0, 120
    for trial in range(trials):
        rng = np.random.default_rng([4, trial])
        ours, theirs = ([result(test, 0.7, rng) for _ in range(3)] for _ in range(2))
        claims += compare(ours, theirs, test, draws=300).verdict != "no difference shown"
    assert claims <= 0.1 * trials


def test_files_of_one_picture_do_not_make_an_interval_narrower() -> None:
    """Twenty copies of each picture say no more than one."""
    widths = []
    for each in (1, 20):
        rng, test = np.random.default_rng(5), pictures(each=each)
        pairs = [(result(test, 0.8, rng), result(test, 0.5, rng)) for _ in range(4)]
        found = compare([a for a, _ in pairs], [b for _, b in pairs], test)
        widths.append(found.high - found.low)
    assert widths[1] > 0.6 * widths[0]


def test_a_summary_of_one_seed_has_no_deviation() -> None:
    assert summarize([0.5]).deviation is None
    assert summarize([0.4, 0.6]).deviation == pytest.approx(0.1414, abs=1e-3)
