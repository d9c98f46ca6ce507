"""`xcal site` as a hospital's engineer types it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support import TINY
from wire import a_request, ask
from xcal.config import to_toml
from xcal.experiments import make_experiment
from xcal.federation.messages import Refusal, Reply

Invoke = Callable[..., tuple[int, str, str]]


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    path = tmp_path / "trial.toml"
    path.write_text(to_toml(make_experiment({**TINY, "method": "xcal-steered"}).resolved()))
    return [
        *("site", "init", str(tmp_path / "site"), "--client", "0", "--population", "clinic"),
        *("--epsilon", "8", "--delta", "1e-3", "--experiment", str(path), "--seed", "0"),
    ]


def test_a_site_is_made_checked_and_shown(invoke: Invoke, words: list[str]) -> None:
    site_dir = Path(words[2])
    code, out, _ = invoke(*words)
    assert code == 0
    assert "policy.toml" in out
    assert site_dir.stat().st_mode & 0o077 == 0
    policy = site_dir / "policy.toml"
    text = policy.read_text()
    assert "# highest ε of one run" in text
    # the network of the trial is our own, so the owner must name it
    assert ask(site_dir, a_request()) == Refusal("0", "network-not-allowed")
    policy.write_text(text.replace('networks = ["small"', 'networks = ["support:micro"'))
    assert isinstance(ask(site_dir, a_request()), Reply)
    code, out, _ = invoke("site", "show", str(site_dir))
    assert code == 0
    assert "1 runs reserved ε = 8 of 8" in " ".join(out.split())
    assert "network-not-allowed" in out
    code, out, _ = invoke("site", "check", str(site_dir))
    assert code == 0
    assert "training images" in out
    assert "code of your own" in out


def test_what_is_wrong_is_named(invoke: Invoke, words: list[str]) -> None:
    assert invoke(*words)[0] == 0
    site_dir = Path(words[2])
    path = site_dir / "site.toml"
    path.write_text(path.read_text().replace("shard = 0", "shard = 9"))
    code, _, err = invoke("site", "check", str(site_dir))
    assert code == 1
    assert "none of number 9" in err
    code, _, err = invoke(*words)
    assert code == 2
    assert "never replaced" in err


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"--client": "../x"}, "--client is not accepted"),
        ({"--epsilon": "-1"}, "epsilon"),
        ({"--experiment": None}, "Say where the data are"),
        ({"--epsilon-run": "9"}, "cannot have more than all"),
        ({"--unit": "person"}, "record or group"),
    ],
)
def test_bad_options_are_one_sentence(
    invoke: Invoke, words: list[str], changes: dict[str, str | None], match: str
) -> None:
    for key, value in changes.items():
        if key in words:
            at = words.index(key)
            words[at : at + 2] = [] if value is None else [key, value]
        elif value is not None:
            words += [key, value]
    code, _, err = invoke(*words)
    assert code == 2
    assert match in err
    assert len(err.strip().splitlines()) == 1
    assert not Path(words[2]).exists()


def test_no_site_is_one_sentence(invoke: Invoke, tmp_path: Path) -> None:
    for command in ("show", "check"):
        code, _, err = invoke("site", command, str(tmp_path / "none"))
        assert code == 2
        assert "xcal site init" in err


def test_fingerprints_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Rich would make an emoji of :AB: and drop what looks like markup."""
    from xcal.cli.federation import say

    say("SHA256:2C:AB:46 [bold]")
    assert capsys.readouterr().out == "SHA256:2C:AB:46 [bold]\n"
