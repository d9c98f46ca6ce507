"""An Executor: its own training loop, made private by xcal.PrivacyEngine."""

import os
from pathlib import Path

import task
import torch
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from torch.utils.data import DataLoader

import xcal
from xcal.errors import UserError


class OwnExecutor(Executor):
    """What the job proposes; the site's policy and ledger decide."""

    def __init__(self, run: str, rounds: int, epochs: int, epsilon: float, delta: float) -> None:
        super().__init__()
        self.run, self.rounds, self.epochs = run, rounds, epochs
        self.epsilon, self.delta = epsilon, delta

    def execute(
        self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        # Where the sites lie is the operator's to say, and no job's.
        site = Path(os.environ["OWN_SITES"]) / fl_ctx.get_identity_name()
        dataset, patients = task.load(site)
        model = task.Network()
        weights = from_shareable(shareable).data
        model.load_state_dict({k: torch.as_tensor(v) for k, v in weights.items()})
        try:
            with xcal.PrivacyEngine(ledger=site, policy=xcal.policy(site)) as engine:
                private, optimizer, criterion, loader = engine.make_private_with_epsilon(
                    module=model,
                    optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
                    data_loader=DataLoader(dataset, batch_size=40),
                    groups=patients,
                    run=self.run,  # rounds, jobs and processes of this name are one training
                    rounds=self.rounds,
                    epochs=self.epochs,
                    target_epsilon=self.epsilon,
                    target_delta=self.delta,
                    max_grad_norm=1.0,
                )
                for _ in range(self.epochs):
                    for x, y in loader:
                        if abort_signal.triggered:
                            return make_reply(ReturnCode.TASK_ABORTED)
                        optimizer.zero_grad()
                        criterion(private(x), y).backward()
                        optimizer.step()
        except UserError as error:
            self.log_error(fl_ctx, f"refused: {error}")  # the sentence stays here
            return make_reply(ReturnCode.EXECUTION_EXCEPTION)
        # Weights are releases and the number of patients is public. A training loss is neither.
        released = {name: value.numpy() for name, value in model.state_dict().items()}
        meta = {MetaKey.NUM_STEPS_CURRENT_ROUND: len(set(patients))}
        return DXO(DataKind.WEIGHTS, data=released, meta=meta).to_shareable()
