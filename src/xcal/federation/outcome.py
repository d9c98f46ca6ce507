"""What a run leaves behind: the preamble, the measurements, the result."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from xcal.config import Experiment
from xcal.data.images import RECORD_GROUPS, ImageData, Images
from xcal.data.normalize import to_tensor
from xcal.dp.calibration import Plan
from xcal.dp.statement import (
    PLUGINS,
    Measured,
    Situation,
    make_statement,
    statement_text,
)
from xcal.errors import UserError
from xcal.explain.choosing import AUTO, CHOSEN_ON, MapChoice, asked_for, choose_map, not_chosen
from xcal.federation.card import card_text, notices
from xcal.federation.evaluation import (
    OnImages,
    Predictions,
    PublicImages,
    explain_road,
    explanation_metrics,
)
from xcal.federation.files import read_json, write_bytes, write_json, write_tensors
from xcal.federation.folder import RunFolder
from xcal.federation.rounds import add_remove_holds
from xcal.federation.setup import DATA_SEED, Federation, validation_is_public
from xcal.first_edition import RENAMED
from xcal.methods.base import Method, nominal_epsilon
from xcal.methods.feature_store import FeatureStore

# What of a client's last report the result keeps.
OF_CLIENTS = "units epsilon_spent epsilon_paper share_spent order steps halted".split()
OnMeasure = Callable[[str, int, int], None]  # of what, how many are done, of how many


def public_subset(images: Images, wanted: int | None) -> Images | None:
    """A fixed subset of a public split, the same for every seed; None where it is empty."""
    count = len(images) if wanted is None else min(wanted, len(images))
    if count == 0:
        return None
    chosen = np.random.default_rng([DATA_SEED, 11]).permutation(len(images))[:count]
    return images.take(np.sort(chosen))


def map_for(
    experiment: Experiment,
    model: nn.Module,
    validation: Callable[[], Images],
    wanted: str,
    on_images: OnImages = lambda *_: None,
) -> MapChoice:
    """Which map explains a released model: the one asked for, or the best on public images.

    Nothing is chosen by images that nobody called public: those are not even loaded.
    """
    if wanted != AUTO:
        return asked_for(wanted)
    try:
        if not validation_is_public(experiment):
            return not_chosen(
                f"nobody agreed that the validation images of {experiment.data} are public"
                " (public_validation)."
            )
        subset = public_subset(validation(), CHOSEN_ON)
    except UserError as error:  # not on this machine, or withheld
        return not_chosen(str(error))
    if subset is None:
        return not_chosen(f"{experiment.data} has no validation images that may be used.")
    inputs = to_tensor(np.asarray(subset.pixels)).to(next(model.parameters()).device)
    return choose_map(model, inputs, subset.groups, on_images=on_images)


def measure_round(
    model: nn.Module, validation: PublicImages | None, explained: Images | None, device: str
) -> dict[str, Any]:
    """A model on public images: what a round's record tells of it."""
    measured = validation.predict(model) if validation is not None else None
    found = explain_road(model, explained, device=device) if explained is not None else {}
    return {
        "validation_macro_f1": None if measured is None else measured.macro_f1(),
        "validation_loss": None if measured is None else measured.loss(),
        "road_validation": found.get("road"),
        "road_logit_percent_validation": found.get("road_logit_percent"),
        "road_seconds": found.get("seconds"),
    }


def plans_of(federation: Federation, reports: Mapping[str, Mapping[str, Any]]) -> dict[str, Plan]:
    """Each client's plan: known beforehand, or from the number of units it declared."""
    if federation.parts is not None:
        named = zip(federation.names, federation.plans, strict=True)
        return {name: plan for name, plan in named if plan is not None}
    found = {}
    for client, name in enumerate(federation.names):
        own = len(federation.own_rounds(client))
        if name in reports and own:
            units = reports[name]["units"]
            plan = federation.method.plan(federation.experiment, units, own)
            if plan is not None:
                found[name] = plan
    return found


def write_preamble(
    folder: RunFolder, federation: Federation, reports: Mapping[str, Mapping[str, Any]]
) -> None:
    """Schedule, plans and statement: public, and known before the first step.

    A server that sees its clients only through messages learns their declared units with their
    first answers, and then writes the same again, complete.
    """
    experiment, parts = federation.experiment, federation.parts
    plans = plans_of(federation, reports)
    central = {} if federation.server_plan is None else {"server": federation.server_plan}
    write_json(folder.path / "schedule.json", [list(r) for r in federation.schedule])
    write_json(folder.path / "plans.json", {c: p.as_dict() for c, p in (plans | central).items()})
    statement = make_statement(
        Situation(
            method=experiment.method,
            unit=experiment.privacy_unit,
            noise=noise_of(federation, reports),
            plans=plans,
            shared_units=parts is not None and parts.shared_units,
            groups_split=parts is not None and parts.groups_split,
            # Who is one group at clients elsewhere, they say.
            group_name=_group_name(federation.data) if parts is not None else GROUPS_ELSEWHERE,
            group_cap=experiment.group_cap,
            server_plan=federation.server_plan,
            epsilon_nominal=nominal_epsilon(federation.method, experiment),
            preset=experiment.preset,
            add_remove=add_remove_of(federation, reports),
            plugins={
                key: name for key in PLUGINS if ":" in (name := getattr(experiment, key) or "")
            },
            measured=_measured(federation),
            shared_groups=federation.shared_groups > 0,
            # Of a data set whose training images nobody here trains on it says nothing.
            groups_declared=parts is not None and federation.data.groups_declared,
            sites=experiment.clients,
            honest=experiment.honest_sites if experiment.trust == "masked" else None,
            discrete=experiment.discrete,
        )
    )
    write_json(folder.path / "statement.json", statement)
    write_bytes(folder.path / "statement.txt", statement_text(statement).encode())


GROUPS_ELSEWHERE = "person"  # or lesion, or picture: what each site counts as one group


def add_remove_of(
    federation: Federation, reports: Mapping[str, Mapping[str, Any]]
) -> frozenset[str]:
    """Clients at which one unit may also come or go: by the sites given, or by what they report."""
    if federation.parts is None:
        return frozenset(name for name, report in reports.items() if report.get("add_remove"))
    return frozenset(
        name
        for name, units in zip(federation.names, federation.declared, strict=False)
        if add_remove_holds(units is not None, federation.dealt, federation.experiment)
    )


def _group_name(data: ImageData) -> str:
    """What a person is called: nothing where it is not known of every image whose it is."""
    return data.group_name if data.groups_known else RECORD_GROUPS


def _measured(federation: Federation) -> Measured:
    """Which public images this run is measured on: subsets of one size lie within another."""
    experiment, data = federation.experiment, federation.data
    judged = max(experiment.validation_images, experiment.road_images)
    return Measured(
        data.name,
        min(judged, len(data.validation)),
        len(data.test),
        experiment.public_validation_by,
        lead=federation.parts is None,
    )


def noise_of(federation: Federation, reports: Mapping[str, Mapping[str, Any]]) -> str:
    """What the noise that protects comes from.

    Clients elsewhere decide for themselves, and a trusted server's noise for them is never seeded.
    """
    if federation.parts is not None:
        return federation.experiment.noise_source
    if federation.server_plan is not None:
        return "secure"
    told = {report.get("noise") for report in reports.values()}
    return "seeded" if "seeded" in told else "secure"


def finish(
    folder: RunFolder,
    federation: Federation,
    model: nn.Module,
    reports: dict[str, dict[str, Any]],
    server: dict[str, Any] | None,
    seconds: float,
    on_measure: OnMeasure = lambda *_: None,
) -> dict[str, Any]:
    """Measure on the whole test set, if there is one, and write the result, last of all."""
    experiment, about = federation.experiment, folder.about
    test = measure_test(model, federation, partial(on_measure, "test images"))
    if len(test.labels):
        _save_predictions(folder.path / "predictions.npz", federation.data.test, test)
    write_tensors(
        folder.path / "model.safetensors",
        model.state_dict(),
        {
            "network": experiment.network,
            "classes": list(federation.data.classes),
            **({"multi_label": True} if federation.data.multi_label else {}),
        },
    )
    wanted = experiment.road_test_images if federation.explains else 0
    subset = public_subset(federation.data.test, wanted)
    explanations = None
    if subset is not None:
        choice = map_for(
            experiment,
            model,
            lambda: federation.data.validation,
            experiment.map_method,
            partial(on_measure, "choosing a map"),
        )
        explanations = explanation_metrics(
            model,
            subset,
            device=experiment.device,
            maps_by=choice.method,
            temperature=temperature_of(model, federation),
            on_images=partial(on_measure, "explanations"),
        )
        if experiment.map_method == AUTO:
            explanations["choice"] = choice.as_dict()
    road = (explanations or {}).get("road", {})
    private, masked = federation.method.private, experiment.trust == "masked"
    shared = (
        {"epsilon_masked": experiment.epsilon, "honest": experiment.honest_sites} if masked else {}
    )
    central = federation.server_plan  # its unit is the client: a column of its own
    nominal = nominal_epsilon(federation.method, experiment)
    paper = [r["epsilon_paper"] for r in reports.values() if r["epsilon_paper"] is not None]
    result = {
        "method": experiment.method,
        "data": experiment.data,
        "network": experiment.network,
        "macro_f1": test.macro_f1() if len(test.labels) else None,
        "road": road.get("road"),
        "road_interval": road.get("interval"),
        "road_images": road.get("images"),
        "road_matched": road.get("road_matched"),
        "road_logit_percent": road.get("road_logit_percent"),
        # What rests on other sites' noise is another guarantee: columns of its own.
        "epsilon_target": experiment.epsilon if private and not masked else None,
        **shared,
        "epsilon_nominal": nominal,
        "epsilon_paper": max(paper) if paper else None,
        "epsilon_client": central.epsilon if central is not None else None,
        "delta": experiment.delta if private or central is not None else None,
        "unit": central.unit
        if central is not None
        else experiment.privacy_unit
        if private
        else None,
        "noise": None if nominal is None and central is None else noise_of(federation, reports),
        "mean_sigma": _mean_sigma(folder) if nominal is not None else None,
        "seed": experiment.seed,
        "clients": [
            {"id": r["client"], **{key: r[key] for key in OF_CLIENTS}}
            for r in (reports[name] for name in federation.names if name in reports)
        ],
        "server": server,
        "classification": measured_by_name(test, federation.data),
        "unmeasured": list(federation.warnings),
        "notices": notices(test, federation.data.classes, folder.read_lines("rounds.jsonl")),
        "explanations": explanations,
        "rounds": experiment.rounds,
        "threads": about["threads"],
        "seconds": round(seconds, 1),
        "unused": unused_keys(federation.method, about["given"]),
        "commit": about["commit"],
        "versions": about["versions"],
        "command": about["command"],
    }
    statement = read_json(folder.path / "statement.json")
    card = card_text(experiment, federation.data, statement, result)
    write_bytes(folder.path / "card.md", card.encode())
    write_json(folder.path / "result.json", result)
    return result


def temperature_of(model: nn.Module, federation: Federation) -> float | None:
    """What makes the model's confidences fit on the public validation images; None without any."""
    experiment = federation.experiment
    if not validation_is_public(experiment):
        return None
    subset = public_subset(federation.data.validation, experiment.validation_images)
    if subset is None:
        return None
    public = PublicImages(subset, experiment.device, experiment.feature_cache_mb)
    return public.predict(model).temperature()


def measure_test(
    model: nn.Module,
    federation: Federation,
    on_images: OnImages = lambda *_: None,
) -> Predictions:
    """The model's answers to the test images; of the right shape also where there are none."""
    images, classes = federation.data.test, len(federation.data.classes)
    if len(images):
        # Asked once: features are worth keeping only where other runs share them.
        shared = FeatureStore.of_environment() is not None
        megabytes = federation.experiment.feature_cache_mb if shared else 0
        public = PublicImages(images, federation.experiment.device, megabytes)
        return public.predict(model, on_images)
    return no_predictions(classes, federation.data.multi_label)


def measured_by_name(found: Predictions, data: ImageData) -> dict[str, Any]:
    """All metrics of a classifier's answers; of several findings also AUROC by their names."""
    metrics = found.metrics()
    if data.multi_label:
        by_name = zip(data.classes, metrics["auroc_per_class"], strict=True)
        metrics["auroc_per_finding"] = dict(by_name)
    return metrics


def no_predictions(classes: int, multi_label: bool = False) -> Predictions:
    none = np.zeros((0, classes) if multi_label else 0, dtype=np.int64)
    return Predictions(none, none, np.zeros(0), np.zeros((0, classes)))


def unused_keys(method: Method, given: Sequence[str]) -> list[str]:
    """Keys that were given and make no difference to the method."""
    return sorted(k for k in given if RENAMED.get(k, k) not in method.uses)


def _mean_sigma(folder: RunFolder) -> float | None:
    """The mean over all steps; none where a line of the trace was damaged."""
    lines = folder.read_lines("trace.jsonl")
    sigmas = [x for line in lines if isinstance(x := line.get("sigma"), int | float)]
    return float(np.mean(sigmas)) if sigmas and len(sigmas) == len(lines) else None


def _save_predictions(path: Path, images: Images, found: Predictions) -> None:
    packed = io.BytesIO()
    np.savez_compressed(
        packed,
        id=images.ids,
        group=images.groups,
        label=found.labels,
        predicted=found.predicted,
        confidence=found.confidence,
        probabilities=found.probabilities,
    )
    write_bytes(path, packed.getvalue())
