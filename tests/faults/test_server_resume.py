"""A trusted server that dies between its charge and its checkpoint: counted once, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import xcal
from support import TINY
from xcal.dp.ledger.rows import charges_of, read_rows, runs_of, verify
from xcal.errors import UserError
from xcal.federation.files import read_tensors, write_tensors
from xcal.federation.folder import RunFolder

KEYS: dict[str, Any] = {
    **TINY,
    "method": "dp-fedavg",
    "epsilon": 50.0,
    "lr": 0.2,
    "road_images": 0,
    "road_test_images": 0,
}


class Killed(BaseException):
    """Stands for the end of the process."""


def cut(folder: Path, round_number: int, **keys: Any) -> None:
    """Run until the server has charged and released the round, and no further."""
    save = RunFolder.save_checkpoint

    def deadly(self: RunFolder, weights: Any, about: Any) -> None:
        if about["rounds"] == round_number + 1:
            raise Killed
        save(self, weights, about)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "save_checkpoint", deadly)
        with pytest.raises(Killed):
            xcal.run(folder, **{**KEYS, **keys})


def paid(folder: Path) -> list[tuple[int, int]]:
    path = folder / "server" / "ledger.sqlite"
    assert verify(path).ok
    rows = read_rows(path)
    (run,) = runs_of(rows)
    return [(c.round, c.step) for c in charges_of(rows, run)]


def model_of(folder: Path) -> dict[str, torch.Tensor]:
    found = read_tensors(folder / "model.safetensors")
    assert found is not None
    return found[0]


def test_a_redone_round_is_the_same_release_and_paid_once(tmp_path: Path) -> None:
    expected = xcal.run(tmp_path / "whole", **KEYS)
    cut(tmp_path / "cut", 1)
    assert paid(tmp_path / "cut") == [(0, 0), (1, 0)]
    result = xcal.run(tmp_path / "cut", resume=True)
    assert paid(tmp_path / "cut") == [(0, 0), (1, 0), (2, 0)]
    first, second = model_of(tmp_path / "whole"), model_of(tmp_path / "cut")
    assert all(torch.equal(first[k], second[k]) for k in first)
    for key in ("epsilon_spent", "share_spent", "releases", "halted"):
        assert result["server"][key] == expected["server"][key]


def test_the_same_noise_never_serves_other_updates(tmp_path: Path) -> None:
    cut(tmp_path / "cut", 1)
    (path,) = (tmp_path / "cut" / "clients" / "2" / "runs").glob("*/reply.safetensors")
    tensors, about = read_tensors(path)  # type: ignore[misc]
    write_tensors(path, {k: v + 1e-3 for k, v in tensors.items()}, about)
    with pytest.raises(UserError, match="must not serve two queries"):
        xcal.run(tmp_path / "cut", resume=True)
    assert paid(tmp_path / "cut") == [(0, 0), (1, 0)]


def test_under_secure_noise_a_redone_round_is_paid_again_and_the_last_one_refused(
    tmp_path: Path,
) -> None:
    cut(tmp_path / "cut", 1, noise="secure")
    before = json.loads((tmp_path / "cut" / "rounds.jsonl").read_text().splitlines()[0])
    assert before["server"]["halted"] is False
    result = xcal.run(tmp_path / "cut", resume=True)
    # three rounds were planned: the second was paid for twice, so nothing is left for the third
    assert paid(tmp_path / "cut") == [(0, 0), (1, 0), (1, 0)]
    assert result["server"]["halted"] is True
    assert result["server"]["releases"] == 2
    assert result["server"]["epsilon_spent"] <= 50.0


def test_a_lost_or_older_ledger_is_noticed(tmp_path: Path) -> None:
    cut(tmp_path / "cut", 2)
    for name in ("ledger.sqlite", "ledger.head"):
        (tmp_path / "cut" / "server" / name).unlink()
    with pytest.raises(UserError, match="does not exist"):
        xcal.run(tmp_path / "cut", resume=True)
