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


def passes(checks: tuple[str, ...], mutant: str | None) -> bool:
    """Whether pytest is content with these checks, with or without the mutant."""
    paths = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    environment.pop("XCAL_MUTANT", None)
    if mutant is not None:
        environment["XCAL_MUTANT"] = mutant
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "audit.mutants", *checks],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    if found.returncode not in (0, 1):
        raise SystemExit(f"pytest could not run {checks}:\n{found.stdout[-3000:]}{found.stderr}")
    return found.returncode == 0


def main() -> int:
    from audit.mutants import MUTANTS

    began = time.monotonic()
    everything = tuple(sorted({check for mutant in MUTANTS for check in mutant.checks}))
    sound = passes(everything, None)
    print(f"without a mutant: {'all checks pass' if sound else 'A CHECK FAILS'}", flush=True)
    rows = []
    for mutant in MUTANTS:
        caught = {check: not passes((check,), mutant.name) for check in mutant.checks}
        rows.append({"mutant": mutant.name, "what": mutant.what, "caught": caught})
        for check, noticed in caught.items():
            print(f"{mutant.name:15} {'caught' if noticed else 'SURVIVES'}  {check}", flush=True)
    seconds = round(time.monotonic() - began)
    print(f"{len(rows)} mutants, {seconds} s")
    if len(sys.argv) > 1:
        path = Path(sys.argv[1])
        path.parent.mkdir(parents=True, exist_ok=True)
        found = {"sound": sound, "seconds": seconds, "mutants": rows}
        path.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if sound and all(any(r["caught"].values()) for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
