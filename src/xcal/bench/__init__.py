"""Step times and memory of our training step, beside plain SGD and the peers."""

from __future__ import annotations

from xcal.bench.results import write_results
from xcal.bench.steps import run_bench
from xcal.bench.variants import NETWORKS, VARIANTS

__all__ = ["NETWORKS", "VARIANTS", "run_bench", "write_results"]
