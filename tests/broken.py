"""Methods and networks as a user writes them on the first day: each fails in one way.

`REPAIRED[0]` mends those that fail while they train.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from support import Micro, micro
from xcal.methods.base import COMMON_KEYS, PRIVATE_KEYS
from xcal.methods.dp_fedavg import CentralNoise
from xcal.methods.fl_dp import StaticNoise

REPAIRED = [False]
_CALLS = [0]


def again(*, repaired: bool = False) -> None:
    """As if the process began anew."""
    REPAIRED[0], _CALLS[0] = repaired, 0


def _times() -> int:
    _CALLS[0] += 1
    return 0 if REPAIRED[0] else _CALLS[0]


def _method(**changes: Any) -> Any:
    """A sound method, changed; None takes something away."""
    sound = StaticNoise(name="mine")
    parts = {
        name: getattr(sound, name)
        for name in "name private pooled uses plan load_state begin_round step".split()
    }
    parts |= {key: staticmethod(v) if callable(v) else v for key, v in changes.items()}
    kept = {k: staticmethod(v) if callable(v) else v for k, v in parts.items() if v is not None}
    return type("Mine", (), kept)()


def _boom(*given: Any) -> Any:
    raise LookupError("no such ward")


def _leave(*given: Any) -> Any:
    raise SystemExit(0)


# --- methods that can be known before the first charge --------------------------------------------

no_begin_round = _method(begin_round=None)
no_name = _method(name=None)
no_step = _method(step=None)
a_class = StaticNoise
a_number = 7
step_of_two = _method(step=lambda context, step: None)
plan_of_one = _method(plan=lambda experiment: None)
step_is_text = _method(step="step")
unknown_key = _method(uses=COMMON_KEYS | PRIVATE_KEYS | {"epsilom"})
uses_text = _method(uses="epsilon")
uses_nothing = _method(uses=frozenset())
private_text = _method(private="yes")
plan_raises = _method(plan=_boom)
plan_leaves = _method(plan=_leave)
plan_is_number = _method(plan=lambda *given: 3.0)
plan_of_text = _method(plan=lambda *g: replace(StaticNoise().plan(*g), sigma_static="large"))
load_state_raises = _method(load_state=_boom)
begin_round_raises = _method(begin_round=_boom)
state_is_tensor = _method(begin_round=lambda state: torch.zeros(1))
half_a_server = _method(server_step=lambda *given: None)
variant_raises = _method(variant=_boom)
variant_is_none = _method(variant=lambda experiment: None)
check_network_raises = _method(check_network=_boom)


class _Property(StaticNoise):
    @property
    def needs_validation(self) -> bool:
        raise LookupError("no such ward")


property_raises = _Property("mine")


@dataclass(frozen=True)
class _NoServerState(CentralNoise):
    def load_server_state(self, saved: Any, experiment: Any) -> None:
        raise LookupError("no such ward")


server_state_raises = _NoServerState(name="mine")

METHODS_BEFORE = {
    "no_begin_round": "begin_round",
    "no_name": "name",
    "no_step": "step",
    "a_class": "class StaticNoise",
    "a_number": "has no 'name'",
    "step_of_two": "step(context, step, experiment, plan, state)",
    "plan_of_one": "plan(experiment, units, own_rounds)",
    "step_is_text": "not a function",
    "unknown_key": "epsilom",
    "uses_text": "uses",
    "uses_nothing": "delta",
    "private_text": "private",
    "plan_raises": "LookupError: no such ward",
    "plan_leaves": "SystemExit",
    "plan_is_number": "float",
    "plan_of_text": "sigma_static",
    "load_state_raises": "LookupError: no such ward",
    "begin_round_raises": "LookupError: no such ward",
    "state_is_tensor": "Tensor",
    "half_a_server": "server_plan",
    "variant_raises": "LookupError: no such ward",
    "variant_is_none": "has no",
    "check_network_raises": "LookupError: no such ward",
    "property_raises": "LookupError: no such ward",
    "server_state_raises": "LookupError: no such ward",
}

# --- methods that fail while they train -----------------------------------------------------------

_SOUND = StaticNoise(name="mine")


def _then(change: Any, *, after: int = 3) -> Any:
    """Sound for `after` steps; from then on `change` of the arguments and the honest result."""

    def step(context: Any, number: int, *given: Any) -> Any:
        count = _times()
        if not count or count <= after:
            return _SOUND.step(context, number, *given)
        return change(context, number, *given)

    return _method(step=step)


def _at_once(*given: Any) -> Any:
    return _boom() if _times() else _SOUND.step(*given)


def _charged_first(context: Any, number: int, *given: Any) -> Any:
    _SOUND.step(context, number, *given)
    return _boom()


def _record(**changes: Any) -> Any:
    def change(*given: Any) -> Any:
        state, record = _SOUND.step(*given)
        return state, replace(record, **changes)

    return change


def _later(function: Any, sound: Any, *, after: int) -> Any:
    def call(*given: Any) -> Any:
        return function(*given) if _times() > after else sound(*given)

    return call


raises_at_once = _method(step=_at_once)
raises = _then(_boom)
leaves = _then(_leave)
charges_and_raises = _then(_charged_first)
returns_none = _then(lambda *given: (_SOUND.step(*given), None)[1])
returns_record = _then(lambda *given: _SOUND.step(*given)[1])
returns_number = _then(lambda *given: (_SOUND.step(*given), 4)[1])
state_of_tensors = _then(lambda *given: (torch.zeros(2), _SOUND.step(*given)[1]))
record_of_tensors = _then(_record(sigma=torch.zeros(2)))
record_of_another = _then(_record(step=99))
record_not_finite = _then(_record(share_spent=float("nan")))
# One call when it is looked at and one in each of the many times that it is asked for.
plan_raises_later = _method(plan=_later(_boom, _SOUND.plan, after=5))
begin_round_raises_later = _method(begin_round=_later(_boom, _SOUND.begin_round, after=12))
paper_raises = _method(epsilon_paper=lambda *given: _boom() if _times() else None)
paper_of_text = _method(epsilon_paper=lambda *given: "much" if _times() else None)

STEPS = (6, 6, 5)  # of a round, by client of TINY
METHODS_WHILE = {  # charges at the first client, and a word of the sentence
    "raises_at_once": (0, "LookupError: no such ward"),
    "raises": (3, "LookupError: no such ward"),
    "leaves": (3, "SystemExit"),
    "charges_and_raises": (4, "LookupError: no such ward"),
    "returns_none": (4, "None from step"),
    "returns_record": (4, "StepRecord from step"),
    "returns_number": (4, "int from step"),
    "state_of_tensors": (4, "Tensor from step"),
    "record_of_tensors": (4, "sigma"),
    "record_of_another": (4, "99"),
    "record_not_finite": (4, "share_spent"),
    "paper_raises": (STEPS[0], "LookupError: no such ward"),
    "paper_of_text": (STEPS[0], "str from epsilon_paper"),
}


@dataclass(frozen=True)
class _ServerRaises(CentralNoise):
    def server_step(self, *given: Any) -> Any:
        found = super().server_step(*given)
        return _boom() if _times() else found


@dataclass(frozen=True)
class _ServerForgets(CentralNoise):
    def server_step(self, *given: Any) -> Any:
        update, state = super().server_step(*given)
        return (dict(list(update.items())[1:]) if _times() else update), state


server_raises = _ServerRaises(name="mine")
server_forgets = _ServerForgets(name="mine")


# --- networks -------------------------------------------------------------------------------------


def no_seed(classes: int) -> nn.Module:
    return micro(classes)


def makes_none(classes: int, *, seed: int) -> None:
    return None


def factory_raises(classes: int, *, seed: int) -> nn.Module:
    return _boom()


an_instance = micro(3)
a_text = "network"


def all_frozen(classes: int, *, seed: int) -> nn.Module:
    return micro(classes, seed=seed).requires_grad_(False)


def _changed(**parts: Any) -> Any:
    def build(classes: int, *, seed: int) -> nn.Module:
        kind = type("Mine", (Micro,), parts)
        model = kind(classes)
        model.load_state_dict(micro(classes, seed=seed).state_dict())
        return model

    return build


def _bare(classes: int, *, seed: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, classes))


no_cam_layer = _bare
cam_layer_nowhere = _changed(cam_layer="nowhere")
cam_layer_is_module = _changed(cam_layer=property(lambda self: self.act))
head_layer_nowhere = _changed(head_layer="nowhere")
two_columns = _changed(forward=lambda self, x: Micro.forward(self, x)[:, :2])
one_row = _changed(forward=lambda self, x: Micro.forward(self, x)[:1])
answers_dict = _changed(forward=lambda self, x: {"logits": Micro.forward(self, x)})
answers_numpy = _changed(forward=lambda self, x: Micro.forward(self, x).detach().numpy())
answers_whole = _changed(
    forward=lambda self, x: Micro.forward(self, x).argmax(1)[:, None] + 0 * x[:, :3, 0, 0].long()
)
forward_raises = _changed(forward=_boom)
train_raises = _changed(train=_boom)


def batch_norm(classes: int, *, seed: int) -> nn.Module:
    model = micro(classes, seed=seed)
    model.norm = nn.BatchNorm2d(8)
    return model


NETWORKS = {
    "no_seed": "no_seed(classes, *, seed)",
    "makes_none": "NoneType",
    "factory_raises": "LookupError: no such ward",
    "an_instance": "function",
    "a_text": "not a function",
    "all_frozen": "no parameter that trains",
    "no_cam_layer": "cam_layer",
    "cam_layer_nowhere": "'nowhere'",
    "cam_layer_is_module": "cam_layer",
    "head_layer_nowhere": "'nowhere'",
    "two_columns": "3 classes",
    "one_row": "3 classes",
    "answers_dict": "dict",
    "answers_numpy": "ndarray",
    "answers_whole": "int64",
    "forward_raises": "LookupError: no such ward",
    "train_raises": "LookupError: no such ward",
    "batch_norm": "GroupNorm",
}


class _TiresOut(Micro):
    """Sound when it is looked at, not as it goes on."""

    def forward(self, images: Tensor) -> Tensor:
        if _times() > 40:
            _boom()
        return super().forward(images)


def tires_out(classes: int, *, seed: int) -> nn.Module:
    model = _TiresOut(classes)
    model.load_state_dict(micro(classes, seed=seed).state_dict())
    return model
