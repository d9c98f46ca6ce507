"""Requests as a server would send them to a site of `made_sites.tiny_site`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from support import TINY
from xcal.dp.clipping.named import trainable
from xcal.dp.ledger.ledger import create
from xcal.dp.ledger.rows import Terms
from xcal.experiments import make_experiment
from xcal.federation.answer import answer
from xcal.federation.messages import (
    Refusal,
    Reply,
    Request,
    decode_answer,
    encode_request,
    frozen_digest,
    public_keys,
)
from xcal.models.model_registry import build_network

KEYS = {**TINY, "method": "xcal-steered"}


def a_request(**changes: Any) -> Request:
    experiment = make_experiment(KEYS)
    model = build_network(experiment, 3)
    made = Request(
        client="0",
        run="trial",
        round=0,
        own_rounds=(0, 1, 2),
        experiment=public_keys(experiment),
        initial_seed=0,
        frozen=frozen_digest(model),
        head=None,
        weights={k: p.detach().clone() for k, p in trainable(model).items()},
        validation_losses=(),
    )
    return replace(made, **changes)


def changed(**keys: Any) -> Request:
    request = a_request()
    return replace(request, experiment={**request.experiment, **keys})


def ask(site_dir: Path, request: Request | bytes) -> Reply | Refusal:
    data = request if isinstance(request, bytes) else encode_request(request)
    return decode_answer(answer(site_dir, data), 1 << 24)


def real(site_dir: Path) -> Path:
    """The same site as a hospital has it: no seed, noise and draws from the operating system."""
    text = (site_dir / "site.toml").read_text()
    text = text.replace("simulated = true", "simulated = false")
    lines = [line for line in text.splitlines() if not line.startswith("seed =")]
    (site_dir / "site.toml").write_text("\n".join(lines) + "\n")
    for file in site_dir.glob("ledger.*"):
        file.unlink()
    create(site_dir / "ledger.sqlite", Terms("simulated client 0", "record", 20.0, 1e-2))
    return site_dir
