"""`precision = "bf16"`: passes of `xcal.run` in half precision, clipped and released in single."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import xcal
from support import TINY, micro, sets
from xcal.dp.clipping import ClippingEngine
from xcal.errors import UserError
from xcal.experiments import make_experiment

QUICK = {**TINY, "method": "fl-dp", "rounds": 1, "road_images": 0, "road_test_images": 0}


@pytest.mark.parametrize("by_group", [False, True])
def test_the_sum_is_that_of_one_image_at_a_time_under_autocast(by_group: bool) -> None:
    model = micro(3, seed=1)
    torch.manual_seed(0)
    images, labels = torch.randn(12, 3, 16, 16), torch.randint(0, 3, (12,))
    units = torch.arange(12) // (3 if by_group else 1)
    clip = 0.05
    engine = ClippingEngine(model, half=torch.bfloat16, chunk=5)
    got = engine.clipped_sum(images, labels, clip=clip, units=units)
    assert all(g.dtype == torch.float32 for g in got.gradients.values())
    total = 0.0
    for unit in range(int(units.max()) + 1):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(images[units == unit]), labels[units == unit])
        found = torch.autograd.grad(loss, list(model.parameters()))
        whole = torch.cat([g.flatten().double() for g in found])
        total = total + whole * min(1.0, clip / float(whole.norm()))
        alone = engine.clipped_sum(
            images[units == unit], labels[units == unit], clip=clip, units=units[units == unit] * 0
        )
        own = torch.cat([g.flatten().double() for g in alone.gradients.values()])
        assert float(own.norm()) <= clip
    mine = torch.cat([g.flatten().double() for g in got.gradients.values()])
    assert float((mine - total).norm()) < 2e-2 * float(total.norm())


@pytest.mark.parametrize("method", ["fl-dp", "fl", "xcal-steered"])
def test_a_run_trains_and_says_so(method: str, tmp_path: Path) -> None:
    found = {}
    for precision in ("single", "bf16"):
        out = tmp_path / precision
        keys = {**QUICK, "method": method, "seed": 3, "precision": precision}
        found[precision] = xcal.run(out, **keys)
        assert json.loads((out / "result.json").read_text())["method"] == method
    assert 'precision = "bf16"' in (tmp_path / "bf16" / "experiment.toml").read_text()
    one, other = (xcal.load(tmp_path / p).model.state_dict() for p in ("single", "bf16"))
    moved = sum(float((one[n] - other[n]).square().sum()) for n in one) ** 0.5
    size = sum(float(one[n].square().sum()) for n in one) ** 0.5
    assert 0 < moved < 0.2 * size  # another rounding, the same training
    assert found["single"]["epsilon_target"] == found["bf16"]["epsilon_target"]


def test_digests_of_runs_without_the_key_stay() -> None:
    assert "precision" not in make_experiment({}).identity()
    with pytest.raises(UserError, match="precision"):
        make_experiment({"precision": "half"})


def test_clients_elsewhere_refuse_it(invoke, tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    words = sets(method="fl-dp", precision="bf16")
    code, _, err = invoke("run", *words, "--engine", "flower", "--out", str(tmp_path / "run"))
    assert code == 2 and "precision" in err and not (tmp_path / "run").exists()
