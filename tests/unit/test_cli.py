"""The command line as its user types it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from inventory import INVENTORY
from support import sets

Invoke = Callable[..., tuple[int, str, str]]


def assert_one_sentence(text: str) -> None:
    assert text.startswith("xcal: ")
    assert "Traceback" not in text
    assert len(text.strip().splitlines()) == 1


def test_version(invoke: Invoke) -> None:
    assert invoke("--version")[:2] == (0, "xcal 0.2.0\n")


PLAN = "plan --epsilon 0.5 --delta 1e-5 --units 3332 --batch 32 --rounds 30".split()


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("xcal-steered", {"sigma_static": 4.23, "sigma_ref": 4.31, "sigma_pld": 3.885}),
        ("xcal-paper", {"sigma_static": 4.23, "sigma_ref": 4.83, "sigma_signal": 36.6}),
        ("fl-dp", {"sigma_static": 3.885, "sigma_ref": 3.885, "sigma_renyi": 4.23}),
    ],
)
def test_plan_prints_one_json_object(
    invoke: Invoke, method: str, expected: dict[str, float]
) -> None:
    code, out, err = invoke(*PLAN, "--method", method, "--json")
    assert (code, err) == (0, "")
    plan = json.loads(out)
    assert set(
        "method epsilon delta units batch rounds steps sample_rate order sigma_static sigma_ref"
        " sigma_min sigma_max sigma_signal signal_price".split()
    ) <= set(plan)
    assert plan["steps"] == 3150
    for key, value in expected.items():
        assert plan[key] == pytest.approx(value, rel=0.005)
    price = plan["sigma_ref"] / plan["sigma_static"] - 1
    assert plan["signal_price"] == pytest.approx(price, abs=1e-9)


def test_plan_table(invoke: Invoke) -> None:
    code, out, _ = invoke(*PLAN, "--method", "xcal-steered")
    assert code == 0
    assert "sigma_ref" in out
    assert "4.311" in out


def test_a_large_delta_is_warned_about(invoke: Invoke) -> None:
    code, out, _ = invoke("plan", "--epsilon", "5", "--delta", "0.01", "--units", "200")
    assert code == 0
    assert "Beware" in out


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["plan", "--epsilon", "-1", "--units", "100"], "epsilon"),
        (["plan", "--epsilon", "nan", "--units", "100"], "epsilon"),
        (["plan", "--epsilon", "1", "--units", "10", "--batch", "32"], "batch"),
        (["plan", "--epsilon", "1", "--delta", "0", "--units", "100"], "delta"),
        (["plan", "--epsilon", "1", "--units", "100", "--set", "band=1.5"], "band"),
        (["plan", "--epsilon", "1", "--units", "0"], "units"),
        (["plan", "--epsilon", "1", "--units", "99", "--method", "fl"], "no guarantee"),
        (["plan", "--epsilon", "1", "--units", "99", "--method", "xcall"], "xcal"),
        (["run", "nowhere.toml", "--out", "x"], "nowhere.toml"),
        (["run"], "--out"),
        (["run", "--resume", "nowhere"], "nowhere"),
        (["run", "--set", "epsilonn=1", "--out", "x"], "'epsilon'"),
        (["run", "--set", "epsilon", "--out", "x"], "key=value"),
        (["run", "--set", "rounds=0", "--out", "x"], "rounds"),
        (["run", "--set", "rounds=many", "--out", "x"], "rounds"),
        (["run", "--set", "data=nosuch", "--out", "x"], "nosuch"),
        (["run", "--set", "network=nosuch", "--out", "x"], "nosuch"),
        (["run", "--set", "network=no.such:thing", "--out", "x"], "no.such:thing"),
        (["run", "--set", "device=cuda", "--out", "x"], "cuda"),
        (["ledger", "show", "nowhere"], "nowhere"),
        (["ledger", "verify", "nowhere"], "nowhere"),
        ("ledger create h --population p --epsilon 0 --delta 1e-5 --unit group".split(), "epsilon"),
        ("ledger create h --population p --epsilon 1 --delta 1e-5 --unit x".split(), "unit"),
        (
            "ledger create h --population p --epsilon 1 --delta 1e-5 --unit group"
            " --rule renyi".split(),
            "order",
        ),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    invoke: Invoke, words: list[str], names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if words[0] == "run" and "data=nosuch" not in words and "--set" in words:
        words = [*words[:1], *sets(), *words[1:]]
    code, out, err = invoke(*words)
    assert code == 2, (out, err)
    assert_one_sentence(err)
    assert names in err
    assert list(tmp_path.iterdir()) == []  # nothing was made


def test_broken_toml_names_the_file(invoke: Invoke, tmp_path: Path) -> None:
    for content in (b"method = ", b"\xff\xfe\x00", b"[table]\nmethod = 'xcal-steered'"):
        path = tmp_path / "broken.toml"
        path.write_bytes(content)
        code, _, err = invoke("run", str(path), "--out", str(tmp_path / "run"))
        assert code == 2
        assert_one_sentence(err)
        assert not (tmp_path / "run").exists()


def test_run_show_resume_and_verify(invoke: Invoke, tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    code, text, err = invoke("run", *sets(method="xcal-steered"), "--out", out)
    assert code == 0, err
    assert "validation F1" in text
    assert "(8, 0.001)-DP per record" in text
    # a second run into the same folder is refused, and says how to go on
    code, _, err = invoke("run", *sets(method="xcal-steered"), "--out", out)
    assert code == 2
    assert "--resume" in err
    # resuming a finished run prints its result
    code, text, _ = invoke("run", "--resume", out)
    assert code == 0
    assert "Test macro F1" in text
    code, text, _ = invoke("ledger", "show", out)
    assert code == 0
    assert "simulated client 0" in text
    code, text, _ = invoke("ledger", "verify", out)
    assert code == 0
    assert text.count("all in order") == 3


def test_unused_keys_are_accepted_and_named(invoke: Invoke, tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    code, text, _ = invoke("run", *sets(method="fl", kappa=3), "--out", out)
    assert code == 0
    assert "Not used by fl" in text
    assert "epsilon" in text
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert {"epsilon", "kappa"} <= set(result["unused"])
    assert result["epsilon_target"] is None


def test_sites_carry_spending_across_runs(invoke: Invoke, tmp_path: Path) -> None:
    sites = [str(tmp_path / f"site{i}") for i in range(3)]
    for i, site_dir in enumerate(sites):
        words = f"ledger create {site_dir} --population ward{i} --epsilon 12 --delta 2e-3".split()
        words += ["--unit", "record"]
        assert invoke(*words)[0] == 0
        assert invoke(*words)[0] == 2  # never replaced
    given = f"sites={json.dumps(sites)}"
    first = ["run", *sets(method="xcal-steered"), "--set", given, "--out", str(tmp_path / "a")]
    assert invoke(*first)[0] == 0
    second = ["run", *sets(method="xcal-steered"), "--set", given, "--out", str(tmp_path / "b")]
    code, _, err = invoke(*second)
    assert code == 2
    assert "epsilon = 4 left" in err
    assert not (tmp_path / "b").exists()
    plain = ["run", *sets(method="fl"), "--set", given, "--out", str(tmp_path / "c")]
    code, _, err = invoke(*plain)
    assert code == 2
    assert "no guarantee" in err
    smaller = [
        "run",
        *sets(method="fl-dp", epsilon=4),
        "--set",
        given,
        "--out",
        str(tmp_path / "d"),
    ]
    assert invoke(*smaller)[0] == 0
    assert invoke("ledger", "verify", sites[0])[0] == 0


def test_nothing_private_in_what_is_printed_logged_or_replied(
    invoke: Invoke, tmp_path: Path
) -> None:
    """File names, labels, drawn counts and losses of training images stay at the client."""
    out = tmp_path / "run"
    code, text, err = invoke("run", *sets(method="xcal-steered"), "--out", str(out))
    assert code == 0
    shared = [text, err]
    for path in out.rglob("*"):
        if path.is_file() and path.suffix in (".json", ".jsonl", ".txt", ".toml"):
            shared.append(path.read_text())
    for piece in shared:
        assert "secret-train" not in piece
        assert "train_loss" not in piece
        assert "drawn" not in piece.replace("drawn batch's size", "").replace(
            "with replacement", ""
        )
    explained = {field.name for field in INVENTORY}
    told = json.loads((out / "rounds.jsonl").read_text().splitlines()[0])["clients"][0]
    assert {f"report.{name}" for name in told} <= explained
    step = json.loads((out / "trace.jsonl").read_text().splitlines()[0])
    assert {f"trace.{name}" for name in step if name != "client"} <= explained
