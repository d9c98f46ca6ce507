"""The examples of apps of one's own, in real processes: two sites, two rounds, one ledger each."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import xcal
from commands import xcal_environment, xcal_forked
from federation.real_processes import end_flower, free_port
from support import ROOT

EXAMPLES = ROOT / "examples"
ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
}
STEPS = 2 * 2 * 6  # rounds, epochs, 240 scans by 40: what the examples plan
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        "XCAL_TEST_FEDERATION" not in os.environ, reason="`make test-federation` runs it"
    ),
]


def binary(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


@pytest.fixture
def sites(tmp_path: Path) -> list[Path]:
    """The two hospitals of the examples, as their script makes them."""
    make_site = runpy.run_path(str(EXAMPLES / "make_sites.py"))["make_site"]
    found = [tmp_path / "sites" / f"site-{number}" for number in (1, 2)]
    for number, site in enumerate(found, start=1):
        make_site(site, number)
    return found


def assert_spent_once(site: Path, steps: int = STEPS, run: str = "study-1") -> None:
    """All planned steps and no more are on record, within the site's limit."""
    (found,) = xcal.Ledger(site).runs()
    assert (found.run, found.charges, found.planned) == (run, steps, STEPS)
    assert found.spent is not None and found.budget is not None
    assert found.spent <= found.budget * (1 + 1e-9)
    spent = xcal.Ledger(site).spent()
    assert (spent.epsilon, spent.epsilon_limit, spent.delta_limit) == (3.0, 8.0, 1e-3)
    assert spent.delta <= 1e-3
    assert xcal.Ledger(site).verify().ok
    done = xcal_forked("ledger", "verify", str(site))
    assert done.returncode == 0, done.stdout + done.stderr


def assert_trained(path: Path) -> None:
    """The weights tell the two findings apart: something came of the rounds."""
    task = runpy.run_path(str(EXAMPLES / "flower_own_app" / "own_app" / "task.py"))
    model = task["network"]()
    model.load_state_dict(torch.load(path, weights_only=True))
    dataset, _ = task["load"](path.parent / "sites" / "site-1")
    with torch.no_grad():
        right = (model.eval()(dataset.tensors[0]).argmax(1) == dataset.tensors[1]).float().mean()
    assert right > 0.7


# Flower: a SuperLink and two SuperNodes, each message in a process of its own.


class Flower:
    """Started here and ended by process ids."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self.environment = {**xcal_environment(), **ENVIRONMENT, "PATH": paths}
        self.port = free_port()
        self.start(
            "superlink",
            *("flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(self.port)),
            "--disable-runtime-dependency-installation",
        )
        home = self.home("admin")
        (home / "config.toml").write_text(
            '[superlink]\ndefault = "silo"\n[superlink.silo]\n'
            f'address = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.2)
        raise AssertionError(self.logs())

    def home(self, name: str) -> Path:
        found = self.folder / f"flwr-{name}"
        found.mkdir(exist_ok=True)
        return found

    def start(self, name: str, *words: str) -> None:
        environment = {**self.environment, "FLWR_HOME": str(self.home(name))}
        with open(self.folder / f"{name}.log", "ab") as log:
            self.processes.append(
                subprocess.Popen(
                    [binary(words[0]), *words[1:]],
                    env=environment,
                    stdout=log,
                    stderr=log,
                    cwd=self.folder,
                    start_new_session=True,  # so that its children can be ended with it
                )
            )

    def node(self, site: Path) -> None:
        self.start(
            site.name,
            *("flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{self.port}"),
            *("--port", str(free_port()), "--node-config", f'site="{site}"'),
        )

    def run(self, **settings: Any) -> str:
        """`flwr run`, to its end; what it printed."""
        given = " ".join(f"{k}={v!r}".replace("'", '"') for k, v in settings.items())
        app = self.folder / "app"
        if not app.exists():
            shutil.copytree(EXAMPLES / "flower_own_app", app)
        done = subprocess.run(
            [binary("flwr"), "run", str(app), "silo", "--stream", "-c", given],
            env={**self.environment, "FLWR_HOME": str(self.home("admin")), "COLUMNS": "200"},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout + done.stderr + self.logs()
        return done.stdout + done.stderr

    def logs(self) -> str:
        return "\n".join(p.read_text()[-3000:] for p in self.folder.glob("*.log"))

    def close(self) -> None:
        end_flower(self.processes, self.folder)


@pytest.fixture
def flower(tmp_path: Path) -> Iterator[Flower]:
    if find_spec("flwr") is None:
        pytest.skip("the extra flower is not installed: make test-federation installs it")
    made = Flower(tmp_path)
    try:
        yield made
    finally:
        made.close()


def test_a_flower_app_of_ones_own(tmp_path: Path, flower: Flower, sites: list[Path]) -> None:
    for site in sites:
        flower.node(site)
    flower.run(out=str(tmp_path / "model.pt"))
    for site in sites:
        assert_spent_once(site)
    assert_trained(tmp_path / "model.pt")
    # Asked for the same run again, the sites do not train: its budget is spent.
    flower.run(out=str(tmp_path / "again.pt"))
    for site in sites:
        assert_spent_once(site)
        (found,) = xcal.Ledger(site).runs()
        assert found.halted
    # A run that the policy does not allow is refused, and charges nothing.
    printed = flower.run(run="study-2", epsilon=5.0)
    assert "epsilon-run" in printed
    assert str(sites[0]) not in printed  # the sentence stays at the site
    for site in sites:
        assert_spent_once(site)
        assert "epsilon-run" in (site / "refusals.jsonl").read_text()


# NVIDIA FLARE: its simulator, with a process for every site.


@pytest.mark.skipif(find_spec("nvflare") is None, reason="the extra nvflare is not installed")
def test_an_nvflare_executor_of_ones_own(tmp_path: Path, sites: list[Path]) -> None:
    job = tmp_path / "job"
    shutil.copytree(EXAMPLES / "nvflare_own_executor" / "job", job)

    words = ("-c", "site-1,site-2", "-t", "2")

    def simulate(name: str) -> str:
        process = subprocess.Popen(
            [binary("nvflare"), "simulator", str(job), "-w", str(tmp_path / name), *words],
            env={**xcal_environment(), **ENVIRONMENT, "OWN_SITES": str(tmp_path / "sites")},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            printed, _ = process.communicate(timeout=400)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return printed

    printed = simulate("first")
    for site in sites:
        assert xcal.Ledger(site).runs(), printed[-5000:]
        assert_spent_once(site)
    (model,) = (tmp_path / "first").rglob("FL_global_model.pt")
    found = torch.load(model, weights_only=False)["model"]
    torch.save({k: torch.as_tensor(v) for k, v in found.items()}, tmp_path / "model.pt")
    assert_trained(tmp_path / "model.pt")
    # A run that the policy does not allow is refused, and charges nothing.
    settings = job / "app" / "config" / "config_fed_client.json"
    values = json.loads(settings.read_text())
    values["executors"][0]["executor"]["args"] |= {"run": "study-2", "epsilon": 5.0}
    settings.write_text(json.dumps(values))
    simulate("second")
    for site in sites:
        assert_spent_once(site)
        assert "epsilon-run" in (site / "refusals.jsonl").read_text()
