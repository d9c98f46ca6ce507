"""What studies ask of onnxruntime equals what torch answers, and what is kept is found again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from reproduce.cell import Declared
from reproduce.fast import kept_maps
from xcal.experiments import make_experiment
from xcal.explain.choosing import make_maps
from xcal.models.model_registry import build_network

pytest.importorskip("onnxruntime")


def network(**keys: object) -> nn.Module:
    probe = {
        "network": "efficientnet_b0",
        "pixels": 64,
        "norm": "frozen",
        "output_stride": 32,
        "head_reads": "stages:4-6",
        "train": "head",
    }
    torch.manual_seed(0)
    model = build_network(make_experiment({**probe, **keys}), 3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    return model.eval()


def test_maps_of_kept_features_are_those_of_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XCAL_FEATURES", str(tmp_path))
    images = torch.rand(3, 3, 64, 64)
    for views in ("none", "turns"):
        model = network(pool_views=views)
        expected = make_maps(model, images, method="gradcam")
        for _ in range(2):  # made, then read
            found = Declared().maps(model, images, "gradcam")
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert len(list((tmp_path / "explained").iterdir())) == 2  # one a network: views differ


def test_nothing_is_kept_where_the_map_trains_or_nobody_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = torch.rand(2, 3, 64, 64)
    monkeypatch.delenv("XCAL_FEATURES", raising=False)
    assert kept_maps(network(), images) is None
    monkeypatch.setenv("XCAL_FEATURES", str(tmp_path))
    assert kept_maps(network(head_reads="last", train="last:1"), images) is None
    assert not list(tmp_path.iterdir())
