"""All roles on one machine: the same four steps, each party in a folder of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from xcal.config import read_toml
from xcal.errors import UserError
from xcal.experiments import make_experiment
from xcal.federation.nvflare import provision
from xcal.federation.nvflare.parties import Invitation, Party, read_federation

if TYPE_CHECKING:  # sites bring torch, which starting and halting need not wait for
    from xcal.federation.site_directory import SiteDirectory


def init_local(
    source: Path, out: Path, experiment: Path | None = None, seed: int | None = None, runs: int = 2
) -> Iterator[str]:
    """Make coordinator and sites under `out`; says what it did, line by line.

    With an experiment each site gets a part of its data and terms that admit `runs` such runs.
    With a seed the sites are simulated: their noise can be drawn again, so it protects nobody.
    """
    about = read_federation(source)
    if about.server != "localhost":
        raise UserError(f"{source} names the server {about.server!r}: --local wants localhost.")
    coordinator = provision.init(source, out / "coordinator")
    yield f"Coordinator: CA, server and lead in {coordinator.folder}."
    for number, site in enumerate(about.sites):
        invited = Invitation.read(coordinator.invitation_file(site))
        party = provision.join(invited, out / site)
        _approve(coordinator, party)
        yield f"{site}: key, certificate and hardened kit in {party.folder}."
        if experiment is not None:
            local_site(party, experiment, number, seed, runs)
            yield f"{site}: site with part {number + 1} of {experiment}'s data."
    for viewer in about.viewers:
        party = provision.join(Invitation.read(coordinator.invitation_file(viewer)), out / viewer)
        _approve(coordinator, party)
        yield f"{viewer}: key and certificate in {party.folder}."
    yield f"Start them all: xcal federation start {out}"


def _approve(coordinator: provision.Coordinator, party: Party) -> None:
    read_out = provision.key_fingerprint(party.request_file)
    provision.accept(party, provision.approve(coordinator, party.request_file, read_out))


def local_site(
    party: Party, experiment: Path, shard: int, seed: int | None = None, runs: int = 2
) -> SiteDirectory:
    """A site for a site that plays along on this machine."""
    from xcal.federation.policy import Policy
    from xcal.federation.setup import settled
    from xcal.federation.site_directory import SiteTable, create_site

    made = settled(make_experiment(read_toml(experiment), str(experiment)))
    about = SiteTable.model_validate(
        {
            # A simulated site stands for the local engine's client of that number.
            "client": party.about.name if seed is None else str(shard),
            "population": f"part {shard} of {experiment.stem}",
            "experiment": str(experiment.resolve()),
            "shard": shard,
            "threads": 1,
            "message_log": True,
            "simulated": seed is not None,
            "seed": seed,
        }
    )
    policy = Policy.model_validate(
        {
            "epsilon_total": runs * made.epsilon,
            "delta_total": runs * made.delta,
            "epsilon_run": made.epsilon,
            "delta_run": made.delta,
            "unit": made.privacy_unit,
        }
    )
    return create_site(party.site_dir, about, policy, unit=made.privacy_unit)


def parties_in(folder: Path) -> list[Party]:
    """One party, or all that a local federation's folder holds, the server first."""
    if (folder / "party.json").exists():
        return [Party.find(folder)]
    server = folder / "coordinator" / "server"
    if not (server / "party.json").exists():
        raise UserError(f"{folder} is neither a party's folder nor a local federation's.")
    sites = sorted(
        p.parent for p in folder.glob("*/party.json") if Party.find(p.parent).about.role == "site"
    )
    return [Party.find(p) for p in (server, *sites)]
