"""Sites with their shard of the tiny data set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support import TINY
from xcal.config import to_toml
from xcal.experiments import make_experiment
from xcal.federation import local
from xcal.federation.folder import RunFolder
from xcal.federation.loaded_site import LoadedSite
from xcal.federation.policy import Policy
from xcal.federation.setup import Federation
from xcal.federation.site_directory import SiteTable, create_site


def make_sites(folder: RunFolder, federation: Federation) -> list[LoadedSite]:
    """The clients of a simulated federation, before its first round."""
    return [c.held.site for c in local.make_clients(folder, federation, set())]


def tiny_site(folder: Path, client: int = 0, *, experiment: Any = None, **policy: Any) -> Path:
    """A simulated site with its shard of TINY; `policy` overrides its terms."""
    made = experiment or make_experiment({**TINY, "method": "xcal-steered"})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "experiment.toml").write_text(to_toml(made.resolved()))
    about = SiteTable(
        client=str(client),
        population=f"simulated client {client}",
        experiment="../experiment.toml",
        shard=client,
        threads=1,
        message_log=True,
        simulated=True,
        seed=made.seed,
    )
    terms = {
        "epsilon_total": 20.0,
        "delta_total": 1e-2,
        "epsilon_run": 8.0,
        "delta_run": 1e-3,
        "sigma_min": 0.0,
        "methods": ("xcal", "xcal-steered", "fl-dp", "xcal-paper"),
        "networks": (made.network,),
        "unit": made.unit,
        **policy,
    }
    return create_site(folder / str(client), about, Policy(**terms), unit=made.unit).path


def ledger_create(site_dir: Path) -> list[str]:
    """The words that make a bare ledger of records; its limits are left to add."""
    return ["ledger", "create", str(site_dir), "--population", site_dir.name, "--unit", "record"]
