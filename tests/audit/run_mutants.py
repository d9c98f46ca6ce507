"""Every mutant against the checks that must notice it; every check without a mutant must pass.

    python tests/audit/run_mutants.py [results.json] [mutant …]

Exit code 1 where a mutant survives or a check fails without one. With names, only those mutants are
planted, and their rows in the results are replaced.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = str(ROOT / "tests")
sys.path.insert(0, TESTS)
# For the processes that checks start.
os.environ["PYTHONPATH"] = os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")])
os.environ["OMP_NUM_THREADS"] = "1"
os.chdir(ROOT)


def run(checks: tuple[str, ...], mutant: str | None) -> str | None:
    """None where pytest is content with these checks, else the first line of what it says.

    In a fork of this process, which spares the seconds of importing torch.
    """
    from audit import mutants

    # No time limit: a slow machine must not look like a caught mutant.
    words = ["-q", "-x", "-n", "0", "-o", "timeout=0", *checks]
    with tempfile.TemporaryFile("w+") as told:
        child = os.fork()
        if child == 0:
            code = 3
            try:
                for stream in (1, 2):
                    os.dup2(told.fileno(), stream)
                os.environ.pop("XCAL_MUTANT", None)
                if mutant is not None:
                    os.environ["XCAL_MUTANT"] = mutant
                code = int(pytest.main(words, plugins=[mutants]))
            finally:
                sys.stdout.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        told.seek(0)
        text = told.read()
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return None
    failed = [line for line in text.splitlines() if line.startswith("FAILED")]
    if code != 1 or not failed:
        raise SystemExit(f"pytest could not run {checks}:\n{text[-3000:]}")
    return failed[0]


def main(results: Path | None, names: list[str]) -> int:
    from audit.mutants import BY_NAME, MUTANTS

    began = time.monotonic()
    chosen = [BY_NAME[name] for name in names] or list(MUTANTS)
    everything = tuple(sorted({check for mutant in chosen for check in mutant.checks}))
    trouble = run(everything, None)
    print(f"without a mutant: {trouble or 'all checks pass'}", flush=True)
    rows = []
    for mutant in chosen:
        caught = {check: run((check,), mutant.name) is not None for check in mutant.checks}
        rows.append({"mutant": mutant.name, "what": mutant.what, "caught": caught})
        for check, noticed in caught.items():
            print(f"{mutant.name:16} {'caught' if noticed else 'SURVIVES'}  {check}", flush=True)
    seconds = round(time.monotonic() - began)
    print(f"{len(rows)} mutants, {seconds} s")
    if results is not None:
        results.parent.mkdir(parents=True, exist_ok=True)
        if names and results.exists():
            before = json.loads(results.read_text())
            known = {row["mutant"]: row for row in [*before["mutants"], *rows]}
            rows_kept = [known[m.name] for m in MUTANTS if m.name in known]
            found = {**before, "sound": before["sound"] and trouble is None, "mutants": rows_kept}
        else:
            found = {"sound": trouble is None, "seconds": seconds, "mutants": rows}
        results.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if trouble is None and all(any(r["caught"].values()) for r in rows) else 1


if __name__ == "__main__":
    given = sys.argv[1:]
    path = Path(given.pop(0)) if given and given[0].endswith(".json") else None
    sys.exit(main(path, given))
