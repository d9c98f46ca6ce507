"""Declared grids: what a cell is called, what is shared, what is refused."""

from __future__ import annotations

import json

import pytest

from reproduce.declared import STUDIES, WEIGHTS, Choice, declare, only_variants
from reproduce.scales import CAME_LATER, LAPTOP, SCALES, make_cell
from xcal.errors import UserError
from xcal.experiments import experiment_type
from xcal.methods.registry import METHODS
from xcal.studies.grid import PROBE

DEFAULTS = {name: field.default for name, field in experiment_type().model_fields.items()}


@pytest.mark.parametrize("scale", sorted(SCALES))
@pytest.mark.parametrize("study", sorted(STUDIES))
def test_every_cell_of_every_study_is_an_experiment(study: str, scale: str) -> None:
    grid = declare(study, scale)
    assert grid.cells
    assert len({c.id for c in grid.cells}) == len(grid.cells)
    for cell in grid.cells:
        experiment = cell.experiment({"weights": "somewhere.pth"})
        assert experiment.method == cell.method
        assert experiment.threads == 1
        assert cell.keys.get("weights") in (None, "imagenet")  # never a machine's path


def test_a_cell_is_called_by_what_counts_for_its_method() -> None:
    base = LAPTOP.values("fl-dp", "blood-cells", "small", 5.0, 0)
    cell = make_cell("laptop", base, 500)
    assert cell.id == make_cell("laptop", base | {"w": 0.9, "band": 0.4}, 500).id
    assert cell.id != make_cell("laptop", base | {"lr": 9.0}, 500).id
    assert cell.id != make_cell("laptop", base, 100).id
    ours = LAPTOP.values("xcal-steered", "blood-cells", "small", 5.0, 0)
    assert make_cell("laptop", ours, 500).id != make_cell("laptop", ours | {"w": 0.9}, 500).id
    plain = LAPTOP.values("fl", "blood-cells", "small", None, 0)
    assert "epsilon" not in make_cell("laptop", plain, 500).keys


def test_names_of_finished_cells_stay() -> None:
    """Committed results are found by these names: whoever changes them orphans the results."""
    values = LAPTOP.values("fl-dp", "blood-cells", "small", 5.0, 0)
    text = json.dumps(sorted(make_cell("laptop", values, 500).keys))
    assert text == json.dumps(
        sorted(
            "average clients concentration data delta epsilon expected_batch_size local_epochs lr"
            " max_grad_norm method network optimizer paired partition pixels road_every road_images"
            " rounds seed train_images unit validation_images".split()
        )
    )


def test_a_probe_has_a_name_of_its_own() -> None:
    """So that its cells are not compared with those of other parts of the same network."""
    grid = declare("privacy-utility", "laptop", Choice(networks=("efficientnet_b0", PROBE)))
    assert {(c.network, c.keys["network"], c.keys["train"]) for c in grid.cells} == {
        ("efficientnet_b0", "efficientnet_b0", "last:2"),
        (PROBE, "efficientnet_b0", "head"),
    }
    assert {c.method for c in grid.cells if c.network == PROBE} == {
        "centralized", "fl", "fl-dp", "xcal-steered", "xcal-paper",
    }  # fmt: skip
    with pytest.raises(UserError, match="layers that train"):
        declare("efficiency", "laptop", Choice(networks=(PROBE,), methods=("agp",)))


@pytest.mark.parametrize("scale", ["probe", "paper"])
def test_a_cell_of_a_later_scale_pins_every_key_that_its_method_uses(scale: str) -> None:
    for study in STUDIES:
        if study in ("shipped", "rates") and scale != "probe":
            continue
        for cell in declare(study, scale).cells:
            missing = METHODS[cell.method].uses - {*cell.keys, *CAME_LATER}
            unset = {k for k in missing if DEFAULTS[k] is not None}
            assert not unset, (cell.title, unset)


def test_methods_of_a_study_share_draws_and_noise() -> None:
    for scale in SCALES:
        assert all(c.keys["paired"] is True for c in declare("privacy-utility", scale).cells)


def test_studies_share_their_cells() -> None:
    main = {c.id for c in declare("privacy-utility", "laptop").cells}
    assert {c.id for c in declare("efficiency", "laptop").cells} <= main
    assert {c.id for c in declare("panel", "laptop").cells} <= main
    ablation = declare("ablation", "laptop").cells
    assert main & {c.id for c in ablation}
    named = {c.variant for c in ablation}
    assert {"signal: constant", "signal: noise", "signal: decay", "signal: rise"} <= named
    assert set(WEIGHTS) - {"balanced"} <= named  # balanced are the defaults: the plain cell


def test_every_cell_as_shipped_has_a_twin_of_the_main_grid() -> None:
    cells = declare("shipped", "probe").cells
    main = {c.id for c in declare("privacy-utility", "probe").cells}
    clean = [c for c in cells if c.keys["data"] == "blood-cells"]
    twins = [c for c in cells if c.keys["data"] == "blood-cells-as-shipped"]
    assert {c.id for c in clean} <= main
    assert [{**c.keys, "data": "blood-cells"} for c in twins] == [c.keys for c in clean]


def test_maps_of_the_first_seeds_are_measured() -> None:
    seeds = {
        (c.keys["data"], c.keys["seed"]): c.explained
        for c in declare("privacy-utility", "probe").cells
    }
    assert seeds["blood-cells", 2] == seeds["chest-xray14", 2] == seeds["ham10000", 4] == 32
    assert seeds["blood-cells", 3] == seeds["chest-xray14", 4] == 0


def test_a_grid_can_be_narrowed_to_some_variants() -> None:
    grid = declare(
        "ablation", "laptop", Choice(networks=("small",), methods=("xcal-steered",), seeds=1)
    )
    some = only_variants(grid, ("signal:", "w = "))
    assert {c.variant for c in some.cells} == {
        "", "signal: constant", "signal: noise", "signal: decay", "signal: rise", "w = 0.25",
        "w = 0.8",
    }  # fmt: skip
    assert {c.method for c in some.cells} == {"fl-dp", "xcal-steered"}
    with pytest.raises(UserError, match=r"'signal: noize'.*Did you mean 'signal: noise'"):
        only_variants(grid, ("signal: noize",))


def test_more_seeds_add_to_what_is_there() -> None:
    few = declare("privacy-utility", "laptop", Choice(data=("blood-cells",), seeds=2)).cells
    more = declare("privacy-utility", "laptop", Choice(data=("blood-cells",), seeds=3)).cells
    assert {c.id for c in few} < {c.id for c in more}


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UserError, match="privacy-utility"):
        declare("privacy-utlity", "laptop")
    with pytest.raises(UserError, match="laptop"):
        declare("ablation", "labtop")
    with pytest.raises(UserError, match="fl-dp"):
        declare("ablation", "laptop", Choice(methods=("fl-dpp",)))
    with pytest.raises(UserError, match="no settings for the network"):
        declare("ablation", "smoke", Choice(networks=("resnet18",)))
