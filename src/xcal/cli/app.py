"""`xcal`: the command line."""

from __future__ import annotations

import sys

import typer
from typer import Option

import xcal
from xcal.cli import (
    audit,
    data,
    demo,
    federation_runs,
    ledger_command,
    model,
    plan,
    report_command,
    run,
    site,
    study,
)
from xcal.cli.interrupts import INTERRUPTED, interrupted, noting
from xcal.config import decimal_point
from xcal.errors import UserError
from xcal.plugins import blamed

app = typer.Typer(
    name="xcal",
    help="Federated training of image classifiers under a hard differential-privacy budget.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"xcal {xcal.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version and leave."
    ),
) -> None: ...


app.command("plan")(plan.plan_command)
app.command("run")(run.run_command)
app.command("demo")(demo.demo_command)
app.command("evaluate")(model.evaluate_command)
app.command("predict")(model.predict_command)
app.command("explain")(model.explain_command)
app.command("export")(model.export_command)
app.command("audit")(audit.audit_command)
app.command("panel")(report_command.panel_command)
app.command("study")(study.study_command)
app.command("report")(report_command.report_command)
app.add_typer(ledger_command.app, name="ledger")
app.add_typer(site.app, name="site")
app.add_typer(site.app, name="home", hidden=True)  # its name in the first edition
app.add_typer(data.app, name="data")
app.add_typer(federation_runs.app, name="federation")


def main(commands: typer.Typer | None = None, name: str = "xcal") -> None:
    """The entry point: bad input is one sentence and exit code 2, Ctrl-C is exit code 130."""
    with noting():
        try:
            (commands or app)()
        except SystemExit as end:
            if end.code == 2:  # an option that is not accepted
                for word in sys.argv[1:]:
                    if hint := decimal_point(word.rpartition("=")[2]):
                        typer.echo(f"{name}:{hint}", err=True)
            raise
        except (Exception, KeyboardInterrupt) as error:
            if isinstance(error, KeyboardInterrupt) or interrupted():
                typer.echo(f"\n{name}: interrupted.", err=True)
                sys.exit(INTERRUPTED)
            told = _sentence(error)
            if told is None:
                raise
            typer.echo(f"{name}: {told}", err=True)
            sys.exit(2)


def _sentence(error: BaseException) -> str | None:
    """What to tell a user of an error that a user can cause; None of any other."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, MemoryError):
        return "There is not enough memory for this: choose smaller sizes."
    told = blamed(error)
    if told is not None:
        return told
    if isinstance(
        error, OSError
    ):  # a disk that is full, or a place that may not be read or written
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or 'the system refused'}."
    return None
