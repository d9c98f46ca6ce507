"""`xcal ledger`: create, show, verify and analyse what a population has paid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from typer import Argument, Option

from xcal.cli.show import make_table, plain_console
from xcal.errors import UserError
from xcal.federation.files import own_folder, write_bytes
from xcal.federation.ledgers_of import find_ledgers

if TYPE_CHECKING:
    from xcal.dp.ledger.analysis import Analysis
    from xcal.dp.ledger.rows import RunTerms

# Commands import what they need themselves: the accountant's library takes seconds to load.

app = typer.Typer(
    help="The durable record of what a population's data have paid.", no_args_is_help=True
)


@app.command("create")
def create_command(
    site_dir: Path = Argument(..., help="The site directory to make."),
    population: str = Option(..., help="Whose data these are: a name you choose, for good."),
    epsilon: float = Option(..., help="Lifetime limit ε over all runs."),
    delta: float = Option(..., help="Lifetime limit δ over all runs."),
    unit: str = Option(
        ..., help="What is protected: group (a person), record (an image) or client; for good."
    ),
    rule: str = Option("sum", help="sum: runs reserve their (ε, δ); renyi: one order for all."),
    order: float | None = Option(None, help="The order of the rule renyi."),
) -> None:
    """Make a ledger that carries a lifetime limit."""
    from xcal.dp.calibration import check_target
    from xcal.dp.ledger import ledger as ledgers
    from xcal.dp.ledger.rows import Terms
    from xcal.federation.site_directory import ONE_LEDGER, sites_of_the_same

    check_target(epsilon, delta)
    path = site_dir / "ledger.sqlite"
    terms = Terms(population, unit, epsilon, delta, rule, order)
    ledgers.check_terms(terms)
    own_folder(site_dir)
    ledgers.create(path, terms)
    typer.echo(
        f"Created {path}: population {population!r}, per {unit}, ({epsilon:g}, {delta:g}), {rule}."
    )
    if rule == "sum":
        typer.echo(room_text(epsilon, delta))
    typer.echo(
        f"Keep it and {path.with_suffix('.head').name} safe: a lost ledger cannot be replaced."
    )
    for line in (ONE_LEDGER, *sites_of_the_same(site_dir, population, None)):
        typer.echo(line)


def room_text(
    epsilon: float, delta: float, epsilon_run: float | None = None, delta_run: float | None = None
) -> str:
    """How many runs a lifetime limit has room for, by ε and by δ, and how to have room for more."""
    from xcal.dp.ledger.analysis import runs_that_fit
    from xcal.experiments import make_experiment

    usual = make_experiment({})
    one = (epsilon_run or usual.epsilon, delta_run or usual.delta)
    fit = runs_that_fit(epsilon, one[0]), runs_that_fit(delta, one[1])
    text = f"Pays for runs of ({one[0]:g}, {one[1]:g}): {fit[0]} by ε, {fit[1]} by δ."
    if min(fit) < 2 or fit[1] < fit[0]:
        wanted = max(5, fit[0])
        text += (
            f" For {wanted} runs let each ask for at most epsilon = {epsilon / wanted:g} and"
            f" delta = {delta / wanted:g}, or allow --epsilon {max(epsilon, wanted * one[0]):g}"
            f" and --delta {max(delta, wanted * one[1]):g}; keep a run's delta below 1 divided by"
            " your units."
        )
    return text


@app.command("show")
def show_command(
    path: Path = Argument(..., help="A ledger, a site directory or a run's folder."),
    rows: int = Option(5, help="How many of the last rows to show."),
) -> None:
    """Show what was spent, by whom, and the last rows."""
    from xcal.dp.ledger.analysis import lifetime_text, spending
    from xcal.dp.ledger.rows import charges_of, read_rows, runs_of, terms_of

    console = plain_console()
    for found in find_ledgers(path):
        lines = read_rows(found)
        terms = terms_of(lines)
        console.print(
            f"{found}: population {terms.population!r}, per {terms.unit}, rule {terms.rule},"
            f" {len(lines)} rows; {lifetime_text(lines)}",
        )
        words: list[tuple[object, ...]] = []
        for run, paid in zip(runs_of(lines).values(), spending(lines), strict=True):
            charges = charges_of(lines, run.run)
            count, spent = len(charges), sum(c.cost for c in charges)
            if run.budget is None:
                words.append((run.run, run.method, *f"– ∞ – ∞ – {count} ∞ – –".split()))
                continue
            words.append(
                (
                    run.run,
                    run.method,
                    _accountant(run),
                    f"{run.epsilon:g}",
                    f"{run.delta:g}",
                    f"{paid['epsilon_spent']:.4g}",
                    f"{run.order:g}",
                    count,
                    f"{spent:.6g}",
                    f"{run.budget:.6g}",
                    f"{spent / run.budget:.4f}",
                )
            )
        numbers = ("ε", "δ", "ε spent", "order", "charges", "Σρ", "R", "Σρ/R")
        heads = ("run", "method", "accountant", *(f">{name}" for name in numbers))
        console.print(make_table(None, heads, words))
        for row in lines[-rows:] if rows > 0 else []:
            body = row.body
            if row.kind == "charge":
                released = ", ".join(f"{n} with noise {s:.4g}" for n, s, _ in body["releases"])
                text = (
                    f"round {body['round']}, step {body['step']}: σ_eff {body['sigma']:.4g},"
                    f" rate {body['rate']:.4g}, ρ {body['cost']:.3e}; {released}"
                )
            else:
                text = ", ".join(f"{k} {v}" for k, v in body.items() if k != "terms")
            console.print(f"  {row.seq:>6} {row.kind:<9} {row.hash[:12]} {text}")


@app.command("verify")
def verify_command(
    path: Path = Argument(..., help="A ledger, a site, a run's folder or a signed page."),
    ledger: Path | None = Option(
        None, help="With a page: the site whose ledger still has to contain it."
    ),
) -> None:
    """Check chain, head, every cost and every limit; exit 0, or 1 naming the row.

    Of a page made by `xcal ledger certificate`: its signature, and with --ledger that the ledger
    still contains what it was made from.
    """
    from xcal.dp.ledger.analysis import lifetime_text, spending_text
    from xcal.dp.ledger.rows import read_rows, verify

    if path.suffix.lower() in (".html", ".htm"):
        _verify_page(path, ledger)
        return
    if ledger is not None:
        raise UserError("--ledger goes with a page that `xcal ledger certificate` made.")
    failed = False
    for found in find_ledgers(path):
        check = verify(found)
        if check.ok:
            rows = read_rows(found)
            told = "; ".join(filter(None, (lifetime_text(rows), spending_text(rows))))
            typer.echo(f"{found}: {check.rows} rows, all in order; {told}")
        else:
            failed = True
            typer.echo(f"{found}: row {check.row} {check.problem}", err=True)
    if failed:
        raise typer.Exit(1)


def _verify_page(path: Path, ledger: Path | None) -> None:
    from xcal.federation.certificate import check_against, read_certificate

    found = None if ledger is None else _one_ledger(ledger)
    try:
        page = read_certificate(path)
        if found is not None:
            check_against(page, found)
    except UserError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    head = page.facts["head"]
    typer.echo(
        f"{path}: signed by {page.facts['site']} with the key {page.key}, and unchanged;"
        f" made {page.facts['made']} of {head['rows']} rows, head {head['hash'][:12]}."
    )
    if found is None:
        typer.echo("Whether its ledger still says so: add --ledger SITE.")
    else:
        typer.echo(f"{found} contains it.")


def _one_ledger(path: Path) -> Path:
    found = list(find_ledgers(path))
    if len(found) != 1:
        raise UserError(f"{path} has {len(found)} ledgers: name one client's.")
    return found[0]


@app.command("certificate")
def certificate_command(
    site_dir: Path = Argument(..., help="A site."),
    out: Path = Option(..., help="The page to write (.html)."),
) -> None:
    """One signed page for the data-protection officer: what was paid, to whom, what is left."""
    from xcal.federation.certificate import KEY, certificate, read_certificate

    if out.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"{out} is no page: give it a name that ends in .html.")
    if not out.parent.is_dir():
        raise UserError(f"There is no folder {out.parent}: make it first.")
    write_bytes(out, certificate(site_dir))
    made = read_certificate(out)
    typer.echo(f"Wrote {out}, signed with {site_dir / KEY}. Its public key:")
    typer.echo(f"  {made.key}")
    typer.echo(f"To check it: xcal ledger verify {out} --ledger {site_dir}")


@app.command("backup")
def backup_command(
    path: Path = Argument(..., help="A ledger or a site directory."),
    folder: Path = Argument(..., help="Where the copy goes: best on another machine's disk."),
) -> None:
    """Copy a ledger, its head and which images it paid for, also while a client spends from it."""
    from xcal.dp.ledger.backup import back_up
    from xcal.federation.partition_record import copy_record

    ledger = _one_ledger(path)
    made = back_up(ledger, folder)
    typer.echo(f"Copied {ledger} to {folder}: {made.count} rows, head {made.hash[:12]}.")
    copied = copy_record(ledger.parent, folder)
    if copied is not None:
        typer.echo(f"Copied {copied.name}, which says which images were charged.")


@app.command("analyse")
def analyse_command(
    path: Path = Argument(..., help="A ledger, a site directory or a run's folder."),
    run: str | None = Option(None, help="Only the run of this name."),
    pld: bool = Option(True, help="Also by privacy-loss distributions (some seconds)."),
    as_json: bool = Option(False, "--json", help="One JSON object and nothing else."),
) -> None:
    """After a run: what was spent on what, what is left, what a static plan would have cost."""
    from xcal.dp.ledger.analysis import HOW_SHARED, analyse, lifetime, lifetime_text
    from xcal.dp.ledger.rows import read_rows

    found = []
    for ledger in find_ledgers(path):
        rows = read_rows(ledger)
        found.append((ledger, rows, analyse(rows, run, pld=pld)))
    if as_json:
        values = [
            {"ledger": str(ledger), "lifetime": lifetime(rows), "runs": [a.as_dict() for a in runs]}
            for ledger, rows, runs in found
        ]
        typer.echo(json.dumps({"shares": HOW_SHARED, "ledgers": values}, indent=2))
        return
    console = plain_console()
    for ledger, rows, runs in found:
        told = f"{ledger}: per {lifetime(rows)['unit']}; {lifetime_text(rows)}"
        console.print(told, style="bold")
        for one in runs:
            for line in _analysis_lines(one):
                console.print(f"  {line}")
    console.print(f"Shares: {HOW_SHARED}.")
    console.print("What is left can be spent only through the same filter at the same order.")


def _accountant(run: RunTerms) -> str:
    if run.honest is not None:
        return f"masked, {run.honest} honest"
    return f"{run.accountant}, discrete" if run.whole_orders else run.accountant


def _analysis_lines(one: Analysis) -> list[str]:
    """One run in words."""
    from xcal.dp.calibration import odometer
    from xcal.dp.ledger.analysis import spent_text

    head = f"{one.run} ({one.method}): {one.charges} charges in {one.rounds} rounds"
    if one.budget is None or one.spent is None or one.left is None:
        return [f"{head}; the method has no guarantee, so Σρ = ∞."]
    assert one.epsilon is not None and one.delta is not None and one.order is not None
    epsilon = odometer(one.order, one.spent, one.epsilon, one.delta, one.accountant)
    lines = [
        f"{head} of {one.planned} planned steps{', halted' if one.halted else ''}",
        f"  target ({one.epsilon:g}, {one.delta:g}) by {one.accountant}; spent"
        f" {spent_text(epsilon, one.spent / one.budget)}; at order {one.order:g}:"
        f" R {one.budget:.6g}, Σρ {one.spent:.6g}, left {one.left:.4g}",
    ]
    for part in one.mechanisms:
        lines.append(
            f"  {part.name:<9} Σρ {part.cost:.6g} ({100 * part.share:.2f} %) in {part.releases}"
            f" releases; alone {part.alone:.6g}"
        )
    if one.static is not None:
        lines.append(
            f"  left pays for {one.more_at_last} more steps at the last σ_eff"
            f" {one.sigma_last:.4g}, for {one.more_at_static} at the static {one.static.sigma:.4g}"
        )
        by_pld = one.static.epsilon_pld
        lines.append(
            f"  a static plan (σ {one.static.sigma:.4g}) of the same {one.static.steps} steps:"
            f" ε {one.static.epsilon_rdp:.4g} by RDP"
            + ("" if by_pld is None else f", {by_pld:.4g} by PLD")
        )
    return lines
