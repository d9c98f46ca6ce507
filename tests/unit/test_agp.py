"""AGP spares what it says, nothing else, and is never taken for private."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import xcal
from step_tools import charged, tiny_bench
from support import TINY, micro
from xcal.cli.show import epsilon_text, show_result
from xcal.dp.calibration import PlanShape, plan_paper
from xcal.dp.ledger.rows import read_rows
from xcal.errors import UserError
from xcal.experiments import make_experiment
from xcal.explain.gradcam import channel_weights
from xcal.methods import agp as step_of_agp
from xcal.methods.agp import AGP, agp_step, channel_importance
from xcal.methods.agp_dp import ChannelState, cam_layer_of, most_important, require_trained
from xcal.methods.context import StepContext
from xcal.methods.step_parts import clipped_sum, release_gradient
from xcal.models.efficientnet import efficientnet_b0
from xcal.models.resnet import resnet18
from xcal.models.small import small


def context(model: nn.Module | None = None) -> StepContext:
    return tiny_bench(model, method="agp")


def test_only_the_chosen_channels_of_the_convolution_get_no_noise() -> None:
    at, layer = context(), cam_layer_of(micro(3))
    before = {name: p.detach().clone() for name, p in at.model.named_parameters()}
    state, record = agp_step(at, 0, sigma=4.0, share=0.25, layer=layer, state=ChannelState())
    assert state.channels is not None
    assert len(state.channels) == 2
    assert record.sigma == 4.0
    # The same draw without noise: lr 1, so the step is the gradient itself.
    quiet = context()
    sums = clipped_sum(quiet, quiet.draw(0)).gradients
    for name, p in at.model.named_parameters():
        clean = before[name] - sums[name] / 20 == p
        for channel in range(len(p)):
            spared = name in ("conv.weight", "conv.bias") and channel in state.channels
            assert bool(clean[channel].all()) == spared, (name, channel)
            assert spared or not bool(clean[channel].any())


def test_with_nothing_protected_it_is_static_noise_to_the_bit() -> None:
    mine, base = context(), context()
    state = ChannelState()
    for step in range(3):
        state, _ = agp_step(
            mine, step, sigma=0.8, share=0.0, layer=cam_layer_of(mine.model), state=state
        )
        sums = clipped_sum(base, base.draw(step))
        release_gradient(base, charged(base, step, 0.8), sums)
    for name, value in mine.model.state_dict().items():
        assert torch.equal(value, base.model.state_dict()[name])


def test_importance_is_the_magnitude_of_gradcams_channel_weights() -> None:
    at = context()
    weights = at.model.head.weight.detach().double().abs()  # type: ignore[union-attr,operator]
    found = channel_importance(at) * 64  # 8 × 8 cells
    assert bool((found <= weights.max(0).values + 1e-6).all())
    assert bool((found >= weights.min(0).values - 1e-6).all())
    images = torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    closed = channel_weights(at.model, images)
    assert closed.shape == (5, 8)
    at.model.head_layer = None  # type: ignore[assignment]
    torch.testing.assert_close(channel_weights(at.model, images), closed)  # by autograd


def test_most_important_takes_the_top_share_and_nobody_counts_as_nothing() -> None:
    values = torch.tensor([1.0, 3.0, 3.0, float("nan"), 2.0])
    assert most_important(values, 0.2) == (1,)
    assert most_important(values, 0.4) == (1, 2)
    assert most_important(values, 0.41) == (1, 2, 4)
    assert most_important(values, 0.0) == ()
    assert most_important(values, 1.0) == (0, 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("network", "convolution", "norm", "channels"),
    [
        (small(5, seed=0), "features.9", "features.10", 32),
        (resnet18(5, norm="group", seed=0), "layer4.1.conv2", "layer4.1.bn2", 512),
        (efficientnet_b0(5, norm="group", seed=0), "features.8.0", "features.8.1", 1280),
        (micro(5), "conv", "norm", 8),
    ],
)
def test_the_cam_layer_is_found(network: Any, convolution: str, norm: str, channels: int) -> None:
    layer = require_trained(network, "agp")
    assert layer.channels == channels
    assert layer.convolution[0] == f"{convolution}.weight"
    assert layer.norm == (f"{norm}.weight", f"{norm}.bias")


def test_a_frozen_cam_layer_without_a_head_is_refused_before_anything(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not train here"):
        xcal.run(tmp_path / "r", method="agp", **{**TINY, "network": "misbehaving:frozen_map"})
    assert not (tmp_path / "r").exists()


def test_where_only_a_head_trains_its_columns_are_spared() -> None:
    model = resnet18(3, norm="group", trainable="head", seed=0)
    at, layer = context(model), cam_layer_of(model)
    assert (layer.head, layer.channels, layer.convolution) == ("fc.weight", 512, ())
    before = model.fc.weight.detach().clone()
    state, _ = agp_step(at, 0, sigma=4.0, share=0.25, layer=layer, state=ChannelState())
    assert state.channels is not None and len(state.channels) == 128
    quiet = context(resnet18(3, norm="group", trainable="head", seed=0))
    sums = clipped_sum(quiet, quiet.draw(0)).gradients["fc.weight"]
    clean = before - sums / 20 == model.fc.weight
    for channel in range(512):
        assert bool(clean[:, channel].all()) == (channel in state.channels)


def test_its_noise_is_the_mean_of_the_published_band() -> None:
    experiment = make_experiment({"method": "agp", "epsilon": 0.5, "batch": 32, "unit": "record"})
    plan = plan_paper(PlanShape(0.5, 1e-5, 3332, 32, 30), rho=0.1, band=0.2)
    assert AGP.sigma(experiment, 3332, 30) == pytest.approx((plan.sigma_min + plan.sigma_max) / 2)
    with pytest.raises(UserError):
        AGP.plan(make_experiment({"method": "agp", "epsilon": -1.0, "unit": "record"}), 100, 3)


def test_it_is_called_unbounded_everywhere(tmp_path: Path) -> None:
    result = xcal.run(tmp_path / "r", method="agp", **TINY)
    assert result["epsilon_target"] is None
    assert result["epsilon_nominal"] == 8.0
    assert result["mean_sigma"] > 0
    assert result["noise"] == "seeded"
    assert all(c["epsilon_spent"] is None for c in result["clients"])
    statement = json.loads((tmp_path / "r" / "statement.json").read_text())
    assert "epsilon is infinite" in statement["promise"]
    assert "an epsilon of 8" in statement["promise"]
    assert statement["epsilon_nominal"] == 8.0
    console = Console(file=io.StringIO(), width=120)
    show_result(console, result, tmp_path)
    assert "no guarantee (ε = ∞ (nominal 8))" in console.file.getvalue()  # type: ignore[attr-defined]
    assert "ε = ∞. Nominal: ε = 8" in (tmp_path / "r" / "card.md").read_text()
    rows = read_rows(tmp_path / "r" / "clients" / "0" / "ledger.sqlite")
    assert [r.body["cost"] for r in rows if r.kind == "unbounded"] == ["inf"] * 3
    assert not [r for r in rows if r.kind == "charge"]


def test_tables_show_the_nominal_epsilon_beside_infinity() -> None:
    assert epsilon_text(None, 8.0) == "∞ (nominal 8)"
    assert epsilon_text(None) == "∞"
    assert epsilon_text(8.0, 8.0) == "8"


def test_a_round_taken_up_in_the_middle_keeps_its_channels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Channels are chosen from the weights received, not from those of the step taken up."""
    quick = {**TINY, "method": "agp", "road_images": 0, "road_test_images": 0}
    xcal.run(tmp_path / "whole", **quick)
    calls = {"count": 0}
    real = step_of_agp.release_tensors

    def fails(*arguments: Any) -> Any:
        calls["count"] += 1
        if calls["count"] == 4:
            raise RuntimeError("power cut")
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(step_of_agp, "release_tensors", fails)
        patch.setattr("xcal.federation.loaded_site.Pace.due", lambda self: True)
        with pytest.raises(RuntimeError, match="power cut"):
            xcal.run(tmp_path / "cut", **quick)
    xcal.run(tmp_path / "cut", resume=True)
    for name in ("model.safetensors", "trace.jsonl"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
