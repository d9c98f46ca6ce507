"""The server: Flower's own FedAvg, which knows nothing of privacy."""

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from own_app import task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    torch.manual_seed(0)
    strategy = FedAvg(fraction_evaluate=0.0, min_evaluate_nodes=0)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(task.network().state_dict()),
        num_rounds=int(context.run_config["num-server-rounds"]),
    )
    for number, metrics in result.train_metrics_clientapp.items():
        print(f"round {number}: {dict(metrics)}", flush=True)
    out = str(context.run_config.get("out") or "")
    if out:
        torch.save(result.arrays.to_torch_state_dict(), out)
