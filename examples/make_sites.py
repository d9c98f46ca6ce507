"""Two made-up hospitals for the examples: python examples/make_sites.py sites

Each folder is what an owner has: the data, a ledger that carries a limit for life, and a policy.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import xcal

POLICY = """\
epsilon_total = 8.0    # of all runs together, as in the ledger
delta_total = 1e-3
epsilon_run = 4.0      # of one run
delta_run = 5e-4
sigma_min = 0.5        # lowest noise multiplier
methods = ["dp-sgd"]   # loops that xcal.PrivacyEngine makes private
unit = "group"         # patients
"""


def make_site(site: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    findings = rng.integers(0, 2, 240)
    scans = rng.normal(size=(240, 1, 8, 8)).astype(np.float32)
    scans[findings == 1, :, 2:5, 2:5] += 1.5
    patients = np.arange(240) // 2  # two scans each
    xcal.Ledger.create(site, population=site.name, unit="group", epsilon=8.0, delta=1e-3)
    (site / "policy.toml").write_text(POLICY)
    np.savez(site / "data.npz", scans=scans, findings=findings, patients=patients)


if __name__ == "__main__":
    for number in (1, 2):
        make_site(Path(sys.argv[1]) / f"site-{number}", number)
