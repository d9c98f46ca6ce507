"""`device`: which names are known, which are there, and what Apple's has no float64 for."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from support import ROOT
from xcal.dp.clipping.precision import double, exact_device
from xcal.errors import UserError
from xcal.experiments import make_experiment
from xcal.federation.preflight import check_device

Invoke = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0", "cuda:1", "mps"])
def test_a_device_may_be_named(device: str) -> None:
    assert make_experiment({"device": device}).device == device


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cpu:1", "mps:0", "CUDA", 1])
def test_another_word_is_refused(device: object) -> None:
    with pytest.raises(UserError, match="a device is cpu, cuda, cuda:0"):
        make_experiment({"device": device})


@pytest.mark.parametrize("device", ["cuda:1", "mps"])
def test_a_device_that_is_not_there_is_one_sentence(
    invoke: Invoke, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    out = tmp_path / "run"
    code, _, err = invoke("run", "--set", f"device={device}", "--out", str(out))
    assert code == 2 and device in err and len(err.strip().splitlines()) == 1
    assert not out.exists()


def test_a_number_beyond_the_last_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_device("cuda:1")
    with pytest.raises(UserError, match="sees 2 GPUs"):
        check_device("cuda:2")


def test_float64_is_kept_where_there_is_such_a_thing() -> None:
    assert exact_device(torch.device("mps")) == torch.device("cpu")
    assert exact_device(torch.device("cuda", 1)) == torch.device("cuda", 1)
    assert double(torch.ones(2)).dtype == torch.float64


def test_what_computes_on_a_device_asks_for_float64_in_one_place() -> None:
    """Anything else in float64 there is on the processor already, or made there."""
    for folder in ("dp/clipping", "methods", "federation"):
        for path in sorted((ROOT / "src" / "xcal" / folder).glob("*.py")):
            text = path.read_text()
            if path.name not in ("precision.py", "reference.py"):  # the latter is for tests
                assert ".double()" not in text, path
            for made in re.finditer(r"dtype=torch\.float64, device=([^)\n]+)", text):
                assert made[1] in ("where", "norms.device") or "exact_device" in made[1], path
