"""The page on the layout names every file there is, where it is, and nothing else."""

from __future__ import annotations

import re
import subprocess
import tomllib

from support import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text()
FILE = re.compile(r"(?<![\w/.])\w+\.(?:py|html|json|csv(?:\.gz)?)\b")


def shown() -> set[str]:
    """Files of the page's tree: a line belongs to the last folder that is indented less."""
    tree = PAGE.split("```\n")[1]
    found, folders = set(), []
    for line in tree.splitlines():
        if not line.strip():
            continue
        indent = len(line) - len(line.lstrip())
        folder = re.match(r"\s*([\w/]+)/(?=\s|$)", line)
        if indent < 20:  # else it goes on with the line above
            folders = [f for f in folders if f[0] < indent]
        if folder:
            folders.append((indent, folder[1]))
        where = "/".join(name for _, name in folders)
        found |= {f"{where}/{name}" for name in FILE.findall(line)}
    return found


def test_the_page_lists_every_file_and_no_other() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "src", "reproduce"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    inner = {p for p in listed if p.endswith("__init__.py") and p != "src/xcal/__init__.py"}
    assert shown() == set(listed) - inner - {"src/xcal/py.typed"}


def test_who_may_import_whom_is_what_is_checked() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = settings["contracts"][0]["layers"]
    told = PAGE.split("## Who may import whom\n\n```\n")[1].split("```")[0]
    assert " ".join(told.split()) == re.sub(r"xcal\.|[()]", "", " > ".join(layers))
