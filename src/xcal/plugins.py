"""Code of the user's own, named `package.module:name`. Never named by a server."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

from xcal.errors import UserError

MANUAL = "docs/extending.md"
PASSED = (UserError, MemoryError)
"""What user code may raise that is a sentence already, or not its fault."""

_FILES: dict[str, list[str]] = {}  # of the modules that were asked for, and what of them was


_GIVEN: dict[str, Any] = {}  # objects handed to `xcal.run` while it runs, by their made-up name
GIVEN = "given:"
"""How the name of an object begins that was handed over as such and cannot be imported."""


class OwnCodeError(UserError):
    """Code of the user's own failed, or is not what it has to be; says which and how."""


@contextmanager
def given(objects: Mapping[str, Any]) -> Iterator[None]:
    """Within, these objects are found by their names, which begin with `GIVEN`."""
    _GIVEN.update(objects)
    try:
        yield
    finally:
        for name in objects:
            _GIVEN.pop(name, None)


def load_object(path: str, what: str) -> Any:
    """Import what `package.module:name` names; also from the current folder, which comes last."""
    if path in _GIVEN:
        return _GIVEN[path]
    if path.startswith(GIVEN):
        raise OwnCodeError(
            f"The {what} {path!r} was given to xcal.run as an object and has no name to import it"
            " by: give it again, to xcal.run with resume=True or to xcal.load."
        )
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute or module_name.startswith("."):
        raise OwnCodeError(
            f"The {what} {path!r} cannot be imported: it is not of the form package.module:name."
        )
    try:
        with _current_folder():
            module = importlib.import_module(module_name)
    except PASSED:
        raise
    except ModuleNotFoundError as error:
        raise OwnCodeError(
            f"The {what} {path!r} cannot be imported ({error}): is its module in the current folder"
            " or on PYTHONPATH?"
        ) from error
    except (Exception, SystemExit) as error:
        raise OwnCodeError(
            f"The {what} {path!r} cannot be imported ({error_words(error)}); see {MANUAL}."
        ) from error
    asked = _FILES.setdefault(_file(module), [])
    if f"{what} {path!r}" not in asked:
        asked.append(f"{what} {path!r}")
    if not hasattr(module, attribute):
        raise OwnCodeError(
            f"The {what} {path!r} cannot be imported: {module_name} has no {attribute!r}."
        )
    return getattr(module, attribute)


@contextmanager
def own_code(
    what: str, path: str, doing: str, *, let: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Within, user code runs: whatever it raises, but `let`, becomes a sentence that names it."""
    try:
        with _current_folder():
            yield
    except (Exception, SystemExit) as error:
        if isinstance(error, (*PASSED, *let)):
            raise
        where = _place(error, _file(sys.modules.get(path.partition(":")[0])))
        raise OwnCodeError(
            f"The {what} {path!r} failed in {doing} ({error_words(error)}{where}); see {MANUAL}."
        ) from error


def blamed(error: BaseException) -> str | None:
    """The sentence for an error that came out of user code elsewhere; None for any other."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename in _FILES:
            which = " or the ".join(_FILES[frame.filename])
            where = _place(error, frame.filename)
            return f"The {which} failed ({error_words(error)}{where}); see {MANUAL}."
    return None


def check_call(what: str, path: str, function: Any, name: str, given: Sequence[str]) -> None:
    """Refuse a function that cannot be called with `given`: names, those after '*' by keyword."""
    shown = f"{name}({', '.join(given)})"
    if not callable(function):
        raise OwnCodeError(
            f"The {what} {path!r} has a {name} that is not a function: see {MANUAL}."
        )
    star = given.index("*") if "*" in given else len(given)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function that does not tell
        return
    try:
        signature.bind(*given[:star], **dict.fromkeys(given[star + 1 :]))
    except TypeError as error:
        raise OwnCodeError(
            f"The {what} {path!r} cannot be called as {shown} ({error}): see {MANUAL}."
        ) from None


@contextmanager
def _current_folder() -> Iterator[None]:
    """Within, modules of the current folder are found too, after all others: it shadows none."""
    try:
        folder = os.getcwd()
    except OSError:
        folder = ""
    if not folder or folder in sys.path:
        yield
        return
    sys.path.append(folder)
    try:
        yield
    finally:
        with suppress(ValueError):
            sys.path.remove(folder)


def _file(module: ModuleType | None) -> str:
    return str(getattr(module, "__file__", None) or "")


def error_words(error: BaseException) -> str:
    """An error's kind and its own words, on one line."""
    said = " ".join(str(error).split()).rstrip(".")
    return f"{type(error).__name__}: {said[:300]}" if said else type(error).__name__


def _place(error: BaseException, file: str) -> str:
    """Where in the user's file it came from, the innermost place."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    return f", line {lines[-1]} of {os.path.basename(file)}" if lines else ""
