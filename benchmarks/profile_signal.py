"""Where the signal's time goes: a profile of the inference pass that it adds to a step.

python benchmarks/profile_signal.py [network]
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
from torch.profiler import ProfilerActivity, profile

from xcal.experiments import make_experiment
from xcal.models.model_registry import build_network

if __name__ == "__main__":
    torch.set_num_threads(1)
    name = sys.argv[1] if len(sys.argv) > 1 else "resnet18"
    model = build_network(make_experiment({"network": name}), 8).eval()
    images = torch.randn(32, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for _ in range(3):
            model(images)
        with profile(activities=[ProfilerActivity.CPU]) as found:
            for _ in range(5):
                model(images)
        for size in (32, 16, 8, 4):
            times = []
            for _ in range(5):
                began = time.perf_counter()
                for part in images.split(size):
                    model(part)
                times.append(1e3 * (time.perf_counter() - began))
            print(f"32 images, {size} at a time: {statistics.median(times):.0f} ms")
    print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=8))
