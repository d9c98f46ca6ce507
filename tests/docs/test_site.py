"""The documentation site: every page has its place, the reference is whole, nothing is fetched."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from support import ROOT

sys.path.insert(0, str(ROOT / "docs"))
try:
    import make_site
finally:
    sys.path.pop(0)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    make_site.gather(folder)
    return folder


def test_every_page_stands_in_one_part(pages: Path) -> None:
    listed = [page for part in make_site.NAV.values() for page in part.values()]
    assert sorted(listed) == sorted(path.name for path in pages.glob("*.md"))
    assert list(make_site.NAV) == ["Tutorials", "How-to", "Reference", "Explanation"]


def test_every_link_of_every_page_leads_somewhere(pages: Path) -> None:
    for page in pages.glob("*.md"):
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for _, _, address in make_site.LINK.findall(text):
            if not re.match(r"[a-z]+:|#", address):
                assert (pages / address.partition("#")[0]).exists(), f"{page.name}: {address}"


def test_the_reference_has_every_public_name_and_command(pages: Path) -> None:
    import xcal

    names = (pages / "names.md").read_text()
    for name in set(xcal.__all__) - {"__version__", "explain"}:
        assert f"## xcal.{name}\n" in names
    for name in xcal.explain.__all__:
        assert f"## xcal.explain.{name}\n" in names
    commands = (pages / "commands.md").read_text()
    for name in ("run", "plan", "demo", "report", "ledger verify", "site init", "data import"):
        assert f"## xcal {name}\n" in commands
    assert "`--live`" in commands and "`--watch`" in commands


@pytest.mark.slow
@pytest.mark.skipif(find_spec("material") is None, reason="the extra `docs` is not installed")
def test_it_builds_without_a_warning_and_fetches_nothing(tmp_path: Path) -> None:
    make_site.build(tmp_path / "site")
    assert (tmp_path / "site" / "index.html").exists()
    assert make_site.fetched(tmp_path / "site") == []
