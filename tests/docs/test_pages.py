"""All pages: the commands they show exist, and so does every file and test that they name."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from support import ROOT

GENERATED = {"results.md", "results-probe.md"}
PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "benchmarks/README.md"]
    if path.name not in GENERATED | {"CHANGELOG.md"}
)
START = r"(?<![\w/.-])"  # of a path from the root, not the rest of an address
PACKAGES = "|".join(p.name for p in (ROOT / "src" / "xcal").iterdir() if p.is_dir())
# Words of our own that the field has others for.
OUR_OWN = re.compile(
    r"\b(houses?|rooms?|homes?|coins?|luck|kept activations|frozen beginnings?"
    r"|lets? \w+ out|lets out"
    r"|is no (method|network|data set|key|site|run|cell|task|number)|knows no|see the manual)\b",
    re.IGNORECASE,
)


def commands(text: str) -> list[str]:
    found = []
    for block in re.findall(r"```(?:sh)?\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            line = re.sub(r"\s+#.*", "", line).strip()
            if line.startswith("xcal ") and "…" not in line:
                found.append(line)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_the_commands_of_a_page_exist(page: Path) -> None:
    import click
    from typer.main import get_command

    from xcal.cli.app import app

    for line in commands(page.read_text()):
        words = shlex.split(line)[1:]
        command = get_command(app)
        while isinstance(command, click.Group) and words and words[0] in command.commands:
            command = command.commands[words.pop(0)]
        options = {name for each in command.params for name in each.opts}
        assert {word for word in words if word.startswith("--")} <= options, line
        for word in words:
            if re.match(r"(examples|deploy|benchmarks)/", word):
                assert (ROOT / word).exists(), line


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_files_and_tests_that_a_page_names_exist(page: Path) -> None:
    text = re.sub(r"\n\s*", " ", page.read_text())
    for name in re.findall(rf"{START}((?:tests|src|benchmarks|docs|reproduce)/[\w/.-]*\w)", text):
        if "*" in name or f"{name}*" in text:
            continue
        assert (ROOT / name).exists(), name
    for path, test in re.findall(r"(tests/[\w/]+\.py)(?:::|<br>)(test_\w+)", text):
        assert f"def {test}(" in (ROOT / path).read_text(), f"{path}::{test}"
    for name in re.findall(rf"{START}((?:{PACKAGES})/[\w/]+\.py)", text):
        assert (ROOT / "src" / "xcal" / name).exists(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_a_page_speaks_the_field_s_language(page: Path) -> None:
    assert [found[0] for found in OUR_OWN.finditer(page.read_text())] == []
