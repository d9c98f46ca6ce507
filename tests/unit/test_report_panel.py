"""The panel: who stands where, which images, one scale; and how it is drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import xcal
from support import TINY, micro, tiny
from xcal.errors import UserError
from xcal.experiments import make_experiment
from xcal.plotting import picture, shortened
from xcal.report.panel import (
    Entry,
    View,
    arrange,
    choose_images,
    in_multiples_of_mean,
    load_entries,
    save_panel,
    shared_peak,
)
from xcal.report.runs import LoadedRun

QUICK = {**TINY, "rounds": 1, "road_images": 0, "road_test_images": 0, "validation_images": 0}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("panel")
    wanted = {
        "fl": {"method": "fl"},
        "strict": {"method": "fl-dp", "epsilon": 4.0},
        "loose": {"method": "xcal-steered", "epsilon": 8.0},
    }
    for name, keys in wanted.items():
        xcal.run(folder / name, **{**QUICK, **keys})
    return {name: folder / name for name in wanted}


def entry(method: str, epsilon: float | None) -> Entry:
    run = LoadedRun(make_experiment(TINY), micro(3), ("left", "middle", "right"))
    return Entry(method, epsilon, run)


def test_methods_are_rows_and_epsilons_columns_with_infinity_last() -> None:
    entries = [
        entry("xcal-steered", 5.0),
        entry("fl", None),
        entry("fl-dp", 0.5),
        entry("fl-dp", 5.0),
        entry("centralized", None),
        entry("mine:own", 5.0),
    ]
    found = arrange(entries)
    assert found.methods == ("fl-dp", "xcal-steered", "mine:own")
    assert found.epsilons == (0.5, 5.0, None)
    assert found.cells == {(1, 1): 0, (1, 2): 1, (0, 0): 2, (0, 1): 3, (0, 2): 4, (2, 1): 5}
    assert found.rows == 3


def test_only_runs_without_guarantee_stand_in_one_column() -> None:
    found = arrange([entry("fl", None), entry("centralized", None)])
    assert found.methods == () and found.epsilons == (None,)
    assert found.cells == {(1, 0): 0, (0, 0): 1}


def test_images_are_chosen_from_each_class_in_turn_and_always_the_same() -> None:
    test = tiny().test
    found = choose_images(test, 7, 3)
    assert found.labels.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert len(set(found.ids.tolist())) == 7
    assert found.ids.tolist() == choose_images(test, 7, 3).ids.tolist()
    assert len(choose_images(test, 1000, 3)) == len(test)
    assert len(choose_images(test.take(np.arange(0)), 4, 3)) == 0


def test_maps_are_shown_in_multiples_of_their_mean() -> None:
    shown = in_multiples_of_mean(torch.tensor([[0.0, 1.0], [0.0, 3.0]]) * 2.0**-30)
    assert shown.tolist() == [[0, 1], [0, 3]]
    for nothing in (torch.zeros(2, 2), torch.tensor([[1.0, float("nan")]])):
        assert not in_multiples_of_mean(nothing).any()


def test_the_peak_is_shared_and_no_single_map_decides_it() -> None:
    views = [View(0, 0.5, torch.tensor([[0.0, v]])) for v in (2.0, 3.0, 4.0, 5.0, 900.0, 0.0)]
    assert shared_peak([views[:2], views[2:]]) == 5
    assert shared_peak([views[:1]]) == 2
    assert shared_peak([views[5:]]) == 0


@pytest.mark.parametrize("images", [1, 4, 5])
def test_a_panel_is_drawn(runs: dict[str, Path], tmp_path: Path, images: int) -> None:
    save_panel(tmp_path / "panel.png", list(runs.values()), images)
    with Image.open(tmp_path / "panel.png") as drawn:
        assert not drawn.info
        pixels = np.asarray(drawn.convert("RGB"), dtype=int)
    # The scale's top color is at least in the bar, so something of every part was drawn.
    assert (np.abs(pixels - (255, 250, 200)).sum(axis=2) < 12).any()
    assert (pixels[:8] == 255).all() and (pixels[:, :8] == 255).all()  # margins stay free


def test_runs_that_cannot_stand_together_are_refused(runs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="both fl at ε = ∞: give one of them"):
        load_entries([runs["fl"], runs["fl"]])
    xcal.run(tmp_path / "large", **{**QUICK, "method": "fl", "pixels": 32})
    with pytest.raises(UserError, match="differ in pixels"):
        load_entries([runs["strict"], tmp_path / "large"])
    with pytest.raises(UserError, match="holds no run"):
        load_entries([tmp_path / "nothing"])
    (runs["loose"] / "result.json").rename(tmp_path / "kept.json")
    with pytest.raises(UserError, match="is not finished"):
        load_entries([runs["loose"]])
    (tmp_path / "kept.json").rename(runs["loose"] / "result.json")


def test_without_matplotlib_a_panel_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xcal.plotting.find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"\.whl\[figures\].* or pip .*\.\[figures\]"):
        save_panel(tmp_path / "panel.png", [tmp_path / "nothing"])


def test_any_letters_are_drawn_and_long_lines_shortened(tmp_path: Path) -> None:
    for text in ("ε = ∞ – naïve Zürich 细", "$x_1$", "a \\ b"):
        with picture(tmp_path / "text.png", width=200, height=40) as drawn:
            drawn.text(0, 0, text)
        with Image.open(tmp_path / "text.png") as saved:
            assert np.asarray(saved.convert("L")).min() < 128
    assert shortened("short", 15) == "short"
    cut = shortened("a very long line of text", 8)
    assert cut == "a very…" and len(cut) <= 8
