"""`units` in home.toml: what a hospital declares is what everybody sees, and not its count."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

import xcal
from support import TINY, tiny_home
from wire import a_request, ask
from xcal.dp.ledger.rows import charges_of, read_rows
from xcal.experiments import make_experiment, to_toml
from xcal.federation.answer import answer
from xcal.federation.folder import RunFolder
from xcal.federation.home import ClientHome, HomeTable, create_home
from xcal.federation.local import run_experiment
from xcal.federation.messages import Refusal, Reply
from xcal.federation.policy import Policy
from xcal.federation.setup import prepare_remote

Invoke = Callable[..., tuple[int, str, str]]
REAL = 51  # units of client 0 in TINY


def declare(home: Path, units: int) -> Path:
    path = home / "home.toml"
    path.write_text(path.read_text().replace("# units =", f"units = {units}"))
    return home


def reply_of(home: Path) -> Reply:
    got = ask(home, a_request())
    assert isinstance(got, Reply), ClientHome.open(home).refusals()
    return got


def test_plan_rate_steps_and_report_follow_the_declaration(invoke: Invoke, tmp_path: Path) -> None:
    trial = tmp_path / "trial.toml"
    trial.write_text(to_toml(make_experiment({**TINY, "method": "xcal"}).resolved()))
    home = tmp_path / "home"
    words = f"home init {home} --client 0 --population clinic --epsilon 8 --delta 1e-3 --units 80"
    code, _, err = invoke(*words.split(), "--experiment", str(trial), "--seed", "0")
    assert code == 0, err
    assert "\nunits = 80\n" in (home / "home.toml").read_text()
    policy = home / "policy.toml"
    policy.write_text(policy.read_text().replace('["small"', '["support:micro"'))
    report = reply_of(home).answer.report
    # Its images are a part of a trial's, which one person less would deal out anew.
    assert (report.units, report.add_remove, report.steps) == (80, False, 8)
    charges = charges_of(read_rows(home / "ledger.sqlite"), "trial")
    assert {c.rate for c in charges} == {10 / 80}
    code, out, _ = invoke("home", "check", str(home))
    assert code == 0
    assert "up to 80 units" in " ".join(out.split())
    code, out, _ = invoke("home", "show", str(home))
    assert "80 units declared" in " ".join(out.split())


def test_a_declaration_below_the_count_is_refused_before_any_charge(
    invoke: Invoke, tmp_path: Path
) -> None:
    home = declare(tiny_home(tmp_path), REAL - 1)
    before = len(read_rows(home / "ledger.sqlite"))
    assert ask(home, a_request()) == Refusal("0", "home")
    assert len(read_rows(home / "ledger.sqlite")) == before
    logged = ClientHome.open(home).refusals()[-1]
    assert logged["code"] == "home" and f"hold {REAL}" in logged["detail"]
    code, _, err = invoke("home", "check", str(home))
    assert code == 1
    assert f"units = {REAL - 1}" in err


def test_a_home_without_a_declaration_trains_as_before(tmp_path: Path) -> None:
    """To the bit: as one that declares what it has, as the local engine, and it says zero-out."""
    counted, declared = tiny_home(tmp_path / "a"), declare(tiny_home(tmp_path / "b"), REAL)
    one, two = (reply_of(home).answer for home in (counted, declared))
    assert one.weights is not None and two.weights is not None
    assert all(torch.equal(one.weights[k], two.weights[k]) for k in one.weights)
    assert (one.report.units, two.report.units) == (REAL, REAL)
    assert (one.report.add_remove, two.report.add_remove) == (False, False)


def own_home(path: Path, client: str, units: int | None) -> Path:
    """A home whose images are its own, and nobody deals them out."""
    about = HomeTable(
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
    return create_home(path / client, about, policy, unit="record").path


@pytest.mark.parametrize("units", [None, 200])
def test_of_its_own_images_a_declared_number_covers_coming_and_going(
    tmp_path: Path, units: int | None
) -> None:
    report = reply_of(own_home(tmp_path, "0", units)).answer.report
    assert (report.units, report.add_remove) == (units or 150, units is not None)


def test_under_a_cap_only_zero_out_is_claimed(tmp_path: Path) -> None:
    experiment = make_experiment({**TINY, "method": "xcal", "group_cap": 2})
    home = declare(tiny_home(tmp_path, experiment=experiment), 60)
    report = reply_of(home).answer.report
    assert (report.units, report.add_remove) == (60, False)


@pytest.mark.parametrize("bad", ["0", "-3", "many", "1.5"])
def test_a_declaration_that_is_no_number_is_one_sentence(invoke: Invoke, tmp_path: Path, bad: str):
    home = tiny_home(tmp_path)
    path = home / "home.toml"
    path.write_text(path.read_text().replace("# units =", f"units = {json.dumps(bad)}"))
    code, _, err = invoke("home", "check", str(home))
    assert code == 2
    assert "units" in err and len(err.strip().splitlines()) == 1


def test_homes_given_by_path_declare_for_the_local_engine(invoke: Invoke, tmp_path: Path) -> None:
    keys = {**TINY, "method": "fl-dp", "noise": "seeded"}
    homes = [
        tiny_home(tmp_path / "h", client, experiment=make_experiment(keys)) for client in (0, 1, 2)
    ]
    declare(homes[1], 77)
    given = {**keys, "homes": tuple(map(str, homes)), "rounds": 1}
    result = xcal.run(tmp_path / "run", **given)
    assert [c["units"] for c in result["clients"]] == [51, 77, 48]
    assert [c["steps"] for c in result["clients"]] == [6, 8, 5]
    plans = json.loads((tmp_path / "run" / "plans.json").read_text())
    assert plans["1"]["units"] == 77 and plans["1"]["sample_rate"] == 10 / 77
    statement = json.loads((tmp_path / "run" / "statement.json").read_text())
    assert [c["add_remove"] for c in statement["clients"]] == [False, False, False]
    card = (tmp_path / "run" / "card.md").read_text()
    assert "51 + 77 + 48 units" in card

    rows = [len(read_rows(home / "ledger.sqlite")) for home in homes]
    path = homes[1] / "home.toml"
    path.write_text(path.read_text().replace("units = 77", "units = 7"))
    sets = [w for k, v in keys.items() for w in ("--set", f"{k}={v}")]
    code, _, err = invoke(
        "run",
        "--out",
        str(tmp_path / "no"),
        *sets,
        "--set",
        f"homes={json.dumps(list(map(str, homes)))}",
    )
    assert code == 2
    assert "declares units = 7" in err and len(err.strip().splitlines()) == 1
    assert [len(read_rows(home / "ledger.sqlite")) for home in homes] == rows
    assert not (tmp_path / "no").exists()


class Post:
    """A carrier to homes in this process."""

    def __init__(self, homes: Mapping[str, Path]) -> None:
        self.homes = homes

    def exchange(
        self, round_number: int, messages: Mapping[str, bytes], timeout: float | None
    ) -> dict[str, bytes]:
        return {client: answer(self.homes[client], m) for client, m in messages.items()}

    def late(self) -> list[str]:
        return []


def test_clients_elsewhere_say_which_neighbours_hold(tmp_path: Path) -> None:
    """The server learns it with the first answers; what it measures is the lead's own."""
    keys = {**TINY, "method": "fl-dp", "rounds": 2, "road_images": 0, "road_test_images": 0}
    experiment = make_experiment(keys)
    homes = {str(c): tiny_home(tmp_path / "h", c, experiment=experiment) for c in (0, 1, 2)}
    homes["2"] = own_home(tmp_path / "own", "2", 200)
    folder = RunFolder.create(tmp_path / "run", experiment, sorted(keys))
    federation = prepare_remote(experiment, tuple(homes))
    result = run_experiment(folder, None, federation, Post(homes))
    assert [c["units"] for c in result["clients"]] == [51, 51, 200]
    statement = json.loads((tmp_path / "run" / "statement.json").read_text())
    assert [(c["units"], c["add_remove"]) for c in statement["clients"]] == [
        (51, False),
        (51, False),
        (200, True),
    ]
    assert "at client 2 it is declared" in statement["neighbouring_relation"]
    assert "at clients 0, 1 it is counted" in statement["neighbouring_relation"]
    assert "of the lead's own data set tiny" in statement["public_images"]
    assert [text.split(" is a")[0] for text in statement["plugins"]] == [
        "the network support:micro",
        "the data set support:tiny",
    ]
