"""The files that a privacy reviewer reads to verify one step (`python tests/step_files.py`).

One real step is traced. Two parts of it stand behind contracts that tests hold, and are not read:
the clipping rules (`dp/clipping`), whose sums must equal those of `dp/clipping/reference.py` and
never exceed C; and explanations (`explain`, `data`, `models`), whose scores a method clips to
[0, 1] before anything is released. What is left charges, draws, bounds and releases.
"""

from __future__ import annotations

import ast
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

SOURCE = Path(__file__).parent.parent / "src" / "xcal"
BEHIND_CONTRACTS = ("dp/clipping/", "explain/", "data/", "models/")


class _Traced(Exception):
    """One step was seen."""


def functions_of_a_step(method: str) -> dict[str, set[int]]:
    """By file, the lines of all functions that one step of a method runs."""
    import xcal
    from support import TINY
    from xcal.methods.registry import METHODS

    called: dict[str, set[int]] = {}

    def watch(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(SOURCE)):
            name = Path(code.co_filename).relative_to(SOURCE).as_posix()
            called.setdefault(name, set()).add(code.co_firstlineno)

    kind = type(METHODS[method])
    step = kind.step

    def traced(self: Any, *given: Any) -> Any:
        sys.setprofile(watch)
        try:
            step(self, *given)
        finally:
            sys.setprofile(None)
        raise _Traced

    kind.step = traced  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            keys = {**TINY, "method": method, "clients": 1, "rounds": 1, "workers": 1}
            xcal.run(Path(folder) / "run", **keys)
    except _Traced:
        pass
    finally:
        kind.step = step  # type: ignore[method-assign]
    return {name: _lines(SOURCE / name, firsts) for name, firsts in sorted(called.items())}


def _lines(path: Path, firsts: set[int]) -> set[int]:
    found: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            marks = getattr(node, "decorator_list", [])
            first = min([node.lineno, *(mark.lineno for mark in marks)])
            if firsts & {first, node.lineno}:
                found |= set(range(first, (node.end_lineno or first) + 1))
    return found


def to_read(method: str) -> dict[str, int]:
    """The files to read, and how many of their lines run in a step."""
    traced = functions_of_a_step(method)
    return {n: len(lines) for n, lines in traced.items() if not n.startswith(BEHIND_CONTRACTS)}


def main() -> None:
    from xcal.methods.registry import METHODS

    for method in sys.argv[1:] or [m for m, found in METHODS.items() if found.private]:
        files = to_read(method)
        print(f"{method}: {len(files)} files, {sum(files.values())} lines")
        for name, lines in files.items():
            print(f"  {lines:4d}  {name}")


if __name__ == "__main__":
    main()
