"""Every public name says what it takes and, where it touches privacy, what it promises."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

import xcal
from support import ROOT
from xcal.dp.loader import PrivateLoader
from xcal.dp.wrappers import PrivateCriterion, PrivateLoss, PrivateModule, PrivateOptimizer
from xcal.report.trained import Trained

OF_A_LOOP = (PrivateModule, PrivateCriterion, PrivateLoss, PrivateOptimizer, PrivateLoader)
WITH_METHODS = {
    "xcal.PrivacyEngine": xcal.PrivacyEngine,
    "xcal.Ledger": xcal.Ledger,
    "xcal.load(…)": Trained,
    **{kind.__name__: kind for kind in OF_A_LOOP},
}

# What neither sees data nor spends or tells of a budget, and what is told by its class.
NO_PRIVACY = {
    "xcal.PrivacyEngine.close",
    "xcal.PrivacyEngine.get_epsilon",  # says under Returns what its number is
    "xcal.PrivacyEngine.save",
    "xcal.PrivacyEngine.statement",
    "xcal.explain.MapChoice",
    "xcal.explain.RoadResult",
    "xcal.explain.Signal",
    "xcal.Ledger.spent",
    "xcal.Ledger.runs",
    "xcal.load(…).preprocess",
    "xcal.load(…).square",
    "xcal.load(…).predict",
    "xcal.load(…).answers",
    "xcal.load(…).logits",
    "PrivateModule.forward",
    "PrivateCriterion.forward",
    "PrivateLoss.detach",
    "PrivateLoss.item",
    "PrivateOptimizer.zero_grad",
    "PrivateOptimizer.state_dict",
    "PrivateOptimizer.load_state_dict",
    "PrivateOptimizer.add_param_group",
    "xcal.dp.refusals.Refused",
    "xcal.errors.UserError",
}
# Pages of the reference; what they name in full is public as well.
PAGES = ("library.md", "own-apps.md", "flower.md", "studies.md", "metrics.md")


def public() -> Iterator[tuple[str, Any]]:
    """Functions and classes of `xcal` and `xcal.explain`, what they give, what the pages name."""
    for name in xcal.__all__:
        found = getattr(xcal, name)
        if isinstance(found, ModuleType):
            yield from ((f"xcal.{name}.{n}", getattr(found, n)) for n in found.__all__)
        elif not name.startswith("_"):
            yield f"xcal.{name}", found
    for name, kind in WITH_METHODS.items():
        yield name, kind
        for own, member in vars(kind).items():
            method = member.__func__ if isinstance(member, classmethod) else member
            if not own.startswith("_") and inspect.isfunction(method):
                if method.__name__.startswith("_"):
                    continue  # refuses what torch's own losses can do
                yield f"{name}.{own}", method
    for page in PAGES:
        text = (ROOT / "docs" / page).read_text()
        for named in sorted(set(re.findall(r"`(xcal(?:\.[A-Za-z_]+){2,})", text))):
            found = resolved(named)
            if inspect.isclass(found) or inspect.isfunction(found):
                yield named, found


def resolved(name: str) -> Any:
    """What a dotted name means: an attribute of the longest module in it."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        with suppress(ImportError):
            found: Any = import_module(".".join(parts[:cut]))
            for attribute in parts[cut:]:
                found = getattr(found, attribute)
            return found
    raise AssertionError(f"{name}, which the reference names, is not there")


NAMES = dict(public())


def parameters(found: Callable[..., Any]) -> list[str]:
    return [n for n in inspect.signature(found).parameters if n not in ("self", "cls")]


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_a_docstring_with_its_arguments(name: str) -> None:
    found, text = NAMES[name], inspect.getdoc(NAMES[name]) or ""
    assert text, f"{name} has no docstring"
    if inspect.isclass(found) and issubclass(found, Exception):
        return
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
    assert {"xcal.Ledger", "xcal.Ledger.create", "xcal.policy", "xcal.fix"} <= NAMES.keys()
    assert {"PrivateLoss.backward", "PrivateOptimizer.step", "PrivateLoader"} <= NAMES.keys()
    assert {f"xcal.PrivacyEngine.{n}" for n in ("make_private", "save", "resume")} <= NAMES.keys()
    assert NAMES.keys() >= NO_PRIVACY - {"xcal.errors.UserError"}


def test_every_parameter_of_the_engine_is_told() -> None:
    """Also those that Opacus has: `help` is the reference."""
    for name in ("make_private", "make_private_with_epsilon", "resume"):
        text = inspect.getdoc(getattr(xcal.PrivacyEngine, name)) or ""
        for argument in parameters(getattr(xcal.PrivacyEngine, name)):
            assert re.search(rf"\b{argument}\b", text), (name, argument)
