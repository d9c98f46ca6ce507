"""The ClientApp: the same in Flower's simulation and on a SuperNode."""

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from xcal.federation.flower.flower_carrier import answer_name, answer_train

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    return answer_train(message, context)


@app.query()
def query(message: Message, context: Context) -> Message:
    return answer_name(message, context)
