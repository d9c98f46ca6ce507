"""Flower as an engine: the local engine's result bit for bit, in real processes."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import xcal
from commands import xcal_environment, xcal_forked
from federation.real_processes import end_flower, free_port
from made_sites import tiny_site
from support import ROOT, TINY, sets
from xcal.config import to_toml
from xcal.dp.ledger.rows import charges_of, read_rows, runs_of, verify
from xcal.experiments import make_experiment
from xcal.federation.files import read_tensors

missing = find_spec("flwr") is None or find_spec("ray") is None
with_flower = pytest.mark.skipif(
    missing, reason="the extra flower is not installed: make test-federation installs it"
)
at_length = pytest.mark.skipif(
    "XCAL_TEST_FEDERATION" not in os.environ, reason="`make test-federation` runs it"
)
ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def model_of(folder: Path) -> dict[str, torch.Tensor]:
    found = read_tensors(folder / "model.safetensors")
    assert found is not None
    return found[0]


def assert_same_run(first: Path, second: Path) -> None:
    one, other = model_of(first), model_of(second)
    assert all(torch.equal(one[k], other[k]) for k in one)
    results = [json.loads((p / "result.json").read_text()) for p in (first, second)]
    for key in ("macro_f1", "road", "clients", "mean_sigma", "epsilon_target", "noise"):
        assert results[0][key] == results[1][key], key
    steps = [
        sorted(
            (line["client"], line["round"], line["step"], line["sigma"], line["signal"])
            for line in map(json.loads, (p / "trace.jsonl").read_text().splitlines())
            if line["signal"] is not None
        )
        for p in (first, second)
    ]
    assert steps[0] == steps[1]


def test_an_engine_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    done = xcal_forked("run", *sets(), "--engine", "flour", "--out", str(tmp_path / "x"))
    assert (done.returncode, done.stderr.strip()) == (
        2,
        "xcal: Unknown engine 'flour'. Did you mean 'flower'?",
    )
    if missing:
        done = xcal_forked("run", *sets(), "--engine", "flower", "--out", str(tmp_path / "x"))
        assert done.returncode == 2
        assert ".whl[flower]" in done.stderr and "'.[flower]'" in done.stderr
    assert not (tmp_path / "x").exists()


@with_flower
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_simulation_gives_the_local_engines_result(tmp_path: Path) -> None:
    keys = {"method": "xcal-steered", "participants": 2, "clients": 4, "road_images": 0}
    xcal.run(tmp_path / "local", **{**TINY, **keys})
    words = ["run", *sets(**keys), "--engine", "flower", "--client-cpus", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "xcal", *words, "--out", str(tmp_path / "flower")],
        env=xcal_environment(),
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_run(tmp_path / "local", tmp_path / "flower")
    for site_dir in (tmp_path / "flower" / "clients").iterdir():
        assert verify(site_dir / "ledger.sqlite").ok


@with_flower
@at_length
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_control_c_loses_nothing_and_any_engine_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    quick = {"method": "xcal-steered", "rounds": 12, "road_images": 0, "road_test_images": 0}
    words = ["run", *sets(**quick), "--engine", "flower", "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-m", "xcal", *words],
        env=xcal_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        while not (out / "rounds.jsonl").exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        printed, errors = process.communicate(timeout=120)
        took = time.monotonic() - began
    finally:
        process.kill()  # Ray's processes end with the one that started them
    assert process.returncode == 130, printed + errors
    assert took < 60, f"{took:.0f} s until it had ended"
    assert "xcal run --resume" in " ".join(printed.split())
    assert "Starting Ray for 3 clients." in printed  # and whom it waits for, if that takes long
    xcal.run(tmp_path / "whole", **{**TINY, **quick})
    xcal.run(out, resume=True)  # on the local engine
    assert_same_run(tmp_path / "whole", out)
    for site_dir in (out / "clients").iterdir():
        rows = read_rows(site_dir / "ledger.sqlite")
        (run,) = runs_of(rows)
        steps = [(c.round, c.step) for c in charges_of(rows, run)]
        assert len(steps) == len(set(steps))  # each paid for once


def binary(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


NGINX = shutil.which("nginx") or ("/usr/sbin/nginx" if Path("/usr/sbin/nginx").exists() else None)


def openssl(folder: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)


def certificates(folder: Path) -> None:
    """`ca.crt`, and `server.crt` with `server.key` for localhost."""
    fresh = ("-newkey", "rsa:2048", "-nodes")
    openssl(
        *(folder, "req", "-x509", *fresh, "-days", "2", "-subj", "/CN=our authority"),
        *("-keyout", "ca.key", "-out", "ca.crt"),
    )
    openssl(
        *(folder, "req", *fresh, "-subj", "/CN=localhost"),
        *("-keyout", "server.key", "-out", "server.csr"),
    )
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    openssl(
        *(folder, "x509", "-req", "-in", "server.csr", "-CA", "ca.crt", "-CAkey", "ca.key"),
        *("-CAcreateserial", "-days", "2", "-extfile", "names", "-out", "server.crt"),
    )


def proxy(folder: Path, behind: int) -> tuple[subprocess.Popen[bytes], int]:
    """The shipped nginx file at work in `folder`, in front of a port; its process and its port."""
    assert NGINX is not None
    port = free_port()
    shipped = (ROOT / "deploy" / "nginx-flower.conf").read_text()
    text = shipped.replace("listen 8443", f"listen 127.0.0.1:{port}")
    text = text.replace("127.0.0.1:39443", f"127.0.0.1:{behind}")
    (folder / "nginx.conf").write_text(f"daemon off;\nmaster_process off;\n{text}")
    words = [NGINX, "-p", str(folder), "-c", "nginx.conf"]
    tried = subprocess.run([*words, "-t"], capture_output=True, text=True)
    assert tried.returncode == 0, tried.stderr
    # in a session of its own, so that it is ended as Flower's processes are
    return subprocess.Popen(words, stderr=subprocess.DEVNULL, start_new_session=True), port


class Deployment:
    """The guide's deployment: a SuperLink behind nginx, SuperNodes known by their keys.

    All of it is ended by process ids.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.processes: list[subprocess.Popen[bytes]] = []
        bin_first = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self.environment = {**xcal_environment(), **ENVIRONMENT, "PATH": bin_first}
        certificates(folder)
        for who, port in (("admin", self.port), ("stranger", 0)):
            self.aim(who, port)

    def aim(self, who: str, port: int) -> None:
        """Which SuperLink `flwr` speaks to for `who`."""
        site_dir = self.folder / f"flwr-{who}"
        site_dir.mkdir(exist_ok=True)
        (site_dir / "config.toml").write_text(
            '[superlink]\ndefault = "silo"\n[superlink.silo]\n'
            f'address = "localhost:{port}"\nroot-certificates = "{self.folder / "ca.crt"}"\n'
        )

    def start(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        site_dir = self.folder / f"flwr-{name}"
        site_dir.mkdir(exist_ok=True)
        with open(self.folder / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                [binary(words[0]), *words[1:]],
                env={**self.environment, "FLWR_HOME": str(site_dir)},
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,  # so that its children can be ended with it
            )
        self.processes.append(process)
        return process

    def superlink(self) -> None:
        self.start(
            "superlink",
            *("flower-superlink", "--host", "127.0.0.1", "--port", str(self.port)),
            *("--ssl-certfile", "server.crt", "--ssl-keyfile", "server.key"),
            *("--ssl-ca-certfile", "ca.crt", "--enable-supernode-auth"),
            *("--database", str(self.folder / "superlink.db")),
            "--disable-runtime-dependency-installation",
        )
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    break
            time.sleep(0.2)
        else:
            raise AssertionError((self.folder / "superlink.log").read_text())
        process, self.front = proxy(self.folder, self.port)
        self.processes.append(process)
        self.aim("stranger", self.front)

    def flwr(self, who: str, *words: str) -> subprocess.CompletedProcess[str]:
        site_dir = self.folder / f"flwr-{who}"
        return subprocess.run(
            [binary("flwr"), *words],
            env={**self.environment, "FLWR_HOME": str(site_dir), "COLUMNS": "200"},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def key(self, name: str) -> Path:
        """A node's key pair, in the form that Flower takes."""
        words = f"ssh-keygen -q -t ecdsa -b 384 -N '' -C node -f {name}.key"
        subprocess.run(shlex.split(words), cwd=self.folder, check=True)
        return self.folder / f"{name}.key"

    def supernode(self, site_dir: Path) -> subprocess.Popen[bytes]:
        key = self.key(f"node-{site_dir.name}")
        done = self.flwr("admin", "supernode", "register", f"{key}.pub", "silo", "--name", key.stem)
        assert done.returncode == 0, done.stdout + done.stderr
        return self.start(
            f"node-{site_dir.name}",
            *("flower-supernode", "--superlink", f"localhost:{self.front}"),
            *("--root-certificates", "ca.crt", "--auth-supernode-private-key", str(key)),
            *("--port", str(free_port()), "--node-config", f'site="{site_dir}"'),
        )

    def run(self, **settings: Any) -> subprocess.Popen[bytes]:
        given = " ".join(f'{k}="{v}"' for k, v in settings.items())
        app = ROOT / "deploy" / "flower"
        return self.start("admin", "flwr", "run", str(app), "silo", "--stream", "-c", given)

    def close(self) -> None:
        end_flower(self.processes, self.folder)


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    made = Deployment(tmp_path)
    try:
        yield made
    finally:
        made.close()


def wait_for(path: Path, deployment: Deployment, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        logs = {p.name: p.read_text()[-1500:] for p in deployment.folder.glob("*.log")}
        assert time.monotonic() < end, logs
        time.sleep(0.2)


with_nginx = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")


@with_flower
@with_nginx
@at_length
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_superlink_and_supernodes_give_the_local_engines_result(
    tmp_path: Path, deployment: Deployment
) -> None:
    keys = {**TINY, "method": "xcal-steered", "clients": 2, "rounds": 2, "road_images": 0}
    experiment = make_experiment(keys)
    xcal.run(tmp_path / "local", **keys)
    path = tmp_path / "experiment.toml"
    path.write_text(to_toml(experiment.resolved()))
    sites = [tiny_site(tmp_path / "sites", i, experiment=experiment) for i in range(2)]
    deployment.superlink()
    for site_dir in sites:
        deployment.supernode(site_dir)
    # Who comes through the proxy, as a hospital would, can neither register a node nor start a run.
    stranger = deployment.key("stranger")
    for words in (
        ("supernode", "register", f"{stranger}.pub", "silo", "--name", "stranger"),
        ("run", str(ROOT / "deploy" / "flower"), "silo"),
    ):
        done = deployment.flwr("stranger", *words)
        assert done.returncode != 0
        assert "403" in done.stdout + done.stderr
    deployment.run(experiment=path, out=tmp_path / "run")
    wait_for(tmp_path / "run" / "result.json", deployment, 600)
    assert_same_run(tmp_path / "local", tmp_path / "run")
    assert json.loads((tmp_path / "run" / "clients.json").read_text()) == ["0", "1"]
    for site_dir in sites:
        assert verify(site_dir / "ledger.sqlite").ok


@with_nginx
def test_the_shipped_proxy_forwards_the_fleet_and_nothing_else(tmp_path: Path) -> None:
    import http.client
    import http.server
    import ssl
    import threading

    seen: list[str] = []

    class Behind(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.append(self.path)
            self.send_response(200)
            self.end_headers()

        do_GET = do_POST

        def log_message(self, *args: Any) -> None:
            return

    certificates(tmp_path)
    behind = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Behind)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    behind.socket = server.wrap_socket(behind.socket, server_side=True)
    threading.Thread(target=behind.serve_forever, daemon=True).start()
    process, port = proxy(tmp_path, behind.server_address[1])
    try:
        trust = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))

        def ask(path: str) -> int:
            for _ in range(50):
                try:
                    line = http.client.HTTPSConnection("localhost", port, context=trust, timeout=5)
                    line.request("POST", path, body=b"x")
                    status = line.getresponse().status
                    line.close()
                    return status
                except ConnectionRefusedError:
                    time.sleep(0.1)
            raise AssertionError("nginx does not answer")

        assert ask("/v1/fleet/pull-messages") == 200
        for path in ("/v1/control/start-run", "/v1/runtime/x", "/", "/v1/fleet/../control/start"):
            assert ask(path) == 403, path
        assert seen == ["/v1/fleet/pull-messages"]
        plain = http.client.HTTPConnection("localhost", port, timeout=5)
        plain.request("POST", "/v1/fleet/x")
        assert plain.getresponse().status == 400  # not without TLS
        plain.close()
    finally:
        process.terminate()
        process.wait()
        behind.shutdown()
        behind.server_close()
