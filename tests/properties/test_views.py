"""Several views of one image are one unit: one gradient of their mean loss, clipped once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support import micro, tiny
from xcal.data.augment import VIEWS, choose_views, show
from xcal.data.normalize import to_tensor
from xcal.dp.clipping import ClippingEngine
from xcal.dp.noise import NoiseKey, SecureNoise, SeededNoise
from xcal.errors import UserError
from xcal.methods.client_data import Batch, LocalData
from xcal.methods.context import Optimizer, StepContext
from xcal.methods.step_parts import clipped_sum, sgd_step

IMAGES = tiny(train=30).train


def data_with(views: int, augment: str = "turns", unit: str = "record") -> LocalData:
    return LocalData(IMAGES, unit=unit, images_per_unit=2, views=views, augment=augment)


def bench_with(data: LocalData, clip: float = 1.0, chunk: int = 256) -> StepContext:
    model = micro(3, seed=1)
    return StepContext(
        client="0",
        method="test",
        round=0,
        first_step=0,
        model=model,
        engine=ClippingEngine(model, chunk=chunk),
        data=data,
        noise=SeededNoise(3),
        account=None,
        optimizer=Optimizer(model, "sgd", 0.1, 0.0),
        batch=10,
        clip=clip,
        chunk=chunk,
    )


def draw(data: LocalData, seed: int, rate: float = 0.5) -> Batch:
    return data.draw(rate, SeededNoise(seed), NoiseKey("0", "m", 0, 0, "draw"))


def flat(sums: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.flatten().double() for value in sums.values()])


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    views=st.integers(2, 8),
    augment=st.sampled_from(["turns", "shifts"]),
    unit=st.sampled_from(["record", "group"]),
    clip=st.sampled_from([0.01, 1.0]),
)
def test_a_unit_with_many_views_moves_the_sum_by_at_most_c(seed, views, augment, unit, clip):
    batch = draw(data_with(views, augment, unit), seed)
    if not batch.n_units:
        return
    context = bench_with(data_with(1), clip)
    gone = torch.zeros(batch.n_units, dtype=torch.bool)
    gone[seed % batch.n_units] = True
    both = flat(clipped_sum(context, batch).gradients)
    without = flat(clipped_sum(context, batch.without(gone)).gradients)
    alone = flat(clipped_sum(context, batch.without(~gone)).gradients)
    assert float((both - without).norm()) <= clip
    assert float(alone.norm()) <= clip


def test_the_clipped_gradient_is_that_of_the_mean_loss_over_the_views() -> None:
    batch = draw(data_with(4), 5)
    context = bench_with(data_with(1), clip=0.05)
    expected = None
    for unit in range(batch.n_units):
        rows = batch.units == unit
        logits = context.model(batch.pictures(rows))
        loss = torch.nn.functional.cross_entropy(logits, batch.labels[rows])
        gradient = torch.cat(
            [
                g.flatten().double()
                for g in torch.autograd.grad(loss, list(context.model.parameters()))
            ]
        )
        clipped = gradient * min(1.0, 0.05 / 1.001 / float(gradient.norm()))
        expected = clipped if expected is None else expected + clipped
    torch.testing.assert_close(
        flat(clipped_sum(context, batch).gradients), expected, rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("chunk", [1, 7, 40])
def test_chunks_bound_memory_and_change_nothing(chunk: int) -> None:
    batch = draw(data_with(5, unit="group"), 2)
    whole, parts = bench_with(data_with(1)), bench_with(data_with(1), chunk=chunk)
    one = clipped_sum(whole, batch, capture="act")
    other = clipped_sum(parts, batch, capture="act")
    torch.testing.assert_close(flat(other.gradients), flat(one.gradients), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(other.logits, one.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(other.features, one.features, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(other.norms, one.norms, rtol=1e-4, atol=1e-6)
    sgd_step(bench_with(data_with(5), chunk=chunk), 0)


def test_the_plain_image_is_among_its_views_and_marked() -> None:
    plain, many = draw(data_with(1), 1), draw(data_with(4), 1)
    assert many.plain is not None
    assert torch.equal(many.pictures(many.plain), plain.images)  # the same draw of units
    assert torch.equal(many.labels[many.plain], plain.labels)
    assert len(many.labels) == 4 * len(plain.labels)


def test_what_one_image_is_shown_as_depends_on_nobody_else() -> None:
    """With fewer others drawn, the views of those that stay are the same."""
    many, few = draw(data_with(3), 4, rate=0.9), draw(data_with(3), 4, rate=0.3)
    shown = dict(zip(_names(many), many.inputs.views.reshape(-1, 3).tolist(), strict=True))
    for name, views in zip(_names(few), few.inputs.views.reshape(-1, 3).tolist(), strict=True):
        assert shown[name] == views


def _names(batch: Batch) -> list[int]:
    return batch.inputs.images[::3].tolist()


def test_views_are_all_different_and_drawn_evenly() -> None:
    uniforms = np.random.default_rng(0).random((4000, 7))
    chosen = choose_views(uniforms, 3)
    assert (chosen[:, 0] == 0).all()
    assert all(len(set(row)) == 3 for row in chosen[:100].tolist())
    counts = np.bincount(chosen[:, 1:].reshape(-1), minlength=8)[1:]
    assert abs(counts / 8000 - 1 / 7).max() < 0.02
    assert (choose_views(uniforms[:5], 8) == np.arange(8)).all()


def test_views_keep_what_is_in_the_picture() -> None:
    pixels = IMAGES.pixels[:1]
    for view in VIEWS["turns"]:  # symmetries: the same pixels in another place
        assert sorted(view.of(pixels).reshape(-1, 3).tolist()) == sorted(
            pixels.reshape(-1, 3).tolist()
        )
    assert len({view.of(pixels).tobytes() for view in VIEWS["turns"]}) == 8
    right = np.array(pixels)
    right[:, :, 1:] = pixels[:, :, :-1]
    moved = next(i for i, v in enumerate(VIEWS["shifts"]) if (v.right, v.down) == (1, 0))
    assert (show(pixels, np.array([moved]), VIEWS["shifts"]) == right).all()
    assert all(VIEWS[kind][0].of(pixels).tobytes() == pixels.tobytes() for kind in VIEWS)


def test_secure_noise_draws_views_too() -> None:
    batch = data_with(3).draw(0.5, SecureNoise(), NoiseKey("0", "m", 0, 0, "draw"))
    assert len(batch.labels) == len(batch.images)
    torch.testing.assert_close(batch.images[:1], to_tensor(IMAGES.pixels[batch.inputs.images[:1]]))


def test_more_views_than_there_are_is_refused() -> None:
    with pytest.raises(UserError, match="views = 9 exceeds the 8"):
        data_with(9)


def test_the_digest_tells_views_apart() -> None:
    found = {data_with(1).digest(), data_with(2).digest(), data_with(2, "shifts").digest()}
    assert len(found) == 3
