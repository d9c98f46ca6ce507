"""What masks cost a round, beside training: processor time and bytes, against the same unmasked.

    python benchmarks/masked_cost.py [SITES:PARAMETERS …]
    (default: 3, 10 and 50 sites with 3,000, 100,000 and 5,000,000 parameters)

*Site, unmasked*: Gaussian noise on the sum, rounding, the answer encoded. *Site, masked*: rounding,
the site's share of discrete noise, one stream of masks for every other site, the answer written
down, signed, encoded. *Server*: answers decoded and averaged, or decoded, checked and summed. Both
are measured in turn, and the ratio is that of one turn: what else the machine does moves both.
Processor seconds. Rows that are measured anew replace those in benchmarks/results/masked/cost.json.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from xcal.dp.distributed import DistributedGrid, Part
from xcal.dp.noise import NoiseKey, SecureNoise, release_tensors
from xcal.federation.aggregation import Mean
from xcal.federation.exchange import ClientReport, RoundReply
from xcal.federation.files import write_json
from xcal.federation.folder import command, commit, versions
from xcal.federation.masks import Attempt, Masked, MaskKeys, Roster, _signed, masked_sum
from xcal.federation.messages import Reply, decode_answer, encode_reply

RESULTS = Path(__file__).parent / "results" / "masked"
SITES, PARAMETERS = (3, 10, 50), (3_000, 100_000, 5_000_000)
TURNS, SIGMA, UNITS, LIMIT = 5, 4.0, 3_000, 1 << 30


def timed(work: Callable[..., Any], *given: Any) -> tuple[float, Any]:
    began = time.process_time()
    made = work(*given)
    return time.process_time() - began, made


def report_of(name: str) -> ClientReport:
    return ClientReport(name, UNITS, 1, False, 8.0, 1.0, None, 0.5, SIGMA, None, None, None)


def encoded(name: str, **answer: Any) -> bytes:
    reply = RoundReply(report_of(name), answer.get("weights"), (), answer.get("masked"))
    return encode_reply(Reply(name, "run", 0, reply))


class Measured:
    """One number of sites and of parameters; one site's work, and the server's on all answers."""

    def __init__(self, folder: Path, sites: int, size: int) -> None:
        self.names = [f"site-{i:02d}" for i in range(sites)]
        self.identities = {n: Ed25519PrivateKey.generate() for n in self.names}
        public = {n: k.public_key().public_bytes_raw() for n, k in self.identities.items()}
        self.roster = Roster(public, sites - 1)
        keys = {n: MaskKeys(folder / n, "run", n, self.identities[n], self.roster) for n in public}
        announced = {n: k.announce() for n, k in keys.items()}
        self.own = keys[self.names[0]]
        self.own.meet(announced)
        self.grid = DistributedGrid((Part("gradient", size, 1.0, SIGMA),), sites, sites - 1, UNITS)
        self.sum = torch.randn(size)
        self.noise = SecureNoise()

    def attempt(self, turn: int) -> Attempt:
        return Attempt("run", turn, 0, tuple(self.names), "0" * 64)

    def site_unmasked(self, turn: int) -> bytes:
        key = NoiseKey("0", "fl-dp", turn, 0, "gradient")
        return encoded(
            self.names[0], weights=release_tensors({"w": self.sum.clone()}, SIGMA, self.noise, key)
        )

    def site_masked(self, turn: int) -> bytes:
        key = NoiseKey("0", "fl-dp", turn, 0, "share")
        numbers = self.grid.round({"gradient": self.sum})
        numbers += self.noise.discrete_normals(key, self.grid.size, self.grid.scale)
        return encoded(self.names[0], masked=self.own.mask(self.attempt(turn), self.grid, numbers))

    def server_unmasked(self, answer: bytes) -> Any:
        replies = []
        for _ in self.names:
            got = decode_answer(answer, LIMIT)
            assert isinstance(got, Reply)
            replies.append(got.answer)
        return Mean().one("w", self.sum, replies)

    def others(self, turn: int) -> dict[str, bytes]:
        """Answers of all sites: what is in them is random, as masks make it."""
        found, attempt = {}, self.attempt(turn)
        data = np.random.default_rng(turn).bytes(self.grid.size * self.grid.width)
        for name in self.names:
            signature = self.identities[name].sign(_signed(attempt, name, data))
            found[name] = encoded(name, masked=Masked(name, attempt.context, data, signature))
        return found

    def server_masked(self, turn: int, answers: dict[str, bytes]) -> Any:
        sent = {}
        for name, data in answers.items():
            got = decode_answer(data, LIMIT)
            assert isinstance(got, Reply) and got.answer.masked is not None
            sent[name] = got.answer.masked
        return self.grid.decode(masked_sum(self.roster, self.attempt(turn), self.grid, sent))


def measure(sites: int, size: int) -> dict[str, Any]:
    turns: dict[str, list[float]] = {
        k: [] for k in ("site", "site masked", "server", "server masked")
    }
    with tempfile.TemporaryDirectory() as scratch:
        work = Measured(Path(scratch), sites, size)
        for turn in range(TURNS + 1):
            plain, answer = timed(work.site_unmasked, turn)
            hidden, masked = timed(work.site_masked, turn)
            averaged, _ = timed(work.server_unmasked, answer)
            answers = work.others(turn)
            summed, _ = timed(work.server_masked, turn, answers)
            if turn:  # the first one warms up
                for name, value in zip(turns, (plain, hidden, averaged, summed), strict=True):
                    turns[name].append(value)
    return {
        "sites": sites,
        "parameters": size,
        "bytes": len(answer),
        "bytes masked": len(masked),
        **{name: statistics.median(values) for name, values in turns.items()},
        **{
            f"{who} ratio": [b / a for a, b in zip(turns[who], turns[f"{who} masked"], strict=True)]
            for who in ("site", "server")
        },
        "made by": command(),
        "commit": commit(),
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| sites | parameters | MB an answer | masked | site CPU s | masked | ratio (range) |"
        " server CPU s | masked | ratio (range) |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        cells = [f"{r['sites']}", f"{r['parameters']:,}"]
        cells += [f"{r[k] / 1e6:.3f}" for k in ("bytes", "bytes masked")]
        for who in ("site", "server"):
            ratios = r[f"{who} ratio"]
            cells += [f"{r[who]:.4f}", f"{r[f'{who} masked']:.4f}"]
            cells.append(f"{statistics.median(ratios):.1f} ({min(ratios):.1f}–{max(ratios):.1f})")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(words: list[str]) -> None:
    torch.set_num_threads(1)
    pairs = [tuple(map(int, word.split(":"))) for word in words]
    path = RESULTS / "cost.json"
    known = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = {(r["sites"], r["parameters"]): r for r in known}
    for sites, size in pairs or [(n, d) for d in PARAMETERS for n in SITES]:
        rows[sites, size] = measure(sites, size)
        print(table([rows[sites, size]]).splitlines()[-1], flush=True)
        RESULTS.mkdir(parents=True, exist_ok=True)
        found = [rows[key] for key in sorted(rows, key=lambda k: (k[1], k[0]))]
        about = {"machine": platform.processor() or platform.machine(), "versions": versions()}
        write_json(path, {**about, "turns": TURNS, "rows": found})
        made = "; ".join(sorted({f"`{r['made by']}` at {r['commit']}" for r in found}))
        head = (
            "One round beside training, median of 5 turns, one thread; ratios of turns in which"
            f" both were measured one after the other. Made by {made}.\n\n"
        )
        (RESULTS / "cost.md").write_text(head + table(found))


if __name__ == "__main__":
    main(sys.argv[1:])
