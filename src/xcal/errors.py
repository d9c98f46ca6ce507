"""Errors a user can act on."""

from __future__ import annotations

from xcal.version import VERSION


def how_to_install(extra: str) -> str:
    """What to type for an extra that is missing, from the wheel and in a clone."""
    return (
        f"pip install 'xcal_fl-{VERSION}-py3-none-any.whl[{extra}]' from the wheel, or pip install"
        f" -c constraints.txt -e '.[{extra}]' in a clone"
    )


def first_line(error: BaseException) -> str:
    """What an error of somebody else's code says, without its full stop; its name if nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


class UserError(Exception):
    """Something the user gave is wrong: one sentence that says what, where and what to do.

    The command line prints it and exits with code 2; it never carries private content.
    """
