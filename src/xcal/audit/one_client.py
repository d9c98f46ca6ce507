"""One client, trained by the real rounds, with everything it releases written down.

The audited client stands alone: the server's view of a client does not depend on the others, and
a model that is one client's alone is the easiest to attack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from xcal.config import Experiment
from xcal.dp.calibration import Plan
from xcal.dp.clipping import ClippingEngine
from xcal.dp.clipping.named import trainable
from xcal.dp.ledger import ledger
from xcal.dp.ledger.rows import Charge, Terms, charges_of, read_rows
from xcal.dp.noise import NoiseSource, SeededNoise
from xcal.errors import UserError
from xcal.federation.exchange import RoundRequest, Weights
from xcal.federation.loaded_site import LoadedSite
from xcal.federation.rounds import client_round
from xcal.methods.client_data import LocalData
from xcal.methods.context import StepRecord
from xcal.methods.loss import loss_of
from xcal.methods.registry import method_of
from xcal.models.model_registry import build_network

RUN = "audit"
Observer = Callable[[nn.Module, Tensor], None]
"""Called after every step with the model as it stood before it and the released sum, flat."""


@dataclass(frozen=True)
class Trained:
    """What a lone client's training left behind."""

    first: Tensor  # flat weights before the first round
    rounds: tuple[Tensor, ...]  # and as sent to the server after each
    trace: tuple[StepRecord, ...]
    plan: Plan | None
    charges: tuple[Charge, ...]
    model: nn.Module  # with the final weights

    @property
    def final(self) -> Tensor:
        return self.rounds[-1] if self.rounds else self.first


def flat(weights: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([value.detach().flatten() for value in weights.values()])


def load_flat(model: nn.Module, values: Tensor) -> None:
    """Put flat weights into a model's trainable parameters."""
    parameters = trainable(model)
    pieces = torch.split(values, [p.numel() for p in parameters.values()])
    with torch.no_grad():
        for parameter, piece in zip(parameters.values(), pieces, strict=True):
            parameter.copy_(piece.view_as(parameter))


def train_one_client(
    experiment: Experiment,
    data: LocalData,
    classes: int,
    *,
    observe: Observer | None = None,
    make_engine: Callable[..., ClippingEngine] = ClippingEngine,
    noise: NoiseSource | None = None,
    site_dir: Path | None = None,
) -> Trained:
    """Train all rounds of one client through `client_round`: real sampler, clipping, noise, filter.

    The released sums are read off the weights: a step of plain SGD moves them by lr/B times it.
    """
    if observe is not None and experiment.optimizer != "sgd":
        raise UserError(
            "The audit reads releases off the weights, so it needs optimizer = 'sgd': any other"
            " optimizer only processes the same releases further."
        )
    method = method_of(experiment)
    plan = method.plan(experiment, data.units, experiment.rounds)
    with nullcontext(site_dir) if site_dir else TemporaryDirectory(prefix="xcal-audit-") as place:
        folder = Path(place)
        path = folder / "ledger.sqlite"
        terms = Terms(
            population="audited client",
            unit=experiment.privacy_unit,
            epsilon=None if plan is None else plan.epsilon,
            delta=None if plan is None else plan.delta,
            simulated=True,
        )
        ledger.create(path, terms)
        built: list[nn.Module] = []

        def build() -> nn.Module:
            built.append(build_network(experiment, classes))
            return built[-1]

        site = LoadedSite(
            client="0",
            site_dir=folder,
            data=data,
            noise=noise or SeededNoise(experiment.seed),
            build_model=build,
            make_engine=make_engine,
            loss=loss_of(experiment),
        )
        watched = build_network(experiment, classes)
        weights: Weights = {k: p.detach().clone() for k, p in trainable(watched).items()}
        first = flat(weights)
        before = first

        def after_step(_: int) -> None:
            nonlocal before
            if observe is None:
                return
            now = flat(trainable(built[-1]))
            load_flat(watched, before)
            observe(watched, (before - now) * (experiment.expected_batch_size / experiment.lr))
            before = now

        sent: list[Tensor] = []
        trace: list[StepRecord] = []
        own = tuple(range(experiment.rounds))
        for number in own:
            before = flat(weights)
            reply = client_round(
                RoundRequest(RUN, number, own, experiment), weights, site, after_step
            )
            trace += reply.trace
            if reply.weights is None:  # exhausted
                break
            weights = reply.weights
            sent.append(flat(weights))
        charges = charges_of(read_rows(path), RUN)
    load_flat(watched, sent[-1] if sent else first)
    return Trained(first, tuple(sent), tuple(trace), plan, tuple(charges), watched)
