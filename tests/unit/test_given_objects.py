"""`xcal.run` with a network and data sets as objects of a script."""

from __future__ import annotations

import copy
import json
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import xcal
from support import TINY, micro, tiny
from xcal.cli.app import main
from xcal.data.given_data import image_data
from xcal.errors import UserError

KEYS = {k: v for k, v in TINY.items() if k not in ("data", "network", "pixels", "unit")}
QUICK = {**KEYS, "rounds": 2, "road_images": 0, "road_test_images": 4, "validation_images": 0}
CLASSES = ("left", "middle", "right")


class Scans(Dataset):
    """(image, label, patient), as a script of one's own would read them."""

    def __init__(self, split: str, *, patients: bool = True) -> None:
        self.images, self.patients = getattr(tiny(), split), patients

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple:
        image = torch.from_numpy(self.images.pixels[i]).permute(2, 0, 1) / 255
        item = image, int(self.images.labels[i])
        return (*item, f"p{self.images.groups[i]}") if self.patients else item


def scans(**options: bool) -> tuple[Scans, Scans, Scans]:
    return tuple(Scans(split, **options) for split in ("train", "validation", "test"))


def network() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1),
            nn.GroupNorm(2, 6),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(96, 3),
        )


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> object:
    def command(*words: str | Path) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["xcal", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            main()
        return int(left.value.code or 0), capsys.readouterr().err

    return command


def test_objects_train_as_the_same_things_by_name_do(tmp_path: Path) -> None:
    """Bit for bit: conversion to tensors and back loses nothing, and seeds mean the same."""
    named = xcal.run(tmp_path / "named", method="fl-dp", **{**TINY, **QUICK, "unit": "group"})
    given = xcal.run(
        tmp_path / "given", method="fl-dp", model=micro, data=scans(), classes=CLASSES, **QUICK
    )
    assert given["unit"] == "group"
    for key in ("macro_f1", "clients", "classification", "epsilon_target"):
        assert given[key] == named[key], key
    weights = [xcal.load(tmp_path / "named"), xcal.load(tmp_path / "given", model=micro)]
    first, second = (trained.model.state_dict() for trained in weights)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_module_trains_from_its_weights_and_is_left_alone(tmp_path: Path) -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    result = xcal.run(
        tmp_path / "run",
        method="xcal-steered",
        model=model,
        layer=model[2],
        data=scans(),
        classes=CLASSES,
        **{**QUICK, "workers": 2},
    )
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not hasattr(model, "cam_layer") and result["road"] is not None
    trained = xcal.load(tmp_path / "run", model=model, layer="2")
    test = tiny().test
    found = trained.predict(list(test.pixels))
    right = np.mean([n == CLASSES[k] for n, k in zip(found.names, test.labels, strict=True)])
    assert right == pytest.approx(result["classification"]["accuracy"])
    statement = (tmp_path / "run" / "statement.txt").read_text()
    assert "plug-in" in statement and "author's word" in " ".join(statement.split())
    with pytest.raises(UserError, match="give it again"):
        xcal.load(tmp_path / "run")


def test_without_a_layer_it_trains_and_says_that_nothing_is_explained(tmp_path: Path) -> None:
    result = xcal.run(
        tmp_path / "run", method="fl", model=network, data=scans(), classes=3, **QUICK
    )
    assert result["road"] is None and result["unmeasured"]
    with pytest.raises(UserError, match="takes its signal from maps"):
        xcal.run(
            tmp_path / "x", method="xcal-steered", model=network, data=scans(), classes=3, **QUICK
        )
    assert not (tmp_path / "x").exists()


class Stop(Exception):
    pass


def test_a_run_of_objects_is_resumed_with_them(call, tmp_path: Path) -> None:
    from xcal.federation.local import NullCallback

    class StopAfterOne(NullCallback):
        def round(self, record: dict) -> None:
            raise Stop

    objects = {"model": network(), "layer": "2", "data": scans(), "classes": CLASSES}
    whole = xcal.run(tmp_path / "whole", method="fl-dp", **objects, **QUICK)
    with pytest.raises(Stop):
        xcal.run(tmp_path / "cut", method="fl-dp", progress=StopAfterOne(), **objects, **QUICK)
    code, complaint = call("run", "--resume", tmp_path / "cut")
    assert code == 2 and "give it again" in complaint and complaint.count("\n") == 1
    with pytest.raises(UserError, match="give it again"):
        xcal.run(tmp_path / "cut", resume=True, model=objects["model"], layer="2")
    resumed = xcal.run(tmp_path / "cut", resume=True, **objects)
    assert resumed["clients"] == whole["clients"] and resumed["macro_f1"] == whole["macro_f1"]
    code, complaint = call("evaluate", tmp_path / "cut")
    assert code == 2 and complaint.count("\n") == 1


def test_groups_may_be_given_beside_the_data(tmp_path: Path) -> None:
    ids = [f"p{g}" for g in tiny().train.groups]
    made = image_data(scans(patients=False), classes=CLASSES, groups=ids)
    inside = image_data(scans(), classes=CLASSES)
    assert made.group_name == "group" and made.groups_known
    assert np.array_equal(made.train.groups, inside.train.groups)
    assert made.shared_groups == 0 and len(np.unique(made.test.groups)) == len(made.test)
    shared = image_data(
        scans(patients=False),
        classes=CLASSES,
        groups=(ids, ["p0"] * len(tiny().validation), ["x"] * len(tiny().test)),
    )
    assert shared.shared_groups == 1
    tensors = [torch.tensor([g]) for g in tiny().train.groups]
    held = image_data(scans(patients=False), classes=CLASSES, groups=tensors)
    assert np.array_equal(held.train.groups, inside.train.groups)
    plain = image_data(scans(patients=False), classes=CLASSES)
    assert plain.group_name == "record" and not plain.groups_known


@pytest.mark.parametrize("kind", ["bytes", "colors last", "floats", "gray", "pil", "dataset"])
def test_images_of_every_kind_come_out_the_same(kind: str) -> None:
    source, labels = tiny().train.pixels[:6].copy(), np.arange(6) % 3
    source[..., 1] = source[..., 2] = source[..., 0]
    first = torch.from_numpy(source).permute(0, 3, 1, 2)
    images = {
        "bytes": first,
        "colors last": source,
        "floats": first / 255,
        "gray": first[:, :1] / 255,
        "pil": [Image.fromarray(one) for one in source],
    }
    if kind == "dataset":
        split = TensorDataset(first, torch.from_numpy(labels))
    else:
        split = (images[kind], labels)
    made = image_data((split, None, None), classes=3)
    assert np.array_equal(made.train.pixels, source)
    assert made.train.labels.tolist() == labels.tolist() and made.classes == ("0", "1", "2")
    assert len(made.validation) == len(made.test) == 0
    assert image_data((split, None, None), classes=3, pixels=8).train.pixels.shape[1] == 8


IMAGES = torch.rand(4, 3, 16, 16)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"classes": None}, "needs classes"),
        ({"classes": ["a", "a"]}, "one name twice"),
        ({"classes": 2}, "names none of the 2 classes"),
        ({"data": (IMAGES, [0, 1, 2, 0])}, "train, validation, test"),
        ({"data": ((IMAGES - 0.5, [0, 1, 2, 0]), None, None)}, "before they are normalized"),
        ({"data": ((IMAGES, [0, 1, 2.5, 0]), None, None)}, "no whole number"),
        ({"data": ((IMAGES, [0, 1]), None, None)}, "of one length"),
        ({"data": ((IMAGES[..., :9], [0, 1, 2, 0]), None, None)}, "give pixels"),
        ({"data": (None, None, None)}, "no training images"),
        ({"data": (iter([]), None, None)}, "with a length"),
        ({"groups": ["a", "b"]}, "groups has 2 ids"),
        ({"groups": {f"{i}.png": "a" for i in range(len(tiny().train))}}, "groups is of type dict"),
        ({"groups": 3}, "groups is of type int"),
        ({"groups": [object() for _ in range(len(tiny().train))]}, "must be a number or a string"),
        ({"groups": [[1] for _ in range(len(tiny().train))]}, "must be a number or a string"),
        ({"model": 3}, "give a torch.nn.Module"),
        ({"model": lambda a, b: None}, "must take"),
        ({"layer": "nine"}, "no module of that name"),
        ({"network": "small"}, "give one of them"),
        ({"sites": ["a", "b", "c"]}, "leave out sites"),
        ({"model": None, "layer": "2"}, "layer belongs to model"),
        ({"model": nn.Sequential(nn.BatchNorm2d(3), *network()), "method": "fl-dp"}, "BatchNorm"),
    ],
)
def test_what_cannot_be_run_is_refused_before_the_folder_is_made(
    tmp_path: Path, changes: dict, problem: str
) -> None:
    objects = {"model": network, "data": scans(), "classes": CLASSES, "method": "fl"}
    with pytest.raises(UserError, match=problem):
        xcal.run(tmp_path / "run", **{**objects, **QUICK, **changes})
    assert not (tmp_path / "run").exists()


def test_nothing_is_held_after_the_run(tmp_path: Path) -> None:
    from xcal.plugins import _GIVEN

    xcal.run(tmp_path / "run", method="fl", model=network, data=scans(), classes=3, **QUICK)
    assert not _GIVEN
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert {"data", "network", "pixels"} <= set(about["given"])


class Forgetful(nn.Module):
    """Draws its weights from torch's generator when it is made."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.inner = nn.Linear(3 * 256, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.inner(images.flatten(1))


def test_a_class_is_made_by_the_seed_and_leaves_the_generator_alone(tmp_path: Path) -> None:
    from xcal.models.given_network import builder_of

    build, state = builder_of(Forgetful), torch.get_rng_state()
    one, two, other = build(3, seed=1), build(3, seed=1), build(3, seed=2)
    assert torch.equal(one.inner.weight, two.inner.weight)
    assert not torch.equal(one.inner.weight, other.inner.weight)
    assert torch.equal(state, torch.get_rng_state())


def mixing(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits - logits.mean(0), labels, reduction="none")


def focal(logits: Tensor, labels: Tensor) -> Tensor:
    losses = nn.functional.cross_entropy(logits, labels, reduction="none")
    return (1 - (-losses).exp()) ** 2 * losses


@pytest.mark.parametrize("method", ["fl", "fl-dp", "xcal-steered"])
def test_a_loss_of_ones_own_is_what_is_trained(tmp_path: Path, method: str) -> None:
    keys = {**TINY, **QUICK, "method": method}
    plain = xcal.run(tmp_path / "plain", **keys)
    same = xcal.run(tmp_path / "same", loss=nn.CrossEntropyLoss(), **keys)
    smooth = xcal.run(tmp_path / "other", loss=focal, **keys)
    weights = [
        torch.cat([p.flatten() for p in xcal.load(tmp_path / name).model.parameters()])
        for name in ("plain", "same", "other")
    ]
    torch.testing.assert_close(weights[0], weights[1])
    assert not torch.allclose(weights[0], weights[2])
    assert plain["epsilon_target"] == same["epsilon_target"] == smooth["epsilon_target"]
    for one in ("same", "other"):
        statement = " ".join((tmp_path / one / "statement.txt").read_text().split())
        assert "the loss given:" in statement


def test_a_loss_by_name_works_on_the_command_line(
    call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = [f"--set={k}={v}" for k, v in {**TINY, **QUICK, "method": "fl"}.items()]
    module = "test_given_objects_losses"
    (tmp_path / f"{module}.py").write_text(
        "import torch.nn.functional as F\n"
        "def soft(logits, labels):\n"
        "    return F.cross_entropy(logits, labels, reduction='none', label_smoothing=0.3)\n"
        "def broken(logits, labels):\n"
        "    return logits.mean()\n"
    )
    monkeypatch.chdir(tmp_path)
    code, complaint = call("run", *sets, f"--set=loss={module}:soft", "--out", "run")
    assert code == 0, complaint
    for wrong in ("broken", "missing"):
        code, complaint = call("run", *sets, f"--set=loss={module}:{wrong}", "--out", "no")
        assert code == 2 and complaint.count("\n") == 1 and "loss" in complaint
    code, complaint = call(
        "run", *sets, f"--set=loss={module}:soft", "--engine", "flower", "--out", "no"
    )
    assert code == 2
    assert ("cross-entropy" if find_spec("flwr") else "not installed") in complaint
    assert not Path("no").exists()


@pytest.mark.parametrize(
    ("loss", "problem"),
    [
        (mixing, "mixes the samples"),
        (lambda logits, labels: logits.mean(), "one number per sample"),
        (lambda logits, labels: torch.zeros(len(labels)), "no gradient"),
        (lambda logits: logits, "failed in a trial"),
        (nn.CrossEntropyLoss, "nor a torch loss"),
        (nn.Sequential(nn.Linear(3, 1)), "trains parameters"),
    ],
)
def test_a_loss_that_cannot_be_bounded_is_refused(tmp_path: Path, loss, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        xcal.run(tmp_path / "run", **{**TINY, **QUICK, "method": "fl-dp"}, loss=loss)
    assert not (tmp_path / "run").exists()
