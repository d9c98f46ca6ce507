"""Every engine asks a client the same function: sites of `xcal run` are held to their policy."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commands import interrupted_after_a_round
from made_sites import ledger_create, tiny_site
from support import ROOT, TINY
from wire import a_request, ask, changed, real
from xcal.dp.ledger.rows import charges_of, read_rows, runs_of, verify
from xcal.experiments import make_experiment
from xcal.federation.files import read_tensors
from xcal.federation.messages import Refusal
from xcal.federation.site_directory import SiteDirectory

Invoke = Callable[..., tuple[int, str, str]]
KEYS = {**TINY, "clients": 2, "rounds": 2, "road_images": 0, "road_test_images": 0}


def words(**keys: Any) -> list[str]:
    found = []
    for key, value in {**KEYS, **keys}.items():
        found += ["--set", f"{key}={json.dumps(value)}"]
    return found


def set_policy(site_dir: Path, **terms: Any) -> None:
    path = site_dir / "policy.toml"
    lines = [line for line in path.read_text().splitlines() if line.split(" =")[0] not in terms] + [
        f"{key} = {json.dumps(value)}" for key, value in terms.items()
    ]
    path.write_text("\n".join(lines) + "\n")


def rows(site_dir: Path) -> int:
    return len(read_rows(site_dir / "ledger.sqlite"))


@pytest.fixture
def sites(invoke: Invoke, tmp_path: Path) -> list[Path]:
    """Two sites as their owners make them, which allow what TINY asks for."""
    made = [tmp_path / name for name in ("ward-1", "ward-2")]
    for site_dir in made:
        limits = "--unit record --epsilon 20 --delta 1e-2 --epsilon-run 8 --delta-run 1e-3".split()
        about = ["--client", site_dir.name, "--population", site_dir.name, "--data", "support:tiny"]
        assert invoke("site", "init", str(site_dir), *about, *limits)[0] == 0
        set_policy(site_dir, networks=["support:micro"], sigma_min=0.0)
    return made


def run(invoke: Invoke, out: Path, sites: list[Path], **keys: Any) -> tuple[int, str, str]:
    return invoke("run", *words(sites=[str(h) for h in sites], **keys), "--out", str(out))


def test_sites_that_allow_it_are_trained_and_charged(
    invoke: Invoke, tmp_path: Path, sites: list[Path]
) -> None:
    code, _, err = run(invoke, tmp_path / "run", sites)
    assert code == 0, err
    for site_dir in sites:
        known = read_rows(site_dir / "ledger.sqlite")
        assert [len(charges_of(known, name)) for name in runs_of(known)] == [16]
        assert verify(site_dir / "ledger.sqlite").ok
    assert json.loads((tmp_path / "run" / "result.json").read_text())["noise"] == "secure"


@pytest.mark.parametrize(
    ("terms", "code"),
    [
        ({"epsilon_run": 1.0}, "epsilon-run"),
        ({"delta_run": 1e-4}, "delta-run"),
        ({"epsilon_total": 4.0, "epsilon_run": 4.0}, "epsilon-run"),
        ({"sigma_min": 50.0}, "sigma-too-low"),
        ({"methods": ["fl-dp"]}, "method-not-allowed"),
        ({"networks": ["small"]}, "network-not-allowed"),
        ({"unit": "group"}, "unit-not-allowed"),
        ({"max_steps": 3}, "too-many-steps"),
        ({"max_batch": 9}, "batch-too-large"),
    ],
)
def test_the_policy_of_a_site_decides_and_no_site_is_charged(
    invoke: Invoke, tmp_path: Path, sites: list[Path], terms: dict[str, Any], code: str
) -> None:
    set_policy(sites[1], **terms)
    exit_code, _, err = run(invoke, tmp_path / "run", sites)
    assert exit_code == 2
    assert str(sites[1]) in err
    assert len(err.strip().splitlines()) == 1
    assert [rows(site_dir) for site_dir in sites] == [1, 1]
    assert not (tmp_path / "run").exists()
    assert [r["code"] for r in SiteDirectory.open(sites[1]).refusals()] == [code]
    assert SiteDirectory.open(sites[0]).refusals() == []


def test_a_policy_that_changes_holds_at_once(
    invoke: Invoke, tmp_path: Path, sites: list[Path]
) -> None:
    with interrupted_after_a_round():
        assert run(invoke, tmp_path / "run", sites)[0] == 130
    before = [rows(site_dir) for site_dir in sites]
    set_policy(sites[1], epsilon_run=1.0)
    code, _, err = invoke("run", "--resume", str(tmp_path / "run"))
    assert (code, [rows(site_dir) for site_dir in sites]) == (2, before), err
    set_policy(sites[1], epsilon_run=8.0)
    code, _, err = invoke("run", "--resume", str(tmp_path / "run"))
    assert code == 0, err


def test_a_site_with_other_data_is_not_charged_for_these(
    invoke: Invoke, tmp_path: Path, sites: list[Path]
) -> None:
    text = (sites[0] / "site.toml").read_text()
    (sites[0] / "site.toml").write_text(text.replace('"support:tiny"', '"smear"'))
    code, _, err = run(invoke, tmp_path / "run", sites)
    assert code == 2
    assert "'smear'" in err
    assert [rows(site_dir) for site_dir in sites] == [1, 1]
    assert [r["code"] for r in SiteDirectory.open(sites[0]).refusals()] == ["data"]


def test_a_site_without_one_of_its_files_is_refused(
    invoke: Invoke, tmp_path: Path, sites: list[Path]
) -> None:
    (sites[0] / "policy.toml").unlink()
    code, _, err = run(invoke, tmp_path / "run", sites)
    assert code == 2
    assert "policy.toml" in err
    assert [rows(site_dir) for site_dir in sites] == [1, 1]


def test_trial_sites_give_the_model_of_the_plain_simulation(invoke: Invoke, tmp_path: Path) -> None:
    whole = make_experiment({**KEYS, "method": "xcal-steered"})
    sites = [tiny_site(tmp_path / "sites", i, experiment=whole) for i in range(2)]
    assert run(invoke, tmp_path / "a", sites, noise="seeded")[0] == 0
    assert invoke("run", *words(), "--out", str(tmp_path / "b"))[0] == 0
    here, plain = (read_tensors(tmp_path / name / "model.safetensors") for name in "ab")
    assert here is not None and plain is not None
    assert all((here[0][name] == value).all() for name, value in plain[0].items())
    # and none of another part's
    code, _, err = run(invoke, tmp_path / "c", sites[::-1], noise="seeded")
    assert code == 2
    assert "shard" in err


def ledgers(invoke: Invoke, folder: Path, *limits: str) -> list[Path]:
    made = [folder / name for name in ("one", "two")]
    for site_dir in made:
        assert invoke(*ledger_create(site_dir), *limits)[0] == 0
    return made


def test_a_bare_ledger_is_held_to_its_limits_and_says_what_ran_out(
    invoke: Invoke, tmp_path: Path
) -> None:
    made = ledgers(invoke, tmp_path, "--epsilon", "20", "--delta", "1e-3")
    assert run(invoke, tmp_path / "first", made)[0] == 0
    code, _, err = run(invoke, tmp_path / "second", made)
    assert code == 2
    assert "delta = 0 left of 0.001 and the run asks for 0.001" in err
    assert "epsilon" not in err
    code, _, err = run(invoke, tmp_path / "second", made, epsilon=16.0, delta=1e-4)
    assert code == 2
    assert "epsilon = 12 left of 20" in err and "delta = 0 left" in err
    for command in ("show", "verify", "analyse"):
        told = " ".join(invoke("ledger", command, str(made[0]))[1].split())
        assert "left ε = 12 and δ = 0" in told, command


def test_a_ledger_says_how_many_runs_fit(invoke: Invoke, tmp_path: Path) -> None:
    words = "--population p --epsilon 8 --delta 1e-5 --unit group".split()
    out = invoke("ledger", "create", str(tmp_path / "a"), *words)[1]
    assert "1 by ε, 1 by δ" in out
    assert "--delta 5e-05" in out
    words = "--population p --epsilon 50 --delta 1e-4 --unit group".split()
    assert "10 by ε, 10 by δ.\n" in invoke("ledger", "create", str(tmp_path / "b"), *words)[1]


def test_delta_of_one_unit_is_refused_for_people_and_told_in_a_simulation(
    invoke: Invoke, tmp_path: Path
) -> None:
    made = ledgers(invoke, tmp_path, "--epsilon", "20", "--delta", "0.1")
    keys = {"delta": 1 / 75, "units_per_client": 75}
    code, _, err = run(invoke, tmp_path / "run", made, **keys)
    assert code == 2
    assert "1/75" in err
    assert [rows(site_dir) for site_dir in made] == [1, 1]
    assert invoke("run", *words(**keys), "--out", str(tmp_path / "simulated"))[0] == 0
    statement = json.loads((tmp_path / "simulated" / "statement.json").read_text())
    assert any("1/units" in warning for warning in statement["warnings"])


def test_delta_of_one_unit_is_refused_by_a_client_elsewhere(tmp_path: Path) -> None:
    terms = {"delta_run": 0.5, "delta_total": 0.5}
    site_dir = tiny_site(tmp_path, **terms)
    assert not isinstance(
        ask(site_dir, changed(delta=0.1)), Refusal
    )  # a trial, with a ledger for one
    site_dir = real(tiny_site(tmp_path / "real", **terms))
    assert ask(site_dir, changed(delta=0.1)) == Refusal("0", "delta-too-large")
    assert rows(site_dir) == 1
    assert not isinstance(ask(site_dir, a_request()), Refusal)


def test_nothing_in_an_engine_passes_the_entry_by() -> None:
    """`client_round` trains whatever it is asked to: only the entry may call it."""
    callers = set()
    for path in (ROOT / "src/xcal/federation").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id == "client_round":
                    callers.add(path.name)
    assert callers == {"answer.py"}
