"""`xcal federation`: how hospitals become a federation over NVIDIA FLARE, and start and stop it."""

from __future__ import annotations

from pathlib import Path

import typer
from typer import Argument, Option

from xcal.cli.show import plain_console
from xcal.cli.site import make_site
from xcal.errors import UserError
from xcal.federation.nvflare import provision
from xcal.federation.nvflare.parties import Invitation, Party

app = typer.Typer(
    help="A federation between hospitals: certificates, checks, runs.", no_args_is_help=True
)
console = plain_console(soft_wrap=True)
say = console.print


@app.command("init")
def init_command(
    source: Path = Argument(..., metavar="FEDERATION.toml", help="Who takes part."),
    out: Path = Option(..., help="The coordinator's new folder."),
    local: bool = Option(
        False, "--local", help="Play all roles on this machine, each in a folder of its own."
    ),
    experiment: Path | None = Option(
        None, help="With --local: give each site its part of this data."
    ),
    seed: int | None = Option(None, help="With --local: simulated noise that can be drawn again."),
) -> None:
    """Coordinator: make the CA, the invitations, and the server's and the lead's kits."""
    if not local:
        if experiment is not None or seed is not None:
            raise UserError("--experiment and --seed go with --local: real sites have their own.")
        made = provision.init(source, out)
        say(f"Made the CA of {made.about.name!r} in {made.ca}; its key never leaves this folder.")
        say(f"The server's party is {made.server}, the lead's {made.lead}.")
        for name in (*made.about.sites, *made.about.viewers):
            say(f"Send {made.invitation_file(name)} to {name}.")
        say("Tell each of them, by telephone, the fingerprint of this federation:")
        say(f"  {made.fingerprint}")
        say(f"Then: xcal federation approve REQUEST.zip --coordinator {out} --fingerprint …")
        return
    from xcal.federation.nvflare.one_machine import init_local

    for line in init_local(source, out, experiment, seed):
        say(line)


@app.command("join")
def join_command(
    invitation: Path = Argument(..., help="The coordinator's invitation."),
    out: Path | None = Option(None, help="This party's new folder."),
    renew: Path | None = Option(
        None, help="A party's existing folder: a new key for a new certificate."
    ),
) -> None:
    """Site: make a key and a request. The key never leaves the folder."""
    invited = Invitation.read(invitation)
    if (out is None) == (renew is None):
        raise UserError("Say where: --out FOLDER for a new party, or --renew FOLDER.")
    if renew is not None:
        party = Party.find(renew)
        if party.about != invited:
            raise UserError(f"{renew} belongs to another invitation than {invitation}.")
        provision.renew(party)
    else:
        assert out is not None
        party = provision.join(invited, out)
    say(f"Made {invited.name}'s key in {party.request_folder}; it stays there.")
    say("Compare the federation's fingerprint with the coordinator, by telephone:")
    say(f"  {invited.fingerprint}")
    say(f"Send {party.request_file} to the coordinator, who is told this fingerprint of it:")
    say(f"  {provision.key_fingerprint(party.request_file)}")
    if renew is not None:
        say("They approve it with --renew: it is signed with the present key.")
    say(f"When the answer comes: xcal federation accept {party.folder} ANSWER.zip")


@app.command("approve")
def approve_command(
    request: Path = Argument(..., help="A site's request."),
    coordinator: Path = Option(..., help="The coordinator's folder."),
    fingerprint: str = Option(..., help="What the site read to you; refused where it differs."),
    renew: bool = Option(
        False, "--renew", help="A new key for a member: its request is signed by the old one."
    ),
    override: str | None = Option(
        None,
        help="With --renew: the old key is lost, and why. It is revoked, and all sites are told.",
    ),
) -> None:
    """Coordinator: sign a request of an invited party."""
    made = provision.Coordinator.find(coordinator)
    signed = provision.approve(made, request, fingerprint, renew=renew, override=override)
    say(f"Signed the key with the fingerprint {provision.key_fingerprint(request)}.")
    say(f"Send {signed} back: it holds certificates and the list of members.")
    _tell_sites(made)


@app.command("revoke")
def revoke_command(
    name: str = Argument(..., help="A site, the lead, a viewer or the server."),
    coordinator: Path = Option(..., help="The coordinator's folder."),
    reason: str = Option(..., help="Why; all sites read it."),
) -> None:
    """Coordinator: shut somebody out. Server and sites refuse the key from then on."""
    made = provision.Coordinator.find(coordinator)
    for key in provision.revoke(made, name, reason):
        say(f"Revoked {name}'s key {key}.")
    say(f"A running round asks {name} no more; its connection ends with its next message.")
    _tell_sites(made)


@app.command("members")
def members_command(
    folder: Path = Argument(..., help="The coordinator's folder, or a party's."),
    listed: Path | None = Argument(None, metavar="[LIST]", help="A newer list to take."),
) -> None:
    """Show who joined, renewed a key or was shut out; with LIST, take a newer one."""
    from xcal.federation.nvflare import members

    if (folder / "party.json").exists():
        party = Party.find(folder)
        party.require_kit()
        if listed is not None:
            try:
                data = listed.read_bytes()
            except OSError:
                raise UserError(f"{listed} cannot be read: check the path.") from None
            members.take(party.folder, data, party.root, str(listed))
        found = members.known(party.folder, party.root)
    elif listed is not None:
        raise UserError(f"{folder} is no party's folder: only a party takes a list.")
    else:
        found = provision.Coordinator.find(folder).members()
    if found is None:
        say("No list of members yet: it comes with the next round.")
        return
    for entry in found.entries:
        say(entry.text())


def _tell_sites(made: provision.Coordinator) -> None:
    say(
        f"{made.members_file} goes to the sites with the next round; a server that lies elsewhere,"
        " and a site that shall know at once, takes it: xcal federation members FOLDER LIST"
    )


@app.command("accept")
def accept_command(
    folder: Path = Argument(..., help="The party's folder."),
    answer: Path = Argument(..., help="The coordinator's answer."),
    data: str | None = Option(
        None, help="Make its site directory too: the imported data set it trains on."
    ),
    population: str | None = Option(None, help="With --data: whose data these are."),
    epsilon: float | None = Option(None, help="With --data: highest ε of all runs, for life."),
    delta: float | None = Option(None, help="With --data: highest δ of all runs, for life."),
    epsilon_run: float | None = Option(None, help="With --data: highest ε of one run."),
    delta_run: float | None = Option(None, help="With --data: highest δ of one run."),
    unit: str | None = Option(
        None,
        help="With --data: what a run must protect, record or group; group if not given and the"
        " data say whose the images are.",
    ),
    units: int | None = Option(
        None, help="With --data: declared number of units, at least as many as there are."
    ),
) -> None:
    """Site: build the kit from the answer, with hardened policies, and check it.

    With --data, --population, --epsilon and --delta it also makes the site's directory and
    its policy.toml, as `xcal site init` does.
    """
    from xcal.federation.nvflare.check import check_party

    party = Party.find(folder)
    terms = (data, population, epsilon, delta)
    if any(t is not None for t in terms):
        if any(t is None for t in terms):
            raise UserError("A site needs all of --data, --population, --epsilon and --delta.")
        if party.about.role != "site" or party.site_dir.exists():
            raise UserError(
                f"{folder} needs no site directory: leave out --data and what goes with it."
            )
    provision.accept(party, answer)
    say(f"Built the kit in {party.kit}: no foreign code, no shell, no log streaming.")
    if data is not None:
        assert population is not None and epsilon is not None and delta is not None
        make_site(
            party.site_dir,
            client=party.about.name,
            population=population,
            epsilon=epsilon,
            delta=delta,
            data=data,
            epsilon_run=epsilon_run,
            delta_run=delta_run,
            unit=unit,
            units=units,
        )
    elif party.about.role == "site" and not party.site_dir.exists():
        say("Now give it a site with your data and your terms, which only you can change:")
        say(
            f"  xcal site init {party.site_dir} --client {party.about.name} --data NAME"
            " --population WHO --epsilon 5 --delta 1e-4"
        )
    for finding in check_party(party):
        say(f"{finding.level:8} {finding.text}")
    if party.about.role in ("site", "server"):
        say(f"Then: xcal federation check {folder} && xcal federation start {folder}")


@app.command("check")
def check_command(folder: Path = Argument(..., help="The party's folder.")) -> None:
    """Tell what is wrong with a party before it starts; exit code 2 where something is."""
    from xcal.federation.nvflare.check import check_party

    found = check_party(Party.find(folder))
    for finding in found:
        say(f"{finding.level:8} {finding.text}")
    problems = sum(f.level == "problem" for f in found)
    if problems:
        raise UserError(f"{folder} is not ready: {problems} problem{'s' * (problems > 1)} above.")
    say("Ready.")


@app.command("start")
def start_command(
    folder: Path = Argument(..., help="A party's folder, or that of a local federation."),
    foreground: bool = Option(False, "--foreground", help="Stay, for a supervisor."),
) -> None:
    """Start a party (or all parties of a local federation)."""
    from xcal.federation.nvflare import process
    from xcal.federation.nvflare.one_machine import parties_in

    parties = parties_in(folder)
    if foreground and len(parties) != 1:
        raise UserError("--foreground starts one party: name its folder.")
    for party in parties:
        pid = process.start(party, foreground=foreground)
        say(f"Started {party.about.name} as process {pid}; it writes {party.log}.")


@app.command("halt")
def halt_command(
    folder: Path = Argument(..., help="A party's folder, or that of a local federation."),
) -> None:
    """End a party's processes (or those of all parties of a local federation)."""
    from xcal.federation.nvflare import process
    from xcal.federation.nvflare.one_machine import parties_in

    for party in reversed(parties_in(folder)):
        count = process.stop(party)
        say(f"Ended {party.about.name}." if count else f"{party.about.name} was not running.")
