"""The benchmark's table, with commit, versions, machine and the command that made it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from peers.variants import default_signal

Row = dict[str, Any]

# What the step is held to at 64 px and one thread: (network, quantity) -> bound.
_QUANTITIES = (
    "our step / plain SGD step",
    "Opacus hooks step / our step",
    "our memory growth / plain",
    "full signal on every step, of our step",
    "default signal, of our step",
    "secure noise prepared ahead, of our step",
)
_BOUNDS: dict[str, tuple[str | None, ...]] = {
    "resnet18": ("≤ 1.25", "≥ 4.5", "≤ 1.4", "≤ 27 %", "≤ 10 %", "≤ 25 %"),
    "efficientnet_b0": ("≤ 1.15", "≥ 30", "≤ 1.3", "≤ 25 %", "≤ 10 %", None),
    "densenet121": ("≤ 1.4", "≥ 3", "≤ 1.6", None, None, None),
    "vit": ("≤ 1.5", "≥ 3", "≤ 1.6", None, None, None),
}


def write_results(rows: Sequence[Row], folder: Path, *, command: str) -> Path:
    """Write `<name>.md` and `<name>.json` into `folder`; returns the path of the table.

    The name says which sizes and thread counts are in it, so that another run of the same kind
    replaces it and git keeps the old one.
    """
    sizes = "-".join(str(size) for size in sorted({row["pixels"] for row in rows}))
    threads = "-".join(str(count) for count in sorted({row["threads"] for row in rows}))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"steps-{sizes}px-{threads}threads.md"
    origin = origin_of(command)
    path.write_text(table(rows, origin), encoding="utf-8")
    content = {"origin": origin, "rows": list(rows)}
    path.with_suffix(".json").write_text(
        json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    return path


def table(rows: Sequence[Row], origin: dict[str, str]) -> str:
    """Markdown: where the numbers come from, every row, and the quantities the step is held to."""
    every, fraction = default_signal()
    lines = ["# Step times and memory", ""]
    lines += _bullets(origin)
    lines += [
        "",
        "Batch 32, group norm, all parameters trained. Ratios to the plain SGD step of the same "
        "round: median and quartiles of interleaved repetitions in one process. Memory: growth "
        "over two steps, one process each. Noise and update count in every private step. Shares of "
        "our step and ratios to it are medians over rounds, paired with our step of the round. The "
        f"default signal is signal_every = {every}, signal_fraction = {fraction:g}.",
    ]
    for pixels, threads in sorted({(row["pixels"], row["threads"]) for row in rows}):
        here = [row for row in rows if (row["pixels"], row["threads"]) == (pixels, threads)]
        lines += ["", f"## {pixels} px, {threads} thread{'s' if threads > 1 else ''}", ""]
        lines += ["| network | variant | step / SGD | quartiles | ms | memory MB |"]
        lines += ["|---|---|---|---|---|---|"]
        lines += [_line(row) for row in here]
        lines += ["", "| quantity | network | measured | bound at 64 px, one thread |"]
        lines += ["|---|---|---|---|"]
        for network in dict.fromkeys(row["network"] for row in here):
            found = quantities([row for row in here if row["network"] == network])
            for name, value, bound in zip(_QUANTITIES, found, _BOUNDS[network], strict=True):
                shown = bound if (pixels, threads) == (64, 1) and bound else "–"
                lines.append(f"| {name} | {network} | {value or '–'} | {shown} |")
        for row in here:
            if row.get("ratio_without_ahead"):
                lines += [
                    "",
                    f"Secure noise on {row['network']}: {row['ratio_to_sgd']:.2f} × SGD with the "
                    "next step's noise prepared by a second thread, "
                    f"{row['ratio_without_ahead']:.2f} × without.",
                ]
    return "\n".join(lines) + "\n"


def quantities(rows: Sequence[Row]) -> list[str | None]:
    """The measured quantities of one network, size and thread count, None where a row lacks."""
    ratio = {row["variant"]: row["ratio_to_sgd"] for row in rows}
    memory = {row["variant"]: row["memory_mb"] for row in rows}
    paired = {row["variant"]: row.get("ratio_to_ours") for row in rows}

    def over(top: float | None, bottom: float | None) -> float | None:
        return top / bottom if top and bottom else None

    def share(variant: str) -> str | None:
        value = paired.get(variant)
        return None if value is None else f"{100 * (value - 1):.1f} %"

    def plain(value: float | None) -> str | None:
        return None if value is None else f"{value:.2f}"

    return [
        plain(ratio.get("ours")),
        plain(paired.get("opacus-hooks")),
        plain(over(memory.get("ours"), memory.get("sgd"))),
        share("ours+full-signal"),
        share("ours+default-signal"),
        share("ours-secure-noise"),
    ]


def _line(row: Row) -> str:
    head = f"| {row['network']} | {row['variant']} |"
    if row["ratio_to_sgd"] is None:
        return f"{head} – | – | – | – ({row.get('reason')}) |"
    memory = "–" if row["memory_mb"] is None else f"{row['memory_mb']:.0f}"
    quartiles = f"{row['q25']:.2f}–{row['q75']:.2f}"
    return f"{head} {row['ratio_to_sgd']:.2f} | {quartiles} | {row['step_ms']:.0f} | {memory} |"


def origin_lines(command: str) -> list[str]:
    """Where a result comes from, as a Markdown list."""
    return _bullets(origin_of(command))


def _bullets(origin: dict[str, str]) -> list[str]:
    return [f"- {key}: {value}" for key, value in origin.items()]


def origin_of(command: str) -> dict[str, str]:
    """Command, commit, time, versions, machine and how busy it was."""
    packages = [f"{name} {_version(name)}" for name in ("torch", "numpy", "opacus")]
    busy = ", ".join(f"{load:.1f}" for load in os.getloadavg()) if hasattr(os, "getloadavg") else ""
    return {
        "command": command,
        "commit": _commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": ", ".join([f"Python {platform.python_version()}", *packages]),
        "machine": f"{_processor()}, {os.cpu_count()} cores",
        "load of the machine at the end (1, 5, 15 minutes)": busy or "unknown",
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    here = Path(__file__).parent
    try:
        name = subprocess.run(
            ["git", "-C", str(here), "rev-parse", "--short", "HEAD"],
            capture_output=True, text=True, check=True,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
