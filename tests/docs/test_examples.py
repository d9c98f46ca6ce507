"""Every example is accepted and trains; the README's commands do what it says."""

from __future__ import annotations

import doctest
import re
import runpy
from pathlib import Path

import pytest

import xcal
from commands import xcal_forked
from support import ROOT
from xcal.config import read_toml
from xcal.experiments import load_experiment
from xcal.federation.outcome import unused_keys
from xcal.methods.registry import get_method, plan_for

EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))
SCRIPTS = [ROOT / "examples" / f"{name}.py" for name in ("patients", "label_shift")]
PAPER = sorted((ROOT / "examples" / "paper").glob("*.toml"))


def test_there_are_examples() -> None:
    assert [path.name for path in EXAMPLES] == ["quick.toml"]
    listed = (ROOT / "examples" / "README.md").read_text()
    assert all(f"({path.name})" in listed for path in [*EXAMPLES, *SCRIPTS])


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_an_example_trains(path: Path, tmp_path: Path) -> None:
    """With the example's own method and federation, on small data and few rounds."""
    keys = read_toml(path)
    keys |= {
        "data": "support:tiny",
        "network": "support:micro",
        "pixels": 16,
        "rounds": 2,
        "batch": 3,
        "threads": 1,
        "delta": 1e-3,
    }
    keys.pop("participants", None)
    result = xcal.run(tmp_path / "run", **keys)
    assert result["method"] == keys["method"]


@pytest.mark.slow
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.stem)
def test_a_script_trains(path: Path, tmp_path: Path) -> None:
    """Two rounds with the script's own keys; it says what it reached for three seeds."""
    made = runpy.run_path(str(path))
    assert re.search(r"seeds 0, 1, 2: (0\.\d\d(, |;)){3}", " ".join(made["__doc__"].split()))
    result = made["train"](tmp_path / "run", rounds=2, threads=1, road_test_images=0)
    keys = made["KEYS"]
    assert (result["unit"], result["epsilon_target"]) == (keys["unit"], keys["epsilon"])


@pytest.mark.parametrize("path", PAPER, ids=lambda p: p.stem)
def test_an_example_of_the_paper_is_accepted(path: Path) -> None:
    """Each says which table or figure it is of, lies on the published settings, and can be paid."""
    text = path.read_text()
    assert re.match(r"# (Table|Figure|Appendix (table|figure)) \"", text), "which one is it?"
    made, given = load_experiment(path)
    assert made.preset == "paper"
    assert (made.expected_batch_size, made.lr, made.delta) == (32, 1e-3, 1e-5)
    assert not unused_keys(get_method(made.method), sorted(given))
    assert plan_for(made, made.units_per_client or 1000).epsilon == made.epsilon


def test_every_example_of_the_paper_is_in_its_list() -> None:
    listed = (ROOT / "examples" / "paper" / "README.md").read_text()
    linked = set(re.findall(r"\(([a-z0-9-]+\.toml)\)", listed))
    assert linked == {path.name for path in PAPER}


def test_the_readme_shows_a_plan_that_the_command_prints() -> None:
    text = (ROOT / "README.md").read_text()
    match = re.search(r"^xcal (plan .*)$", text, re.MULTILINE)
    assert match is not None
    done = xcal_forked(*match.group(1).split())
    assert done.returncode == 0, done.stderr
    for name in ("sigma_static", "sigma_ref", "signal_price"):
        shown = re.search(rf"{name}\s*│\s*([0-9.]+)", done.stdout)
        assert shown is not None
        assert shown.group(1) in text, f"README does not show {name} = {shown.group(1)}"


def test_links_of_the_documents_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_configuration_page_is_up_to_date() -> None:
    namespace = runpy.run_path(str(ROOT / "docs" / "make_configuration.py"), run_name="page")
    assert (ROOT / "docs" / "configuration.md").read_text() == namespace["page"]()


def test_the_docstrings_of_the_api_tell_the_truth() -> None:
    found = doctest.testmod(xcal)
    assert found.attempted > 0
    assert found.failed == 0


@pytest.mark.slow
def test_the_findings_are_those_of_the_committed_results() -> None:
    from reproduce.findings import PAGES, page

    for name in PAGES:
        text = (ROOT / name).read_text()
        assert text == page(text), "run `python -m reproduce findings`"


def test_the_tables_of_results_are_views_of_their_cells() -> None:
    from reproduce.scales import SCALES
    from reproduce.store import Results, table_text
    from reproduce.whole import whole_grids

    results = Results(ROOT / "results")
    for scale in SCALES:
        for study, grid in whole_grids(scale, results).items():
            path = results.table_path(study, scale)
            if path.exists():
                assert path.read_text() == table_text(results.of_grid(grid)), path
