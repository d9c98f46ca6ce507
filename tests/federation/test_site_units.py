"""`units` in site.toml: what a hospital declares is what everybody sees, and not its count."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

import xcal
from made_sites import tiny_site
from support import TINY
from wire import a_request, ask
from xcal.config import to_toml
from xcal.dp.ledger.rows import charges_of, read_rows
from xcal.experiments import make_experiment
from xcal.federation.answer import answer
from xcal.federation.folder import RunFolder
from xcal.federation.local import run_experiment
from xcal.federation.messages import Refusal, Reply
from xcal.federation.policy import Policy
from xcal.federation.setup import prepare_remote
from xcal.federation.site_directory import SiteDirectory, SiteTable, create_site

Invoke = Callable[..., tuple[int, str, str]]
REAL = 51  # units of client 0 in TINY


def declare(site_dir: Path, units: int) -> Path:
    path = site_dir / "site.toml"
    path.write_text(path.read_text().replace("# units =", f"units = {units}"))
    return site_dir


def reply_of(site_dir: Path) -> Reply:
    got = ask(site_dir, a_request())
    assert isinstance(got, Reply), SiteDirectory.open(site_dir).refusals()
    return got


def test_plan_rate_steps_and_report_follow_the_declaration(invoke: Invoke, tmp_path: Path) -> None:
    trial = tmp_path / "trial.toml"
    trial.write_text(to_toml(make_experiment({**TINY, "method": "xcal-steered"}).resolved()))
    site_dir = tmp_path / "site"
    words = (
        f"site init {site_dir} --client 0 --population clinic --epsilon 8 --delta 1e-3 --units 80"
    )
    code, _, err = invoke(*words.split(), "--experiment", str(trial), "--seed", "0")
    assert code == 0, err
    assert "\nunits = 80\n" in (site_dir / "site.toml").read_text()
    policy = site_dir / "policy.toml"
    policy.write_text(policy.read_text().replace('["small"', '["support:micro"'))
    report = reply_of(site_dir).answer.report
    # Its images are a part of a trial's, which one person less would deal out anew.
    assert (report.units, report.add_remove, report.steps) == (80, False, 8)
    charges = charges_of(read_rows(site_dir / "ledger.sqlite"), "trial")
    assert {c.rate for c in charges} == {10 / 80}
    code, out, _ = invoke("site", "check", str(site_dir))
    assert code == 0
    assert "up to 80 units" in " ".join(out.split())
    code, out, _ = invoke("site", "show", str(site_dir))
    assert "80 units declared" in " ".join(out.split())


def test_a_declaration_below_the_count_is_refused_before_any_charge(
    invoke: Invoke, tmp_path: Path
) -> None:
    site_dir = declare(tiny_site(tmp_path), REAL - 1)
    before = len(read_rows(site_dir / "ledger.sqlite"))
    assert ask(site_dir, a_request()) == Refusal("0", "site")
    assert len(read_rows(site_dir / "ledger.sqlite")) == before
    logged = SiteDirectory.open(site_dir).refusals()[-1]
    assert logged["code"] == "site" and f"hold {REAL}" in logged["detail"]
    code, _, err = invoke("site", "check", str(site_dir))
    assert code == 1
    assert f"units = {REAL - 1}" in err


def test_a_site_without_a_declaration_trains_as_before(tmp_path: Path) -> None:
    """To the bit: as one that declares what it has, as the local engine, and it says zero-out."""
    counted, declared = tiny_site(tmp_path / "a"), declare(tiny_site(tmp_path / "b"), REAL)
    one, two = (reply_of(site_dir).answer for site_dir in (counted, declared))
    assert one.weights is not None and two.weights is not None
    assert all(torch.equal(one.weights[k], two.weights[k]) for k in one.weights)
    assert (one.report.units, two.report.units) == (REAL, REAL)
    assert (one.report.add_remove, two.report.add_remove) == (False, False)


def own_site(path: Path, client: str, units: int | None) -> Path:
    """A site whose images are its own, and nobody deals them out."""
    about = SiteTable(
        client=client,
        population="clinic",
        data="support:tiny",
        threads=1,
        units=units,
        simulated=True,
        seed=0,
    )
    policy = Policy(
        epsilon_total=20.0,
        delta_total=1e-2,
        epsilon_run=8.0,
        delta_run=1e-3,
        sigma_min=0.0,
        networks=("support:micro",),
    )
    return create_site(path / client, about, policy, unit="record").path


@pytest.mark.parametrize("units", [None, 200])
def test_of_its_own_images_a_declared_number_covers_coming_and_going(
    tmp_path: Path, units: int | None
) -> None:
    report = reply_of(own_site(tmp_path, "0", units)).answer.report
    assert (report.units, report.add_remove) == (units or 150, units is not None)


def test_under_a_cap_only_zero_out_is_claimed(tmp_path: Path) -> None:
    experiment = make_experiment({**TINY, "method": "xcal-steered", "group_cap": 2})
    site_dir = declare(tiny_site(tmp_path, experiment=experiment), 60)
    report = reply_of(site_dir).answer.report
    assert (report.units, report.add_remove) == (60, False)


@pytest.mark.parametrize("bad", ["0", "-3", "many", "1.5"])
def test_a_declaration_that_is_no_number_is_one_sentence(invoke: Invoke, tmp_path: Path, bad: str):
    site_dir = tiny_site(tmp_path)
    path = site_dir / "site.toml"
    path.write_text(path.read_text().replace("# units =", f"units = {json.dumps(bad)}"))
    code, _, err = invoke("site", "check", str(site_dir))
    assert code == 2
    assert "units" in err and len(err.strip().splitlines()) == 1


def test_sites_given_by_path_declare_for_the_local_engine(invoke: Invoke, tmp_path: Path) -> None:
    keys = {**TINY, "method": "fl-dp", "noise": "seeded"}
    sites = [
        tiny_site(tmp_path / "h", client, experiment=make_experiment(keys)) for client in (0, 1, 2)
    ]
    declare(sites[1], 77)
    given = {**keys, "sites": tuple(map(str, sites)), "rounds": 1}
    result = xcal.run(tmp_path / "run", **given)
    assert [c["units"] for c in result["clients"]] == [51, 77, 48]
    assert [c["steps"] for c in result["clients"]] == [6, 8, 5]
    plans = json.loads((tmp_path / "run" / "plans.json").read_text())
    assert plans["1"]["units"] == 77 and plans["1"]["sample_rate"] == 10 / 77
    statement = json.loads((tmp_path / "run" / "statement.json").read_text())
    assert [c["add_remove"] for c in statement["clients"]] == [False, False, False]
    card = (tmp_path / "run" / "card.md").read_text()
    assert "51 + 77 + 48 units" in card

    rows = [len(read_rows(site_dir / "ledger.sqlite")) for site_dir in sites]
    path = sites[1] / "site.toml"
    path.write_text(path.read_text().replace("units = 77", "units = 7"))
    sets = [w for k, v in keys.items() for w in ("--set", f"{k}={v}")]
    code, _, err = invoke(
        "run",
        "--out",
        str(tmp_path / "no"),
        *sets,
        "--set",
        f"sites={json.dumps(list(map(str, sites)))}",
    )
    assert code == 2
    assert "declares units = 7" in err and len(err.strip().splitlines()) == 1
    assert [len(read_rows(site_dir / "ledger.sqlite")) for site_dir in sites] == rows
    assert not (tmp_path / "no").exists()


class Post:
    """A carrier to sites in this process."""

    def __init__(self, sites: Mapping[str, Path]) -> None:
        self.sites = sites

    def exchange(
        self, round_number: int, messages: Mapping[str, bytes], timeout: float | None
    ) -> dict[str, bytes]:
        return {client: answer(self.sites[client], m) for client, m in messages.items()}

    def late(self) -> list[str]:
        return []


def test_clients_elsewhere_say_which_neighbors_hold(tmp_path: Path) -> None:
    """The server learns it with the first answers; what it measures is the lead's own."""
    keys = {**TINY, "method": "fl-dp", "rounds": 2, "road_images": 0, "road_test_images": 0}
    experiment = make_experiment(keys)
    sites = {str(c): tiny_site(tmp_path / "h", c, experiment=experiment) for c in (0, 1, 2)}
    sites["2"] = own_site(tmp_path / "own", "2", 200)
    folder = RunFolder.create(tmp_path / "run", experiment, sorted(keys))
    federation = prepare_remote(experiment, tuple(sites))
    result = run_experiment(folder, None, federation, Post(sites))
    assert [c["units"] for c in result["clients"]] == [51, 51, 200]
    statement = json.loads((tmp_path / "run" / "statement.json").read_text())
    assert [(c["units"], c["add_remove"]) for c in statement["clients"]] == [
        (51, False),
        (51, False),
        (200, True),
    ]
    assert "at client 2 it is declared" in statement["neighboring_relation"]
    assert "at clients 0, 1 it is counted" in statement["neighboring_relation"]
    assert "of the lead's own data set tiny" in statement["public_images"]
    assert [text.split(" is a")[0] for text in statement["plugins"]] == [
        "the network support:micro",
        "the data set support:tiny",
    ]
