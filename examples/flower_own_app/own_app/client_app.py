"""A client: its own training loop, made private by xcal.PrivacyEngine."""

import logging
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.utils.data import DataLoader

import xcal
from own_app import task
from xcal.errors import UserError

app = ClientApp()


def site_of(context: Context) -> Path:
    """The folder that the SuperNode's operator named; in a simulation, one of all sites'."""
    if "site" in context.node_config:
        return Path(str(context.node_config["site"]))
    number = int(context.node_config["partition-id"]) + 1
    return Path(str(context.run_config["sites"])) / f"site-{number}"


@app.train()
def train(msg: Message, context: Context) -> Message:
    site, config = site_of(context), context.run_config
    dataset, patients = task.load(site)
    model = task.network()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    epochs = int(config["local-epochs"])
    try:
        with xcal.PrivacyEngine(ledger=site, policy=xcal.policy(site)) as engine:
            private, optimizer, criterion, loader = engine.make_private_with_epsilon(
                module=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
                data_loader=DataLoader(dataset, batch_size=40),
                groups=patients,
                run=str(config["run"]),  # every round is a new process: the ledger ties them
                rounds=int(config["num-server-rounds"]),
                epochs=epochs,
                target_epsilon=float(config["epsilon"]),
                target_delta=float(config["delta"]),
                max_grad_norm=1.0,
            )
            for _ in range(epochs):
                for x, y in loader:
                    optimizer.zero_grad()
                    criterion(private(x), y).backward()
                    optimizer.step()
            steps = engine.steps
    except UserError as error:
        logging.error("refused: %s", error)  # the sentence stays here
        return Message(Error(1, reason=getattr(error, "code", "ledger")), reply_to=msg)
    # Weights are releases; counts of patients and of steps are public. A training loss is neither.
    told = MetricRecord({"num-examples": len(set(patients)), "steps": steps})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": told})
    return Message(content, reply_to=msg)
