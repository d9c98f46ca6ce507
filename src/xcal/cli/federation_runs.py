"""`xcal federation`: runs of a federation, and how it is watched and kept clean."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import typer
from typer import Argument, Option

from xcal.cli.federation import app, console, say
from xcal.cli.show import make_table
from xcal.errors import UserError

LEAD = Option(
    None, "--lead", envvar="XCAL_LEAD", help="The lead's folder (or a viewer's, to look)."
)

KEEP_GOING = Option(
    False,
    "--keep-going",
    help="Watch the run, and resume it where server or sites were lost: up to five times without a"
    " further complete round.",
)

WATCH_PATIENCE = 60.0
"""Seconds that who watches waits for a server that gives no answer."""


@app.command("submit")
def submit_command(
    experiment: Path = Argument(..., help="An experiment file (TOML)."),
    lead: Path | None = LEAD,
    sets: list[str] = Option([], "--set", help="key=value on top of it; may be repeated."),
    name: str | None = Option(None, help="The run's name; new."),
    quorum: int | None = Option(
        None, help="Fewest sites whose answers make a round; all if not given."
    ),
    timeout: float | None = Option(None, help="Seconds a round may take; an hour if not given."),
    simulated: bool = Option(
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
    experiment: Path = Argument(..., help="An experiment file (TOML): data, pixels, unit."),
    epsilon: float = Option(..., help="What each site pays for its answer."),
    delta: float = Option(..., help="What each site pays for its answer."),
    lead: Path | None = LEAD,
    sets: list[str] = Option([], "--set", help="key=value on top of it; may be repeated."),
    name: str | None = Option(None, help="Under which name it is charged; new."),
    timeout: float | None = Option(None, help="Seconds to wait; an hour."),
    out: Path | None = Option(None, help="Write the numbers as JSON, too."),
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
    if found["sites"]:
        rows = (
            (
                site,
                *(f"{count:.0f}" for count in told["counts"]),
                f"{1.96 * told['noise']:.0f}",
                f"{told['distance']:.2f}",
            )
            for site, told in found["sites"].items()
        )
        heads = ("site", *(f">{name}" for name in found["classes"]), ">±", ">share apart")
        console.print(make_table(f"{found['unit']}s by class, with noise", heads, rows))
        say(
            f"±: 95 % of the noise that each site added and paid ({found['epsilon']:g},"
            f" {found['delta']:g}) for. Share apart: total variation between the site's classes and"
            " those of all sites together, 0 to 1."
        )
    else:
        say("No site told its counts: what it tells is in its policy.toml (statistics_epsilon).")
    for site, code in found["refused"].items():
        say(f"{site} refused ({code})")
    for site in found["missing"]:
        say(f"no answer from {site}")


@app.command("status")
def status_command(
    run: str | None = Argument(None, help="A run's name; all if not given."),
    lead: Path | None = LEAD,
    watch: bool = Option(False, "--watch", help="Until the run ends."),
    every: float = Option(2.0, help="Seconds between looks."),
    tensorboard: Path | None = Option(
        None, help="With --watch: write the same for TensorBoard to this folder."
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
    tries, rounds, complete = 0, 0, 0

    def tell(lines: Iterable[str]) -> None:
        for line in lines:
            if line not in said:  # a second look after a lost one tells the beginning again
                said.add(line)
                say(line)

    silent_since = None
    while True:
        try:
            with runs.look(lead, run, tensorboard if watch else None) as looking:
                try:
                    tell(looking.first())
                    while watch and looking.goes_on():
                        silent_since = None
                        time.sleep(every)
                        tell(looking.news())
                finally:  # a server that is lost tells nothing more of what was complete
                    complete = max(complete, looking.rounds)
                if not keep_going or run is None or not looking.may_continue():
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
        tries, rounds = (1, complete) if complete > rounds else (tries + 1, rounds)
        if tries > runs.RESUBMISSIONS:
            raise UserError(
                f"The run {run!r} was resumed {runs.RESUBMISSIONS} times without a further complete"
                " round: look at the server's and the sites' logs before you resume it."
            )
        job = runs.continue_run(lead, run, say)
        say(f"Resumed {run!r} after round {rounds} ({tries}, job {job}): it was not worked on.")


@app.command("stop")
def stop_command(
    run: str = Argument(..., help="The run's name."), lead: Path | None = LEAD
) -> None:
    """Lead: stop a run. What was trained and charged stays; it can be resumed."""
    from xcal.federation.nvflare import lead_runs as runs

    runs.stop(_lead(lead), run)
    say(f"Stopped {run!r}. Go on with: xcal federation resume {run}")


@app.command("resume")
def resume_command(
    run: str = Argument(..., help="The run's name."),
    lead: Path | None = LEAD,
    quorum: int | None = Option(None, help="Another quorum from here on."),
    timeout: float | None = Option(None, help="Another timeout from here on."),
) -> None:
    """Lead: go on with a run from the server's last checkpoint, under the same name."""
    from xcal.federation.nvflare import lead_runs as runs

    job = runs.resume(_lead(lead), run, quorum, timeout)
    say(f"Submitted {run!r} again (job {job}): it goes on after its last complete round.")


@app.command("fetch")
def fetch_command(
    run: str = Argument(..., help="The run's name."),
    lead: Path | None = LEAD,
    out: Path = Option(..., help="Where the run's folder goes; must not exist."),
) -> None:
    """Lead: fetch a run's results."""
    from xcal.federation.nvflare import lead_runs as runs

    for line in runs.fetch(_lead(lead), run, out):
        say(line)


# --- operating ------------------------------------------------------------------------------------


@app.command("dashboard")
def dashboard_command(
    lead: Path | None = LEAD,
    port: int = Option(8470, help="On 127.0.0.1; nobody else can reach it."),
    every: float = Option(5.0, help="Seconds between looks at the server."),
    once: bool = Option(False, "--once", help="Print the page and leave."),
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
    folder: Path = Argument(..., help="The party's folder: a site's, the server's, a lead's."),
    port: int = Option(9464, help="On 127.0.0.1; nobody else can reach it."),
    once: bool = Option(False, "--once", help="Print the metrics and leave."),
    healthy: bool = Option(
        False, "--health", help="Say whether all is well and leave; exit code 1 where it is not."
    ),
    verify_every: float = Option(3600.0, help="Seconds between verifications of a site's ledger."),
) -> None:
    """Serve /metrics in Prometheus' text format and /health on loopback, from a party's files."""
    from xcal.federation.loopback import Page, serve
    from xcal.federation.nvflare import exposition, observe
    from xcal.federation.nvflare.dashboard import Eye

    party = observe.party_of(folder)
    looks = party.about.role in ("lead", "viewer")  # at the server, and has no ledger of its own
    watched = observe.Watched(party, verify_every)
    eye = Eye(party, 15.0)

    def text() -> str:
        if looks:
            seen = eye.snapshot
            return "" if seen is None else exposition.exposed(exposition.of_runs(seen))
        found = exposition.of_party(watched)
        if party.about.role == "server":
            runs = exposition.of_runs(observe.of_server(party))
            found = {name: [*found[name], *runs[name]] for name in found}
        return exposition.exposed(found)

    def answers(path: str, query: Mapping[str, str]) -> Page | None:  # noqa: ARG001
        if path == "/metrics":
            return Page(text(), exposition.KIND)
        if path != "/health":
            return None
        if looks:
            return Page(f"{eye.problem or 'ok'}\n", status=503 if eye.problem else 200)
        return exposition.health(watched)

    if (once or healthy) and looks:
        eye.look()
    if healthy:
        told = answers("/health", {})
        assert told is not None
        typer.echo(told.body, nl=False)
        raise typer.Exit(int(told.status != 200))
    if once:
        if looks and eye.problem:
            raise UserError(eye.problem)
        typer.echo(text(), nl=False)
        return
    server = serve(port, answers)
    if looks:
        eye.start()
    say(f"http://127.0.0.1:{server.server_port}/metrics until Ctrl-C.")
    server.serve_forever()


@app.command("clean")
def clean_command(
    folder: Path = Argument(..., help="A party's folder, or that of a local federation."),
    days: float = Option(90.0, "--older-than", help="Days that nobody wrote to it."),
    dry_run: bool = Option(False, "--dry-run", help="Only say what would go."),
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
