"""Every public name says what it takes and, where it touches privacy, what it promises."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

import xcal

# What neither sees data nor spends or tells of a budget.
NO_PRIVACY = {
    "xcal.PrivacyEngine.close",
    "xcal.PrivacyEngine.get_epsilon",  # says under Returns what its number is
    "xcal.PrivacyEngine.save",
    "xcal.PrivacyEngine.statement",
    "xcal.explain.MapChoice",
    "xcal.explain.RoadResult",
    "xcal.explain.Signal",
}


def public() -> Iterator[tuple[str, Any]]:
    """Functions and classes of `xcal` and `xcal.explain`, and the methods of the engine."""
    for name in xcal.__all__:
        found = getattr(xcal, name)
        if isinstance(found, ModuleType):
            yield from ((f"xcal.{name}.{n}", getattr(found, n)) for n in found.__all__)
        elif not name.startswith("_"):
            yield f"xcal.{name}", found
    for name, method in inspect.getmembers(xcal.PrivacyEngine, callable):
        if not name.startswith("_"):
            yield f"xcal.PrivacyEngine.{name}", method


NAMES = dict(public())


def parameters(found: Callable[..., Any]) -> list[str]:
    return [n for n in inspect.signature(found).parameters if n not in ("self", "cls")]


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_a_docstring_with_its_arguments(name: str) -> None:
    found, text = NAMES[name], inspect.getdoc(NAMES[name]) or ""
    assert text, f"{name} has no docstring"
    if inspect.isclass(found) and hasattr(found, "__dataclass_fields__"):
        described = text  # a result: its fields are told in words
    elif not parameters(found):
        return
    else:
        assert "\nArgs:\n" in text, f"{name} does not list its arguments"
        described = text.split("\nArgs:\n")[1].split("\n\n")[0]
    assert any(re.search(rf"\b{argument}\b", described) for argument in parameters(found))
    if "Args:" in text:
        for argument in parameters(found):
            assert re.search(rf"\b{argument}\b", described), f"{name} does not tell of {argument}"


@pytest.mark.parametrize("name", sorted(NAMES.keys() - NO_PRIVACY))
def test_what_touches_privacy_says_what_it_guarantees(name: str) -> None:
    text = inspect.getdoc(NAMES[name]) or ""
    assert re.search(r"\nGuarantee: \S", text), f"{name} does not say what it guarantees"


def test_every_public_name_is_there() -> None:
    assert {"xcal.run", "xcal.plan", "xcal.load", "xcal.PrivacyEngine"} <= NAMES.keys()
    assert {"xcal.explain.gradcam", "xcal.explain.road", "xcal.explain.signal"} <= NAMES.keys()
    assert NAMES.keys() >= NO_PRIVACY
