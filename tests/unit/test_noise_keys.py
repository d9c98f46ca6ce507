"""The whole key counts: torch's own seeding would keep 32 bits of it."""

from __future__ import annotations

import torch

from xcal.dp import noise


def test_streams_that_share_their_low_bits_differ() -> None:
    assert noise._torch_state_is_known()

    def draw(stream: int) -> torch.Tensor:
        return torch.empty(64).normal_(generator=noise._torch_generator(stream))

    first = draw(12345)
    assert torch.equal(first, draw(12345))
    for shift in (32, 64, 128, 200):
        assert not torch.equal(first, draw(12345 + (1 << shift)))
