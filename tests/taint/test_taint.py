"""What leaves a client depends on its releases only.

The functions that add noise are replaced by ones that look at nothing but their key. Then all
that a run writes (replies, traces, states, ledgers, results) must be the same to the bit, whatever
the private images and labels are and whoever is drawn: what differs has come past a release.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tainted
import xcal
import xcal.dp.distributed
import xcal.dp.mechanism
import xcal.methods.client_data
from method_cases import BASE, CASES
from xcal.dp.ledger.rows import read_rows
from xcal.dp.noise import NoiseKey
from xcal.federation import folder as folders

DRAWS = ("as drawn", "nobody", "everybody")


def from_key(key: NoiseKey, count: int) -> torch.Tensor:
    """Numbers that are made of the key alone."""
    text = repr((key.client, key.round, key.step, key.block)).encode()
    seed = int.from_bytes(hashlib.sha256(text).digest()[:7], "little")
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(count)).float()


@pytest.fixture
def released_from_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    def tensors(sums: Any, scale: float, noise: Any, key: NoiseKey) -> Any:
        return {
            name: scale * from_key(key, value.numel()).view_as(value)
            for name, value in sums.items()
        }

    def scalar(value: float, scale: float, noise: Any, key: NoiseKey) -> float:
        return scale * float(from_key(key, 1)[0])

    def whole(value: Any, part: Any, grid: Any, noise: Any, key: NoiseKey) -> Any:
        return (from_key(key, part.size) * grid.scale).round().double().numpy() / grid.fineness(
            part
        )

    monkeypatch.setattr(xcal.dp.distributed, "release_whole", whole)
    monkeypatch.setattr(xcal.dp.mechanism, "release_tensors", tensors)
    monkeypatch.setattr(xcal.dp.mechanism, "release_scalar", scalar)
    monkeypatch.setattr(folders.secrets, "token_hex", lambda size: "0" * size)
    monkeypatch.setattr(
        "xcal.federation.loaded_site.Pace.due", lambda self: True
    )  # every state is saved


def draw_as(patch: pytest.MonkeyPatch, who: str) -> None:
    real = xcal.methods.client_data.poisson_draw

    def mine(uniforms: Any, rate: float) -> Any:
        return real(uniforms, {"nobody": 0.0, "everybody": 1.0}.get(who, rate))

    patch.setattr(xcal.methods.client_data, "poisson_draw", mine)


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _timeless(v) for k, v in value.items() if "seconds" not in k and k != "time"}
    return [_timeless(v) for v in value] if isinstance(value, list) else value


def contents(path: Path) -> dict[str, Any]:
    """Every file below a folder, without times."""
    found: dict[str, Any] = {}
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        name = file.relative_to(path).as_posix()
        if file.suffix in (".json", ".jsonl"):
            lines = [file.read_text()] if file.suffix == ".json" else file.read_text().splitlines()
            found[name] = [_timeless(json.loads(line)) for line in lines]
        elif file.suffix == ".sqlite":
            found[name] = read_rows(file)
        elif file.suffix == ".npz":
            with np.load(file) as arrays:
                found[name] = {k: arrays[k].tolist() for k in arrays}
        elif file.suffix in (".md", ".txt"):
            found[name] = re.sub(r"[\d.,]+ (s|seconds)\b", "", file.read_text())
        elif not file.name.endswith((".lock", "-wal", "-shm")):
            found[name] = file.read_bytes()
    return found


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if one[name] != other[name]] == []


@pytest.mark.usefixtures("released_from_keys")
@pytest.mark.parametrize(("method", "options"), CASES)
def test_nothing_a_run_writes_depends_on_private_data_but_through_releases(
    method: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    for images, who in zip(tainted.KINDS, DRAWS, strict=True):
        with monkeypatch.context() as patch:
            patch.setattr(tainted, "CHOSEN", [images])
            draw_as(patch, who)
            out = tmp_path / images / "run"
            xcal.run(out, method=method, **{**BASE, **options})
        seen.append(contents(out))
    assert "trace.jsonl" in seen[0]
    assert "clients/0/ledger.sqlite" in seen[0]
    for other in seen[1:]:
        assert_same(seen[0], other)


class Cut(Exception):
    """The power fails."""


@pytest.mark.usefixtures("released_from_keys")
@pytest.mark.parametrize("method", ["fl-dp", "xcal-steered", "xcal-paper", "adap-dpfl"])
def test_neither_does_what_a_round_cut_off_leaves_behind(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state saved after a step, with which a client goes on."""

    class Watching:
        done = 0

        def step(self, count: int) -> None:
            self.done += count
            if self.done == 4:
                raise Cut

        def start(self, total: int, done: int) -> None: ...

        def round(self, record: Any) -> None: ...

    seen = []
    for images, who in zip(tainted.KINDS, DRAWS, strict=True):
        with monkeypatch.context() as patch:
            patch.setattr(tainted, "CHOSEN", [images])
            draw_as(patch, who)
            out = tmp_path / images / "run"
            with pytest.raises(Cut):
                xcal.run(out, progress=Watching(), **{**BASE, "method": method, "batch": 15})
        seen.append(contents(out))
    assert any("progress" in name for name in seen[0])
    for other in seen[1:]:
        assert_same(seen[0], other)


@pytest.mark.usefixtures("released_from_keys")
def test_what_the_command_prints_depends_on_releases_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from xcal.__main__ import main

    printed = []
    for images, who in zip(tainted.KINDS, DRAWS, strict=True):
        with monkeypatch.context() as patch:
            patch.setattr(tainted, "CHOSEN", [images])
            draw_as(patch, who)
            patch.chdir(tmp_path)
            words = [w for k, v in BASE.items() for w in ("--set", f"{k}={v}")]
            patch.setattr("sys.argv", ["xcal", "run", *words, "--out", f"{images}/run"])
            patch.setenv("COLUMNS", "120")
            with pytest.raises(SystemExit) as end:
                main()
            assert end.value.code in (0, None)
        told = capsys.readouterr()
        text = (told.out + told.err).replace(images, "")
        printed.append(re.sub(r"\d+(\.\d+)? ?s\b|\d+:\d\d(:\d\d)?|│ +\d+ │$", "", text))
    assert len(printed[0]) > 100
    assert printed[1:] == printed[:-1]
