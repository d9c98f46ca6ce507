"""Sites that a simulation makes for its clients, inside the run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xcal.dp.ledger import ledger
from xcal.dp.ledger.rows import Terms
from xcal.federation.files import write_bytes
from xcal.federation.folder import RunFolder
from xcal.federation.masks import Roster
from xcal.federation.policy import Policy
from xcal.federation.setup import Federation
from xcal.federation.site_directory import SiteTable, commented
from xcal.federation.site_identity import ROSTER, public_key, roster_text


def make_ledger(path: Path, federation: Federation, client: int) -> None:
    """A throw-away ledger that carries the run's own target."""
    plan = federation.plans[client]
    terms = Terms(
        population=f"simulated client {federation.names[client]}",
        unit=federation.experiment.privacy_unit,
        epsilon=None if plan is None else plan.epsilon,
        delta=None if plan is None else plan.delta,
        simulated=True,
    )
    ledger.create(path, terms)


def make_sites(folder: RunFolder, federation: Federation, threads: int) -> None:
    """One site a client, for engines whose clients are other processes.

    Each allows what the experiment asks for and nothing else. A ledger is made once: where a
    client has answered before and its ledger is gone, nothing is made, and the client refuses.
    """
    experiment = federation.experiment
    found = folder.load_checkpoint()
    known = set(found[1]["heads"]) if found is not None else set()
    seeded = experiment.noise_source == "seeded"
    terms: dict[str, Any] = {
        "epsilon_total": experiment.epsilon if experiment.epsilon > 0 else 1.0,
        "delta_total": experiment.delta if experiment.delta > 0 else 1.0,
        "sigma_min": 0.0,
        "methods": (experiment.method,),
        "networks": (experiment.network,),
        "unit": experiment.privacy_unit,
        "max_message": 1 << 30,
        "max_steps": 1 << 40,
    }
    terms |= {"epsilon_run": terms["epsilon_total"], "delta_run": terms["delta_total"]}
    policy = Policy(**terms)
    weights = None if experiment.weights is None else str(Path(experiment.weights).resolve())
    for client, name in enumerate(federation.names):
        site_dir = folder.client_dir(name)
        if not (site_dir / "ledger.sqlite").exists() and name not in known:
            make_ledger(site_dir / "ledger.sqlite", federation, client)
        keys: dict[str, Any] = {
            "client": name,
            "population": f"simulated client {name}",
            "experiment": "../../experiment.toml",
            "shard": client,
            "weights": weights,
            "device": experiment.device,
            "threads": threads,
            "chunk": experiment.chunk,
            "pass_rows": experiment.pass_rows,
            "feature_cache_mb": experiment.feature_cache_mb,
            "simulated": seeded,
            "seed": experiment.seed if seeded else None,
        }
        site_dir.mkdir(parents=True, exist_ok=True)
        write_bytes(site_dir / "site.toml", commented(SiteTable(**keys)).encode())
        write_bytes(site_dir / "policy.toml", commented(policy).encode())
    if experiment.trust == "masked":
        sites = {name: folder.client_dir(name) for name in federation.names}
        public = {name: public_key(site_dir) for name, site_dir in sites.items()}
        text = roster_text(Roster(public, experiment.honest_sites))
        for site_dir in sites.values():
            write_bytes(site_dir / ROSTER, text.encode())
