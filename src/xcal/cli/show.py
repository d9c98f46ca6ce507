"""How a run shows itself while it runs, and its result afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from xcal.cli.interrupts import stop_if_interrupted
from xcal.report.words import epsilon_text


def plain_console(**options: Any) -> Console:
    """What is printed is text as it stands: a name with brackets is a name, not a style."""
    return Console(markup=False, emoji=False, highlight=False, **options)


def make_table(
    title: str | None, heads: Sequence[str], rows: Iterable[Sequence[object]], **options: Any
) -> Table:
    """Rows of texts or numbers; a head after > stands at the right, with all below it."""
    shown = None if title is None else Text(title, style="italic")
    table = Table(title=shown, title_justify="left", **options)
    for head in heads:
        table.add_column(
            Text(head.removeprefix(">")), justify="right" if head.startswith(">") else "left"
        )
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    return table


def number(value: float | None, digits: int = 3, missing: str = "–") -> str:
    return missing if value is None else f"{value:.{digits}f}"


class Bar:
    """A bar of rich's that stands while something is done."""

    _bar: Progress

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._bar.stop()


class LiveProgress(Bar):
    """A bar with an estimate, and one line per round."""

    def __init__(self, console: Console, title: str = "training") -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._title = title
        self._task: Any = None
        self._counted = ("", "")  # what the bar counts, where it is not steps
        self._headed = False
        self._signal = False  # whether the method has one to show

    def start(self, total_steps: int, done_steps: int) -> None:
        self._task = self._bar.add_task(
            self._title, total=total_steps, completed=done_steps, unit="steps"
        )

    def measure(self, what: str, done: int, total: int) -> None:
        self.count("measuring", what, done, total)

    def draw(self, done: int, total: int) -> None:
        """Before a run: the images of a data set that is drawn."""
        self.count("drawing", "images", done, total)

    def attack(self, doing: str, what: str, done: int, total: int) -> None:
        """Of an audit: which attack, on what, how many of its parts are done."""
        self.count(doing, "parts", done, total)
        self._bar.update(self._task, description=f"{doing}: {what}")

    def count(self, doing: str, what: str, done: int, total: int) -> None:
        stop_if_interrupted()
        if (doing, what) != self._counted:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._counted = (doing, what)
            self._task = self._bar.add_task(doing, total=total, unit=what)
        self._bar.update(self._task, completed=done)

    def step(self, count: int) -> None:
        stop_if_interrupted()
        self._bar.advance(self._task, count)

    def say(self, text: str) -> None:
        self._console.print(text)

    def round(self, record: dict[str, Any]) -> None:
        """F1 on public validation images, ε spent (share of Σρ), mean σ, mean signal if any."""
        clients = record["clients"]
        signal = [c["mean_signal"] for c in clients if c["mean_signal"] is not None]
        if not self._headed:
            self._signal = bool(signal)
            head = "  signal" if self._signal else ""
            self._console.print(
                f"  round  validation F1   ε spent (of Σρ)   mean σ{head}  clients", style="bold"
            )
            self._headed = True
        payers = clients
        if record.get("server") is not None:  # a trusted server's own budget
            payers = [record["server"]]
        paid = [p for p in payers if p.get("share_spent") is not None]
        sigma = [c["mean_sigma"] for c in clients if c["mean_sigma"] is not None]
        most = "–"
        if paid:
            top = max(paid, key=lambda p: p["share_spent"])
            most = f"{number(top.get('epsilon_spent'))} ({100 * top['share_spent']:.1f} %)"
        asked = len(clients) + len(record.get("missing", ())) + len(record.get("refused", ()))
        absent = "".join(
            f", {len(record[what])} {what}"
            for what in ("exhausted", "missing", "refused", "late")
            if record.get(what)
        )
        mean_signal = f"  {number(_mean(signal)):>6}" if self._signal else ""
        self._console.print(
            f"  {record['round'] + 1:>5}  {number(record['validation_macro_f1']):>13}"
            f"  {most:>16}  {number(_mean(sigma)):>7}{mean_signal}"
            f"  {record['answered']} of {asked}{absent}"
        )


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def show_result(console: Console, result: dict[str, Any], folder: Path) -> None:
    """One run's result as a table, and where everything is."""
    from xcal.federation.files import read_json

    rows = (
        (
            client["id"],
            client["units"],
            client["steps"],
            number(client["epsilon_spent"], 4, "∞"),
            number(client["share_spent"], 4),
            "yes" if client["halted"] else "no",
        )
        for client in result["clients"]
    )
    heads = ("client", ">units", ">steps", ">ε spent (odometer)", ">Σρ/R", "halted")
    console.print(make_table(f"{result['method']} on {result['data']}", heads, rows))
    promise = (
        f"({result['epsilon_target']:g}, {result['delta']:g})-DP per {result['unit']}"
        if result["epsilon_target"] is not None
        else f"no guarantee (ε = {epsilon_text(None, result['epsilon_nominal'])})"
    )
    if result.get("epsilon_masked") is not None:
        promise = (
            f"({result['epsilon_masked']:g}, {result['delta']:g})-DP per {result['unit']} while"
            f" {result['honest']} of {len(result['clients'])} sites are honest (masked)"
        )
    if result.get("epsilon_client") is not None:
        spent = result["server"]["epsilon_spent"]
        console.print(
            f"Client level, by a trusted server: ({result['epsilon_client']:g},"
            f" {result['delta']:g})-DP per client, odometer {spent:.4g}; the table above is per"
            f" record, against the server."
        )
        promise = "no guarantee per record (ε = ∞)"
    console.print(
        f"Test macro F1 {number(result['macro_f1'])}, {promise}, {result['noise'] or 'no'} noise."
    )
    for text in result.get("notices", ()):  # new in 0.1
        console.print(f"Beware: {text}", highlight=False)
    between = result.get("road_interval")
    if between is not None:
        console.print(
            f"ROAD {number(result['road'])} ({number(between[0])} to {number(between[1])}, 95 %),"
            f" on {result['road_images']} test images."
        )
    if result["epsilon_paper"] is not None:
        console.print(f"ε by the paper's own accounting: {result['epsilon_paper']:.4g}.")
    if result["unused"]:
        console.print(f"Not used by {result['method']}: {', '.join(result['unused'])}.")
    statement = folder / "statement.json"
    opening = read_json(statement).get("opening", ()) if statement.exists() else ()  # new in 0.1
    for sentence in opening:
        console.print(sentence, highlight=False, markup=False)
    console.print(
        f"Everything is in {folder}; the privacy statement in {folder / 'statement.txt'}."
    )
