"""`xcal demo budget`: sites that refuse, a run that is killed, a ledger that adds up."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from xcal.cli.interrupts import interruptible, stop_if_interrupted
from xcal.cli.site import checked
from xcal.errors import UserError
from xcal.federation.files import read_json, whole_lines

SITES = ("north", "south")
LIMITS = {"epsilon_total": 3.0, "delta_total": 2e-3, "epsilon_run": 2.0, "delta_run": 1e-3}
KEYS: dict[str, Any] = {
    "method": "fl-dp",
    "data": "smear",
    "pixels": 32,
    "train_images": 1200,
    "clients": len(SITES),
    "unit": "group",
    "rounds": 3,
    "epsilon": 2.0,
    "delta": 1e-3,
    "expected_batch_size": 10,
    "lr": 0.5,
    "threads": 1,
    "public_validation": True,
    "public_validation_by": "the demo: its images are synthetic",
    "validation_images": 100,
    "road_images": 0,
    "road_test_images": 0,
}
PATIENCE = 600.0  # seconds that a run may take to its first charges


def budget_part(console: Console, out: Path) -> list[str]:
    """Ask for too much, train and be killed, go on, verify, ask for more than is left."""
    from xcal.config import to_toml

    folder = _new(out / "budget")
    sites = [_site(folder / name, name) for name in SITES]
    limits = f"ε = {LIMITS['epsilon_run']:g} a run and {LIMITS['epsilon_total']:g} for life"
    console.print(
        f"Two hospitals ({folder}), each with a ledger of its own and a policy.toml that allows at"
        f" most {limits}, per patient. Noise comes from the operating system."
    )
    keys = {**KEYS, "sites": [str(site) for site in sites]}
    told = [_refused(console, folder / "too-much", {**keys, "epsilon": 2.5}, sites[0])]

    file = folder / "experiment.toml"
    file.write_text(to_toml(keys))
    run = folder / "run"
    _kill(console, file, run, sites)
    told.append(_resumed(console, run, sites))

    told.append(_refused(console, folder / "again", keys, sites[0]))
    console.print(f"What the hospital's owner sees: `xcal site show {sites[0]}`.", soft_wrap=True)
    return told


def _new(folder: Path) -> Path:
    """A folder that is not there yet: what a ledger has paid stays."""
    number, found = 1, folder
    while found.exists():
        number += 1
        found = folder.with_name(f"{folder.name}-{number}")
    return found


def _site(path: Path, name: str) -> Path:
    from xcal.federation.policy import Policy
    from xcal.federation.site_directory import SiteTable, create_site

    policy = checked(Policy, **LIMITS, unit="group")
    about = checked(SiteTable, client=name, population=name, data="smear")
    create_site(path, about, policy, unit="group")
    return path


def _refused(console: Console, out: Path, keys: dict[str, Any], site: Path) -> str:
    """Ask, and show the refusal: its sentence here, its code in the site's own log."""
    import xcal
    from xcal.dp.ledger.rows import read_rows
    from xcal.federation.site_directory import SiteDirectory

    ledger = site / "ledger.sqlite"
    before = len(read_rows(ledger))
    console.print(f"\nA run that asks for ε = {keys['epsilon']:g}:")
    try:
        xcal.run(out, **keys)
    except UserError as error:
        console.print(f"  refused: {error}", soft_wrap=True, style="yellow", markup=False)
    else:
        raise RuntimeError("a site gave more than it allows")
    code = SiteDirectory.open(site).refusals()[-1]["code"]
    if len(read_rows(ledger)) != before:
        raise RuntimeError("a refusal was charged")
    console.print(f"  {site.name} logged the refusal as {code}; its ledger was not charged.")
    return f"A site refused a run of ε = {keys['epsilon']:g} ({code}) and was not charged."


def _charges(sites: Sequence[Path]) -> int:
    """Steps that all sites together have paid for; 0 while a ledger cannot be read."""
    from xcal.dp.ledger.rows import read_rows

    try:
        return sum(
            row.kind == "charge" for site in sites for row in read_rows(site / "ledger.sqlite")
        )
    except UserError:
        return 0


def _kill(console: Console, file: Path, run: Path, sites: Sequence[Path]) -> None:
    """Start the run as a user would, and kill −9 it in the middle of its second round."""
    words = ["run", str(file), "--out", str(run)]
    console.print(f"\nA run of ε = {KEYS['epsilon']:g}, which they allow: xcal {' '.join(words)}")
    again = f"Go on with `xcal run --resume {run}`."
    with interruptible(console, again), open(run.with_name("run.log"), "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "xcal", *words], stdout=log, stderr=subprocess.STDOUT
        )
        try:
            _wait_for_the_second_round(process, run, sites)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
    console.print(f"  kill -9 in round 2, after {_charges(sites)} charged steps.")


def _wait_for_the_second_round(
    process: subprocess.Popen[bytes], run: Path, sites: Sequence[Path]
) -> None:
    end, at_start = time.monotonic() + PATIENCE, None
    while process.poll() is None and time.monotonic() < end:
        stop_if_interrupted()
        if at_start is None:
            if (run / "rounds.jsonl").exists() and whole_lines(run / "rounds.jsonl"):
                at_start = _charges(sites)
        elif _charges(sites) > at_start + len(sites):
            return
        time.sleep(0.01)
    said = run.with_name("run.log").read_text(errors="replace").strip()
    raise UserError(f"The run did not come to its second round: {said[-500:]}")


def _resumed(console: Console, run: Path, sites: Sequence[Path]) -> str:
    from xcal.cli.show import LiveProgress
    from xcal.dp.ledger.rows import charges_of, read_rows, runs_of, verify
    from xcal.federation.folder import RunFolder
    from xcal.federation.local import run_experiment

    console.print(f"Resumed: xcal run --resume {run}")
    before = _charges(sites)
    again = f"Go on with `xcal run --resume {run}`."
    with interruptible(console, again), LiveProgress(console) as progress:
        result = run_experiment(RunFolder.find(run), progress)
    plans = read_json(run / "plans.json")
    console.print(f"xcal ledger verify {run.parent}")
    for site, plan, client in zip(sites, plans.values(), result["clients"], strict=True):
        rows = read_rows(site / "ledger.sqlite")
        check = verify(site / "ledger.sqlite")
        if not check.ok:
            raise RuntimeError(f"row {check.row} of {site}: {check.problem}")
        paid = sum(len(charges_of(rows, name)) for name in runs_of(rows))
        console.print(
            f"  {site.name}: {check.rows} rows verified; {paid} steps charged of"
            f" {plan['steps']} planned, ε {client['epsilon_spent']:.3f} of"
            f" {LIMITS['epsilon_run']:g}"
        )
    after = _charges(sites)
    console.print(
        "A step is charged before its batch is drawn: a charge survives the process that made it,"
        " and a batch that has to be drawn again is charged again."
    )
    return f"A run killed after {before} charged steps was resumed to {after}; ledgers verified."
