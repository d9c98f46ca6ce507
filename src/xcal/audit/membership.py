"""Membership inference: was this image in the training set? Asked of the final model.

A pool of images is split in half at random, once for each of a few models, so that every image is
in about half of them. Each model is attacked in turn: by the loss alone (Yeom et al. 2018), and by
likelihood ratio (LiRA, Carlini et al. 2022), the other models serving as shadows.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xcal.audit.one_client import train_one_client
from xcal.config import Experiment
from xcal.data.images import Images
from xcal.errors import UserError
from xcal.federation.evaluation import predict
from xcal.methods.client_data import LocalData
from xcal.metrics.classification import area

Matrix = NDArray[np.float64]
FALSE_POSITIVES = 0.01
RESAMPLES = 300  # of the images, for the intervals


@dataclass(frozen=True)
class Membership:
    """One attack on one method, over all models."""

    method: str
    attack: str  # "loss" or "lira"
    epsilon_claimed: float | None
    models: int
    members: int  # of each model
    auc: float
    auc_low: float  # 95 % interval, by resampling images
    auc_high: float
    tpr: float  # at 1 % false positives
    tpr_low: float
    tpr_high: float
    tpr_limit: float  # what (ε, δ) allows there
    train_accuracy: float
    outside_accuracy: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def broken(self) -> bool:
        """More true positives than (ε, δ) allows, beyond chance."""
        return self.epsilon_claimed is not None and self.tpr_low > self.tpr_limit


def halves(images: int, models: int, seed: int) -> NDArray[np.bool_]:
    """(models, images): who is in whose training set. Models come in complementary pairs."""
    rng = np.random.default_rng([seed, 0x3E3B])
    rows = []
    for _ in range(models // 2):
        inside = np.zeros(images, dtype=bool)
        inside[rng.permutation(images)[: images // 2]] = True
        rows += [inside, ~inside]
    return np.array(rows)


def tpr_of(scores: Matrix, inside: NDArray[np.bool_], false_positives: float) -> float:
    """Members above the threshold that lets at most this share of strangers through."""
    strangers = np.sort(scores[~inside])[::-1]
    allowed = int(np.floor(false_positives * len(strangers)))
    threshold = strangers[allowed] if allowed < len(strangers) else -np.inf
    return float((scores[inside] > threshold).mean())


def lira_scores(confidence: Matrix, inside: NDArray[np.bool_]) -> Matrix:
    """Each model in turn is the target; Gaussians of "in" and "out" come from the others.

    With few shadows the two share one variance, as the authors advise.
    """
    scores = np.empty_like(confidence)
    for target in range(len(confidence)):
        others = np.arange(len(confidence)) != target
        values, member = confidence[others], inside[others]
        mean_in = _mean_where(values, member)
        mean_out = _mean_where(values, ~member)
        rest = values - np.where(member, mean_in, mean_out)
        variance = rest.var() + 1e-12
        seen = confidence[target]
        scores[target] = ((seen - mean_out) ** 2 - (seen - mean_in) ** 2) / (2 * variance)
    return scores


def _mean_where(values: Matrix, chosen: NDArray[np.bool_]) -> Matrix:
    count = np.maximum(chosen.sum(0), 1)
    result: Matrix = np.where(chosen, values, 0.0).sum(0) / count
    return result


def infer_membership(
    experiment: Experiment,
    pool: Images,
    classes: int,
    *,
    models: int = 8,
) -> list[Membership]:
    """Train `models` models of the experiment's method and attack each of them both ways."""
    if models < 4 or models % 2:
        raise UserError(f"models is {models}: membership inference needs an even number from 4 on.")
    inside = halves(len(pool), models, experiment.seed)
    confidence = np.empty((models, len(pool)))
    right = np.empty((models, len(pool)), dtype=bool)
    claimed = None
    for k in range(models):
        # Another seed for every model: first weights, draws and noise are its own.
        own = experiment.model_copy(update={"seed": experiment.seed + 1000 * (k + 1)})
        members = pool.take(np.flatnonzero(inside[k]))
        members = replace(members, groups=np.arange(len(members), dtype=np.int64))
        data = LocalData(members, unit="record", images_per_unit=1)
        trained = train_one_client(own, data, classes)
        claimed = None if trained.plan is None else trained.plan.epsilon
        found = predict(trained.model, pool)
        p = found.probabilities[np.arange(len(pool)), pool.labels]
        p = np.clip(np.nan_to_num(p), 1e-12, 1 - 1e-12)
        confidence[k] = np.log(p) - np.log1p(-p)
        right[k] = found.predicted == pool.labels
    limit = 1.0
    if claimed is not None:
        limit = min(1.0, float(np.exp(claimed)) * FALSE_POSITIVES + experiment.delta)
    rng = np.random.default_rng([experiment.seed, 0xB007])
    results = []
    for attack, scores in (("loss", confidence), ("lira", lira_scores(confidence, inside))):
        draws = []
        for _ in range(RESAMPLES):
            images = rng.integers(0, len(pool), len(pool))
            some, who = scores[:, images], inside[:, images]
            draws.append((area(some, who), tpr_of(some, who, FALSE_POSITIVES)))
        low, high = np.quantile(np.array(draws), [0.025, 0.975], axis=0)
        results.append(
            Membership(
                method=experiment.method,
                attack=attack,
                epsilon_claimed=claimed,
                models=models,
                members=len(pool) // 2,
                auc=area(scores, inside),
                auc_low=float(low[0]),
                auc_high=float(high[0]),
                tpr=tpr_of(scores, inside, FALSE_POSITIVES),
                tpr_low=float(low[1]),
                tpr_high=float(high[1]),
                tpr_limit=limit,
                train_accuracy=float(right[inside].mean()),
                outside_accuracy=float(right[~inside].mean()),
            )
        )
    return results
