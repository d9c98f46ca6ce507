"""Comparing the clipping engine with one unit at a time: sums, norms, chunks, fixed passes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from xcal.dp.clipping import ClippingEngine
from xcal.dp.clipping.reference import norm, one_at_a_time, unit_gradients


def assert_exact(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    *,
    loss=None,
    units: Tensor | None = None,
    tolerance: float = 1e-10,
    **options,
) -> None:
    """Units of one row and of several, all at once, in chunks, in fixed passes, and nobody."""
    several = torch.arange(len(inputs)) % max(1, len(inputs) // 2)
    several[0] = several.max()  # of different sizes; unit 0 may have no row
    for given in (units,) if units is not None else (None, several):
        lengths = [norm(g) for g in unit_gradients(model, inputs, targets, given, loss)]
        expected_norms = torch.tensor(lengths, dtype=torch.float64)
        clip = float(expected_norms[expected_norms > 0].median())  # some are clipped, some not
        expected = one_at_a_time(model, inputs, targets, clip=clip, units=given, loss=loss)
        scale = max([1.0, *(float(part.abs().max()) for part in expected.values())])
        for sizes in ({}, {"chunk": 2}, {"rows": len(inputs) + 1, "chunk": 64}):
            engine = ClippingEngine(model, **sizes, **options)
            found = engine.clipped_sum(inputs, targets, clip=clip, units=given, loss=loss)
            assert list(found.gradients) == list(expected)
            for name, part in expected.items():
                assert found.gradients[name].shape == part.shape
                worst = float((found.gradients[name] - part).abs().max())
                assert worst <= tolerance * scale, (name, worst, sizes, given)
            torch.testing.assert_close(
                found.norms, expected_norms, rtol=tolerance, atol=tolerance * scale
            )
            assert not found.dropped.any()
    nobody = torch.zeros(0, dtype=torch.long)
    empty = ClippingEngine(model, **options).clipped_sum(
        inputs[:0], targets[:0], clip=1.0, units=nobody, n_units=2, loss=loss
    )
    assert empty.norms.tolist() == [0.0, 0.0]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert empty.gradients[name].shape == parameter.shape
            assert not empty.gradients[name].any()
