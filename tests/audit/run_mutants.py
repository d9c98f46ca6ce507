"""Every mutant against the checks that must notice it; every check without a mutant must pass.

    python tests/audit/run_mutants.py [results.json]

Exit code 1 where a mutant survives or a check fails without one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))


def run(checks: tuple[str, ...], mutant: str | None) -> str | None:
    """None where pytest is content with these checks, else the first line of what it says."""
    paths = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    environment.pop("XCAL_MUTANT", None)
    if mutant is not None:
        environment["XCAL_MUTANT"] = mutant
    # No time limit: a slow machine must not look like a caught mutant.
    words = ["-q", "-x", "-n", "0", "-o", "timeout=0", "-p", "audit.mutants", *checks]
    found = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    if found.returncode == 0:
        return None
    failed = [line for line in found.stdout.splitlines() if line.startswith("FAILED")]
    if found.returncode != 1 or not failed:
        raise SystemExit(f"pytest could not run {checks}:\n{found.stdout[-3000:]}{found.stderr}")
    return failed[0]


def main() -> int:
    from audit.mutants import MUTANTS

    began = time.monotonic()
    everything = tuple(sorted({check for mutant in MUTANTS for check in mutant.checks}))
    trouble = run(everything, None)
    print(f"without a mutant: {trouble or 'all checks pass'}", flush=True)
    rows = []
    for mutant in MUTANTS:
        caught = {check: run((check,), mutant.name) is not None for check in mutant.checks}
        rows.append({"mutant": mutant.name, "what": mutant.what, "caught": caught})
        for check, noticed in caught.items():
            print(f"{mutant.name:15} {'caught' if noticed else 'SURVIVES'}  {check}", flush=True)
    seconds = round(time.monotonic() - began)
    print(f"{len(rows)} mutants, {seconds} s")
    sound = trouble is None
    if len(sys.argv) > 1:
        path = Path(sys.argv[1])
        path.parent.mkdir(parents=True, exist_ok=True)
        found = {"sound": sound, "seconds": seconds, "mutants": rows}
        path.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if sound and all(any(r["caught"].values()) for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
