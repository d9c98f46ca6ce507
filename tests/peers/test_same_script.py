"""One script, two libraries: Opacus' ghost clipping and ours."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import xcal

N, BATCH = 48, 8


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 36, 3),
    )


def data() -> TensorDataset:
    torch.manual_seed(4)
    return TensorDataset(2 * torch.randn(N, 1, 8, 8), torch.randint(0, 3, (N,)))


def script(engine_class: Any, loss: nn.Module, reduction: str = "mean") -> dict[str, Any]:
    """As it stands in Opacus' tutorial; only the class differs."""
    torch.manual_seed(0)
    model = network()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    engine = engine_class()
    model, optimizer, criterion, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        criterion=loss,
        data_loader=DataLoader(data(), batch_size=BATCH, shuffle=True),
        target_epsilon=4.0,
        target_delta=1e-3,
        epochs=2,
        max_grad_norm=1.0,
        loss_reduction=reduction,
        grad_sample_mode="ghost",
        poisson_sampling=True,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    shown = []
    model.train()
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            value = criterion(model(x), y)
            value.backward()
            optimizer.step()
            shown.append(value.item())
        scheduler.step()
    model.eval()
    with torch.no_grad():
        outputs = model(data()[:5][0])
    return {
        "steps": len(shown),
        "length": len(loader),
        "epsilon": engine.get_epsilon(1e-3),
        "outputs": tuple(outputs.shape),
        "names": sorted(model.state_dict()),
        "lr": optimizer.param_groups[0]["lr"],
        "gradients": [tuple(p.grad.shape) for p in model.parameters()],
    }


def engine_of(library: str) -> Any:
    if library == "xcal":
        return xcal.PrivacyEngine
    return pytest.importorskip("opacus").PrivacyEngine


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_same_script_runs_with_either_library() -> None:
    theirs = script(engine_of("opacus"), nn.CrossEntropyLoss())
    ours = script(engine_of("xcal"), nn.CrossEntropyLoss())
    assert 3.9 < theirs.pop("epsilon") <= 4.0
    assert 3.9 < ours.pop("epsilon") <= 4.0
    assert ours == theirs


LOSSES = {
    "plain": (nn.CrossEntropyLoss, {}),
    "weighted": (nn.CrossEntropyLoss, {"weight": torch.tensor([0.2, 1.0, 3.0]).double()}),
    "smoothed": (nn.CrossEntropyLoss, {"label_smoothing": 0.2}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_opacus_for_the_same_batch(name: str, reduction: str) -> None:
    kind, keys = LOSSES[name]
    found = []
    for library in ("opacus", "xcal"):
        # A loader of one batch draws everyone; noise of 1e-7 moves no digit that is compared.
        images, labels = data()[:]
        model: Any = network().double()
        everyone = TensorDataset(images.double(), labels)
        model, optimizer, criterion, loader = engine_of(library)().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
            criterion=kind(reduction=reduction, **keys),
            data_loader=DataLoader(everyone, batch_size=N),
            noise_multiplier=1e-9,
            max_grad_norm=0.4,
            loss_reduction=reduction,
            grad_sample_mode="ghost",
        )
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        found.append([p.grad.clone() for p in model.parameters()])
    for theirs, ours in zip(*found, strict=True):
        # Opacus clips to C/(norm + 1e-6).
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert all(float(g.abs().max()) > 1e-4 for g in found[0])


def test_without_warnings_ours_says_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        script(engine_of("xcal"), nn.CrossEntropyLoss())
