"""What a server asks beside rounds: counts by class before training, and after it a final model.

Nothing here can keep a run from being finished: a site that says no, or nothing, is named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from xcal.config import Experiment
from xcal.dp.calibration import check_target
from xcal.errors import UserError
from xcal.federation.coordinator import Carrier, read_answer
from xcal.federation.disclosure import CLASSES, label_shares
from xcal.federation.exact_counts import read_counts
from xcal.federation.files import write_json
from xcal.federation.folder import RunFolder
from xcal.federation.local_evaluation import read_sent
from xcal.federation.messages import (
    Disclosure,
    Refusal,
    Request,
    StatisticsRequest,
    encode_request,
    encode_statistics,
    frozen_digest,
    public_keys,
)
from xcal.federation.setup import Federation, load_fewest, with_unit
from xcal.models.model_registry import build_network

EVALUATIONS = "evaluations.json"
STATISTICS = "statistics.json"


def _asked(
    carrier: Carrier, number: int, run: str, messages: Mapping[str, bytes], timeout: float | None
) -> tuple[dict[str, Disclosure], dict[str, str], list[str]]:
    """Answers, refusals by code, and who said nothing; an answer that is none is a refusal."""
    came = carrier.exchange(number, messages, timeout)
    told: dict[str, Disclosure] = {}
    refused: dict[str, str] = {}
    for client, data in came.items():
        got = read_answer(Disclosure, client, run, data)
        if isinstance(got, Refusal):
            refused[client] = got.code
        else:
            told[client] = got
    return told, refused, sorted(set(messages) - set(came))


def tell_final(folder: RunFolder, federation: Federation, carrier: Carrier) -> dict[str, Any]:
    """Send a finished run's model to its sites; what they send back of it, which may be nothing."""
    experiment, run = federation.experiment, folder.about["run"]
    found = folder.load_checkpoint()
    if found is None:
        raise UserError(f"{folder.path} has no checkpoint: its model was not sent to the sites.")
    classes = len(federation.data.classes)
    frozen = frozen_digest(build_network(experiment, classes).to(experiment.device))
    kind = "reported/"
    weights = {k.removeprefix(kind): v for k, v in found[0].items() if k.startswith(kind)}
    messages = {
        name: encode_request(
            Request(
                client=name,
                run=run,
                round=experiment.rounds,
                own_rounds=federation.own_rounds(client),
                experiment=public_keys(experiment),
                initial_seed=experiment.seed,
                frozen=frozen,
                head=None,
                weights=weights,
                final=True,
            )
        )
        for client, name in enumerate(federation.names)
    }
    told, refused, missing = _asked(
        carrier, experiment.rounds, run, messages, experiment.round_timeout
    )
    sites: dict[str, Any] = {}
    exact: dict[str, Any] = {}  # apart: who reads `sites` may take all there for private
    for client, sent in told.items():
        try:
            if sent.counts is not None:
                exact[client] = read_counts(sent, federation.data.classes)
            else:
                sites[client] = read_sent(sent, classes) if sent.tables else None
        except UserError:
            refused[client] = "malformed"
    result = {"sites": sites, "exact": exact, "refused": refused, "missing": missing}
    write_json(folder.path / EVALUATIONS, result)
    return result


def statistics_of(
    run: str,
    experiment: Experiment,
    clients: Sequence[str],
    target: tuple[float, float],
    carrier: Carrier,
) -> dict[str, Any]:
    """Units by class at every site that answers, with noise, and how far their shares lie apart.

    `distance`: total variation between a site's shares and those of all sites together.
    """
    check_target(*target)
    data = load_fewest(experiment)
    experiment = with_unit(experiment, data)
    asked = {
        client: encode_statistics(
            StatisticsRequest(
                client,
                run,
                experiment.privacy_unit,
                experiment.pixels,
                len(data.classes),
                *target,
            )
        )
        for client in clients
    }
    told, refused, missing = _asked(carrier, 0, run, asked, experiment.round_timeout)
    counts = {}
    for client, sent in told.items():
        if len(sent.tables.get(CLASSES, ())) == len(data.classes):
            counts[client] = np.array(sent.tables[CLASSES])
        else:
            refused[client] = "malformed"
    overall = label_shares(sum(counts.values(), start=np.zeros(len(data.classes))))
    return {
        "run": run,
        "classes": list(data.classes),
        "unit": experiment.privacy_unit,
        "epsilon": target[0],
        "delta": target[1],
        "sites": {
            client: {
                "counts": values.tolist(),
                "noise": told[client].noise,
                "shares": label_shares(values).tolist(),
                "distance": float(np.abs(label_shares(values) - overall).sum() / 2),
            }
            for client, values in counts.items()
        },
        "refused": refused,
        "missing": missing,
    }
