"""Any words after `xcal`, any experiment file: no traceback, no hang, nothing half made."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer.main

from fuzzing import damaged, rounds, within
from support import TINY
from xcal.cli.app import app, main
from xcal.config import to_toml
from xcal.experiments import KEYS

VALUES = (
    "", " ", "-1", "0", "1", "7", "1e9", "999999999999999999999", "nan",
    "inf", "-inf", "1e-400", "xcal-steered", "fl", "fl-dp", "nosuch", "smear2",
    "record", "group", "é", "a" * 500, "..", "/dev/null", "nowhere/at/all",
    ".", "broken.bin", "broken.toml", "folder", "=", "--", "key=value", "epsilon=", "=5",
    "epsilon=-1", "data=support:tiny", "\x7f", "%s", "{}", "'; x", "*",
)  # fmt: skip
# Where nothing is wrong with its words, a run is to be a short one.
SMALL = {**TINY, "rounds": 1, "clients": 2, "road_images": 0, "road_test_images": 0}
# The others begin hours of work where nothing is wrong with their words: they get a wrong one.
QUICK = {"plan", "run", "ledger", "data", "evaluate", "explain", "panel", "site"}


def commands(
    command: click.Command, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from commands(inner, (*path, name))
    else:
        yield path, command


COMMANDS = dict(commands(typer.main.get_command(app)))


def words_for(path: tuple[str, ...], command: click.Command, rng: random.Random) -> list[str]:
    """Arguments and options of one command, filled from `VALUES`; some left out or doubled."""
    words = list(path)
    for parameter in command.params:
        if isinstance(parameter, click.Argument):
            if rng.random() < 0.9:
                words.append(rng.choice(VALUES))
        elif rng.random() < (0.9 if parameter.required else 0.3) and parameter.name != "help":
            words.append(rng.choice(parameter.opts))
            if not getattr(parameter, "is_flag", False):
                words.append(rng.choice(VALUES))
    if rng.random() < 0.1:
        words.insert(rng.randrange(len(words) + 1), rng.choice(("--nosuch", "-x", *VALUES)))
    if path[0] not in QUICK:
        words.append("--no-such-option")
    if path == ("run",) and "--resume" not in words:
        words += _sizes("")
    return words


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XCAL_HOME", str(tmp_path / "xcal-site"))
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


def call(words: list[str], capsys: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """The real entry point; whatever is no clean exit raises."""
    monkeypatch.setattr(sys, "argv", ["xcal", *words])
    with within(60, " ".join(words)):
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return code, capsys.readouterr().err


def _sizes(text: str) -> list[str]:
    """--set arguments for what an experiment file does not say any more: a run stays short."""
    missing = [key for key in SMALL if f"{key} =" not in text]
    return [word for key in missing for word in ("--set", f"{key}={SMALL[key]}")]


@pytest.mark.parametrize("name", sorted({" ".join(path) for path in COMMANDS}))
def test_any_words(
    name: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tuple(name.split())
    for number in rounds(8 if path[0] in QUICK else 1):
        (here / "broken.bin").write_bytes(bytes(range(256)))
        (here / "broken.toml").write_bytes(b"method = 3\nepsilon = 'x'\n")
        (here / "folder").mkdir(exist_ok=True)
        words = words_for(path, COMMANDS[path], random.Random(f"{name} {number}"))
        code, err = call(words, capsys, monkeypatch)
        assert code in (0, 1, 2), (words, err)
        assert "Traceback" not in err, (words, err)
        if code == 2:
            assert err.strip(), words


def test_any_experiment_file(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damaged as by an editor: refused with nothing made, or trained to its end."""
    whole = to_toml({**SMALL, "method": "fl-dp"}).encode()
    for number in rounds(25):
        rng = random.Random(f"toml {number}")
        text = damaged(whole, rng)
        if number % 3 == 0:  # a line from elsewhere
            value = rng.choice(("1", "'x'", "[1]", "{a = 1}", "nan", "true", "1979-05-27"))
            text = whole + f"{rng.choice(KEYS)} = {value}\n".encode()
        path, out = here / "experiment.toml", here / f"run{number}"
        path.write_bytes(text)
        sizes = _sizes(text.decode(errors="replace"))
        code, err = call(["run", str(path), "--out", str(out), *sizes], capsys, monkeypatch)
        assert code in (0, 2), (number, text, err)
        assert "Traceback" not in err
        if code == 2:
            assert err.startswith("xcal: ")
            assert len(err.strip().splitlines()) == 1, err
            assert not out.exists(), (number, text, err)
