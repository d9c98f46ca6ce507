"""`xcal demo`: what the package is for, in three parts, on embedded data."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from xcal import plotting
from xcal.cli import demo_budget, demo_speed
from xcal.cli.interrupts import interruptible
from xcal.cli.show import LiveProgress, epsilon_text, make_table, number
from xcal.config import nearest
from xcal.errors import UserError

METHODS: dict[str, str] = {
    "fl": "FedAvg without privacy",
    "fl-dp": "FedAvg with DP-SGD, constant noise",
    "adaptive-clip": "DP-SGD whose clipping norm follows a quantile of the gradient norms",
    "xcal": "DP-SGD that averages features over four rotations of each image",
}
SETTINGS: dict[str, Any] = {
    "clients": 3,
    "unit": "record",
    "pixels": 32,
    "rounds": 8,
    "epsilon": 5.0,
    "expected_batch_size": 128,
    "lr": 2.0,
    "average": 0.3,
    "seed": 0,
    "threads": 1,  # so that the table is the same everywhere
    "validation_images": 300,
    "road_images": 0,
    "road_test_images": 60,
}
OWN: dict[str, dict[str, Any]] = {
    "fl": {"lr": 0.3},  # without clipping a gradient is larger
    "xcal": {"pool_views": "turns"},  # a cell has no upper side
}
MAPS = "gradcam"  # one kind for all, so that the pictures compare; no search, which takes longer
REPORT = "report.html"
PANEL = "panel.png"
MADE = (*METHODS, REPORT, PANEL)


def demo_command(
    part: str | None = Argument(None, help="speed, methods or budget; all if not given."),
    out: Path = Option(Path("runs/demo"), help="Where what it makes goes."),
    fresh: bool = Option(False, "--fresh", help="Remove what an earlier demo left there."),
) -> None:
    """A private step timed, methods compared at one ε, a budget enforced: minutes, no network."""
    if part is not None and part not in PARTS:
        raise UserError(
            f"The demo has no part {part!r}.{nearest(part, tuple(PARTS))} It has"
            f" {', '.join(PARTS)}; without a name it shows all of them."
        )
    console = Console(highlight=False)
    if fresh and out.exists():
        if any(p.name not in MADE and not p.name.startswith("budget") for p in out.iterdir()):
            raise UserError(f"{out} holds other things than a demo: remove it by hand.")
        shutil.rmtree(out)
    wanted = tuple(PARTS) if part is None else (part,)
    seen: list[str] = []
    for count, name in enumerate(wanted, start=1):
        title, show = PARTS[name]
        which = f"{count} of {len(wanted)}: " if len(wanted) > 1 else ""
        console.print(f"\n[bold]{which}{title}[/bold] (xcal demo {name})")
        seen += show(console, out)
    if len(wanted) > 1:
        console.print("\n[bold]What was shown[/bold]")
        for line in seen:
            console.print(f"  • {line}", soft_wrap=True)
    if "methods" in wanted:
        # A path stays one word.
        console.print(f"Report, to open in a browser: {out / REPORT}", soft_wrap=True)
        if (out / PANEL).exists():
            console.print(f"Saliency maps of every model: {out / PANEL}", soft_wrap=True)


def methods_part(console: Console, out: Path) -> list[str]:
    """A federation trained by several methods at one ε, its page and what the models look at."""
    from xcal.report.panel import save_panel
    from xcal.report.report import save_report

    console.print(
        f"{SETTINGS['clients']} simulated hospitals train a classifier of blood cells (synthetic"
        f" images) with {len(METHODS)} methods: one without privacy, the others"
        f" ({SETTINGS['epsilon']:g}, 1e-05)-DP per image."
    )
    results = {}
    for method, what in METHODS.items():
        console.print(f"\n[bold]{method}[/bold]: {what}")
        results[method] = _trained(console, out, method)
    console.print()
    console.print(comparison(results))
    console.print(
        "macro F1 and ROAD are measured on test images; ROAD says how faithful the model's"
        " saliency maps are (-0.5 to 0.5, higher is better). ε is the guarantee for everything a"
        " client releases, ε spent what the ledger of the client that spent most adds up to, σ the"
        " noise multiplier. One seed is no ranking of methods: `xcal study` compares several."
    )
    runs = [out / method for method in METHODS]
    console.print("Drawing the saliency maps of every model, and the report …")
    if plotting.available():
        explained = [run for run in runs if results[run.name]["road"] is not None]
        save_panel(out / PANEL, explained, 3, MAPS)
    else:
        console.print(plotting.NEEDED, soft_wrap=True, markup=False)
    save_report(out / REPORT, runs, panel_images=2, maps=MAPS)
    return _findings(results)


def _trained(console: Console, out: Path, method: str) -> dict[str, Any]:
    from xcal.data.synthetic import watched
    from xcal.experiments import make_experiment
    from xcal.federation.folder import RunFolder
    from xcal.federation.local import run_experiment
    from xcal.federation.setup import prepare

    values = {"method": method, **SETTINGS, **OWN.get(method, {})}
    folder = out / method
    federation = None
    if (folder / "run.json").exists():
        console.print(f"Continuing what stands in {folder}.")
        run = RunFolder.find(folder)
    else:
        with LiveProgress(console) as shown, watched(shown.draw):
            federation = prepare(make_experiment(values))
        run = RunFolder.create(folder, federation.experiment, sorted(values))
    again = f"`xcal demo methods --out {out}` goes on from here."
    with interruptible(console, again), LiveProgress(console, method) as progress:
        return run_experiment(run, progress, federation)


def comparison(results: Mapping[str, Mapping[str, Any]]) -> Table:
    """One row a method."""
    names = ("macro F1", "ROAD", "ε", "ε spent", "σ", "seconds")
    rows = (
        (
            method,
            number(result["macro_f1"]),
            number(result["road"], 2),
            epsilon_text(result["epsilon_target"], result["epsilon_nominal"]),
            number(_spent(result), 2, "∞"),
            number(result["mean_sigma"], 2),
            number(result["seconds"], 0),
        )
        for method, result in results.items()
    )
    heads = ("method", *(f">{name}" for name in names))
    return make_table("The same data and clients for every method", heads, rows)


def _spent(result: Mapping[str, Any]) -> float | None:
    spent = [c["epsilon_spent"] for c in result["clients"]]
    return None if None in spent else max(spent, default=None)


def _findings(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    private = {m: r for m, r in results.items() if r["epsilon_target"] is not None}
    plain = results.get("fl")
    if not private or plain is None:
        return []
    best = max(private, key=lambda m: private[m]["macro_f1"])
    return [
        f"Macro F1 is {private[best]['macro_f1']:.2f} at ε = {SETTINGS['epsilon']:g} with {best},"
        f" {plain['macro_f1']:.2f} without privacy."
    ]


Part = Callable[[Console, Path], list[str]]
PARTS: dict[str, tuple[str, Part]] = {
    "speed": ("what a private step costs", demo_speed.speed_part),
    "methods": ("one federation, several methods, one ε", methods_part),
    "budget": ("a budget enforced at the site: refusals, kill -9", demo_budget.budget_part),
}
