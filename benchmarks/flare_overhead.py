"""What FLARE adds to a round: the server's round less its slowest site's own work.

    python benchmarks/flare_overhead.py FEDERATION RUN

FEDERATION is a local federation's folder (`xcal federation init --local`), RUN a run that was not
cut off in it. Reads the server's record and the sites' own logs; set validation_images and
road_images to 0 for the run, or what the server measures is counted too.
"""

from __future__ import annotations

import datetime
import json
import re
import sys
from pathlib import Path

BEGINS, ENDS = "invoking task executor", "finished processing task"


def work(site: Path, run: str) -> list[float]:
    """Seconds that each of a site's rounds took, from its own log."""
    for meta in site.glob("kit/*/meta.json"):
        if json.loads(meta.read_text()).get("name") == run:
            lines = (meta.parent / "log.txt").read_text().splitlines()
            break
    else:
        raise SystemExit(f"{site} knows no run {run}")
    moments = {BEGINS: [], ENDS: []}  # type: dict[str, list[datetime.datetime]]
    for line in lines:
        for what, found in moments.items():
            if what in line and (stamp := re.match(r"[\d-]+ [\d:]+,\d+", line)):
                found.append(datetime.datetime.strptime(stamp[0], "%Y-%m-%d %H:%M:%S,%f"))
    pairs = zip(moments[BEGINS], moments[ENDS], strict=True)
    return [(end - begin).total_seconds() for begin, end in pairs]


if __name__ == "__main__":
    place, run = Path(sys.argv[1]), sys.argv[2]
    path = place / "coordinator" / "server" / "runs" / run / "rounds.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    sites = [work(p.parent.parent, run) for p in sorted(place.glob("*/site/site.toml"))]
    for record, *own in zip(records, *sites, strict=True):
        rest = record["seconds"] - max(own)
        print(
            f"round {record['round'] + 1}: {record['seconds']:.2f} s, slowest of {len(own)} sites"
            f" {max(own):.2f} s, FLARE and the server {rest:.2f} s"
        )
