"""Overlays: colors, sizes, degenerate maps, files."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from xcal.errors import UserError
from xcal.explain.overlay import (
    color_map,
    colors,
    css_gradient,
    overlay,
    picture,
    scaled_map,
)


def test_the_scale_gets_steadily_lighter() -> None:
    table = colors(np.linspace(0, 1, 52)).astype(float)
    lightness = table @ np.array([0.2126, 0.7152, 0.0722])
    assert (np.diff(lightness) > 0).all()
    assert np.array_equal(colors(np.array([-1.0, math.nan])), colors(np.zeros(2)))
    assert np.array_equal(colors(np.array([7.0])), colors(np.ones(1)))


def test_where_nothing_is_salient_the_image_is_seen_as_it_is() -> None:
    image = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(0))
    plain = np.asarray(picture(image))
    for saliency in (torch.zeros(2, 2), torch.full((2, 2), math.nan), -torch.ones(2, 2)):
        assert np.array_equal(np.asarray(overlay(image, saliency)), plain)
    saliency = torch.zeros(8, 8)
    saliency[:4] = 1
    drawn = np.asarray(overlay(image, saliency, opacity=1.0))
    assert np.array_equal(drawn[4:], plain[4:])
    assert (drawn[:4] == colors(np.ones(1))).all()


def test_a_shared_peak_makes_maps_comparable() -> None:
    weak = torch.full((2, 2), 0.5)
    assert scaled_map(weak, (4, 4), None) == pytest.approx(1)
    assert scaled_map(weak, (4, 4), 2.0) == pytest.approx(0.25)
    assert scaled_map(weak.double() * 1e-300, (4, 4), None) == pytest.approx(1)
    assert scaled_map(weak, (4, 4), 0.1) == pytest.approx(1)


def test_sizes_and_channels() -> None:
    gray = torch.rand(1, 10, 20, generator=torch.Generator().manual_seed(0))
    assert picture(gray).size == (20, 10)
    assert overlay(gray, torch.rand(3, 3), side=200).size == (200, 100)
    assert picture(gray, side=5).size == (5, 2)
    with pytest.raises(UserError, match="cannot be drawn"):
        picture(torch.rand(4, 10, 10))


def test_the_scale_is_the_same_for_matplotlib_and_for_pages() -> None:
    ends = colors(np.array([0.0, 1.0]))
    made = color_map()
    assert np.allclose([made(0)[:3], made(255)[:3]], ends / 255)
    low, high = (f"rgb({', '.join(map(str, end.tolist()))})" for end in ends)
    assert css_gradient().startswith(f"linear-gradient(to right, {low}")
    assert css_gradient().endswith(f"{high})")
