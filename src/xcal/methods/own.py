"""A method of the user's own: what it is, is looked at before anything is charged."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection
from dataclasses import fields, is_dataclass
from inspect import signature
from typing import Any, cast

from torch import Tensor

from xcal.config import Experiment, nearest
from xcal.dp.calibration import Plan
from xcal.dp.filter import BudgetExhausted
from xcal.methods.base import CentralMethod, ChecksNetwork, Method, save_state
from xcal.methods.context import StepRecord
from xcal.plugins import MANUAL, OwnCodeError, check_call, own_code


def _of(protocol: type, *names: str) -> dict[str, tuple[str, ...]]:
    """What a method is asked, by name, with what it is given: as `methods/base.py` has it."""
    return {n: tuple(signature(getattr(protocol, n)).parameters)[1:] for n in names}


NEEDED = _of(Method, "plan", "load_state", "begin_round", "step")
SERVER = _of(CentralMethod, "server_plan", "load_server_state", "server_step")
OPTIONAL = {
    **_of(Method, "epsilon_paper"),
    **_of(ChecksNetwork, "check_network"),
    "variant": ("experiment",),
}
VALUES = ("name", "private", "pooled", "uses")
_PRIVATE = frozenset({"epsilon", "delta", "max_grad_norm"})


class OwnMethod:
    """A method from elsewhere, as the rest of the package knows methods.

    Its values are read once, its functions looked at before they are called; whatever it raises or
    returns that it should not is one sentence that names it.
    """

    def __init__(self, path: str, method: Any, known: frozenset[str]) -> None:
        self._path = path
        self._known = known
        if isinstance(method, type):
            raise self._refusal(f"is the class {method.__name__}: name an object made of it")
        with own_code("method", path, "its attributes"):
            missing = [n for n in (*VALUES, *NEEDED) if not hasattr(method, n)]
            asked = {**NEEDED, **OPTIONAL, **SERVER}
            there = {n: getattr(method, n) for n in asked if getattr(method, n, None) is not None}
            values = {n: getattr(method, n, None) for n in VALUES}
            self.needs_validation = bool(getattr(method, "needs_validation", False))
            own = getattr(method, "parameters", Experiment)
        if not isinstance(own, type) or not issubclass(own, Experiment):
            raise self._refusal(
                "has 'parameters' that are not a subclass of xcal.config.Experiment"
            )
        self.parameters: type[Experiment] = own
        if missing:
            raise self._refusal(f"has no {missing[0]!r}")
        of_server = [n for n in SERVER if n in there]
        if of_server and len(of_server) < len(SERVER):
            lacking = next(n for n in SERVER if n not in there)
            raise self._refusal(f"has {of_server[0]!r} and no {lacking!r}")
        for name, given in asked.items():
            if name in there:
                check_call("method", path, there[name], name, given)
                setattr(self, name, self._asked(name, there[name]))
        self._take_values(values)
        self._try_states()

    def _refusal(self, what: str) -> OwnCodeError:
        return OwnCodeError(f"The method {self._path!r} {what}: see {MANUAL}.")

    def _take_values(self, values: dict[str, Any]) -> None:
        name, private, pooled, uses = (values[n] for n in VALUES)
        if not isinstance(name, str) or not name.strip():
            raise self._refusal(f"has the name {name!r}, which is not text")
        for key, value in (("private", private), ("pooled", pooled)):
            if not isinstance(value, bool):
                raise self._refusal(f"has {key} = {value!r}, which is neither True nor False")
        if isinstance(uses, str) or not isinstance(uses, Collection):
            raise self._refusal("has a 'uses' that is not a set of an experiment's keys")
        for key in uses:
            if key not in self._known and key not in self.parameters.model_fields:
                raise OwnCodeError(
                    f"The method {self._path!r} uses the key {key!r}, which no experiment has"
                    f" (see {MANUAL}).{nearest(str(key), sorted(self._known))}"
                )
        lacking = sorted(_PRIVATE - set(uses))
        if private and lacking:
            raise self._refusal(f"calls itself private, and its 'uses' lacks {lacking[0]!r}")
        self.name: str = name
        self.private: bool = private
        self.pooled: bool = pooled
        self.uses: frozenset[str] = frozenset(uses)

    def _try_states(self) -> None:
        """What is kept between rounds must be one that can be kept."""
        method = cast(Method, self)
        begun = method.begin_round(method.load_state(None))
        method.load_state(json.loads(json.dumps(save_state(begun))))

    def epsilon_paper(self, experiment: Any, plan: Any, state: Any) -> float | None:
        return None

    def _asked(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        check = {
            "plan": self._plan,
            "server_plan": self._server_plan,
            "load_state": self._state,
            "begin_round": self._state,
            "load_server_state": self._state,
            "step": self._stepped,
            "server_step": self._server_stepped,
            "epsilon_paper": self._epsilon,
            "variant": self._variant,
        }.get(name)

        stops = (BudgetExhausted,) if name in ("step", "server_step") else ()

        def call(*given: Any) -> Any:
            try:
                with own_code("method", self._path, name, let=stops):
                    found = function(*given)
            except BudgetExhausted as refusal:
                self._state(name, refusal.state)
                raise
            return found if check is None else check(name, found, *given)

        return call

    # --- what came back -------------------------------------------------------------------------

    def _returned(self, name: str, found: Any, instead: str) -> OwnCodeError:
        what = None if found is None else type(found).__name__
        return self._refusal(f"returned {what} from {name} where it must return {instead}")

    def _plan(self, name: str, found: Any, *given: Any) -> Any:
        return None if found is None else self._server_plan(name, found)

    def _server_plan(self, name: str, found: Any, *given: Any) -> Any:
        if not isinstance(found, Plan):
            raise self._returned(name, found, "a Plan, such as plan_fixed or plan_static make")
        for field in fields(Plan):
            value = getattr(found, field.name)
            number = field.type in ("int", "float") or (
                field.type == "float | None" and value is not None
            )
            if number and not _is_number(value):
                raise self._refusal(f"made a plan with {field.name} = {value!r}")
        return found

    def _state(self, name: str, found: Any, *given: Any) -> Any:
        if found is None:
            return None
        if isinstance(found, type) or not is_dataclass(found):
            raise self._returned(name, found, "its state, a dataclass of plain values or None")
        try:
            json.dumps(save_state(found))
        except (TypeError, ValueError, RecursionError) as error:
            raise self._refusal(
                f"returned a state from {name} that cannot be kept as JSON ({error})"
            ) from None
        return found

    def _stepped(self, name: str, found: Any, *given: Any) -> Any:
        if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], StepRecord):
            raise self._returned(name, found, "its state and a StepRecord")
        state, record = found
        self._state(name, state)
        context, step = given[0], given[1]
        if (record.round, record.step) != (context.round, step):
            raise self._refusal(
                f"recorded step {record.step!r} of round {record.round!r} for step {step} of round"
                f" {context.round}"
            )
        for key in ("sigma", "share_spent", "signal", "clip"):
            value = getattr(record, key)
            if not _is_number(value) and (value is not None or key in ("sigma", "share_spent")):
                raise self._refusal(f"recorded a step with {key} = {value!r}")
        return found

    def _server_stepped(self, name: str, found: Any, *given: Any) -> Any:
        instead = "the mean update, with the names and shapes of the updates, and its state"
        if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], dict):
            raise self._returned(name, found, instead)
        update, state = found
        first = given[3][0] if given[3] else {}
        for key, value in first.items():
            if not isinstance(update.get(key), Tensor) or update[key].shape != value.shape:
                raise self._returned(name, update.get(key), f"{instead}; look at {key!r}")
        self._state(name, state)
        return found

    def _epsilon(self, name: str, found: Any, *given: Any) -> Any:
        if found is not None and not _is_number(found):
            raise self._returned(name, found, "a number or None")
        return found

    def _variant(self, name: str, found: Any, *given: Any) -> Any:
        return OwnMethod(self._path, found, self._known)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def own_method(path: str, method: Any, known: frozenset[str]) -> Method:
    """The user's method, held to what a method is. Raises `OwnCodeError`, before any charge.

    `known`: the keys of the built-in methods, which it may use beside its own `parameters`.
    """
    return cast(Method, OwnMethod(path, method, known))
