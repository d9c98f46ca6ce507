"""`python -m xcal` and `xcal`: the entry point, which only adds that Ctrl-C works from the start.

Importing the commands takes a second or more, and a library that is interrupted while it is being
imported says strange things.
"""

from __future__ import annotations

import sys

from xcal.cli.interrupts import INTERRUPTED, interrupted, noting


def main() -> None:
    """Import the commands and carry out the one that was asked for."""
    try:
        with noting():
            _carry_out()
    except KeyboardInterrupt:  # on the way out
        sys.exit(INTERRUPTED)


def _carry_out() -> None:
    try:
        from xcal.cli.app import main as command

        command()
    except BaseException as error:
        if isinstance(error, SystemExit) or not interrupted():
            raise
        print("\nxcal: interrupted.", file=sys.stderr)
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
