"""What an interrupted run left behind, checked against what it promises.

`examine` after every interruption: every ledger verifies; every release that the sites' files know
of is charged, at the noise it was released with; no charge and no committed round is gone.
`compare` when a run has come through: its model, its charges and its records equal those of a run
that nobody disturbed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from xcal.dp.ledger import rows as ledger_rows
from xcal.dp.ledger.rows import Charge, charges_of, read_rows, runs_of, verify
from xcal.federation.files import read_tensors

CLIENTS = ("0", "1", "2")

# The same steps are verified again and again: their costs need be computed once.
ledger_rows.reference_cost = lru_cache(maxsize=None)(ledger_rows.reference_cost)


class Broken(AssertionError):
    """A promise that did not hold; the text says which, and where."""


def need(truth: bool, what: str) -> None:
    if not truth:
        raise Broken(what)


@dataclass
class Snapshot:
    """What a run's files say: what was paid, what was released, which rounds are committed."""

    charges: dict[str, list[Charge]] = field(default_factory=dict)
    released: dict[str, set[tuple[int, int]]] = field(default_factory=dict)
    rounds: int = 0
    unfinished: int = 0  # files that were being written

    @property
    def unreleased(self) -> int:
        """Steps that were paid for and of which no file knows: the allowed over-count."""
        return sum(len(c) - len(self.released.get(k, ())) for k, c in self.charges.items())


def examine(out: Path, before: Snapshot) -> Snapshot:
    """Read all that a killed process left, and raise `Broken` where a promise does not hold."""
    now = Snapshot(unfinished=len(list(out.rglob("*.new"))) if out.exists() else 0)
    if not out.exists():
        need(before.rounds == 0 and not before.charges, "the run's folder is gone")
        return now
    for client in CLIENTS:
        site_dir = out / "clients" / client
        ledger = site_dir / "ledger.sqlite"
        paid: list[Charge] = []
        if ledger.exists():
            check = verify(ledger)
            need(check.ok, f"ledger of client {client}: row {check.row} {check.problem}")
            rows = read_rows(ledger)
            paid = [c for run in runs_of(rows) for c in charges_of(rows, run)]
        old = before.charges.get(client, [])
        need(paid[: len(old)] == old, f"client {client}: a charge is gone or was changed")
        price = {(c.round, c.step): c for c in paid}
        need(len(price) == len(paid), f"client {client}: a step was charged twice")
        let_out: set[tuple[int, int]] = set()
        for file in site_dir.glob("runs/*/*.safetensors"):
            found = read_tensors(file)
            need(found is not None, f"{file.name} of client {client} cannot be read")
            assert found is not None
            for record in found[1]["trace"]:
                _check_paid(client, record, price)
                let_out.add((record["round"], record["step"]))
            report = found[1].get("report")
            if report is not None:
                need(report["steps"] <= len(paid), f"client {client} reports unpaid steps")
        now.charges[client], now.released[client] = paid, let_out
    lines = _lines(out / "trace.jsonl")
    for record in lines:
        client = record["client"]
        _check_paid(client, record, {(c.round, c.step): c for c in now.charges[client]})
        now.released[client].add((record["round"], record["step"]))
    checkpoint = read_tensors(out / "checkpoint.safetensors")
    if checkpoint is not None:
        now.rounds = checkpoint[1]["rounds"]
    known = {line["round"] for line in _lines(out / "rounds.jsonl")}
    need(set(range(now.rounds)) <= known, "a committed round has lost its record")
    need(now.rounds >= before.rounds, "a committed round was lost")
    return now


def _check_paid(client: str, record: dict[str, Any], price: dict[tuple[int, int], Charge]) -> None:
    where = f"client {client}, round {record['round']}, step {record['step']}"
    charge = price.get((record["round"], record["step"]))
    if charge is None:
        raise Broken(f"{where} was released and never charged")
    releases = {r.name: r.noise for r in charge.releases}
    need(releases["gradient"] == record["sigma"], f"{where} was released with other noise")
    need((record["signal"] is None) == ("signal" not in releases), f"{where}: signal not charged")


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(x) for x in path.read_text().splitlines() if x.endswith("}")]


def _model(out: Path) -> dict[str, torch.Tensor]:
    found = read_tensors(out / "model.safetensors")
    need(found is not None, f"{out / 'model.safetensors'} is missing")
    assert found is not None
    return found[0]


def compare(out: Path, whole: Path) -> None:
    """The run that was killed and the one that was not: the same to the bit."""
    first, second = _model(whole), _model(out)
    same = set(first) == set(second) and all(torch.equal(first[k], second[k]) for k in first)
    need(same, "the model differs from the undisturbed run's")
    for client in CLIENTS:
        paid = []
        for folder in (whole, out):
            rows = read_rows(folder / "clients" / client / "ledger.sqlite")
            charges = [c for run in runs_of(rows) for c in charges_of(rows, run)]
            paid.append([(c.round, c.step, c.rate, c.sigma, c.cost) for c in charges])
        need(paid[0] == paid[1], f"client {client} paid otherwise than in the undisturbed run")
    for name in ("rounds.jsonl", "trace.jsonl"):
        told = [[_without_times(x) for x in _lines(folder / name)] for folder in (whole, out)]
        need(told[0] == told[1], f"{name} differs from the undisturbed run's")


def _without_times(line: dict[str, Any]) -> dict[str, Any]:
    line = {k: v for k, v in line.items() if "seconds" not in k}
    for client in line.get("clients", ()):
        client.pop("ledger_hash")  # holds the run's own name and its site's secret key
    return line
