"""The parts of the attacks: canaries, readings, ranks, pictures."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from support import micro, tiny
from xcal.audit.canaries import (
    CanaryData,
    CanaryEngine,
    Directions,
    blank_pictures,
    mislabeled,
    mixture_ratio,
    plant,
    quiet_blocks,
    reach,
    toss_coins,
)
from xcal.audit.inversion import psnr, ssim
from xcal.audit.membership import halves, lira_scores, tpr_of
from xcal.dp.clipping import ClippingEngine
from xcal.dp.clipping.named import trainable
from xcal.dp.noise import NoiseKey, SeededNoise
from xcal.methods.client_data import LocalData
from xcal.metrics.classification import area


def test_directions_are_orthonormal_and_read_back():
    directions = Directions(1000, 90, seed=3)
    each = torch.stack([directions.sum_of(np.array([i])) for i in range(90)]).double()
    torch.testing.assert_close(each @ each.T, torch.eye(90).double(), rtol=0, atol=1e-6)
    read = directions.read(directions.sum_of(np.array([4, 7, 7])))
    assert read[4] == pytest.approx(1, abs=1e-6)
    assert read[7] == pytest.approx(2, abs=1e-6)
    assert np.abs(np.delete(read, [4, 7])).max() < 1e-6
    weighted, deviation = directions.read_weighted(each[5].float(), torch.full((1000,), 0.5))
    assert weighted[5] == pytest.approx(1, abs=1e-6)
    assert deviation[5] == pytest.approx(0.5, abs=1e-6)
    with pytest.raises(ValueError, match="orthogonal"):
        Directions(10, 11, seed=0)


def test_coins_are_fair():
    assert 4700 < toss_coins(10_000, 5).sum() < 5300
    assert not np.array_equal(toss_coins(100, 1), toss_coins(100, 2))


def planted_data(*, in_gradient: bool):
    benign = tiny().train
    included = np.array([True, False, True, False])
    planted = plant(benign, mislabeled(benign.take(np.arange(4)), 3, seed=1))
    return planted, CanaryData(planted, included, in_gradient=in_gradient)


def test_drawing_is_the_real_one_and_the_null_canary_contributes_nothing():
    planted, data = planted_data(in_gradient=False)
    assert data.units == len(planted) == 154
    key = NoiseKey("0", "x", 0, 0, "draw")
    real = LocalData(planted, unit="record", images_per_unit=1)
    mine = data.draw(1.0, SeededNoise(1), key)
    whole = real.draw(1.0, SeededNoise(1), key)
    assert mine.n_units == whole.n_units == 154  # still drawn, still a unit
    kept = np.delete(np.arange(154), [151, 153])
    assert torch.equal(mine.images, whole.images[kept])
    some = data.draw(0.3, SeededNoise(2), key)
    same = real.draw(0.3, SeededNoise(2), key)
    assert some.n_units == same.n_units


def test_gradient_canaries_are_added_at_full_length_once():
    _, data = planted_data(in_gradient=True)
    model = micro(3, seed=1)
    size = sum(p.numel() for p in trainable(model).values())
    directions = Directions(size, 4, seed=0)
    engine = CanaryEngine(model, data=data, directions=directions, bounds=[])
    batch = data.draw(1.0, SeededNoise(1), NoiseKey("0", "x", 0, 0, "draw"))
    assert len(batch.labels) == 150  # canaries have no pictures
    real = ClippingEngine(model).clipped_sum(batch.images, batch.labels, clip=0.7)
    for expected in (0.7, 0.0):
        mine = engine.clipped_sum(batch.images, batch.labels, clip=0.7)
        added = torch.cat(
            [(mine.gradients[k] - real.gradients[k]).flatten() for k in real.gradients]
        )
        read = directions.read(added)
        np.testing.assert_allclose(read, [expected, 0, expected, 0], atol=1e-5)


def test_reach_is_the_inner_product_with_each_images_gradient():
    model, images = (
        micro(3, seed=2),
        torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(4)),
    )
    labels = torch.tensor([0, 1, 2, 0, 1])
    parameters = list(trainable(model).values())
    size = sum(p.numel() for p in parameters)
    direction = torch.randn(size, generator=torch.Generator().manual_seed(5))
    slope, norm = reach(model, images, labels, direction)
    for i in range(5):
        loss = F.cross_entropy(model(images[i : i + 1]), labels[i : i + 1])
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
        assert slope[i] == pytest.approx(float(gradient @ direction), rel=0.02, abs=0.01)
        assert norm[i] == pytest.approx(float(gradient.norm()), rel=1e-3)


def test_the_likelihood_ratio_of_a_mixture():
    z, sigma, rate = np.array([-0.3, 0.4, 2.0]), 0.8, 0.2
    density = lambda x, mean: np.exp(-((x - mean) ** 2) / (2 * sigma**2))  # noqa: E731
    one = np.log(((1 - rate) * density(z, 0) + rate * density(z, 1)) / density(z, 0))
    np.testing.assert_allclose(mixture_ratio(z, steps=1, rate=rate, deviation=sigma), one)
    both = (1 - rate) ** 2 * density(z, 0) + 2 * rate * (1 - rate) * density(z, 1)
    both = np.log((both + rate**2 * density(z, 2)) / density(z, 0))
    np.testing.assert_allclose(mixture_ratio(z, steps=2, rate=rate, deviation=sigma), both)
    full = mixture_ratio(z, steps=1, rate=1.0, deviation=sigma)
    np.testing.assert_allclose(full, (2 * z - 1) / (2 * sigma**2))


def test_channels_without_noise_are_noticed():
    model = micro(3, seed=1)
    parameters = list(trainable(model).values())
    released = torch.randn(
        sum(p.numel() for p in parameters), generator=torch.Generator().manual_seed(1)
    )
    assert quiet_blocks(model, released) is None
    released[:27] *= 1e-3  # the first output channel of the convolution
    spread = quiet_blocks(model, released)
    assert spread is not None
    assert float(spread[:27].max()) < 0.01 < 0.5 < float(spread[27:].min())


def test_labels_of_mislabeled_pictures_are_wrong():
    source = tiny().train
    wrong = mislabeled(source, 3, seed=1)
    assert (wrong.labels != source.labels).all()
    assert wrong.labels.min() >= 0
    assert wrong.labels.max() <= 2
    assert blank_pictures(3, 16).pixels.max() == 0


def test_auc_and_tpr_by_hand():
    inside = np.array([True, True, False, False])
    assert area(np.array([3.0, 2.0, 1.0, 0.0]), inside) == 1.0
    assert area(np.array([3.0, 1.0, 2.0, 0.0]), inside) == 0.75
    assert area(np.zeros(4), inside) == 0.5
    scores = np.concatenate([np.arange(200.0), np.full(50, 197.5), np.full(50, -1.0)])
    who = np.concatenate([np.zeros(200, bool), np.ones(100, bool)])
    assert tpr_of(scores, who, 0.01) == 0.5  # two strangers above 197.5 are 1 %
    assert tpr_of(scores, who, 0.005) == 0.0


def test_halves_and_likelihood_ratios_separate_what_differs():
    inside = halves(40, 8, seed=1)
    assert (inside.sum(0) == 4).all()
    assert (inside.sum(1) == 20).all()
    rng = np.random.default_rng(0)
    hard = rng.normal(0, 5, 40)  # differs by image more than by membership
    confidence = hard + 2.0 * inside + 0.3 * rng.standard_normal(inside.shape)
    assert area(confidence, inside) < 0.75
    assert area(lira_scores(confidence, inside), inside) > 0.99


def test_psnr_and_ssim():
    picture = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    assert psnr(picture, picture).tolist() == [100.0, 100.0]
    torch.testing.assert_close(ssim(picture, picture), torch.ones(2).double())
    shifted = picture + 0.1
    assert psnr(picture, shifted)[0] == pytest.approx(20.0, abs=1e-4)
    noise = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    assert abs(float(ssim(picture, noise)[0])) < 0.2
    assert not math.isnan(float(ssim(torch.zeros(1, 3, 32, 32), torch.zeros(1, 3, 32, 32))))
