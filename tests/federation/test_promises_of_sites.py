"""Sites, ledgers and policies promise nothing that the data or the run do not support."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import support
from commands import interrupted_after_a_round
from made_sites import ledger_create, tiny_site
from support import TINY
from wire import a_request, ask, real
from xcal.config import to_toml
from xcal.dp.ledger.ledger import Ledger
from xcal.dp.ledger.rows import Charge, Release, RunTerms, charges_of, read_rows, runs_of
from xcal.experiments import make_experiment
from xcal.federation.messages import Refusal, Reply

Invoke = Callable[..., tuple[int, str, str]]
KEYS = {
    **TINY,
    "method": "fl-dp",
    "clients": 2,
    "rounds": 1,
    "road_images": 0,
    "road_test_images": 0,
}
LIMITS = "--unit record --epsilon 20 --delta 1e-2".split()


def words(**keys: Any) -> list[str]:
    found = []
    for key, value in {**KEYS, **keys}.items():
        found += ["--set", f"{key}={json.dumps(value)}"]
    return found


def run(invoke: Invoke, out: Path, sites: list[Path], **keys: Any) -> tuple[int, str, str]:
    return invoke("run", *words(sites=[str(h) for h in sites], **keys), "--out", str(out))


def rows(site_dir: Path) -> int:
    return len(read_rows(site_dir / "ledger.sqlite"))


def told(site_dir: Path) -> list[dict[str, Any]]:
    """What the site wrote down that it refused, also where it is a bare ledger."""
    path = site_dir / "refusals.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def allow(site_dir: Path, **terms: Any) -> None:
    path = site_dir / "policy.toml"
    lines = [line for line in path.read_text().splitlines() if line.split(" =")[0] not in terms]
    lines += [f"{key} = {json.dumps(value)}" for key, value in terms.items()]
    path.write_text("\n".join(lines) + "\n")


def set_site(site_dir: Path, **keys: Any) -> None:
    path = site_dir / "site.toml"
    lines = [
        line
        for line in path.read_text().splitlines()
        if line.removeprefix("# ").split(" =")[0] not in keys
    ]
    lines += [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture(params=["bare", "whole"])
def sites(request: pytest.FixtureRequest, invoke: Invoke, tmp_path: Path) -> list[Path]:
    """Two sites of real populations: bare ledgers, or with a policy."""
    return make(invoke, tmp_path, bare=request.param == "bare")


@pytest.fixture
def bare(invoke: Invoke, tmp_path: Path) -> list[Path]:
    return make(invoke, tmp_path, bare=True)


@pytest.fixture
def whole(invoke: Invoke, tmp_path: Path) -> list[Path]:
    return make(invoke, tmp_path, bare=False)


def make(invoke: Invoke, folder: Path, *, bare: bool) -> list[Path]:
    made = [folder / name for name in ("ward-1", "ward-2")]
    for site_dir in made:
        if bare:
            args = ["ledger", "create", str(site_dir), "--population", site_dir.name]
        else:
            args = [
                "site",
                "init",
                str(site_dir),
                "--population",
                site_dir.name,
                "--client",
                site_dir.name,
            ]
            args += ["--data", "support:tiny"]
        code, _, err = invoke(*args, *LIMITS)
        assert code == 0, err
        if not bare:
            allow(site_dir, networks=["support:micro"], sigma_min=0.0)
    return made


# --- which patients a site has --------------------------------------------------------------------


def test_sites_that_would_share_patients_are_refused(
    invoke: Invoke, tmp_path: Path, sites: list[Path]
) -> None:
    code, _, err = run(invoke, tmp_path / "run", sites, units_per_client=100)
    assert code == 2
    assert "units_per_client = 100" in err and len(err.strip().splitlines()) == 1
    assert [rows(site_dir) for site_dir in sites] == [1, 1]
    assert not (tmp_path / "run").exists()
    assert [r["code"] for r in told(sites[0])] == ["data"]
    assert run(invoke, tmp_path / "run", sites, units_per_client=75)[0] == 0
    # a simulation protects nobody
    assert invoke("run", *words(units_per_client=100), "--out", str(tmp_path / "made-up"))[0] == 0


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"partition": "label"}, "partition"),
        ({"units_per_client": 60}, "units_per_client"),
        ({"train_images": 120}, "train_images"),
        ({"keep_groups": False}, "keep_groups"),
    ],
)
def test_another_partition_is_refused_by_the_key_that_makes_it(
    invoke: Invoke, tmp_path: Path, bare: list[Path], keys: dict[str, Any], named: str
) -> None:
    assert run(invoke, tmp_path / "first", bare)[0] == 0
    code, _, err = run(invoke, tmp_path / "second", bare, **keys)
    assert code == 2
    assert f"{named} = " in err and len(err.strip().splitlines()) == 1


def test_another_seed_moves_nobody_to_another_ledger(
    invoke: Invoke, tmp_path: Path, sites: list[Path]
) -> None:
    assert run(invoke, tmp_path / "first", sites)[0] == 0
    before = [rows(site_dir) for site_dir in sites]
    code, _, err = run(invoke, tmp_path / "second", sites, seed=1)
    assert code == 2
    assert "seed = 0" in err and "seed = 1" in err and len(err.strip().splitlines()) == 1
    assert [rows(site_dir) for site_dir in sites] == before
    assert not (tmp_path / "second").exists()
    assert told(sites[0])[-1]["code"] == "data"
    # what gives nobody another site is a run like any other
    assert run(invoke, tmp_path / "second", sites, lr=0.1, epsilon=4.0, concentration=0.9)[0] == 0


def test_sites_that_change_places_or_join_are_refused(
    invoke: Invoke, tmp_path: Path, bare: list[Path]
) -> None:
    assert run(invoke, tmp_path / "first", bare)[0] == 0
    code, _, err = run(invoke, tmp_path / "second", bare[::-1])
    assert code == 2
    assert "partition 0 of 2" in err and "partition 1 of 2" in err
    code, _, err = run(invoke, tmp_path / "second", bare[:1], clients=1)
    assert code == 2
    assert "clients = 2" in err


def test_a_site_that_had_all_does_not_share_later(
    invoke: Invoke, tmp_path: Path, whole: list[Path]
) -> None:
    """And one that holds all there is may see it grow: nobody's spending moves elsewhere."""
    one = {"clients": 1, "epsilon": 4.0}
    assert run(invoke, tmp_path / "first", whole[:1], **one)[0] == 0
    assert run(invoke, tmp_path / "second", whole[:1], **one, train_images=120, seed=1)[0] == 0
    code, _, err = run(invoke, tmp_path / "third", whole)
    assert code == 2
    assert "clients = 1" in err
    assert rows(whole[1]) == 1


def test_data_that_changed_under_the_same_name_deal_anew(
    invoke: Invoke, tmp_path: Path, bare: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(invoke, tmp_path / "first", bare)[0] == 0
    tiny = support.tiny
    monkeypatch.setattr(
        support, "tiny", lambda *, pixels=16, seed=0: tiny(pixels=pixels, train=153)
    )
    code, _, err = run(invoke, tmp_path / "second", bare)
    assert code == 2
    assert "support:tiny" in err and "changed" in err


def test_a_site_from_before_takes_the_deal_of_its_next_run(
    invoke: Invoke, tmp_path: Path, bare: list[Path]
) -> None:
    assert run(invoke, tmp_path / "first", bare)[0] == 0
    for site_dir in bare:
        (site_dir / "partition.json").unlink()
    assert run(invoke, tmp_path / "second", bare, seed=1)[0] == 0
    assert run(invoke, tmp_path / "third", bare, seed=0)[0] == 2


def test_a_memory_that_cannot_be_read_is_one_sentence(
    invoke: Invoke, tmp_path: Path, bare: list[Path]
) -> None:
    assert run(invoke, tmp_path / "first", bare)[0] == 0
    for text in ("{", "[]", '{"clients": "two"}'):
        (bare[0] / "partition.json").write_text(text)
        code, _, err = run(invoke, tmp_path / "second", bare)
        assert code == 2
        assert "partition.json" in err and len(err.strip().splitlines()) == 1


def test_a_trial_may_be_dealt_anew(invoke: Invoke, tmp_path: Path) -> None:
    site_dir = tiny_site(tmp_path)
    assert isinstance(ask(site_dir, a_request()), Reply)
    assert not (site_dir / "partition.json").exists()


def test_a_client_elsewhere_keeps_to_its_part(tmp_path: Path) -> None:
    site_dir = real(tiny_site(tmp_path))
    assert isinstance(ask(site_dir, a_request()), Reply)
    path = tmp_path / "experiment.toml"
    text = path.read_text()
    assert "seed = 0\n" in text
    path.write_text(text.replace("seed = 0\n", "seed = 1\n"))
    before = rows(site_dir)
    assert ask(site_dir, a_request(run="another")) == Refusal("0", "data")
    assert rows(site_dir) == before


# --- passes ---------------------------------------------------------------------------------------


def test_passes_as_large_as_the_draw_are_refused(
    invoke: Invoke, tmp_path: Path, sites: list[Path]
) -> None:
    code, _, err = run(invoke, tmp_path / "run", sites, pass_rows=0)
    assert code == 2
    assert "pass_rows = 0" in err and len(err.strip().splitlines()) == 1
    assert [rows(site_dir) for site_dir in sites] == [1, 1]
    assert [r["code"] for r in told(sites[0])] == ["experiment-invalid"]
    assert run(invoke, tmp_path / "run", sites, pass_rows=16)[0] == 0


def test_an_owner_may_allow_them(invoke: Invoke, tmp_path: Path, whole: list[Path]) -> None:
    for site_dir in whole:
        set_site(site_dir, pass_rows=0)
    assert run(invoke, tmp_path / "run", whole, pass_rows=0)[0] == 0


# --- two ledgers over the same people -------------------------------------------------------------


def test_who_makes_a_second_ledger_is_told_what_it_means(invoke: Invoke, tmp_path: Path) -> None:
    args = ["ledger", "create", "--population", "ward 7", *LIMITS]
    first = " ".join(invoke(*args, str(tmp_path / "a"))[1].split())
    assert "grants its own limit" in first and "Beware" not in first
    second = " ".join(invoke(*args, str(tmp_path / "b"))[1].split())
    assert f"Beware: {tmp_path / 'a'}" in second
    assert "Beware" not in invoke(*args, str(tmp_path / "elsewhere" / "c"))[1]

    args = ["site", "init", "--client", "x", "--data", "support:tiny", *LIMITS]
    first = " ".join(invoke(*args, str(tmp_path / "h" / "a"), "--population", "p")[1].split())
    assert "grants its own limit" in first and "Beware" not in first
    second = " ".join(invoke(*args, str(tmp_path / "h" / "b"), "--population", "q")[1].split())
    assert f"Beware: {tmp_path / 'h' / 'a'}" in second


# --- a ledger of the rule renyi -------------------------------------------------------------------


def use_up(site_dir: Path) -> None:
    """Have an earlier run of the population leave less than any step of a run costs."""
    with Ledger(site_dir / "ledger.sqlite") as ledger:
        ledger.reserve(RunTerms("earlier", "xcal", "record", 8.0, 1e-3, 8.0, 100.0, 10_000))
        for sigma in (2.0, 8.0, 32.0, 128.0):
            while ledger.lifetime_admits(0.2, sigma):
                paid = (Release("gradient", sigma, 1.0),)
                ledger.charge(Charge("earlier", 0, 0, 0.2, sigma, 1.0, paid))


@pytest.mark.parametrize("method", ["fl-dp", "xcal-steered", "xcal-paper", "adap-dpfl"])
def test_a_run_that_cannot_pay_one_step_is_refused(
    invoke: Invoke, tmp_path: Path, method: str
) -> None:
    made = [tmp_path / name for name in ("one", "two")]
    for site_dir in made:
        args = ledger_create(site_dir)
        limits = "--epsilon 8 --delta 1e-3 --rule renyi --order 5".split()
        assert invoke(*args, *limits)[0] == 0
    use_up(made[1])
    before = [rows(site_dir) for site_dir in made]
    keys = {"method": method, "epsilon": 4.0, "public_validation": True}
    keys["public_validation_by"] = "the board"
    code, _, err = run(invoke, tmp_path / "run", made, **keys)
    assert code == 2, err
    assert str(made[1]) in err and "one step of the run costs" in err
    assert [rows(site_dir) for site_dir in made] == before
    assert [r["code"] for r in told(made[1])] == ["epsilon-total"]
    assert run(invoke, tmp_path / "run", made[:1], **{**keys, "clients": 1})[0] == 0
    charged = read_rows(made[0] / "ledger.sqlite")
    assert all(charges_of(charged, name) for name in runs_of(charged))


def test_an_order_without_its_rule_is_refused(invoke: Invoke, tmp_path: Path) -> None:
    args = ["ledger", "create", str(tmp_path / "a"), "--population", "p", *LIMITS]
    code, _, err = invoke(*args, "--order", "8")
    assert code == 2
    assert "--rule renyi" in err
    assert not (tmp_path / "a").exists()
    assert invoke(*args, "--order", "8", "--rule", "renyi")[0] == 0


# --- sentences ------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["verify", "show", "analyse"])
def test_ledgers_of_a_run_with_sites_are_found(
    invoke: Invoke, tmp_path: Path, bare: list[Path], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "run"
    near = [Path(site_dir.name) for site_dir in bare]
    assert run(invoke, out, near)[0] == 0
    code, text, err = invoke("ledger", command, str(out))
    assert code == 0, err
    assert all(f"{site_dir / 'ledger.sqlite'}:" in text for site_dir in near)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    code, _, err = invoke("ledger", command, str(out))
    assert code == 2
    assert "ward-1" in err and "relative" in err and "ledger create" not in err


def test_a_run_is_resumed_from_where_its_sites_are(
    invoke: Invoke, tmp_path: Path, bare: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    near = [Path(site_dir.name) for site_dir in bare]
    with interrupted_after_a_round():
        assert run(invoke, tmp_path / "run", near, rounds=2)[0] == 130
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    code, _, err = invoke("run", "--resume", str(tmp_path / "run"))
    assert code == 2
    assert "ward-1" in err and "relative" in err and "ledger create" not in err
    assert list((tmp_path / "elsewhere").iterdir()) == []
    monkeypatch.chdir(tmp_path)
    code, _, err = invoke("run", "--resume", str(tmp_path / "run"))
    assert code == 0, err


def test_a_new_run_with_a_site_that_is_not_there_makes_none(
    invoke: Invoke, tmp_path: Path, bare: list[Path]
) -> None:
    code, _, err = run(invoke, tmp_path / "run", [bare[0], tmp_path / "nowhere"])
    assert code == 2
    assert "nowhere" in err
    assert not (tmp_path / "nowhere").exists() and not (tmp_path / "run").exists()


def test_a_ledger_that_is_used_up_says_so(invoke: Invoke, tmp_path: Path) -> None:
    made = [tmp_path / name for name in ("one", "two")]
    for site_dir in made:
        args = ledger_create(site_dir)
        assert invoke(*args, "--epsilon", "8", "--delta", "1e-2")[0] == 0
    assert run(invoke, tmp_path / "first", made)[0] == 0
    code, _, err = run(invoke, tmp_path / "second", made)
    assert code == 2
    assert "epsilon = 0 left of 8" in err and "used up" in err and "lower" not in err


@pytest.mark.parametrize(
    ("terms", "parts"),
    [
        ({"epsilon_run": 3.0}, ("epsilon = 8", "epsilon_run = 3")),
        ({"delta_run": 1e-4}, ("delta = 0.001", "delta_run = 0.0001")),
        ({"max_steps": 3}, ("8 steps", "max_steps = 3")),
        ({"max_batch": 9}, ("batch = 10", "max_batch = 9")),
        ({"sigma_min": 50.0}, ("noise multiplier", "sigma_min = 50")),
        ({"methods": ["xcal-steered"]}, ("method = 'fl-dp'", "methods")),
        ({"networks": ["small"]}, ("network = 'support:micro'", "networks")),
    ],
)
def test_a_policy_refuses_by_key_and_unit(
    invoke: Invoke, tmp_path: Path, whole: list[Path], terms: dict[str, Any], parts: tuple[str, ...]
) -> None:
    allow(whole[1], **terms)
    code, _, err = run(invoke, tmp_path / "run", whole)
    assert code == 2
    assert all(part in err for part in (*parts, "policy.toml")), err


def test_a_policy_whose_total_is_reserved_says_so(
    invoke: Invoke, tmp_path: Path, whole: list[Path]
) -> None:
    for site_dir in whole:
        allow(site_dir, epsilon_total=8.0, epsilon_run=8.0)
    assert run(invoke, tmp_path / "first", whole)[0] == 0
    code, _, err = run(invoke, tmp_path / "second", whole)
    assert code == 2
    assert "epsilon = 8" in err and "epsilon_total = 8" in err and "nothing is left" in err
    assert told(whole[0])[-1]["code"] == "epsilon-total"


def nameless(*, pixels: int = 16, seed: int = 0) -> Any:
    """`tiny`, of which nobody knows whose the images are."""
    from dataclasses import replace

    from xcal.data.images import RECORD_GROUPS

    data = support.tiny(pixels=pixels, seed=seed)
    parts = {name: replace(images, groups=images.groups * 0) for name, images in data.splits()}
    for name, images in parts.items():
        start = {"train": 0, "validation": 10_000, "test": 20_000}[name]
        groups = start + support.np.arange(len(images), dtype=support.np.int64)
        parts[name] = replace(images, groups=groups)
    return replace(data, group_name=RECORD_GROUPS, **parts)


def test_a_ledger_per_person_and_images_of_nobody(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "nameless", nameless, raising=False)
    site_dir = tmp_path / "site"
    args = ["ledger", "create", str(site_dir), "--population", "p", "--unit", "group"]
    assert invoke(*args, "--epsilon", "20", "--delta", "1e-2")[0] == 0
    keys = {"data": "support:nameless", "clients": 1}
    code, _, err = run(invoke, tmp_path / "run", [site_dir], **keys)
    assert code == 2
    assert "--group-column" in err and "--unit record" in err
    assert rows(site_dir) == 1


# --- what a site writes down ----------------------------------------------------------------------


def test_a_refusal_before_the_site_is_entered_is_written_down_there(
    invoke: Invoke, tmp_path: Path, whole: list[Path]
) -> None:
    set_site(whole[1], units=20)
    assert run(invoke, tmp_path / "run", whole)[0] == 2
    assert [r["code"] for r in told(whole[1])] == ["site"]
    set_site(whole[1], units=90)
    assert run(invoke, tmp_path / "run", whole, batch=88)[0] == 2  # ward-1 has 75
    assert [r["code"] for r in told(whole[0])] == ["plan-refused"]
    (whole[1] / "policy.toml").rename(whole[1] / "away")
    assert run(invoke, tmp_path / "run", whole)[0] == 2
    assert [r["code"] for r in told(whole[1])] == ["site", "site"]
    assert "policy.toml" in told(whole[1])[-1]["detail"]
    assert [rows(site_dir) for site_dir in whole] == [1, 1]


# --- units that a site declares -------------------------------------------------------------------


def test_check_holds_a_site_to_its_part(invoke: Invoke, tmp_path: Path, whole: list[Path]) -> None:
    for site_dir in whole:
        set_site(site_dir, units=80)
    assert run(invoke, tmp_path / "run", whole)[0] == 0
    code, out, err = invoke("site", "check", str(whole[0]))
    assert code == 0, err
    assert "partition 0 of 2" in out and "up to 80 units" in " ".join(out.split())
    set_site(whole[0], units=60)
    code, _, err = invoke("site", "check", str(whole[0]))
    assert code == 1
    assert "units = 60" in err and "hold 75" in err


def init(invoke: Invoke, site_dir: Path, *args: str) -> tuple[int, str, str]:
    usual = "--client x --population p --epsilon 8 --delta 1e-3".split()
    return invoke("site", "init", str(site_dir), *usual, *args)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--data", "support:tiny", "--units", "149", "--unit", "record"], "units = 149"),
        (["--data", "support:tiny", "--units", "49", "--unit", "group"], "units = 49"),
        (["--data", "support:nameless", "--unit", "group"], "--group-column"),
        (["--experiment", "TRIAL", "--units", "50"], "units = 50"),
        (["--experiment", "TRIAL", "--shard", "9"], "none of number 9"),
        (["--experiment", "TRIAL", "--unit", "group"], "unit"),
    ],
)
def test_a_site_that_cannot_work_is_not_made(
    invoke: Invoke,
    tmp_path: Path,
    args: list[str],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(support, "nameless", nameless, raising=False)
    trial = tmp_path / "trial.toml"
    trial.write_text(to_toml(make_experiment({**TINY, "method": "xcal-steered"}).resolved()))
    args = [str(trial) if word == "TRIAL" else word for word in args]
    code, _, err = init(invoke, tmp_path / "site", *args)
    assert code == 2
    assert named in err and len(err.strip().splitlines()) == 1
    assert not (tmp_path / "site").exists()


def test_a_site_before_its_images_is_made_unchecked_and_says_so(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XCAL_HOME", str(tmp_path / "images"))
    code, out, err = init(invoke, tmp_path / "site", "--data", "later", "--unit", "group")
    assert code == 0, err
    assert "xcal site check" in out
    code, out, err = init(invoke, tmp_path / "b", "--data", "support:tiny", "--units", "150")
    assert code == 0, err
    assert "xcal site check" not in out


# --- whose folders --------------------------------------------------------------------------------


def test_nobody_else_reads_a_site(sites: list[Path]) -> None:
    assert [site_dir.stat().st_mode & 0o777 for site_dir in sites] == [0o700, 0o700]


def test_a_ledger_in_a_folder_that_was_there(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(mode=0o755)
    args = ["ledger", "create", str(tmp_path / "a"), "--population", "p", *LIMITS]
    assert invoke(*args)[0] == 0
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700
