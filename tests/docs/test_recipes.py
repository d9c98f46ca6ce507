"""The tables of the recipes page are what the committed rows say."""

from __future__ import annotations

import runpy

from support import ROOT


def test_the_recipes_page_shows_the_rows_of_the_search() -> None:
    made = runpy.run_path(str(ROOT / "benchmarks" / "recipe_tables.py"), run_name="page")
    assert (ROOT / "docs" / "recipes.md").read_text() == made["page"]()
