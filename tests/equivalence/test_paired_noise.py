"""Common random numbers: methods of one seed differ by what they do, not by their luck."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import xcal
from made_sites import tiny_site
from support import TINY
from xcal.dp.noise import NoiseKey, SeededNoise
from xcal.errors import UserError
from xcal.experiments import make_experiment
from xcal.federation.files import read_tensors
from xcal.federation.messages import public_keys
from xcal.federation.setup import prepare
from xcal.federation.site_directory import SiteDirectory

QUICK: dict[str, Any] = {
    **TINY,
    "accountant": "renyi",
    "road_images": 0,
    "road_test_images": 0,
    "rounds": 2,
}


def weights_of(folder: Path) -> torch.Tensor:
    found = read_tensors(folder / "model.safetensors")
    assert found is not None
    return torch.cat([value.flatten().double() for _, value in sorted(found[0].items())])


def apart(base: Path, one: dict[str, Any], two: dict[str, Any], **keys: Any) -> float:
    """Distance of the two models, over the length of the first."""
    models = []
    for number, changes in enumerate((one, two)):
        folder = base / f"{number}-{keys.get('paired', False)}"
        xcal.run(folder, **{**QUICK, **keys, **changes})
        models.append(weights_of(folder))
    return float((models[0] - models[1]).norm() / models[0].norm())


def test_methods_that_do_the_same_give_the_same_model(tmp_path: Path) -> None:
    """A signal that is next to free and moves nothing is static noise."""
    static = {"method": "fl-dp", "accountant": "renyi"}
    still = {"method": "xcal-steered", "w": 0.0, "kappa": 1e4, "signal_source": "constant"}
    own = apart(tmp_path, static, still)
    shared = apart(tmp_path, static, still, paired=True)
    assert own > 0.05  # the luck of two streams of noise
    assert shared < 0.02 * own


def test_a_shared_stream_depends_on_all_but_the_method() -> None:
    def drawn(method: str, *, paired: bool, **changes: Any) -> float:
        key = NoiseKey(**{"client": "0", "round": 1, "step": 2, "block": "gradient", **changes},
                       method=method)  # fmt: skip
        return SeededNoise(5, paired=paired).scalar(key)

    assert drawn("fl-dp", paired=True) == drawn("xcal-steered", paired=True)
    assert drawn("fl-dp", paired=False) != drawn("xcal-steered", paired=False)
    for other in ({"client": "1"}, {"round": 2}, {"step": 3}, {"block": "signal"}):
        assert drawn("xcal-steered", paired=True) != drawn("xcal-steered", paired=True, **other)


def test_real_noise_is_never_shared(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="only a simulation may"):
        prepare(make_experiment({**TINY, "paired": True, "noise": "secure"}))
    assert "paired" not in public_keys(make_experiment({**TINY, "paired": True}))


@pytest.mark.parametrize("paired", [True, False])
def test_a_trial_s_site_follows_its_own_file(tmp_path: Path, paired: bool) -> None:
    experiment = make_experiment({**TINY, "method": "xcal-steered", "paired": paired})
    site_dir = SiteDirectory.open(tiny_site(tmp_path / "site", experiment=experiment))
    noise = site_dir.noise()
    seed = site_dir.about.seed
    assert seed is not None
    key = NoiseKey("0", "xcal", 0, 0, "gradient")
    assert noise.scalar(key) == SeededNoise(seed, paired=paired).scalar(key)
    assert site_dir.experiment(public_keys(experiment), 0).paired is paired
