"""A preset is a layer beneath the experiment's own keys, and is pinned key by key."""

from __future__ import annotations

from pathlib import Path

import pytest

import xcal
from support import TINY
from xcal.config import to_toml
from xcal.errors import UserError
from xcal.experiments import load_experiment, make_experiment, read_pinned
from xcal.federation.folder import RunFolder
from xcal.methods.base import MASKED_KEYS
from xcal.methods.registry import method_of, name_today
from xcal.presets import PRESETS


def test_the_paper_s_settings() -> None:
    made = make_experiment({"preset": "paper", "data": "blood-cells"})
    assert made.method == "xcal-paper"
    assert (made.expected_batch_size, made.lr, made.max_grad_norm, made.q) == (32, 1e-3, 1.0, 0.2)
    assert (made.rho, made.band, made.tau) == (0.1, 0.2, 0.2)
    assert (made.alpha, made.beta, made.gamma) == (1.0, 1.0, 1.0)
    assert (made.rounds, made.local_epochs, made.delta) == (30, 1, 1e-5)
    assert made.average == 1.0
    assert made.views == 1
    assert made.optimizer == "sgd"


@pytest.mark.parametrize(
    ("data", "pixels"),
    [("blood-cells", 150), ("chest-xray14", 128), ("ham10000", 64), ("something else", 128)],
)
def test_the_paper_s_sizes_follow_the_data_set(data: str, pixels: int) -> None:
    assert make_experiment({"preset": "paper", "data": data}).pixels == pixels


def test_the_paper_s_norm_follows_the_weights() -> None:
    assert make_experiment({"preset": "paper"}).norm == "group"
    assert make_experiment({"preset": "paper", "weights": "w.pth"}).norm == "frozen"


def test_own_keys_and_settings_lie_above_a_preset(tmp_path: Path) -> None:
    path = tmp_path / "e.toml"
    path.write_text('preset = "paper"\nbatch = 64\nlr = 0.5\n')
    made, given = load_experiment(path, ["lr=0.25"])
    assert (made.expected_batch_size, made.lr, made.rounds) == (64, 0.25, 30)
    assert given == {"preset", "expected_batch_size", "lr"}  # what a preset fills in was not given


def test_a_preset_may_come_by_set() -> None:
    made, _ = load_experiment(None, ["preset=paper", "data=ham10000"])
    assert made.pixels == 64


def test_an_unknown_preset_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"Unknown preset 'papr'.*Did you mean 'paper'"):
        make_experiment({"preset": "papr"})
    with pytest.raises(UserError, match="Unknown preset"):
        make_experiment({"preset": ["paper"]})


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize("data", ["blood-cells", "chest-xray14", "ham10000", "other", "smear"])
@pytest.mark.parametrize("epsilon", [0.05, 0.5, 5.0, 50.0])
@pytest.mark.parametrize("weights", [None, "w.pth"])
def test_every_preset_is_accepted_and_pinned(
    name: str, data: str, epsilon: float, weights: str | None, tmp_path: Path
) -> None:
    keys = {"preset": name, "data": data, "epsilon": epsilon, "weights": weights}
    made = make_experiment(keys)
    assert (made.data, made.epsilon, made.weights) == (data, epsilon, weights)
    path = tmp_path / "experiment.toml"
    path.write_text(to_toml(made.resolved()))
    assert read_pinned(path) == made


def test_a_pinned_run_keeps_a_key_that_was_unset_on_purpose(tmp_path: Path) -> None:
    made = make_experiment({"preset": "paper", "tau": None})
    assert made.tau is None
    folder = RunFolder.create(tmp_path / "run", made, ["preset", "tau"])
    assert folder.experiment == made


def test_a_run_names_its_preset(tmp_path: Path) -> None:
    keys = {**TINY, "rounds": 1, "road_images": 0, "road_test_images": 0}
    xcal.run(tmp_path / "run", **keys, preset="paper")
    pinned = (tmp_path / "run" / "experiment.toml").read_text()
    assert 'preset = "paper"' in pinned
    assert "rho = 0.1" in pinned
    assert f"lr = {TINY['lr']}" in pinned
    for name in ("statement.txt", "card.md"):
        assert "preset paper" in (tmp_path / "run" / name).read_text(), name


def test_good_reads_standardized_stages_where_the_network_has_them() -> None:
    keys = {"preset": "good", "data": "blood-cells", "weights": "w.pth"}
    made = make_experiment(keys)
    assert (made.network, made.head_reads, made.train) == ("efficientnet_b0", "stages:4-6", "head")
    assert made.pool_views == "mirrored-turns"
    assert make_experiment({**keys, "data": "another"}).pool_views == "none"
    assert make_experiment({**keys, "network": "resnet18"}).head_reads == "last"
    assert make_experiment({**keys, "weights": None}).head_reads == "last"


def test_good_has_a_rate_for_each_size_of_epsilon() -> None:
    keys = {"preset": "good", "data": "blood-cells", "weights": "w.pth"}
    rates = [make_experiment({**keys, "epsilon": e}).lr for e in (0.05, 0.5, 5.0)]
    assert rates == [0.01, 0.05, 0.2]


def test_xcal_takes_what_helps_and_says_it_key_by_key(tmp_path: Path) -> None:
    def settled(**keys: object) -> tuple[object, ...]:
        made = make_experiment({"preset": "good", "weights": "w.pth", **keys})
        return made.pool_views, made.whiten, made.maps

    assert settled(data="blood-cells", epsilon=0.5) == ("mirrored-turns", 10.0, "auto")
    assert settled(data="blood-cells", epsilon=0.05) == ("mirrored-turns", 0.0, "auto")
    assert settled(data="chest-xray14") == ("shifts", 0.0, "auto")
    assert settled(data="something else") == ("none", 0.0, "auto")
    # Each part can be switched off, and given to others.
    off = settled(data="ham10000", pool_views="none", whiten=0, maps="gradcam")
    assert off == ("none", 0.0, "gradcam")
    assert settled(data="ham10000", method="fl-dp") == ("none", 0.0, "gradcam")
    given = settled(data="ham10000", method="fl-dp", pool_views="turns", whiten=3, maps="auto")
    assert given == ("turns", 3.0, "auto")
    # A run's file holds what it came to.
    made = make_experiment({"preset": "good", "weights": "w.pth", "data": "blood-cells"})
    path = tmp_path / "experiment.toml"
    path.write_text(to_toml(made.resolved()))
    assert read_pinned(path) == made


def test_a_file_of_the_first_edition_keeps_its_meaning(tmp_path: Path) -> None:
    """`xcal` was then what moved noise in time by the signal."""
    now = make_experiment({**TINY, "method": "xcal"})
    then = {k: v for k, v in now.resolved().items() if k not in ("steering", "whiten", "maps")}
    path = tmp_path / "experiment.toml"
    path.write_text(to_toml(then))
    old = read_pinned(path)
    assert (old.steering, old.whiten, old.maps) == ("signal", 0.0, "gradcam")  # type: ignore[attr-defined]
    assert name_today(old) == "xcal-steered"
    assert name_today(now) == "xcal"
    assert method_of(old).uses > method_of(now).uses - MASKED_KEYS
