"""`xcal federation`: hospitals that train together over NVIDIA FLARE."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table

from xcal.cli.site import make_site
from xcal.errors import UserError

if TYPE_CHECKING:
    from xcal.federation.nvflare.provision import Coordinator

app = typer.Typer(
    help="A federation between hospitals: certificates, checks, runs.", no_args_is_help=True
)
# A fingerprint may hold ":AB:", which rich would print as an emoji.
console = Console(highlight=False, soft_wrap=True, emoji=False)

LEAD = typer.Option(
    None, "--lead", envvar="XCAL_LEAD", help="The lead's folder (or a viewer's, to look)."
)

KEEP_GOING = typer.Option(
    False,
    "--keep-going",
    help="Watch the run, and resume it where server or sites were lost: up to five times without a"
    " further complete round.",
)

WATCH_PATIENCE = 60.0
"""Seconds that who watches waits for a server that gives no answer."""


def say(text: str) -> None:
    console.print(text, markup=False)


# --- becoming a federation ------------------------------------------------------------------------


@app.command("init")
def init_command(
    source: Path = typer.Argument(..., metavar="FEDERATION.toml", help="Who takes part."),
    out: Path = typer.Option(..., "--out", help="The coordinator's new folder."),
    local: bool = typer.Option(
        False, "--local", help="Play all roles on this machine, each in a folder of its own."
    ),
    experiment: Path | None = typer.Option(
        None, "--experiment", help="With --local: give each site its part of this data."
    ),
    seed: int | None = typer.Option(
        None, "--seed", help="With --local: simulated noise that can be drawn again."
    ),
) -> None:
    """Coordinator: make the CA, the invitations, and the server's and the lead's kits."""
    from xcal.federation.nvflare import provision

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
    invitation: Path = typer.Argument(..., help="The coordinator's invitation."),
    out: Path | None = typer.Option(None, "--out", help="This party's new folder."),
    renew: Path | None = typer.Option(
        None, "--renew", help="A party's existing folder: a new key for a new certificate."
    ),
) -> None:
    """Site: make a key and a request. The key never leaves the folder."""
    from xcal.federation.nvflare import provision
    from xcal.federation.nvflare.parties import Invitation, Party

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
    request: Path = typer.Argument(..., help="A site's request."),
    coordinator: Path = typer.Option(..., "--coordinator", help="The coordinator's folder."),
    fingerprint: str = typer.Option(
        ..., "--fingerprint", help="What the site read to you; refused where it differs."
    ),
    renew: bool = typer.Option(
        False, "--renew", help="A new key for a member: its request is signed by the old one."
    ),
    override: str | None = typer.Option(
        None,
        "--override",
        help="With --renew: the old key is lost, and why. It is revoked, and all sites are told.",
    ),
) -> None:
    """Coordinator: sign a request of an invited party."""
    from xcal.federation.nvflare import provision

    made = provision.Coordinator.find(coordinator)
    signed = provision.approve(made, request, fingerprint, renew=renew, override=override)
    say(f"Signed the key with the fingerprint {provision.key_fingerprint(request)}.")
    say(f"Send {signed} back: it holds certificates and the list of members.")
    _tell_sites(made)


@app.command("revoke")
def revoke_command(
    name: str = typer.Argument(..., help="A site, the lead, a viewer or the server."),
    coordinator: Path = typer.Option(..., "--coordinator", help="The coordinator's folder."),
    reason: str = typer.Option(..., "--reason", help="Why; all sites read it."),
) -> None:
    """Coordinator: shut somebody out. Server and sites refuse the key from then on."""
    from xcal.federation.nvflare import provision

    made = provision.Coordinator.find(coordinator)
    for key in provision.revoke(made, name, reason):
        say(f"Revoked {name}'s key {key}.")
    say(f"A running round asks {name} no more; its connection ends with its next message.")
    _tell_sites(made)


@app.command("members")
def members_command(
    folder: Path = typer.Argument(..., help="The coordinator's folder, or a party's."),
    listed: Path | None = typer.Argument(None, metavar="[LIST]", help="A newer list to take."),
) -> None:
    """Show who joined, renewed a key or was shut out; with LIST, take a newer one."""
    from xcal.federation.nvflare import members, provision
    from xcal.federation.nvflare.parties import Party

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


def _tell_sites(made: Coordinator) -> None:
    say(
        f"{made.members_file} goes to the sites with the next round; a server that lies elsewhere,"
        " and a site that shall know at once, takes it: xcal federation members FOLDER LIST"
    )


@app.command("accept")
def accept_command(
    folder: Path = typer.Argument(..., help="The party's folder."),
    answer: Path = typer.Argument(..., help="The coordinator's answer."),
    data: str | None = typer.Option(
        None, help="Make its site directory too: the imported data set it trains on."
    ),
    population: str | None = typer.Option(None, help="With --data: whose data these are."),
    epsilon: float | None = typer.Option(
        None, help="With --data: highest ε of all runs, for life."
    ),
    delta: float | None = typer.Option(None, help="With --data: highest δ of all runs, for life."),
    epsilon_run: float | None = typer.Option(None, help="With --data: highest ε of one run."),
    delta_run: float | None = typer.Option(None, help="With --data: highest δ of one run."),
    unit: str | None = typer.Option(
        None,
        help="With --data: what a run must protect, record or group; group if not given and the"
        " data say whose the images are.",
    ),
    units: int | None = typer.Option(
        None, help="With --data: declared number of units, at least as many as there are."
    ),
) -> None:
    """Site: build the kit from the answer, with hardened policies, and check it.

    With --data, --population, --epsilon and --delta it also makes the site's directory and
    its policy.toml, as `xcal site init` does.
    """
    from xcal.federation.nvflare import provision
    from xcal.federation.nvflare.check import check_party
    from xcal.federation.nvflare.parties import Party

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
def check_command(folder: Path = typer.Argument(..., help="The party's folder.")) -> None:
    """Tell what is wrong with a party before it starts; exit code 2 where something is."""
    from xcal.federation.nvflare.check import check_party
    from xcal.federation.nvflare.parties import Party

    found = check_party(Party.find(folder))
    for finding in found:
        say(f"{finding.level:8} {finding.text}")
    problems = sum(f.level == "problem" for f in found)
    if problems:
        raise UserError(f"{folder} is not ready: {problems} problem{'s' * (problems > 1)} above.")
    say("Ready.")


@app.command("start")
def start_command(
    folder: Path = typer.Argument(..., help="A party's folder, or that of a local federation."),
    foreground: bool = typer.Option(False, "--foreground", help="Stay, for a supervisor."),
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
    folder: Path = typer.Argument(..., help="A party's folder, or that of a local federation."),
) -> None:
    """End a party's processes (or those of all parties of a local federation)."""
    from xcal.federation.nvflare import process
    from xcal.federation.nvflare.one_machine import parties_in

    for party in reversed(parties_in(folder)):
        count = process.stop(party)
        say(f"Ended {party.about.name}." if count else f"{party.about.name} was not running.")


# --- running experiments --------------------------------------------------------------------------


@app.command("submit")
def submit_command(
    experiment: Path = typer.Argument(..., help="An experiment file (TOML)."),
    lead: Path | None = LEAD,
    sets: list[str] = typer.Option([], "--set", help="key=value on top of it; may be repeated."),
    name: str | None = typer.Option(None, "--name", help="The run's name; new."),
    quorum: int | None = typer.Option(
        None, "--quorum", help="Fewest sites whose answers make a round; all if not given."
    ),
    timeout: float | None = typer.Option(
        None, "--timeout", help="Seconds a round may take; an hour if not given."
    ),
    simulated: bool = typer.Option(
        False, "--simulated", help="Sites made by `init --local --seed`: compare with `xcal run`."
    ),
    keep_going: bool = KEEP_GOING,
) -> None:
    """Lead: propose an experiment to the sites. Each decides by its own policy."""
    from xcal.federation.nvflare import lead_runs as runs

    run, job = runs.submit(_lead(lead), experiment, sets, name, quorum, timeout, simulated)
    say(f"Submitted the run {run!r} (job {job}).")
    if keep_going:
        _watch(_lead(lead), run, 2.0, None, keep_going=True)
    else:
        say(f"Watch it: xcal federation status {run} --watch")


@app.command("statistics")
def statistics_command(
    experiment: Path = typer.Argument(..., help="An experiment file (TOML): data, pixels, unit."),
    epsilon: float = typer.Option(..., "--epsilon", help="What each site pays for its answer."),
    delta: float = typer.Option(..., "--delta", help="What each site pays for its answer."),
    lead: Path | None = LEAD,
    sets: list[str] = typer.Option([], "--set", help="key=value on top of it; may be repeated."),
    name: str | None = typer.Option(None, "--name", help="Under which name it is charged; new."),
    timeout: float | None = typer.Option(None, "--timeout", help="Seconds to wait; an hour."),
    out: Path | None = typer.Option(None, "--out", help="Write the numbers as JSON, too."),
) -> None:
    """Lead: before training, ask the sites how many units each class has.

    They answer with noise, charged to their ledgers, if their policy.toml allows it.
    """
    from xcal.federation.files import write_json
    from xcal.federation.nvflare import lead_runs as runs

    if out is not None and out.exists():
        raise UserError(f"{out} exists already: choose another file.")
    found = runs.statistics(_lead(lead), experiment, sets, name, (epsilon, delta), timeout)
    if out is not None:
        write_json(out, found)
    _show_statistics(found)


def _show_statistics(found: dict[str, Any]) -> None:
    table = Table(title=f"{found['unit']}s by class, with noise", title_justify="left")
    for head in ("site", *found["classes"], "±", "share apart"):
        table.add_column(head, justify="left" if head == "site" else "right")
    for site, told in found["sites"].items():
        counts = (f"{count:.0f}" for count in told["counts"])
        table.add_row(site, *counts, f"{1.96 * told['noise']:.0f}", f"{told['distance']:.2f}")
    console.print(table)
    say(
        f"±: 95 % of the noise that each site added and paid ({found['epsilon']:g},"
        f" {found['delta']:g}) for. Share apart: total variation between the site's classes and"
        " those of all sites together, 0 to 1."
    )
    for site, code in found["refused"].items():
        say(f"{site} refused ({code})")
    for site in found["missing"]:
        say(f"no answer from {site}")


@app.command("status")
def status_command(
    run: str | None = typer.Argument(None, help="A run's name; all if not given."),
    lead: Path | None = LEAD,
    watch: bool = typer.Option(False, "--watch", help="Until the run ends."),
    every: float = typer.Option(2.0, "--every", help="Seconds between looks."),
    tensorboard: Path | None = typer.Option(
        None, "--tensorboard", help="With --watch: write the same for TensorBoard to this folder."
    ),
    keep_going: bool = KEEP_GOING,
) -> None:
    """Show sites, runs and, of a run, its rounds: released quantities only."""
    if (watch or keep_going) and run is None:
        raise UserError("--watch and --keep-going need a run's name.")
    _watch(_lead(lead), run, every, tensorboard, watch=watch, keep_going=keep_going)


def _watch(
    lead: Path,
    run: str | None,
    every: float,
    tensorboard: Path | None,
    *,
    watch: bool = True,
    keep_going: bool = False,
) -> None:
    """Say what there is to say of a run until it ends, and for as long as it is kept going."""
    from xcal.federation.nvflare import lead_runs as runs
    from xcal.federation.nvflare.jobs import ServerSilent

    watch = watch or keep_going
    said: set[str] = set()
    tries, rounds = 0, 0

    def tell(lines: Iterable[str]) -> None:
        for line in lines:
            if line not in said:  # a second look after a lost one tells the beginning again
                said.add(line)
                say(line)

    silent_since = None
    while True:
        try:
            with runs.look(lead, run, tensorboard if watch else None) as looking:
                tell(looking.first())
                while watch and looking.goes_on():
                    silent_since = None
                    time.sleep(every)
                    tell(looking.news())
                if not keep_going or run is None or not looking.may_go_on():
                    tell(looking.last())
                    return
                if runs.was_stopped(lead, run):
                    return
        except ServerSilent:
            # Who watches waits out a busy server; one that is down is told of after a while.
            silent_since = silent_since or time.monotonic()
            patience = runs.COME_BACK if keep_going else WATCH_PATIENCE
            if not watch or time.monotonic() - silent_since > patience:
                raise
            tell(["The server does not answer just now; still watching."])
            time.sleep(every)
            continue
        complete = sum(line.startswith("round ") for line in said)
        tries, rounds = (1, complete) if complete > rounds else (tries + 1, rounds)
        if tries > runs.RESUBMISSIONS:
            raise UserError(
                f"The run {run!r} was resumed {runs.RESUBMISSIONS} times without a further complete"
                " round: look at the server's and the sites' logs before you resume it."
            )
        job = runs.go_on(lead, run, say)
        say(f"Resumed {run!r} after round {rounds} ({tries}, job {job}): it was not worked on.")


@app.command("stop")
def stop_command(
    run: str = typer.Argument(..., help="The run's name."), lead: Path | None = LEAD
) -> None:
    """Lead: stop a run. What was trained and charged stays; it can be resumed."""
    from xcal.federation.nvflare import lead_runs as runs

    runs.stop(_lead(lead), run)
    say(f"Stopped {run!r}. Go on with: xcal federation resume {run}")


@app.command("resume")
def resume_command(
    run: str = typer.Argument(..., help="The run's name."),
    lead: Path | None = LEAD,
    quorum: int | None = typer.Option(None, "--quorum", help="Another quorum from here on."),
    timeout: float | None = typer.Option(None, "--timeout", help="Another timeout from here on."),
) -> None:
    """Lead: go on with a run from the server's last checkpoint, under the same name."""
    from xcal.federation.nvflare import lead_runs as runs

    job = runs.resume(_lead(lead), run, quorum, timeout)
    say(f"Submitted {run!r} again (job {job}): it goes on after its last complete round.")


@app.command("fetch")
def fetch_command(
    run: str = typer.Argument(..., help="The run's name."),
    lead: Path | None = LEAD,
    out: Path = typer.Option(..., "--out", help="Where the run's folder goes; must not exist."),
) -> None:
    """Lead: bring a run's results home."""
    from xcal.federation.nvflare import lead_runs as runs

    for line in runs.fetch(_lead(lead), run, out):
        say(line)


# --- operating ------------------------------------------------------------------------------------


@app.command("dashboard")
def dashboard_command(
    lead: Path | None = LEAD,
    port: int = typer.Option(8470, "--port", help="On 127.0.0.1; nobody else can reach it."),
    every: float = typer.Option(5.0, "--every", help="Seconds between looks at the server."),
    once: bool = typer.Option(False, "--once", help="Print the page and leave."),
) -> None:
    """Lead: a live page on this machine: sites, rounds, who is late, refusals, curves, budgets."""
    from xcal.federation.loopback import serve
    from xcal.federation.nvflare.dashboard import Eye, page
    from xcal.federation.nvflare.observe import party_of

    party = party_of(_lead(lead))
    eye = Eye(party, every)
    if once:
        eye.look()
        typer.echo(page(party.about.federation, eye.snapshot, eye.problem, None, every))
        return
    server = serve(port, eye.answers(party.about.federation, every))
    eye.start()
    say(f"http://127.0.0.1:{server.server_port}/ until Ctrl-C.")
    server.serve_forever()


@app.command("metrics")
def metrics_command(
    folder: Path = typer.Argument(
        ..., help="The party's folder: a site's, the server's, a lead's."
    ),
    port: int = typer.Option(9464, "--port", help="On 127.0.0.1; nobody else can reach it."),
    once: bool = typer.Option(False, "--once", help="Print the metrics and leave."),
    healthy: bool = typer.Option(
        False, "--health", help="Say whether all is well and leave; exit code 1 where it is not."
    ),
    verify_every: float = typer.Option(
        3600.0, "--verify-every", help="Seconds between verifications of a site's ledger."
    ),
) -> None:
    """Serve /metrics in Prometheus' text format and /health on loopback, from a party's files."""
    from xcal.federation.loopback import Page, serve
    from xcal.federation.nvflare import exposition, observe
    from xcal.federation.nvflare.dashboard import Eye

    party = observe.party_of(folder)
    watched = observe.Watched(party, verify_every)
    eye = Eye(party, 15.0)

    def text() -> str:
        if party.about.role in ("lead", "viewer"):
            return "" if eye.snapshot is None else exposed(exposition.of_runs(eye.snapshot))
        found = exposition.of_party(watched)
        if party.about.role == "server":
            runs = exposition.of_runs(observe.of_server(party))
            found = {name: [*found[name], *runs[name]] for name in found}
        return exposed(found)

    def answers(path: str, query: Mapping[str, str]) -> Page | None:  # noqa: ARG001
        if path == "/metrics":
            return Page(text(), exposition.KIND)
        if path != "/health":
            return None
        if party.about.role in ("lead", "viewer"):
            return Page(f"{eye.problem or 'ok'}\n", status=503 if eye.problem else 200)
        return exposition.health(watched)

    exposed = exposition.exposed
    if (once or healthy) and party.about.role in ("lead", "viewer"):
        eye.look()
    if healthy:
        told = answers("/health", {})
        assert told is not None
        typer.echo(told.body, nl=False)
        raise typer.Exit(int(told.status != 200))
    if once:
        if party.about.role in ("lead", "viewer") and eye.problem:
            raise UserError(eye.problem)
        typer.echo(text(), nl=False)
        return
    server = serve(port, answers)
    if party.about.role in ("lead", "viewer"):
        eye.start()
    say(f"http://127.0.0.1:{server.server_port}/metrics until Ctrl-C.")
    server.serve_forever()


@app.command("clean")
def clean_command(
    folder: Path = typer.Argument(..., help="A party's folder, or that of a local federation."),
    days: float = typer.Option(90.0, "--older-than", help="Days that nobody wrote to it."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Only say what would go."),
) -> None:
    """Remove old job folders, scratch files and logs; never ledgers, runs or answers."""
    from xcal.federation.nvflare import cleaning
    from xcal.federation.nvflare.one_machine import parties_in

    for party in parties_in(folder):
        gone = cleaning.old(party, days) if dry_run else cleaning.clean(party, days)
        for path in gone:
            say(f"{'Would remove' if dry_run else 'Removed'} {path}")
        say(f"{party.about.name}: {len(gone)} of more than {days:g} days.")


def _lead(folder: Path | None) -> Path:
    """The lead's folder: named, or the one lying about here."""
    if folder is not None:
        return folder
    near = [Path("."), Path("lead"), Path("coordinator/lead")]
    near += [p / "coordinator" / "lead" for p in Path(".").iterdir() if p.is_dir()]
    found = [p for p in near if (p / "party.json").exists()]
    if len(found) != 1:
        raise UserError("Name the lead's folder with --lead, or set XCAL_LEAD to it.")
    os.environ.setdefault("XCAL_LEAD", str(found[0]))
    return found[0]
