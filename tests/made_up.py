"""Results that nobody measured, to test what is made of results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from reproduce.declared import Choice, declare
from reproduce.store import ROAD_STEP, Results, TestSet, pack
from xcal.metrics.classification import macro_f1
from xcal.studies.grid import Cell

GOOD = {
    "fl": 0.85,
    "centralized": 0.87,
    "fl-dp": 0.6,
    "agp": 0.62,
    "xcal-paper": 0.6,
    "xcal-steered": 0.75,
}


def made_up_cell(cell: Cell, test: TestSet) -> dict[str, Any]:
    """A cell of a method that knows this share of the pictures; a seed's pictures are paired."""
    rng = np.random.default_rng([cell.seed, 1])
    epsilon = cell.epsilon or 5.0
    right = GOOD.get(cell.method, 0.5) * (1 - 0.2 * (epsilon < 1))
    if cell.variant.startswith("signal"):
        right = GOOD["fl-dp"]
    easy = rng.random(int(test.groups.max()) + 1)
    known = easy < right
    answer = np.where(known[test.groups], test.labels, (test.labels + 1) % len(test.classes))
    explained = np.arange(0, len(answer), 4)
    scores = np.clip(rng.normal(0.1 * right, 0.05, len(explained)), -0.5, 0.5)
    rounds = int(cell.keys["rounds"])
    clients = int(cell.keys.get("clients", 1))
    t = (np.arange(rounds) + 1) / rounds
    noisy = cell.epsilon is not None
    private = noisy and cell.method != "agp"  # whose ε is nominal
    steered = cell.method.startswith("xcal")
    spent = [[float(s)] * clients if private else [None] * clients for s in t]
    if cell.method == "xcal-paper":  # whose clients spend each at its own pace
        spent = [[float(s * (1 - 0.1 * k * (1 - s))) for k in range(clients)] for s in t]
    sigma = [1.0 + (0.01 * cell.seed + 0.2 * (1 - float(s))) * steered for s in t]
    return {
        "id": cell.id,
        "scale": cell.scale,
        "status": "finished",
        "keys": dict(cell.keys),
        "explained": cell.explained,
        "macro_f1": float(macro_f1(test.labels, answer, len(test.classes))),
        "road": round(float(scores.mean()), 5),
        "road_logit_percent": 20.0,
        "auroc": 0.8,
        "epsilon_target": cell.epsilon if private else None,
        "epsilon_nominal": cell.epsilon,
        "epsilon_paper": None,
        "delta": 1e-5 if private else None,
        "unit": "record" if private else None,
        "mean_sigma": 1.0 if noisy else None,
        "clients": [
            {
                "units": 1000,
                "steps": 16 * rounds,
                "share_spent": 1.0 if private else None,
                "epsilon_spent": cell.epsilon if private else None,
                "halted": False,
            }
        ]
        * clients,
        "rounds": {
            "f1": [round(float(right * s), 4) for s in t],
            "road": [
                round(float(0.1 * right * min(1, 2 * s)), 4) if i % 2 else None
                for i, s in enumerate(t)
            ],
            "seconds": [3.0 + (cell.method != "fl-dp")] * rounds,
            "share": spent,
            "sigma": [[s if noisy else None] * clients for s in sigma],
            "signal": [[0.5 + 0.1 * cell.seed if steered else None] * clients] * rounds,
        },
        "test_set": test.name,
        "predicted": pack(answer.astype(np.uint8)),
        "road_images": pack(explained.astype(np.int32)),
        "road_scores": pack(np.round(scores / ROAD_STEP).astype(np.int16)),
        "seconds": 60.0,
        "seconds_in_all": 70.0,
        "commit": "0" * 40,
        "versions": {"python": "3.11", "torch": "2"},
        "command": f"xcal study made-up --scale {cell.scale}",
    }


def made_up_results(folder: Path, *, seeds: int = 3, scale: str = "laptop") -> Results:
    """Parts of every study on one set and network."""
    group = np.repeat(np.arange(60), 5)
    test = TestSet(
        "blood-cells-64px", ("eosinophil", "lymphocyte", "monocyte"), "picture", group % 3, group
    )
    results = Results(folder)
    choice = Choice(data=("blood-cells",), networks=("small",), epsilons=(0.5, 5.0), seeds=seeds)
    for study in ("privacy-utility", "ablation", "efficiency", "overhead", "units"):
        for cell in declare(study, scale, choice).cells[:60]:
            results.write(scale, made_up_cell(cell, test), test)
    few = Choice(("blood-cells",), ("efficientnet_b0",), ("fl", "fl-dp", "xcal-steered"), (0.5,), 2)
    for cell in declare("clients", scale, few).cells:
        results.write(scale, made_up_cell(cell, test), test)
    return results
