"""Errors a user can act on."""

from __future__ import annotations


class UserError(Exception):
    """Something the user gave is wrong: one sentence that says what, where and what to do.

    The command line prints it and exits with code 2; it never carries private content.
    """
