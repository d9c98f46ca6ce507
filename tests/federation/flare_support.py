"""A federation of real processes on loopback, shared by the tests of this folder."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from federation.real_processes import free_port
from xcal.federation.nvflare import process
from xcal.federation.nvflare.one_machine import init_local, parties_in
from xcal.federation.nvflare.parties import Party

LONG = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        "XCAL_TEST_FEDERATION" not in os.environ, reason="`make test-federation` runs it"
    ),
]
LISTENS = "added secure port"  # what the server's log says when it is up
SITES = ("hospital-a", "hospital-b", "hospital-c")
VIEWER = "auditor@three.example"

# `smear`, small: a round takes a site about a second.
EXPERIMENT = """
method = "xcal-steered"
data = "smear"
pixels = 32
train_images = 300
unit = "record"
clients = 3
rounds = 3
batch = 20
epsilon = 8.0
delta = 1e-3
lr = 0.5
signal_every = 2
validation_images = 40
road_images = 0
road_test_images = 4
threads = 1
seed = 5
"""


SUBMIT = """
import sys, time
from pathlib import Path
from xcal.errors import UserError
from xcal.federation.nvflare.jobs import Lead
from xcal.federation.nvflare.parties import Party
try:
    with Lead.session(Party.find(Path(sys.argv[1]))) as session:
        folder = Path(sys.argv[2])
        print("accepted", session.submit(folder), flush=True)
        while session.last(folder.name).running:
            time.sleep(0.5)
        print("ended", session.last(folder.name).status)
except UserError as error:
    print("refused", error)
"""


def wait_for(condition: Callable[[], Any], what: str, patience: float = 120.0) -> Any:
    """The condition's first true value; fails loudly after `patience` seconds."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.2)
    raise AssertionError(f"waited {patience:g} s in vain for {what}")


class Federation:
    """Three sites, a server and a lead in folders of their own, as `init --local` makes them."""

    def __init__(self, folder: Path, seed: int | None = 5) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self.port = free_port()
        source = folder / "FEDERATION.toml"
        source.write_text(
            f'name = "three"\nserver = "localhost"\nport = {self.port}\n'
            f'sites = {list(SITES)!r}\nlead = "lead@three.example"\nviewers = ["{VIEWER}"]\n'
        )
        self.experiment = folder / "smear.toml"
        self.experiment.write_text(EXPERIMENT)
        self.place = folder / "federation"
        list(init_local(source, self.place, self.experiment, seed, runs=20))

    def party(self, name: str) -> Party:
        if name in ("server", "lead"):
            return Party.find(self.place / "coordinator" / name)
        return Party.find(self.place / name)

    @property
    def lead(self) -> Path:
        return self.place / "coordinator" / "lead"

    def start(self, *names: str) -> None:
        for name in names or ("server", *SITES):
            if name == "server":
                self.starts = self._server_log().count(LISTENS) + 1
            process.start(self.party(name))

    def _server_log(self) -> str:
        log = self.party("server").kit / "log.txt"
        return log.read_text() if log.exists() else ""

    def kill(self, name: str) -> None:
        """As a power cut: every process of the party, at once."""
        party = self.party(name)
        running = process.processes(party)
        assert running
        for pid in running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not process.processes(party), f"{name} to be gone", 20)

    def halt(self) -> None:
        for party in reversed(parties_in(self.place)):
            process.stop(party, patience=3)

    def wait_connected(self, *names: str) -> None:
        """Until the server's own log tells that the sites joined since it was last started."""

        def joined() -> bool:
            text = self._server_log()
            if text.count(LISTENS) < self.starts:
                return False
            text = text[text.rfind(LISTENS) :]
            return all(
                f"New client {name}@" in text or f"Re-activate the client: {name} " in text
                for name in names or SITES
            )

        wait_for(joined, "the sites to join", 240)

    def submit(self, run: str, *words: str) -> None:
        done = self.xcal(
            "submit", str(self.experiment), "--name", run, "--simulated", "--timeout", "150", *words
        )
        assert done.returncode == 0, done.stderr

    def wait_end(self, run: str) -> str:
        """The run's last words."""
        done = self.xcal("status", run, "--watch", "--every", "0.5")
        assert done.returncode == 0, done.stderr
        return done.stdout

    def fetch(self, run: str) -> Path:
        out = self.folder / "fetched" / run
        done = self.xcal("fetch", run, "--out", str(out))
        assert done.returncode == 0, done.stderr
        return out

    def site_dir(self, name: str) -> Path:
        return self.party(name).site_dir

    def submit_folder(self, folder: Path, who: Path | None = None) -> str:
        """Submit any job folder as `who`, past our own command; what became of it."""
        done = subprocess.run(
            [sys.executable, "-c", SUBMIT, str(who or self.lead), str(folder)],
            capture_output=True,
            text=True,
            timeout=240,
        )
        return done.stdout + done.stderr

    def xcal(self, *words: str, lead: Path | None = None) -> subprocess.CompletedProcess[str]:
        """The real command, as the lead types it."""
        return subprocess.run(
            [sys.executable, "-m", "xcal", "federation", *words],
            capture_output=True,
            text=True,
            timeout=600,
            env={**os.environ, "XCAL_LEAD": str(lead or self.lead), "COLUMNS": "200"},
        )


@contextmanager
def running(folder: Path, **options: Any) -> Iterator[Federation]:
    """A started federation; its processes are ended, by their ids, whatever happens."""
    federation = Federation(folder, **options)
    try:
        federation.start()
        yield federation
    finally:
        federation.halt()


class Relay:
    """A TCP relay on loopback that keeps every byte it passes on."""

    def __init__(self, target: int) -> None:
        self.port = free_port()
        self.recorded: list[tuple[bytearray, bytearray]] = []  # to the server, from it
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._closing = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while not self._closing:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            kept = (bytearray(), bytearray())
            self.recorded.append(kept)
            threading.Thread(target=self._pass_on, args=(near, kept), daemon=True).start()

    def _pass_on(self, near: socket.socket, kept: tuple[bytearray, bytearray]) -> None:
        try:
            far = socket.create_connection(("127.0.0.1", self._target))
        except OSError:
            near.close()
            return
        with near, far:
            while not self._closing:
                ready, _, _ = select.select([near, far], [], [], 0.5)
                for end in ready:
                    try:
                        data = end.recv(65536)
                    except OSError:
                        return
                    if not data:
                        return
                    (far if end is near else near).sendall(data)
                    kept[0 if end is near else 1].extend(data)

    def close(self) -> None:
        self._closing = True
        self._listener.close()


def tls_records(data: bytes) -> list[int]:
    """The content types of a stream that is nothing but TLS records; raises where it is not."""
    kinds, at = [], 0
    while at < len(data):
        kind, major, size = data[at], data[at + 1], int.from_bytes(data[at + 3 : at + 5], "big")
        if kind not in (20, 21, 22, 23) or major != 3 or size > (1 << 14) + 256:
            raise AssertionError(f"byte {at} begins no TLS record: {bytes(data[at : at + 5])!r}")
        kinds.append(kind)
        at += 5 + size
    return kinds


def end(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
