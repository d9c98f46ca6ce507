"""The embedded data set `smear`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from xcal.data.catalog import ImageData, load
from xcal.data.normalize import to_tensor
from xcal.data.synthetic import CLASSES, smear
from xcal.errors import UserError
from xcal.models.small import small


@pytest.fixture(scope="module")
def data() -> ImageData:
    return smear(train=400, validation=60, test=80, seed=3)


def macro_f1(predicted: np.ndarray, labels: np.ndarray) -> float:
    scores = []
    for c in range(len(CLASSES)):
        hits = np.sum((predicted == c) & (labels == c))
        scores.append(2 * hits / max(1, np.sum(predicted == c) + np.sum(labels == c)))
    return float(np.mean(scores))


def test_shapes_classes_and_balance(data):
    assert data.classes == CLASSES
    assert [len(images) for _, images in data.splits()] == [400, 60, 80]
    for _, images in data.splits():
        assert images.pixels.shape == (len(images), 64, 64, 3)
        assert images.masks is not None
        assert np.ptp(np.bincount(images.labels, minlength=4)) <= 1
        assert len(set(images.ids.tolist())) == len(images)


def test_patients_keep_to_one_split_and_mix_classes(data):
    groups = [set(images.groups.tolist()) for _, images in data.splits()]
    assert not (groups[0] & groups[1] or groups[0] & groups[2] or groups[1] & groups[2])
    sizes = np.bincount(data.train.groups)
    assert sizes.max() == 6
    of_first = data.train.labels[data.train.groups == 0]
    assert len(set(of_first.tolist())) > 1


def test_images_of_a_patient_share_the_stain(data):
    # Mean color varies less within a patient than between patients.
    colors = data.train.pixels.reshape(400, -1, 3).mean(1)
    own = colors[:396].reshape(66, 6, 3)
    assert own.std(axis=1).mean() < 0.8 * own.mean(axis=1).std(axis=0).mean()


def test_the_same_seed_gives_the_same_bytes(data):
    state = np.random.get_state()[1].copy()
    again = smear(train=400, validation=0, test=80, seed=3)
    assert (np.random.get_state()[1] == state).all()
    assert np.array_equal(again.train.pixels, data.train.pixels)
    assert np.array_equal(again.test.pixels, data.test.pixels)
    assert np.array_equal(again.test.masks, data.test.masks)
    other = smear(train=400, validation=0, test=0, seed=4)
    assert not np.array_equal(other.train.pixels, data.train.pixels)


def test_the_mask_is_the_dark_nucleus(data):
    images = data.train
    masks = images.masks
    assert masks is not None
    green = images.pixels[..., 1].astype(float)
    inside = np.array([g[m].mean() for g, m in zip(green, masks, strict=True)])
    outside = np.array([g[~m].mean() for g, m in zip(green, masks, strict=True)])
    assert (inside < outside - 15).all()
    areas = masks.mean((1, 2))
    assert 0.02 < areas.min() < areas.max() < 0.25


def test_nuclei_of_all_classes_cover_like_areas(data):
    # Else the amount of purple would give the class away.
    masks = data.train.masks
    assert masks is not None
    areas = [masks[data.train.labels == c].mean() for c in range(4)]
    assert max(areas) / min(areas) < 1.12


def lobes(mask: np.ndarray) -> int:
    """Number of 4-connected pieces left after the thin strands are worn away."""
    from scipy import ndimage

    worn = ndimage.binary_erosion(mask, ndimage.generate_binary_structure(2, 2), iterations=7)
    return int(ndimage.label(worn)[1])


def test_nuclei_have_the_lobes_of_their_class():
    data = smear(pixels=160, train=120, validation=0, test=0, seed=1)
    masks = data.train.masks
    assert masks is not None
    counts = np.array([lobes(mask) for mask in masks])
    medians = [np.median(counts[data.train.labels == c]) for c in range(4)]
    eosinophil, lymphocyte, monocyte, neutrophil = medians
    assert (eosinophil, lymphocyte, monocyte) == (2, 1, 1)
    assert neutrophil >= 3


@pytest.mark.parametrize("pixels", [16, 28, 100])
def test_any_size_can_be_drawn(pixels):
    data = load("smear", pixels=pixels, seed=0, train=20, validation=4, test=4)
    assert data.train.pixels.shape == (20, pixels, pixels, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pixels": 4}, "pixels"),
        ({"train": 0}, "train"),
        ({"test": -1}, "test"),
        ({"images_per_patient": 0}, "images_per_patient"),
        ({"seed": -1}, "seed"),
    ],
)
def test_nonsense_is_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        smear(**arguments)


@pytest.mark.slow
def test_small_learns_it_and_color_alone_does_not():
    torch.set_num_threads(1)
    data = smear()
    pixels, labels = to_tensor(data.train.pixels), torch.from_numpy(data.train.labels)
    shuffle = torch.Generator().manual_seed(0)

    def fit(network, inputs, epochs, rate):
        optimizer = torch.optim.Adam(network.parameters(), lr=rate)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=epochs)
        for _ in range(epochs):
            for batch in torch.randperm(len(labels), generator=shuffle).split(64):
                optimizer.zero_grad()
                cross_entropy(network(inputs[batch]), labels[batch]).backward()
                optimizer.step()
            schedule.step()

    network = small(len(CLASSES), seed=0)
    fit(network, pixels, epochs=8, rate=3e-3)
    with torch.no_grad():
        predicted = network(to_tensor(data.test.pixels)).argmax(1).numpy()
    assert macro_f1(predicted, data.test.labels) >= 0.9

    def histograms(images):
        counts = [
            [np.histogram(image[..., c], bins=16, range=(0, 256))[0] for c in range(3)]
            for image in images.pixels
        ]
        return torch.tensor(np.array(counts).reshape(len(images), 48) / 400, dtype=torch.float32)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        by_color = torch.nn.Sequential(
            torch.nn.Linear(48, 64), torch.nn.ReLU(), torch.nn.Linear(64, len(CLASSES))
        )
    fit(by_color, histograms(data.train), epochs=8, rate=3e-3)
    with torch.no_grad():
        predicted = by_color(histograms(data.test)).argmax(1).numpy()
    assert macro_f1(predicted, data.test.labels) < 0.45
