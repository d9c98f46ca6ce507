"""Does it work here? A global model on a site's own held-out images; the numbers stay at the site.

What is measured lies in `evaluation/RUN.json`, and `evaluation/RUN.html` shows it to clinicians.
Nothing of it leaves, unless policy.toml says so. With `evaluation_epsilon` tables of the final
model are charged to the site's ledger and sent with noise (`disclosure.py`); with
`evaluation_floor` exact counts are sent, each below the floor withheld, without a guarantee
(`exact_counts.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from xcal.config import Experiment
from xcal.dp.ledger.rows import read_rows, runs_of
from xcal.dp.sampling import UnitTable
from xcal.errors import UserError
from xcal.explain.interval import mean_interval
from xcal.federation.clinicians_page import NAMES, write_page
from xcal.federation.disclosure import STATISTICS, Sums, disclose, one_hot, unit_sums
from xcal.federation.evaluation import Predictions, predict
from xcal.federation.exact_counts import mean_f1, send_counts
from xcal.federation.exchange import Weights, load_weights
from xcal.federation.files import own_folder, read_json, write_json
from xcal.federation.held_out import HeldOut, held_out
from xcal.federation.loaded_site import torch_threads
from xcal.federation.logbook import note, now
from xcal.federation.messages import EDITIONS, Disclosure, Request, frozen_digest
from xcal.federation.personal_head import head_of_its_own
from xcal.federation.policy import admit_experiment
from xcal.federation.request_refusals import Refused, naming
from xcal.federation.site_directory import SiteDirectory
from xcal.methods.context import digest_tensors
from xcal.metrics.metric_registry import classification_metrics
from xcal.models.model_registry import build_network

TABLES = ("confusion", "calibration")
BINS = 5  # of confidence, in what is sent: with more of them noise would add up to a higher error


@dataclass(frozen=True)
class Measured:
    """A model's numbers on held-out images, and what they were made from."""

    numbers: dict[str, Any]
    predictions: Predictions
    held: HeldOut
    model: nn.Module


def measure(site: SiteDirectory, model: nn.Module, experiment: Experiment) -> Measured:
    """F1, AUROC, calibration and the like, whole and by subgroup. Charges and sends nothing."""
    held = held_out(site, experiment.pixels)
    images = held.images
    predictions = predict(model, images, device=experiment.device)
    whole = classification_metrics(images.labels, predictions.probabilities)
    numbers: dict[str, Any] = {name: whole[name] for name in NAMES}
    numbers |= {
        "images": len(images),
        "units": len(np.unique(images.groups)),
        "unit": held.who,
        "apart": held.apart,
        "classes": list(held.classes),
        "sensitivity": whole["sensitivity"],
        "specificity": whole["specificity"],
        "confusion_matrix": whole["confusion_matrix"],
        "accuracy_interval": mean_interval(predictions.predicted == images.labels, images.groups),
        "reliability": _reliability(predictions),
        "subgroups": {
            column: _by_value(values, predictions, held, site.about.subgroup_floor)
            for column, values in held.subgroups.items()
        },
    }
    return Measured(numbers, predictions, held, model)


def _reliability(predictions: Predictions) -> list[dict[str, float]]:
    """Confidence against truth, bin by bin."""
    bins = 10
    place = _place(predictions.confidence, bins)
    right = predictions.predicted == predictions.labels
    return [
        {
            "images": int(inside.sum()),
            "confidence": float(predictions.confidence[inside].mean()),
            "right": float(right[inside].mean()),
        }
        for k in range(bins)
        if (inside := place == k).any()
    ]


def _place(confidence: NDArray[np.float64], bins: int) -> NDArray[np.int64]:
    found: NDArray[np.int64] = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    return found


def _by_value(
    values: NDArray[np.str_], predictions: Predictions, held: HeldOut, floor: int
) -> list[dict[str, Any]]:
    """Every value of a column; one of fewer people than the floor has no numbers."""
    found = []
    for value in np.unique(values):
        inside = values == value
        people = len(np.unique(held.images.groups[inside]))
        if people < floor:
            found.append({"value": str(value), "fewer_than": floor})
            continue
        numbers = classification_metrics(
            held.images.labels[inside], predictions.probabilities[inside]
        )
        found.append(
            {
                "value": str(value),
                "units": people,
                "images": int(inside.sum()),
                **{name: numbers[name] for name in NAMES},
            }
        )
    return found


def record(
    site: SiteDirectory, run: str, which: str, round_number: int, measured: Measured
) -> None:
    """Write numbers down and draw the page anew. `which`: global or personal."""
    folder = site.path / "evaluation"
    own_folder(folder)
    path = folder / f"{run}.json"
    kept = read_json(path)["records"] if path.exists() else []
    place = {"model": which, "round": round_number}
    others = [r for r in kept if {k: r[k] for k in place} != place]
    records = [*others, {**place, "time": now(), **measured.numbers}]
    write_json(path, {"run": run, "site": site.name, "records": records})
    write_page(folder / f"{run}.html", site.name, run, records, measured)
    note(site.path, "evaluated", run=run, round=round_number, model=which)


# --- what a server's questions set off ------------------------------------------------------------


def _model(site: SiteDirectory, experiment: Experiment, asked: Request) -> nn.Module:
    with naming("data"):
        classes = len(site.whole_set(experiment.pixels).classes)
    with naming("network-not-allowed"):
        model = build_network(experiment, classes).to(experiment.device)
    if frozen_digest(model) != asked.frozen:
        raise Refused("frozen-mismatch", "The parts that do not train differ: check weights.")
    load_weights(model, asked.weights)
    return model


def after_round(site: SiteDirectory, experiment: Experiment, asked: Request) -> None:
    """Where the owner wants each round: the model that this round began with. Never fails."""
    if site.about.evaluate != "each" or asked.round == 0:
        return  # the first round begins with a model that nobody has trained
    try:
        with torch_threads(site.threads):
            measured = measure(site, _model(site, experiment, asked), experiment)
        record(site, asked.run, "global", asked.round, measured)
    except Exception as error:
        note(site.path, "not-evaluated", run=asked.run, round=asked.round, detail=str(error)[:2000])


def answer_final(site: SiteDirectory, asked: Request) -> Disclosure:
    """What a site does with a run's final model. Sends nothing, unless the policy says so.

    Only of a run that this ledger has paid for: a server cannot have budgets spent under names of
    its own invention.
    """
    about, policy = site.about, site.policy
    silent = Disclosure(site.name, asked.run, {})
    if asked.client != site.name:
        raise Refused("wrong-client", f"The request is for {asked.client!r}.")
    paid = runs_of(read_rows(site.ledger_path)).get(asked.run)
    if paid is None or paid.method == STATISTICS:
        raise Refused("round-not-own", f"This site took no part in the run {asked.run!r}.")
    sends = policy.evaluation_epsilon or policy.evaluation_floor
    if about.evaluate == "never" and not about.personal and not sends:
        return silent
    with naming("experiment-invalid"):
        experiment = site.experiment(asked.experiment, asked.initial_seed)
        admit_experiment(policy, experiment)
    with torch_threads(site.threads):
        model = _model(site, experiment, asked)
        with naming("data"):
            measured = measure(site, model, experiment)
        last = experiment.rounds
        if about.evaluate != "never":
            record(site, asked.run, "global", last, measured)
        sent = silent
        if policy.evaluation_epsilon:
            sent = _sent(site, asked, measured)
        elif policy.evaluation_floor:
            sent = _sent_exactly(site, asked, measured) or silent
        if about.personal:
            _personal(site, experiment, asked.run, asked.weights, last)
    return sent


def _personal(
    site: SiteDirectory, experiment: Experiment, run: str, weights: Weights, last: int
) -> None:
    """A head of the site's own; what keeps it from being made is for the owner's eyes alone."""
    try:
        model = head_of_its_own(site, experiment, run, weights)
        record(site, run, "personal", last, measure(site, model, experiment))
    except UserError as error:
        note(site.path, "no-personal-head", run=run, detail=str(error)[:2000])


def _sent_exactly(site: SiteDirectory, asked: Request, measured: Measured) -> Disclosure | None:
    if asked.edition and not EDITIONS[asked.edition].reads_counts:
        detail = f"a server of {asked.edition} does not read exact counts"
        note(site.path, "not-disclosed", run=asked.run, detail=detail)
        return None
    return send_counts(
        site,
        asked.run,
        digest_tensors(sorted(asked.weights.items())),
        measured.held,
        measured.predictions.probabilities,
    )


def _sent(site: SiteDirectory, asked: Request, measured: Measured) -> Disclosure:
    images, answers = measured.held.images, measured.predictions
    classes, unit = len(measured.held.classes), site.policy.unit
    table = UnitTable.of(unit, images.groups)
    if unit == "group" and not measured.held.apart:
        raise Refused(
            "data", "Whose the held-out images are is not known: nothing is sent of them."
        )

    def sums() -> Sums:
        cells = one_hot(images.labels * classes + answers.predicted, classes**2)
        gap = answers.confidence - (answers.predicted == images.labels)
        place = one_hot(_place(answers.confidence, BINS), BINS)
        return {
            "confusion": unit_sums(cells, table),
            "calibration": unit_sums(place * gap[:, None], table),
        }

    return disclose(
        site,
        asked.run,
        "evaluation",
        unit=unit,
        target=(site.policy.evaluation_epsilon, site.policy.evaluation_delta),
        units=table.n_units,
        tables=TABLES,
        sums=sums,
        about=digest_tensors(sorted(asked.weights.items())),
    )


def read_sent(sent: Disclosure, classes: int) -> dict[str, Any]:
    """What the lead makes of a site's tables; functions of them, so they cost nothing more."""
    if set(sent.tables) != set(TABLES) or len(sent.tables["confusion"]) != classes**2:
        raise UserError(f"{sent.client} sent tables of another shape.")
    counts = np.maximum(np.array(sent.tables["confusion"]).reshape(classes, classes), 0.0)
    total = max(float(counts.sum()), 1e-9)
    gaps = np.abs(np.array(sent.tables["calibration"])).sum()
    return {
        "macro_f1": mean_f1(counts),
        "accuracy": float(np.trace(counts) / total),
        "calibration_error": float(gaps / total),
        "units": total,
        "noise": sent.noise,
        "epsilon": sent.epsilon,
        "delta": sent.delta,
    }
