"""The server's end of a FLARE job, without FLARE's processes: counts, a run, the final model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nvflare", reason="the extra nvflare is not installed")

from made_sites import tiny_site
from support import TINY
from xcal.federation.answer import answer
from xcal.federation.nvflare.controller import XcalController
from xcal.federation.nvflare.flare_carrier import FlareCarrier, Stopped
from xcal.federation.request_refusals import CODES

NAMES = {"0": "0", "1": "1", "2": "2"}
ALLOWED = {
    "statistics_epsilon": 1.0,
    "statistics_delta": 1e-4,
    "evaluation_epsilon": 2.0,
    "evaluation_delta": 1e-4,
}


class Direct(FlareCarrier):
    """Carries to sites of this process. `stops`: the lead stops the job at the final model."""

    def __init__(self, sites_in: Path, *, stops: bool = False) -> None:
        super().__init__(None, lambda: False)  # type: ignore[arg-type]
        self._sites_in, self._stops = sites_in, stops

    def exchange(
        self, round_number: int, messages: Mapping[str, bytes], timeout: float | None
    ) -> dict[str, bytes]:
        if self._stops and round_number == 1:
            raise Stopped
        return {client: answer(self._sites_in / client, m) for client, m in messages.items()}


def run_job(tmp_path: Path, name: str, *, stops: bool = False, **given: Any) -> Path:
    """What the job left for the lead."""
    keys = {**TINY, "method": "xcal-steered", "rounds": 1, "quorum": 2, "round_timeout": 60.0}
    made = XcalController(name, NAMES, {k: v for k, v in keys.items() if k != "batch"}, **given)
    made._experiment = {**(made._experiment or {}), "expected_batch_size": keys["batch"]}
    made._carrier = Direct(tmp_path, stops=stops)
    clients = [SimpleNamespace(name=name) for name in NAMES]
    kit, out = tmp_path / "server" / "kit", tmp_path / "job" / name
    kit.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True)
    made.engine = SimpleNamespace(
        get_workspace=lambda: SimpleNamespace(get_root_dir=lambda: str(kit)),
        get_clients=lambda: clients,
    )
    made.fl_ctx = SimpleNamespace(get_job_id=lambda: "job")
    made.get_run_dir = lambda: str(out)
    made.error = lambda text: None
    made.run()
    return out / "xcal"


def events(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(x) for x in (tmp_path / "server" / "log.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_counts_a_run_and_what_its_sites_send(tmp_path: Path) -> None:
    counts = {k: v for k, v in ALLOWED.items() if "statistics" in k} | {"evaluation_floor": 5}
    for client, terms in enumerate(({}, ALLOWED, counts)):
        tiny_site(tmp_path, client, **terms)
    left = run_job(tmp_path, "before", statistics=[1.0, 1e-4])
    found = json.loads((left / "statistics.json").read_text())
    assert set(found["sites"]) == {"1", "2"}
    assert found["refused"] == {"0": "statistics-not-allowed"} and "statistics-not-allowed" in CODES
    left = run_job(tmp_path, "one")
    assert json.loads((left / "outcome.json").read_text())["ok"] is True
    told = json.loads((left / "evaluations.json").read_text())
    assert told["sites"]["0"] is None and told["sites"]["1"]["epsilon"] == 2.0
    assert set(told["exact"]) == {"2"} and told["exact"]["2"]["floor"] == 5
    said = [(e["event"], e.get("run")) for e in events(tmp_path)]
    assert said == [
        ("began", "before"),
        ("ended", "before"),
        ("began", "one"),
        ("round", "one"),
        ("ended", "one"),
    ]


@pytest.mark.slow
def test_a_run_is_finished_whatever_becomes_of_its_final_model(tmp_path: Path) -> None:
    for client in range(3):
        tiny_site(tmp_path, client)
    left = run_job(tmp_path, "one", stops=True)
    assert json.loads((left / "outcome.json").read_text())["text"] == "finished."
    assert (left / "result.json").exists() and not (left / "evaluations.json").exists()


@pytest.mark.slow
def test_a_site_put_back_between_runs_is_refused_and_the_run_goes_on(tmp_path: Path) -> None:
    site, *_ = [tiny_site(tmp_path, client) for client in range(3)]
    shutil.copytree(site, tmp_path / "copy")
    run_job(tmp_path, "one")
    shutil.rmtree(site)
    shutil.copytree(tmp_path / "copy", site)
    left = run_job(tmp_path, "two")
    (record,) = map(json.loads, (left / "rounds.jsonl").read_text().splitlines())
    assert record["answered"] == 2 and record["refused"] == {"0": "ledger-older"}
    assert set(json.loads((tmp_path / "server" / "heads.json").read_text())) == set(NAMES)
