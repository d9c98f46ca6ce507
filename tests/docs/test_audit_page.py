"""docs/audit.md is what the committed results say."""

import sys

import pytest

from support import ROOT

sys.path.insert(0, str(ROOT / "docs"))


def test_the_page_is_that_of_the_committed_results() -> None:
    from make_audit import page

    found = page(ROOT / "benchmarks" / "results" / "audit")
    assert (ROOT / "docs" / "audit.md").read_text() == found


def test_no_results_leave_the_page_as_it_is(tmp_path) -> None:
    from make_audit import main

    with pytest.raises(SystemExit, match="no results of an audit"):
        main(tmp_path)
