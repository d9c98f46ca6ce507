"""What a round costs the server, against the number of sites and the size of the model.

    python benchmarks/federation_growth.py [SITES …]            (default 1 5 10 25 50)
    python benchmarks/federation_growth.py NETWORK:SITES …      measures these, keeps other rows

Runs the real coordinator (requests encoded, answers decoded and checked, averaged, checkpointed)
over a carrier whose simulated sites answer at once with the weights they were sent, so that what is
left is the server's own work. Processor seconds are counted, not the clock's: neighbors on the
machine do not change them much. Writes benchmarks/results/federation-growth.{json,md}.
"""

from __future__ import annotations

import itertools
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xcal.experiments import make_experiment
from xcal.federation.exchange import ClientReport, RoundReply
from xcal.federation.files import write_json
from xcal.federation.folder import RunFolder, command, commit, versions
from xcal.federation.local import run_experiment
from xcal.federation.messages import Reply, decode_request, encode_reply
from xcal.federation.setup import prepare_remote

RESULTS = Path(__file__).parent / "results"
NETWORKS = ("small", "resnet18", "efficientnet_b0")
MOST = {"resnet18": 10}  # 45 MB a message, three times a site in memory
ROUNDS = 4
UNITS = 1000


class Echo:
    """Sites that answer at once; their own time and all bytes are counted apart."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.sent = self.received = 0

    def exchange(
        self, round_number: int, messages: Mapping[str, bytes], timeout: float | None
    ) -> dict[str, bytes]:
        began = time.process_time()
        answers = {}
        for client, message in messages.items():
            asked = decode_request(message, 1 << 30)
            report = ClientReport(
                client, UNITS, round_number + 1, False, 8.0, 1.0, None, 0.5, 1.0, None, None, None
            )
            reply = Reply(client, asked.run, asked.round, RoundReply(report, asked.weights))
            answers[client] = encode_reply(reply)
            self.sent += len(message)
            self.received += len(answers[client])
        self.seconds += time.process_time() - began
        return answers

    def late(self) -> list[str]:
        return []


def measure(network: str, sites: int) -> dict[str, Any]:
    """One run of ROUNDS rounds in this process."""
    experiment = make_experiment(
        {
            "method": "fl-dp",
            "data": "smear",
            "unit": "record",
            "network": network,
            "pixels": 32,
            "clients": sites,
            "rounds": ROUNDS,
            "quorum": sites,
            "round_timeout": 60.0,
            "validation_images": 0,
            "road_images": 0,
            "road_test_images": 0,
            "threads": 1,
        }
    )
    federation = prepare_remote(experiment, [f"site-{i}" for i in range(sites)])
    echo = Echo()
    with tempfile.TemporaryDirectory() as scratch:
        folder = RunFolder.create(Path(scratch) / "run", experiment, [])
        marks: list[float] = []

        class Marks:
            """Notes the server's own processor time after every round."""

            def start(self, total_steps: int, done_steps: int) -> None:
                marks.append(time.process_time() - echo.seconds)

            def step(self, count: int) -> None: ...

            def round(self, record: dict[str, Any]) -> None:
                marks.append(time.process_time() - echo.seconds)

            def measure(self, what: str, done: int, total: int) -> None: ...

            def say(self, text: str) -> None: ...

        run_experiment(folder, Marks(), federation, echo)
    spent = [after - before for before, after in itertools.pairwise(marks)]
    return {
        "network": network,
        "sites": sites,
        "request_bytes": echo.sent / (ROUNDS * sites),
        "reply_bytes": echo.received / (ROUNDS * sites),
        "server_seconds_a_round": sorted(spent)[len(spent) // 2],
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def line_through(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Intercept and slope by least squares."""
    n = len(points)
    mx, my = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    slope = sum((x - mx) * (y - my) for x, y in points) / sum((x - mx) ** 2 for x, _ in points)
    return my - slope * mx, slope


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| network | sites | MB a request | MB a reply | server CPU s a round | peak memory MB |",
        "|---|---|---|---|---|---|",
    ]
    for r in rows:
        lines.append(
            f"| {r['network']} | {r['sites']} | {r['request_bytes'] / 1e6:.3f} |"
            f" {r['reply_bytes'] / 1e6:.3f} | {r['server_seconds_a_round']:.3f} |"
            f" {r['peak_memory_mb']:.0f} |"
        )
    lines += ["", "Lines through them, and what they give for 1,000 sites:", ""]
    for network in NETWORKS:
        own = [r for r in rows if r["network"] == network]
        if len(own) < 2:
            continue
        fixed, each = line_through([(r["sites"], r["server_seconds_a_round"]) for r in own])
        base, memory = line_through([(r["sites"], r["peak_memory_mb"]) for r in own])
        size = (own[-1]["request_bytes"] + own[-1]["reply_bytes"]) / 1e6
        lines.append(
            f"- {network}: {fixed:.3f} s + {1e3 * each:.1f} ms a site → {fixed + 1000 * each:.1f} s"
            f" a round; {base:.0f} MB + {memory:.2f} MB a site → {(base + 1000 * memory) / 1e3:.1f}"
            f" GB; {size:.2f} MB a site and round over the wire → {size:.1f} GB a round."
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure(sys.argv[2], int(sys.argv[3]))))
        sys.exit()
    path = RESULTS / "federation-growth.json"
    wanted = [(w.split(":")[0], int(w.split(":")[1])) for w in sys.argv[1:] if ":" in w]
    rows = json.loads(path.read_text())["rows"] if wanted else []
    if not wanted:
        counts = [int(word) for word in sys.argv[1:]] or [1, 5, 10, 25, 50]
        wanted = [(n, c) for n in NETWORKS for c in counts if c <= MOST.get(n, c)]
    for network, sites in wanted:
        # a process each, so that peak memory is its own
        words = [sys.executable, __file__, "--one", network, str(sites)]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        row = {**json.loads(done.stdout.splitlines()[-1]), "commit": commit()}
        print(row, flush=True)
        rows = [r for r in rows if (r["network"], r["sites"]) != (network, sites)] + [row]
        rows.sort(key=lambda r: (NETWORKS.index(r["network"]), r["sites"]))
        RESULTS.mkdir(exist_ok=True)
        about = {
            "command": command(),
            "versions": versions(),
            "machine": f"{platform.machine()}, one thread",
            "rows": rows,
        }
        write_json(path, about)
        (RESULTS / "federation-growth.md").write_text(table(rows))
    print(table(rows))
