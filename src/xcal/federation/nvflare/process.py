"""Starting and stopping a party on its own machine."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path

from cryptography import x509

from xcal.errors import UserError
from xcal.federation.logbook import LARGEST
from xcal.federation.nvflare.members import fingerprint_of_key, known
from xcal.federation.nvflare.parties import Party
from xcal.federation.nvflare.provision import require_nvflare

MAIN = "xcal.federation.nvflare.main"
PATIENCE = 5.0  # seconds that a killed server's port may take to become free
MODULES = {
    "server": ("nvflare.private.fed.app.server.server_train", "fed_server.json"),
    "site": ("nvflare.private.fed.app.client.client_train", "fed_client.json"),
}


def command(party: Party) -> list[str]:
    """FLARE's own process for the party, by this Python and with no code from the kit's folder."""
    if party.about.role not in MODULES:
        raise UserError(f"{party.folder} is a person's folder: it has nothing to start.")
    module, settings = MODULES[party.about.role]
    given = ["secure_train=true", f"org={party.about.organization}", "config_folder="]
    if party.about.role == "site":
        given.insert(1, f"uid={party.about.name}")
    words = [sys.executable, "-u", "-m", MAIN, module, "-m", str(party.kit), "-s", settings]
    return [*words, "--set", *given]


def environment(party: Party) -> dict[str, str]:
    """The party's own folder for temporary files; nothing importable from where it is started."""
    temporary = party.folder / "tmp"
    temporary.mkdir(exist_ok=True, mode=0o700)
    (party.kit / "transfer").mkdir(exist_ok=True)
    return {**os.environ, "TMPDIR": str(temporary), "PYTHONSAFEPATH": "1"}


def processes(party: Party) -> list[int]:
    """The party's processes, parents first: those that work on its kit, and no others."""
    kit = str(party.kit)
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        text = [w.decode(errors="replace") for w in words]
        if any(w.startswith("nvflare.private.fed.app.") for w in text) and kit in text:
            found.append(int(entry.name))
    return sorted(found)


def start(party: Party, *, foreground: bool = False) -> int:
    """Start the party; returns its process id. In the foreground it does not return."""
    require_nvflare()
    party.require_kit()
    running = processes(party)
    if running:
        raise UserError(f"{party.about.name} runs already, as process {running[0]}.")
    words, env = command(party), environment(party)
    if party.about.role == "server" and not port_is_free(party, PATIENCE):
        raise UserError(f"Port {party.about.port} is in use by another process: free it first.")
    members = known(party.folder, party.root)
    if members is not None and own_key(party) in members.revoked:
        raise UserError(
            f"{party.about.name}'s key was revoked: ask the coordinator, then make another one with"
            " `xcal federation join --renew`."
        )
    if foreground:
        os.chdir(party.kit)
        sys.stdout.flush()
        os.execve(sys.executable, words, env)
    if party.log.exists() and party.log.stat().st_size > LARGEST:
        os.replace(party.log, party.log.with_name(f"{party.log.name}.1"))
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return os.posix_spawn(  # in a session of its own: it outlives this command and its terminal
        sys.executable,
        words,
        env,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(party.log), append, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )


def port_is_free(party: Party, patience: float = 0.0) -> bool:
    """Whether a server could listen on its port, now or within some seconds."""
    address = "127.0.0.1" if party.about.server == "localhost" else "0.0.0.0"
    deadline = time.monotonic() + patience
    while True:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, party.about.port))
                return True
            except OSError:
                if time.monotonic() >= deadline:
                    return False
        time.sleep(0.2)


def own_key(party: Party) -> str:
    """The fingerprint of the key that the party's certificate is for."""
    return fingerprint_of_key(
        x509.load_pem_x509_certificate(party.certificate.read_bytes()).public_key()
    )


def stop(party: Party, *, patience: float = 10.0) -> int:
    """Ask the party's processes to end, then end them; returns how many there were.

    Nothing is lost: what a round has paid for is in the ledger, what it has reached is saved.
    """
    ending = processes(party)
    for pid in ending:
        _send(pid, signal.SIGTERM)
    deadline = time.monotonic() + patience
    while processes(party) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in processes(party):
        _send(pid, signal.SIGKILL)
    return len(ending)


def _send(pid: int, what: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, what)
