"""Step times and memory of our training step, beside plain SGD and the peers."""

from __future__ import annotations

from peers.results import write_results
from peers.steps import run_bench
from peers.variants import NETWORKS, VARIANTS

__all__ = ["NETWORKS", "VARIANTS", "run_bench", "write_results"]
