"""What a training loop may get wrong is refused by name, and nothing of it is released."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import xcal
from private_loop import N, data, network, private, train
from xcal.dp.engine import Private
from xcal.dp.refusals import Refused
from xcal.errors import UserError


def refused(code: str, call: Callable[[], Any]) -> Refused:
    with pytest.raises(Refused) as caught:
        call()
    assert caught.value.code == code, str(caught.value)
    return caught.value


def weights(made: Private) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in made.module.parameters()])


def first(made: Private) -> Any:
    batch = next(iter(made.data_loader))
    assert len(batch[0])
    return batch


def triples() -> DataLoader[Any]:
    """Of image, label and number: what a loop does with them is not known before it does it."""
    numbered = TensorDataset(*data()[:], torch.arange(N))
    return DataLoader(numbered, batch_size=8, shuffle=True)


# In the loop.


def test_a_second_backward() -> None:
    made = private()
    x, y = first(made)
    loss = made.criterion(made.module(x), y)
    loss.backward()
    before = [p.grad.clone() for p in made.module.parameters()]
    refused("second-backward", loss.backward)
    refused("second-backward", lambda: made.module(x))
    assert all(
        torch.equal(a, p.grad) for a, p in zip(before, made.module.parameters(), strict=True)
    )
    made.optimizer.step()


def test_two_losses_that_go_back_one_after_the_other() -> None:
    made = private()
    x, y = first(made)
    output = made.module(x)
    one, other = made.criterion(output, y), made.criterion(2 * output, y)
    one.backward()
    made.optimizer.zero_grad()
    refused("second-backward", other.backward)


def test_a_plain_loss() -> None:
    made = private()
    x, y = first(made)
    output = made.module(x)
    refused("foreign-loss", lambda: F.cross_entropy(output, y).backward())
    assert all(p.grad is None for p in made.module.parameters())
    refused("no-backward", made.optimizer.step)


def test_a_gradient_of_the_input() -> None:
    """Grad-CAM and the like, in the middle of a private pass."""
    made = private()
    x, _ = first(made)
    x.requires_grad_()
    output = made.module(x)
    refused("foreign-loss", lambda: torch.autograd.grad(output.sum(), x))


def test_a_plain_loss_beside_the_private_one() -> None:
    made = private()
    x, y = first(made)
    loss = made.criterion(made.module(x), y)
    refused("reduced-loss", lambda: loss + sum(p.square().sum() for p in made.module.parameters()))
    refused("reduced-loss", lambda: loss * torch.ones(len(x)))


def test_a_loss_averaged_by_hand() -> None:
    made = private()
    x, y = first(made)
    refused("reduced-loss", lambda: made.criterion(made.module(x), y).mean())
    refused("reduced-loss", lambda: made.criterion(made.module(x), y).sum())


@pytest.mark.parametrize(
    "criterion",
    [F.cross_entropy, lambda o, t: F.cross_entropy(o, t, reduction="none").mean(0, keepdim=True)],
)
def test_a_criterion_that_averages(criterion: Any) -> None:
    refused("reduced-loss", lambda: private(criterion=criterion))
    made = private(loader=triples(), criterion=criterion)  # only the loop shows it
    x, y, _ = first(made)
    before = weights(made)
    refused("reduced-loss", lambda: made.criterion(made.module(x), y).backward())
    assert torch.equal(before, weights(made))


def test_a_criterion_that_mixes_samples() -> None:
    def standardized(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        losses = F.cross_entropy(output, target, reduction="none")
        return losses / losses.mean()

    refused("criterion", lambda: private(criterion=standardized))
    made = private(loader=triples(), criterion=standardized)
    x, y, _ = first(made)
    refused("criterion", lambda: made.criterion(made.module(x), y))


def test_the_network_in_training_mode_outside_the_loop() -> None:
    made = private()
    x, _ = data()[:8]
    refused("no-draw", lambda: made.module(x))
    train(made)
    refused("no-draw", lambda: made.module(x))
    with torch.no_grad():
        assert made.module(x).shape == (8, 3)
    made.module.eval()
    assert made.module(x).shape == (8, 3)


def test_the_loop_in_evaluation_mode() -> None:
    made = private()
    x, y = first(made)
    made.module.eval()
    refused("no-draw", lambda: made.criterion(made.module(x), y).backward())
    assert all(p.grad is None for p in made.module.parameters())


def test_a_loss_without_the_network() -> None:
    made = private()
    x, y = first(made)
    made.module(x)
    refused("no-draw", lambda: made.criterion(torch.zeros(len(x), 3), y).backward())


def test_the_network_that_was_handed_in() -> None:
    module = network()
    made = private(module=module)
    x, y = first(made)
    refused("no-draw", lambda: made.criterion(module(x), y).backward())
    F.cross_entropy(module(x), y).backward()  # plain torch: nobody can keep it from that
    refused("no-backward", made.optimizer.step)
    made.module(x)
    refused("not-zeroed", lambda: made.criterion(made.module(x), y).backward())


def test_the_optimizer_that_was_handed_in() -> None:
    module = network()
    plain = torch.optim.SGD(module.parameters(), lr=0.1)
    made = private(module=module, optimizer=plain)
    x, y = first(made)
    F.cross_entropy(module(x), y).backward()
    before = weights(made)
    refused("unwrapped-optimizer", plain.step)
    assert torch.equal(before, weights(made))


def test_other_rows_than_were_drawn() -> None:
    made = private()
    x, _ = first(made)
    refused("other-rows", lambda: made.module(x[:-1]))
    refused("other-rows", lambda: made.module(data()[:][0]))


def test_a_step_without_a_draw_or_a_backward() -> None:
    made = private()
    refused("no-draw", made.optimizer.step)
    x, y = first(made)
    refused("no-backward", made.optimizer.step)
    made.criterion(made.module(x), y).backward()
    made.optimizer.step()
    refused("no-draw", made.optimizer.step)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1e-3),
        lambda m: next(m.parameters()).grad.data.mul_(2),
        lambda m: setattr(next(m.parameters()), "grad", None),
        lambda m: m.zero_grad(),
    ],
    ids=["clipped", "in place", "removed", "zeroed"],
)
def test_gradients_changed_by_hand(change: Callable[[nn.Module], Any]) -> None:
    made = private()
    x, y = first(made)
    made.criterion(made.module(x), y).backward()
    change(made.module)
    before = weights(made)
    refused("changed-gradients", made.optimizer.step)
    assert torch.equal(before, weights(made))


def test_zero_grad_is_missing() -> None:
    made = private()
    model, optimizer, criterion, loader = made
    batches = iter(loader)
    x, y = next(batches)
    criterion(model(x), y).backward()
    optimizer.step()
    x, y = next(batches)
    refused("not-zeroed", lambda: criterion(model(x), y).backward())
    optimizer.zero_grad(set_to_none=False)
    criterion(model(x), y).backward()
    optimizer.step()


def test_accumulation_is_refused_before_anything_more_is_charged() -> None:
    engine = xcal.PrivacyEngine(seed=0)
    made = private(engine)
    batches = iter(made.data_loader)
    x, y = next(batches)
    made.criterion(made.module(x), y).backward()
    refused("not-zeroed", lambda: next(batches))
    assert engine.steps == 1


def test_parameters_that_come_to_the_optimizer_later() -> None:
    made = private()
    x, y = first(made)
    made.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    made.criterion(made.module(x), y).backward()
    refused("foreign-parameters", made.optimizer.step)


def test_a_network_that_begins_to_use_batch_statistics() -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(32, 3))
    module.eval()
    made = private(module=module)
    module.eval()
    made.module.training = True
    x, _ = first(made)
    made.module.train()
    assert "BatchNorm" in str(refused("network", lambda: made.module(x)))


class Mixing(nn.Module):
    """Takes the batch's mean away: a batch norm of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(36, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        return self.head(x - x.mean(0))


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(36, 3)
        self.register_buffer("seen", torch.zeros(36))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.detach().flatten(1).sum(0)
        return self.head(x.flatten(1))


def test_a_network_that_mixes_rows() -> None:
    refused("network", lambda: private(module=Mixing()))
    made = private(module=Mixing(), loader=triples())
    x, _, _ = first(made)
    refused("network", lambda: made.module(x))


def test_dropout_in_either_form_is_no_mixing() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(36, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(nn.functional.dropout(x.flatten(1), 0.5, self.training))

    for module in (Functional(), nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(36, 3))):
        assert train(private(module=module)) == 5


def test_a_network_that_cannot_be_copied() -> None:
    module = network()
    module.kept = module[0].weight * 2
    refused("network", lambda: private(module=module))
    module = network()
    made = private(module=module)
    x, _ = first(made)
    module.kept = module[0].weight * 2
    refused("network", lambda: made.module(x))


def test_a_network_that_remembers() -> None:
    refused("network", lambda: private(module=Remembering()))
    made = private(module=Remembering(), loader=triples())
    x, y, _ = first(made)
    refused("network", lambda: made.criterion(made.module(x), y).backward())
    assert all(p.grad is None for p in made.module.parameters())


def test_one_step_more_than_the_budget() -> None:
    engine = xcal.PrivacyEngine(seed=0)
    made = private(engine)
    with pytest.warns(UserWarning, match="budget is spent after 10 steps"):
        assert train(made, epochs=3) == 10
    assert engine.steps == 10
    refused("budget", made.optimizer.step)
    assert train(made) == 0


# What is handed in.


def loader(**keys: Any) -> DataLoader[Any]:
    return DataLoader(data(), **keys)


class OwnBatches(BatchSampler):
    """Balanced, say."""


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(data())


class WithoutLength(Dataset[Any]):
    def __getitem__(self, item: int) -> Any:
        return data()[item]


@pytest.mark.parametrize(
    "made",
    [
        lambda: loader(batch_size=None),
        lambda: loader(batch_sampler=OwnBatches(RandomSampler(data()), 8, True)),
        lambda: loader(batch_size=8, sampler=WeightedRandomSampler([1.0] * N, N)),
        lambda: loader(batch_size=8, sampler=SubsetRandomSampler(range(20))),
        lambda: loader(batch_size=8, sampler=RandomSampler(data(), replacement=True)),
        lambda: DataLoader(Stream(), batch_size=8),
        lambda: DataLoader(WithoutLength(), batch_size=8, sampler=range(20)),
        lambda: [(torch.zeros(8, 1, 6, 6), torch.zeros(8).long())],
        lambda: private().data_loader,
    ],
    ids=[
        "none",
        "batches",
        "weighted",
        "subset",
        "replacement",
        "stream",
        "unsized",
        "list",
        "twice",
    ],
)
def test_loaders(made: Callable[[], Any]) -> None:
    given = made()
    refused("loader", lambda: private(loader=given))


def test_ordinary_loaders_are_replaced() -> None:
    for given in (loader(batch_size=8), loader(batch_size=8, shuffle=True, drop_last=True)):
        made = private(loader=given)
        assert len(made.data_loader) == len(given)
        assert made.data_loader.dataset is given.dataset


def test_an_optimizer_of_other_parameters() -> None:
    other = torch.optim.SGD(network().parameters(), lr=0.1)
    refused("foreign-parameters", lambda: private(optimizer=other))


def test_batch_norm() -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(32, 3))
    assert "BatchNorm2d" in str(refused("network", lambda: private(module=module)))


def test_more_steps_than_anyone_plans_for() -> None:
    refused("option", lambda: private(epochs=10**9))


def test_networks_that_are_spread_or_frozen() -> None:
    refused("network", lambda: private(module=nn.DataParallel(network())))
    frozen = network().requires_grad_(False)
    refused(
        "network",
        lambda: private(
            module=frozen, optimizer=torch.optim.SGD(list(frozen.parameters()), lr=0.1)
        ),
    )


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning", "ignore:Lazy modules")
def test_networks_without_shapes_or_without_source() -> None:
    lazy = nn.Sequential(nn.Flatten(), nn.LazyLinear(3))
    assert "'1.weight' has no shape yet" in str(refused("network", lambda: private(module=lazy)))
    plain = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    traced = torch.jit.trace(plain, torch.zeros(1, 1, 6, 6))
    assert "TorchScript" in str(refused("network", lambda: private(module=traced)))


class Trained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.scale * output, target, reduction="none")


def test_criteria() -> None:
    refused("criterion", lambda: private(criterion=Trained()))
    refused("criterion", lambda: private(criterion=nn.CrossEntropyLoss(reduction="sum")))
    refused("criterion", lambda: private(criterion=private().criterion))
    refused("criterion", lambda: private(criterion="cross_entropy"))


@pytest.mark.parametrize(
    "ids",
    [
        list(range(N - 1)),
        [None] * N,
        [float("nan")] * N,
        [""] * N,
        [[1]] * N,
        [object() for _ in range(N)],  # told apart by where they lie, not by whose they are
        {f"scan {i}": i // 4 for i in range(N)},  # its keys are the scans
        set(range(N)),
        "p" * N,
        7,
        [i // 4 if i % 2 else str(i // 4) for i in range(N)],  # 7 and "7"
        [torch.tensor([i, i]) for i in range(N)],
    ],
)
def test_groups(ids: Any) -> None:
    error = refused("groups", lambda: private(groups=ids))
    assert str(error).startswith("groups ") and str(error).count(". ") == 0


@pytest.mark.parametrize(
    "one",
    [
        torch.tensor,  # as `[item[2] for item in dataset]` gives them
        lambda i: torch.tensor([i]),
        np.int64,
        lambda i: np.array([i]),
        str,
        lambda i: ("clinic", torch.tensor(i)),
    ],
)
def test_one_id_is_one_unit_whatever_holds_it(one: Callable[[int], Any]) -> None:
    engine = xcal.PrivacyEngine(seed=0)
    private(engine, groups=[one(i // 4) for i in range(N)])
    assert f"of units ({N // 4})" in " ".join(engine.statement().split())


def test_spaces_around_an_id_name_nobody_else() -> None:
    engine = xcal.PrivacyEngine(seed=0)
    private(engine, groups=[f"p{i // 4}" + " " * (i % 4) for i in range(N)])
    assert f"of units ({N // 4})" in " ".join(engine.statement().split())


@pytest.mark.parametrize(
    "keys",
    [
        {"poisson_sampling": False},
        {"clipping": "per_layer"},
        {"grad_sample_mode": "hooks"},
        {"batch_first": False},
        {"wrap_model": False},
        {"max_grad_norm": [1.0, 1.0]},
        {"max_grad_norm": 0.0},
        {"loss_reduction": "none"},
        {"epochs": 0},
        {"max_gradnorm": 1.0},
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_options(keys: dict[str, Any]) -> None:
    engine = xcal.PrivacyEngine(seed=0)
    refused("option", lambda: private(engine, **keys))
    assert engine.steps == 0
    private(engine)  # nothing is left of the refusal


def test_engines() -> None:
    refused("option", lambda: xcal.PrivacyEngine(accountant="gdp"))
    refused("option", lambda: xcal.PrivacyEngine(secure_mode=True, seed=1))
    engine = xcal.PrivacyEngine(secure_mode=True)
    refused("option", lambda: private(engine, noise_generator=torch.Generator()))
    private(engine)
    refused("option", lambda: private(engine))
    for call in (lambda e: e.get_epsilon(1e-5), lambda e: e.statement(), lambda e: e.save("x")):
        refused("option", lambda call=call: call(xcal.PrivacyEngine()))
    module = network()
    refused(
        "option", lambda: private(module=module, optimizer=torch.optim.LBFGS(module.parameters()))
    )


def test_no_noise_and_no_room() -> None:
    def made(sigma: float, **keys: Any) -> Any:
        module = network()
        return xcal.PrivacyEngine().make_private(
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
            data_loader=loader(batch_size=8),
            noise_multiplier=sigma,
            max_grad_norm=1.0,
            **keys,
        )

    refused("option", lambda: made(0.0))
    refused("option", lambda: made(1.0, target_epsilon=1.0))
    refused("option", lambda: made(0.01, target_epsilon=1.0, target_delta=1e-5))


def test_a_seed_with_a_new_ledger(tmp_path: Path) -> None:
    engine = xcal.PrivacyEngine(ledger=tmp_path / "ward-7", seed=1)
    refused("option", lambda: private(engine))
    assert list(tmp_path.iterdir()) == []


def test_a_ledger_without_a_budget(tmp_path: Path) -> None:
    module = network()
    refused(
        "option",
        lambda: xcal.PrivacyEngine(ledger=tmp_path / "ward-7").make_private(
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
            data_loader=loader(batch_size=8),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        ),
    )
    assert list(tmp_path.iterdir()) == []


def test_a_private_loop_may_look_at_what_it_likes() -> None:
    """Measuring between steps, in evaluation mode, leaves the training as it is."""
    public = TensorDataset(*data(seed=9)[:])
    found = []
    for looks in (False, True):
        made = private()
        for x, y in made.data_loader:
            made.optimizer.zero_grad()
            made.criterion(made.module(x), y).backward()
            if looks:
                made.module.eval()
                with torch.no_grad():
                    made.criterion(made.module(public[:][0]), public[:][1]).item()
                made.module.train()
            made.optimizer.step()
        found.append(weights(made))
    assert torch.equal(*found)


def test_numbers_that_are_text_and_an_empty_set() -> None:
    with pytest.raises(UserError, match="epsilon must be a number"):
        private(target_epsilon="3")
    module = network()
    plain = torch.optim.SGD(module.parameters(), lr=0.1)
    keys = {"module": module, "optimizer": plain, "data_loader": loader(batch_size=8)}
    made = xcal.PrivacyEngine().make_private
    refused("option", lambda: made(**keys, noise_multiplier="1", max_grad_norm=1.0))
    empty = DataLoader(TensorDataset(torch.zeros(0, 1, 6, 6), torch.zeros(0).long()), batch_size=2)
    refused("loader", lambda: private(loader=empty))


def test_a_plain_loss_in_evaluation_mode_reaches_no_parameter() -> None:
    """What is explained there has gradients of inputs; what trains has none."""
    made = private()
    made.module.eval()
    images = torch.randn(4, 1, 6, 6, requires_grad=True)
    losses = F.cross_entropy(made.module(images), torch.zeros(4).long())
    losses.backward()
    assert images.grad is not None and bool(images.grad.any())
    assert all(p.grad is None and p.requires_grad for p in made.module.parameters())
    with pytest.raises(RuntimeError, match="does not require grad"):
        F.cross_entropy(made.module(images.detach()), torch.zeros(4).long()).backward()
    made.module.train()
    assert train(made, most=2) == 2
