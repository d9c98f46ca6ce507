"""`xcal demo`: four methods, one federation, one table."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from xcal.cli.interrupts import interruptible
from xcal.errors import UserError

METHODS = ("fl", "fl-dp", "xcal-paper", "xcal")
# Without clipping a gradient is larger, so plain federated learning has a learning rate of its own.
SETTINGS: dict[str, Any] = {
    "clients": 3,
    "unit": "record",
    "rounds": 8,
    "epsilon": 5.0,
    "seed": 0,
    "threads": 1,  # so that the table is the same everywhere
    "road_images": 16,
    "road_test_images": 100,
}
PLAIN_LR = 0.3
REPORT = "report.html"


def demo_command(
    out: Path = typer.Option(Path("runs/demo"), help="Where the four runs go."),
    fresh: bool = typer.Option(False, "--fresh", help="Remove what an earlier demo left there."),
) -> None:
    """Train fl, fl-dp, xcal-paper and xcal on the embedded data at one ε, and compare them."""
    from xcal.cli.show import LiveProgress
    from xcal.data.watch import watched
    from xcal.experiments import make_experiment
    from xcal.federation.folder import RunFolder
    from xcal.federation.local import run_experiment
    from xcal.federation.setup import prepare
    from xcal.report.report import save_report

    console = Console()
    if fresh and out.exists():
        if any(p.name not in (*METHODS, REPORT) for p in out.iterdir()):
            raise UserError(f"{out} holds other things than a demo: remove it by hand.")
        shutil.rmtree(out)
    console.print(
        f"A federation of {SETTINGS['clients']} clients trains on synthetic blood smears, four"
        f" times: without privacy, then with three methods at (ε, δ) = ({SETTINGS['epsilon']:g},"
        " 1e-05) per image."
    )
    results = {}
    for method in METHODS:
        values = {"method": method, **SETTINGS, **({"lr": PLAIN_LR} if method == "fl" else {})}
        folder = out / method
        console.print(f"\n[bold]{method}[/bold]")
        if (folder / "run.json").exists():
            console.print(f"Continuing what stands in {folder}.")
            run = RunFolder.find(folder)
            federation = None
        else:
            with LiveProgress(console) as shown, watched(shown.draw):
                federation = prepare(make_experiment(values))
            run = RunFolder.create(folder, federation.experiment, sorted(values))
        again = f"`xcal demo --out {out}` goes on from here."
        with interruptible(console, again), LiveProgress(console, method) as progress:
            results[method] = run_experiment(run, progress, federation)
    console.print()
    console.print(comparison(results))
    console.print(
        "macro F1: mean over classes on the test images. ROAD: how faithful the explanations are,"
        " from −0.5 to 0.5, on 100 of them. ε proved: for what ran. ε paper: by the"
        " paper's own accounting. σ: mean noise multiplier over all steps."
        f"\nEach run's ledger, statement and traces are in {out}/<method>; try"
        f" `xcal ledger verify {out}/xcal`."
    )
    save_report(out / REPORT, [out / method for method in METHODS])
    console.print(
        f"The same on one page, with figures to touch and what each model looks at: {out / REPORT}",
        soft_wrap=True,  # a path stays one word
    )


def comparison(results: dict[str, dict[str, Any]]) -> Table:
    from xcal.cli.show import epsilon_text, number

    table = Table(title="One federation, four methods", title_justify="left")
    table.add_column("method", no_wrap=True)
    for name in (
        "macro F1",
        "ROAD",
        "ε proved",
        "ε paper",
        "mean σ",
        "steps",
        "seconds",
    ):
        table.add_column(name, justify="right")
    for method, result in results.items():
        table.add_row(
            method,
            number(result["macro_f1"]),
            number(result["road"]),
            epsilon_text(result["epsilon_target"], result["epsilon_nominal"]),
            number(result["epsilon_paper"], 2),
            number(result["mean_sigma"]),
            str(sum(c["steps"] for c in result["clients"])),
            number(result["seconds"], 0),
        )
    return table
