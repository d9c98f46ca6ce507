"""`xcal site`: a client's own folder, with its data reference, policy, ledger and refusal log."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic import BaseModel, ValidationError
from typer import Argument, Option

from xcal.cli.ledger_command import room_text
from xcal.cli.show import make_table, plain_console
from xcal.errors import UserError

app = typer.Typer(
    help="A site directory: whose it is, what it allows, what it has paid, what it refused.",
    no_args_is_help=True,
)


LIMITS = ("epsilon", "delta")
NUMBERS = ("macro_f1", "auroc", "calibration_error")

Made = TypeVar("Made", bound=BaseModel)


def checked(kind: type[Made], **values: Any) -> Made:
    """A table from options; the first that is not accepted becomes one sentence."""
    try:
        return kind(**values)
    except ValidationError as error:
        first = error.errors()[0]
        option = str(first["loc"][0]).replace("_", "-")
        what = first["msg"][:1].lower() + first["msg"][1:]
        raise UserError(f"--{option} is not accepted: {what}.") from None


@app.command("init")
def make_site(
    site_dir: Annotated[Path, Argument(help="The site directory to make.")],
    *,
    client: Annotated[str, Option(help="The name this client goes by in federations.")],
    population: Annotated[str, Option(help="Whose data these are: a name you choose, for good.")],
    epsilon: Annotated[float, Option(help="Highest ε of all runs together, for life.")],
    delta: Annotated[float, Option(help="Highest δ of all runs together, for life.")],
    data: Annotated[str | None, Option(help="An imported data set: its training images.")] = None,
    experiment: Annotated[
        Path | None,
        Option(help="Instead of --data, for trials: an experiment file, of which it has a part."),
    ] = None,
    shard: Annotated[int, Option(help="With --experiment: which part, from 0.")] = 0,
    units: Annotated[
        int | None,
        Option(
            help="Declared number of units, at least as many as there are: then their real number"
            " stays private. Not given: they are counted."
        ),
    ] = None,
    epsilon_run: Annotated[
        float | None, Option(help="Highest ε of one run; all if not given.")
    ] = None,
    delta_run: Annotated[
        float | None, Option(help="Highest δ of one run; all if not given.")
    ] = None,
    unit: Annotated[
        str | None,
        Option(
            help="What a run must protect: record (an image) or group (a person); group if not"
            " given and the data say whose the images are."
        ),
    ] = None,
    weights: Annotated[
        Path | None, Option(help="Published weights the network starts from.")
    ] = None,
    seed: Annotated[
        int | None, Option(help="Only for a simulation: noise and draws come from this seed.")
    ] = None,
) -> None:
    """Make a site: `site.toml`, `policy.toml` and a ledger with your limits."""
    from xcal.dp.calibration import check_target
    from xcal.federation.policy import Policy
    from xcal.federation.site_check import check_data, data_at_hand
    from xcal.federation.site_directory import (
        ONE_LEDGER,
        SiteDirectory,
        SiteTable,
        create_site,
        sites_of_the_same,
    )

    check_target(epsilon, delta)
    if (data is None) == (experiment is None):
        raise UserError("Say where the data are: --data NAME, or for a trial --experiment FILE.")
    if unit not in (None, "record", "group"):
        raise UserError(f"--unit is record or group, not {unit!r}.")
    unit, why = _unit_of(data, experiment, unit)
    if (epsilon_run or 0) > epsilon or (delta_run or 0) > delta:
        raise UserError("One run cannot have more than all: lower --epsilon-run or --delta-run.")
    about = checked(
        SiteTable,
        client=client,
        population=population,
        data=data,
        experiment=None if experiment is None else str(experiment.resolve()),
        shard=shard,
        units=units,
        weights=None if weights is None else str(weights.resolve()),
        simulated=seed is not None,
        seed=seed,
    )
    policy = checked(
        Policy,
        epsilon_total=epsilon,
        delta_total=delta,
        epsilon_run=epsilon if epsilon_run is None else epsilon_run,
        delta_run=delta if delta_run is None else delta_run,
        unit=unit,
    )
    checked_data = data_at_hand(draft := SiteDirectory(site_dir, about, policy))
    if checked_data:
        part = ""
        if units is not None and data is not None:
            part = "; a site that has a part of a set is made with --experiment and --shard"
        for finding in check_data(draft):
            if finding.level == "problem":
                raise UserError(f"No site was made: {finding.text.rstrip('.')}{part}.")
    made = create_site(site_dir, about, policy, unit=unit)
    typer.echo(f"Made {made.path}: client {client!r}, population {population!r}, per {unit}.")
    if why:
        typer.echo(why)
    typer.echo(room_text(epsilon, delta, epsilon_run, delta_run))
    typer.echo(
        "Read policy.toml and set it to what you allow; keep ledger.sqlite and ledger.head safe:"
        " a lost ledger cannot be replaced."
    )
    if seed is None:
        for line in (ONE_LEDGER, *sites_of_the_same(site_dir, population, data)):
            typer.echo(line)
    if not checked_data:
        typer.echo(f"The data are not here yet: run `xcal site check {site_dir}` once they are.")


def _unit_of(data: str | None, experiment: Path | None, given: str | None) -> tuple[str, str]:
    """What runs on these data protect, for as long as the ledger lives; and what to say of it.

    A unit that the data do not support is refused here, before there is a ledger of it. Data that
    are not there yet are taken at the owner's word, if a unit was given.
    """
    from xcal.data.image_store import sizes_of
    from xcal.experiments import load_experiment, make_experiment
    from xcal.federation.setup import (
        check_groups_apart,
        check_groups_known,
        load_fewest,
        with_unit,
    )

    try:
        if experiment is not None:
            keys = load_experiment(experiment, [])[0]
        else:
            assert data is not None
            sizes = sizes_of(data) if ":" not in data and data != "smear" else []
            keys = make_experiment({"data": data, **({"pixels": sizes[0]} if sizes else {})})
        found = load_fewest(keys)
    except UserError as error:
        if given is not None:
            return given, ""
        raise UserError(f"{error} Or say with --unit what a run must protect.") from None
    unit = given or with_unit(keys, found).privacy_unit
    check_groups_known(unit, found)
    check_groups_apart(unit, found)
    if unit == "group" or found.groups_known:
        return unit, ""
    return unit, (
        f"One image is protected and not one person: {found.name} does not say of every image whose"
        " it is. Where people have several, import it with --group-column and make the site then."
    )


@app.command("show")
def show_command(
    site_dir: Path = Argument(..., help="A site directory."),
    refusals: int = Option(5, help="How many of the last refusals to show."),
) -> None:
    """Show what a client allows, what it has paid, and what it refused last."""
    from xcal.dp.ledger.analysis import lifetime_text, spending_text
    from xcal.dp.ledger.rows import read_rows, runs_of
    from xcal.federation.exact_counts import sent_by, sent_text
    from xcal.federation.site_directory import SiteDirectory

    opened = SiteDirectory.open(site_dir)
    console = plain_console()
    about, policy = opened.about, opened.policy
    console.print(
        f"Client {about.client!r}, population {about.population!r}, data"
        f" {about.data or about.experiment!r},"
        f" {'units counted' if about.units is None else f'{about.units} units declared'},"
        f" {'simulated: seeded noise' if about.simulated else 'secure noise'}.",
    )
    allowed = (
        (
            key,
            ", ".join(value) if isinstance(value, tuple) else value,
            type(policy).model_fields[key].description,
        )
        for key, value in policy.model_dump().items()
    )
    console.print(make_table("Policy", ("key", "value", "what it is"), allowed))
    rows = read_rows(opened.ledger_path)
    runs = runs_of(rows).values()
    reserved = {name: sum(getattr(run, name) or 0.0 for run in runs) for name in LIMITS}
    console.print(
        f"{len(runs)} runs reserved ε = {reserved['epsilon']:g} of {policy.epsilon_total:g} and δ ="
        f" {reserved['delta']:g} of {policy.delta_total:g} that the policy allows; the ledger:"
        f" {lifetime_text(rows)}. `xcal ledger show {site_dir}` has the rows.",
    )
    if runs:
        console.print(f"Spent by the odometer: {spending_text(rows)}.")
    if exact := sent_text(sent_by(rows)):
        console.print(f"Without a charge: {exact}.")
    logged = opened.refusals()
    console.print(f"{len(logged)} refusals{':' if logged and refusals > 0 else '.'}")
    for entry in logged[-refusals:] if refusals > 0 else []:
        last = str(entry["detail"]).strip().splitlines()[-1:]
        console.print(f"  {entry['time']} {entry['code']}: {''.join(last)}")


@app.command("key")
def key_command(site_dir: Path = Argument(..., help="A site directory.")) -> None:
    """Print the public key that other sites know this one by: a line of their roster.toml."""
    from xcal.federation.site_directory import SiteDirectory
    from xcal.federation.site_identity import public_key

    typer.echo(f'"{SiteDirectory.open(site_dir).name}" = "{public_key(site_dir).hex()}"')


@app.command("check")
def check_command(site_dir: Path = Argument(..., help="A site directory.")) -> None:
    """Look for what would keep a client from answering; exit 0, or 1 naming what is wrong."""
    from xcal.federation.site_check import check_site
    from xcal.federation.site_directory import SiteDirectory

    found = check_site(SiteDirectory.open(site_dir))
    for finding in found:
        if finding.level != "problem":
            typer.echo(finding.text)
    wrong = [finding.text for finding in found if finding.level == "problem"]
    for text in wrong:
        typer.echo(f"{site_dir}: {text}", err=True)
    if wrong:
        raise typer.Exit(1)


@app.command("evaluate")
def evaluate_command(
    site_dir: Path = Argument(..., help="A site directory."),
    run: Path = Argument(..., help="A finished run's folder, as `federation fetch` brings."),
) -> None:
    """Measure a run's model on this site's held-out images. Nothing is charged or sent."""
    from xcal.federation.folder import RunFolder
    from xcal.federation.local_evaluation import measure, record
    from xcal.federation.site_directory import SiteDirectory
    from xcal.metrics.metric_registry import metric_title
    from xcal.report.runs import load_run

    opened, loaded = SiteDirectory.open(site_dir), load_run(run)
    classes = opened.whole_set(loaded.experiment.pixels).classes
    if classes != loaded.classes:
        raise UserError(
            f"The model of {run} knows the classes {', '.join(loaded.classes)}, and the data of"
            f" {site_dir} have {', '.join(classes)}: they must be the same, in this order."
        )
    measured = measure(opened, loaded.model, loaded.experiment)
    name = str(RunFolder.find(run).about["run"])  # as the site's ledger has it
    record(opened, name, "global", loaded.experiment.rounds, measured)
    numbers = measured.numbers
    known = [key for key in NUMBERS if numbers[key] is not None]
    told = ", ".join(f"{metric_title(key)} {numbers[key]:.3f}" for key in known)
    of = f"{numbers['images']} held-out images of {numbers['units']} {numbers['unit']}s"
    typer.echo(f"{name} on {of}: {told}.")
    typer.echo(f"The page for your clinicians: {opened.path / 'evaluation' / f'{name}.html'}")
    typer.echo("It stays here: its numbers have no privacy guarantee.")
