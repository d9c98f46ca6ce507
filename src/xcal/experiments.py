"""Experiments from files, keys and presets: checked before anything runs."""

from __future__ import annotations

import copyreg
import json
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError, create_model

from xcal.config import BEFORE_THE_KEY, RENAMED, Experiment, nearest
from xcal.errors import UserError
from xcal.methods.registry import METHODS, get_method
from xcal.presets import PRESETS


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


def names_of_today(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values under the names that keys have today; of two names of one key the later counts."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found[RENAMED.get(key, key)] = value
    return found


def with_preset(values: Mapping[str, Any], where: str = "the experiment") -> dict[str, Any]:
    """The values on top of the layer of defaults that their `preset` names, if any."""
    name = values.get("preset")
    if name is None:
        return dict(values)
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
    values = with_preset(values, where)
    try:
        made = kind(**values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"][:1]) or "?"
        what = first["msg"][:1].lower() + first["msg"][1:]
        raise UserError(
            f"{key} = {values.get(key)!r} in {where} is not accepted: {what}"
            f" ({kind.model_fields[key].description})."
        ) from None
    if (made.public_validation is True) != bool((made.public_validation_by or "").strip()):
        raise UserError(
            f'public_validation = true and public_validation_by = "who agreed" go together, and'
            f" {where} has only one of them: give both, or neither."
        )
    return made


def read_toml(path: Path) -> dict[str, Any]:
    """An experiment file's keys."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"There is no experiment file {path}: check the path.") from None
    except (OSError, UnicodeDecodeError):
        raise UserError(f"The experiment file {path} cannot be read as text.") from None
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"The experiment file {path} is not valid TOML: {error}.") from None
    for old, new in RENAMED.items():
        if old in values and new in values:
            raise UserError(
                f"{path} has both {old!r} and {new!r}, which are one key: drop {old!r}."
            )
    return values


def read_pinned(path: Path) -> Experiment:
    """A run's resolved configuration: a key that is not in the file is None, not a preset's."""
    values = names_of_today(read_toml(path))
    fields = experiment_type(str(values.get("method", ""))).model_fields
    unset = {name: None for name, field in fields.items() if field.default is None}
    unset["road_test_images"] = None  # all of them, which a file cannot say otherwise
    return make_experiment({**unset, **BEFORE_THE_KEY, **values}, str(path))


def parse_set(text: str) -> tuple[str, Any]:
    """`key=value` as the command line gives it; the value is read as TOML, else taken as text."""
    key, sign, raw = text.partition("=")
    if not sign or not key.strip():
        raise UserError(f"--set takes key=value, not {text!r}.")
    try:
        value = tomllib.loads(f"v = {raw.strip()}")["v"]
    except tomllib.TOMLDecodeError:
        value = raw.strip()
    return key.strip(), value


def load_experiment(path: Path | None, sets: Sequence[str] = ()) -> tuple[Experiment, set[str]]:
    """File, then settings on top of it; also which keys were given and not defaulted."""
    values = {} if path is None else names_of_today(read_toml(path))
    where = "the settings" if path is None else str(path)
    make_experiment(values, where)  # so that an error in the file names the file
    for text in sets:
        key, value = parse_set(text)
        values[RENAMED.get(key, key)] = value
    return make_experiment(values, where if not sets else "the settings"), set(values)


def to_toml(values: Mapping[str, Any]) -> str:
    """Flat keys as TOML; None is left out, since TOML has no null."""
    lines = []
    for key, value in values.items():
        if value is not None:
            lines.append(f"{key} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"
