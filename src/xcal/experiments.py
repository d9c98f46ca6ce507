"""Experiments from files, keys and presets: checked before anything runs."""

from __future__ import annotations

import copyreg
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError, create_model

from xcal.config import Experiment, decimal_point, nearest, parse_set, read_toml
from xcal.errors import UserError
from xcal.first_edition import BEFORE_THE_KEY, RENAMED, names_of_today
from xcal.methods.registry import METHODS, get_method
from xcal.presets import PRESETS, left_to_the_method


def experiment_type(method: str = "") -> type[Experiment]:
    """The keys that every method has and those of all built-in ones, so that one file serves all.

    A method from elsewhere adds its own `parameters`, a subclass of `Experiment`: to know them its
    code is run.
    """
    own: type[Experiment] = Experiment
    if ":" in method:
        with suppress(UserError):  # said where it is used: a run's files can be read without it
            own = getattr(get_method(method), "parameters", Experiment)
    return _joined(own)


@lru_cache(maxsize=64)
def _joined(own: type[Experiment]) -> type[Experiment]:
    kinds = [own, *(getattr(m, "parameters", Experiment) for m in METHODS.values())]
    leaves = [k for k in dict.fromkeys(kinds) if not any(k in o.__mro__[1:] for o in kinds)]
    made: type[Experiment] = create_model("Experiment", __base__=tuple(leaves))
    copyreg.pickle(made, _pickled)
    return made


def _pickled(experiment: Experiment) -> tuple[Any, ...]:
    """A class that is made when it is needed is found again by its method."""
    return _unpickled, (dict(experiment), experiment.model_fields_set)


def _unpickled(values: dict[str, Any], given: set[str]) -> Experiment:
    return experiment_type(values["method"]).model_construct(_fields_set=given, **values)


def travels(kind: type[Experiment], name: str) -> bool:
    """Whether a server sends this key to its clients; a method's own are sent unless marked."""
    mark = kind.model_fields[name].json_schema_extra
    return not isinstance(mark, dict) or bool(mark.get("travels", True))


KEYS = tuple(experiment_type().model_fields)
# What no server may set: its own business, or what only a client's owner decides.
LOCAL_KEYS = frozenset(k for k in KEYS if not travels(experiment_type(), k))


def _with_preset(values: dict[str, Any], where: str) -> dict[str, Any]:
    """The values on top of the layer of defaults that their `preset` names, if any."""
    if (name := values.get("preset")) is None:
        return values
    if not isinstance(name, str) or name not in PRESETS:
        raise UserError(
            f"Unknown preset {name!r} in {where}.{nearest(str(name), tuple(PRESETS))}"
            f" Known: {', '.join(PRESETS)}."
        )
    return {**PRESETS[name](values), **values}


def make_experiment(values: Mapping[str, Any], where: str = "the experiment") -> Experiment:
    """Check values into an Experiment; the first problem becomes one sentence.

    A preset is a layer beneath the values given here, and is resolved into plain keys.
    """
    values = names_of_today(values)
    kind = experiment_type(str(values.get("method", "")))
    known = tuple(kind.model_fields)
    for key in values:
        if key not in known:
            raise UserError(f"Unknown key {key!r} in {where}.{nearest(str(key), known)}")
    given = set(values)
    values = _with_preset(values, where)
    try:
        made = kind(**values)
        made = made.model_copy(update=left_to_the_method(dict(made)))
        made.model_fields_set.intersection_update(given)  # what a preset filled in was not given
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"][:1]) or "?"
        what = first["msg"][:1].lower() + first["msg"][1:]
        raise UserError(
            f"{key} = {values.get(key)!r} in {where} is not accepted: {what}"
            f" ({kind.model_fields[key].description}).{decimal_point(values.get(key))}"
        ) from None
    if (made.public_validation is True) != bool((made.public_validation_by or "").strip()):
        raise UserError(
            f'public_validation = true and public_validation_by = "who agreed" go together, and'
            f" {where} has only one of them: give both, or neither."
        )
    return made


def read_pinned(path: Path) -> Experiment:
    """A run's resolved configuration: a key that is not in the file is None, not a preset's."""
    values = names_of_today(read_toml(path))
    fields = experiment_type(str(values.get("method", ""))).model_fields
    unset = {name: None for name, field in fields.items() if field.default is None}
    unset["road_test_images"] = None  # all of them, which a file cannot say otherwise
    return make_experiment({**unset, **BEFORE_THE_KEY, **values}, str(path))


def load_experiment(path: Path | None, sets: Sequence[str] = ()) -> tuple[Experiment, set[str]]:
    """File, then settings on top of it; also which keys were given and not defaulted."""
    values = {} if path is None else names_of_today(read_toml(path))
    where = "the settings" if path is None else str(path)
    make_experiment(values, where)  # so that an error in the file names the file
    for text in sets:
        key, value = parse_set(text)
        values[RENAMED.get(key, key)] = value
    return make_experiment(values, where if not sets else "the settings"), set(values)
