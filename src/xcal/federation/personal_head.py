"""A head of a site's own, trained on its own images from a run's final model.

It is made by the private engine and paid for in the site's ledger, although it stays at the site: a
file gets copied, shown and written about, and what is promised of it must hold then too. So it has
a guarantee of its own, as a run called `RUN+personal`, which no message can name: no server is
given it, neither by the site nor by asking for the answer that is kept of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from xcal.config import Experiment
from xcal.dp.clipping.named import trainable
from xcal.errors import UserError
from xcal.federation.answer import respond
from xcal.federation.disclosure import PERSONAL, own_name
from xcal.federation.exchange import Question, RoundRequest, Weights, load_weights
from xcal.federation.files import own_folder, write_json, write_tensors
from xcal.federation.loaded_site import Held
from xcal.federation.site_directory import SiteDirectory
from xcal.models.model_registry import STAGED

METHOD = "fl-dp"


@dataclass(frozen=True)
class _Around(SiteDirectory):
    """The site, with a network that starts from a run's final model."""

    weights: Weights

    def hold(self, experiment: Experiment) -> Held:
        held = super().hold(experiment)
        build = held.site.build_model

        def filled() -> nn.Module:
            model = build()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name in self.weights:
                        parameter.copy_(self.weights[name])
            return model

        return held._replace(site=replace(held.site, build_model=filled))

    def start(self, experiment: Experiment) -> nn.Module:
        """The final model, of which only the head trains."""
        return self.hold(experiment).site.build_model()


def head_of_its_own(
    site: SiteDirectory, experiment: Experiment, run: str, weights: Weights
) -> nn.Module:
    """Train it, or take the one that was trained: nothing is paid twice.

    Guarantee: (personal_epsilon, personal_delta)-DP of policy.toml for one unit of the training
    images, charged step by step; the held-out images take no part.
    """
    policy = site.policy
    if not policy.personal_epsilon:
        raise UserError(
            "personal = true in site.toml needs personal_epsilon and personal_delta in policy.toml:"
            " what a head of its own may cost."
        )
    own = experiment.model_copy(
        update={
            "method": METHOD,
            "train": "head" if experiment.network in STAGED else "all",  # others train whole
            "rounds": 1,
            "local_epochs": site.about.personal_epochs,
            "epsilon": policy.personal_epsilon,
            "delta": policy.personal_delta,
        }
    )
    client = _Around(site.path, site.about, site.policy, weights)
    name = own_name(run, PERSONAL)
    start: Weights = {k: p.detach().clone() for k, p in trainable(client.start(own)).items()}
    request = RoundRequest(name, 0, (0,), own)
    reply = respond(client, Question(client.name, request, start))
    model = client.start(own)
    if reply.weights is not None:
        load_weights(model, reply.weights)
    folder = site.path / "evaluation"
    own_folder(folder)
    statement = {
        "run": name,
        "model": "this site's own, from the final model of the run; of what was pretrained only the"
        " head was trained on",
        "epsilon": policy.personal_epsilon,
        "delta": policy.personal_delta,
        "epsilon_spent": reply.report.epsilon_spent,
        "unit": policy.unit,
        "recipients": "this site alone: neither the head nor its numbers are sent to anybody",
        "why_charged": "it stays here and is charged all the same, so that the promise holds"
        " whatever becomes of the file; its numbers on held-out people are not covered by it",
    }
    write_tensors(folder / f"{name}.safetensors", model.state_dict(), statement)
    write_json(folder / f"{name}-statement.json", statement)
    return model
