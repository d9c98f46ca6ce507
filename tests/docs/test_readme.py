"""The README: its commands exist and run as they stand, its script runs, its wheel installs."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from commands import xcal_forked
from support import ROOT

TEXT = (ROOT / "README.md").read_text()
COMMANDS = [
    line
    for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    for line in (re.sub(r"\s+#.*", "", each).strip() for each in block.splitlines())
    if line
]
LINKS = re.findall(r"^\[([a-z0-9-]+)\]: (\S+)$", TEXT, re.MULTILINE)
OF_XCAL = [command for command in COMMANDS if command.startswith("xcal ")]
# What takes minutes or several processes runs elsewhere: tests/unit/test_demo.py, tests/federation.
ELSEWHERE = ("xcal demo", "xcal federation ", "xcal site show federation/")


def test_what_everybody_needs_is_on_two_screens() -> None:
    """To the first heading that not everybody needs: two screens of 60 lines."""
    before, found, _ = TEXT.partition("\n## What is promised")
    shown = re.sub(r"^\[[a-z0-9-]+\]: .*\n", "", before, flags=re.MULTILINE)
    assert found and len(shown.splitlines()) <= 120


def test_every_cell_of_the_comparison_has_its_source() -> None:
    rows = [line.strip("| ").split(" | ") for line in TEXT.splitlines() if line.startswith("| ")]
    start = next(i for i, row in enumerate(rows) if row[0] == "what users ask for")
    compared = rows[start + 1 : start + 9]
    assert all(len(row) == 5 for row in compared) and compared[-1][0].startswith("hides")
    names = {name: name in dict(LINKS) for name in re.findall(r"\]\[([a-z0-9-]+)\]", TEXT)}
    assert all(names.values()), names
    for asked, *cells in compared:
        for cell in cells:  # a link, or the row's or the cell's note
            assert re.search(r"\]\(|\]\[| ²", cell) or "¹" in asked, (asked, cell)


def test_commands_of_the_shell_are_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in re.findall(r"`?\bmake ([a-z-]+)", TEXT):
        assert words in targets, f"make {words}"
    for command in COMMANDS:
        first = shlex.split(command)[0]
        assert first in ("xcal", "make", "source", "pip", "export"), command


def test_every_command_and_option_exists() -> None:
    import click
    from typer.main import get_command

    from xcal.cli.app import app

    for line in OF_XCAL:
        words = shlex.split(line)[1:]
        command = get_command(app)
        while isinstance(command, click.Group) and words[0] in command.commands:
            command = command.commands[words.pop(0)]
        options = {name for each in command.params for name in each.opts}
        assert {word for word in words if word.startswith("--")} <= options, line


def test_a_federation_is_started_as_its_page_says() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text()
    for command in COMMANDS:
        if command.startswith(ELSEWHERE[1:]) or "XCAL_LEAD" in command:
            assert command in page, command


def test_the_script_runs(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("\n".join(re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)))
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "(3, 0.001)-differentially private" in " ".join(done.stdout.split())
    assert xcal_forked("ledger", "verify", str(tmp_path / "ward-7")).returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_commands_run_one_after_the_other(tmp_path: Path) -> None:
    """As they stand, in a folder with the example files and a small set of images."""
    from PIL import Image

    for folder in ("examples", "deploy"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    images = tmp_path / "blood-cells"
    for i in range(300):
        path = images / ("left", "right")[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 64), (i % 256, 255 - i % 256, 60 * (i % 2))).save(path)
    shutil.make_archive(str(images), "zip", images)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "XCAL_HOME": str(tmp_path / "images"),
    }
    for command in OF_XCAL:
        if command.startswith(ELSEWHERE):
            continue
        done = subprocess.run(
            [sys.executable, "-m", "xcal", *shlex.split(command)[1:]],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    for made in ("runs/quick/result.json", "runs/report.html", "runs/blood/result.json"):
        assert (tmp_path / made).exists(), made


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_wheel_installs_in_a_clean_environment(tmp_path: Path) -> None:
    """`make wheel`, then a fresh environment that has the dependencies and not this checkout."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "src", "pyproject.toml", "README.md", "LICENSE"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        target = tmp_path / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    recipe = re.search(r"-m pip (wheel [^\n]*) \.$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    subprocess.run([*pip, *recipe[1].split(), "."], cwd=tmp_path / "source", check=True)
    (wheel,) = (tmp_path / "source" / "dist").glob("xcal_fl-*.whl")

    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    bin_folder = tmp_path / "venv" / "bin"
    install = [str(bin_folder / "python"), "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*install, "--no-index", str(wheel)], check=True)
    # The dependencies of the running environment, behind the wheel's own packages.
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    others = [p for p in sys.path if p.endswith("site-packages")]
    (packages / "dependencies.pth").write_text("\n".join(others) + "\n")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def xcal(*words: str) -> str:
        done = subprocess.run(
            [str(bin_folder / "xcal"), *words],
            cwd=tmp_path,
            env={**environment, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert re.fullmatch(r"xcal \d+\.\d+\.\d+\s*", xcal("--version"))
    small = (
        "unit=record rounds=1 train_images=240 pixels=16 expected_batch_size=20 delta=1e-3".split()
    )
    xcal("run", *(word for key in small for word in ("--set", key)), "--out", "run")
    xcal("ledger", "verify", "run")
    xcal("report", "run", "--out", "report.html")
    where = subprocess.run(
        [str(bin_folder / "python"), "-c", "import xcal; print(xcal.__file__)"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert where.stdout.startswith(str(packages)), "another xcal than the wheel's"
