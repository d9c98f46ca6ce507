"""Objects of the user's own, named `package.module:name`. Never named by a server."""

from __future__ import annotations

import importlib
from typing import Any

from xcal.errors import UserError


def load_object(path: str, what: str) -> Any:
    """Import what `package.module:name` names."""
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(
            f"The {what} {path!r} cannot be imported ({error}): is its module on the path?"
        ) from None
    except ValueError:
        raise UserError(f"The {what} {path!r} is not of the form package.module:name.") from None
    if not hasattr(module, attribute):
        raise UserError(f"The module {module_name} has no {attribute!r}, asked for as {what}.")
    return getattr(module, attribute)
