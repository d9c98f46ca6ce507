"""Secure noise that a second thread prepares: fresh, used once, gone with its owner."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch

from commands import told_by_a_fork
from xcal.dp.noise import NoiseKey, SecureNoise
from xcal.dp.noise_ahead import SecureNoiseAhead

KEY = NoiseKey("c", "m", 0, 0, "gradient")


def test_numbers_are_standard_normal_and_used_once():
    noise = SecureNoiseAhead()
    first, second = noise.normals(KEY, 1_500_000), noise.normals(KEY, 700_000)
    noise.close()
    assert abs(float(first.mean())) < 0.01
    assert abs(float(first.std()) - 1) < 0.01
    # float32 normals repeat by chance; a run of them never does.
    assert not torch.equal(first[:1000], second[:1000])
    assert int(torch.isin(second[:1000], first[-1000:]).sum()) < 10


def test_it_counts_as_the_secure_source():
    assert SecureNoiseAhead().name == "secure"


def test_the_thread_ends_with_close_and_with_its_owner():
    before = threading.active_count()
    noise = SecureNoiseAhead()
    noise.normals(KEY, 1000)
    assert threading.active_count() == before + 1
    noise.close()
    assert threading.active_count() == before
    noise.normals(KEY, 1000)  # a closed source starts anew
    del noise
    gc.collect()
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_a_child_takes_nothing_its_parent_prepared():
    noise = SecureNoiseAhead()
    noise.normals(KEY, 4096)
    told = told_by_a_fork(lambda: noise.normals(KEY, 64).numpy().tobytes())
    theirs = torch.frombuffer(bytearray(told), dtype=torch.float32)
    ours = noise.normals(KEY, 100_000)
    noise.close()
    assert len(theirs) == 64
    assert int(torch.isin(theirs, ours).sum()) < 8


def test_a_thread_that_fails_says_so_instead_of_waiting_for_ever(monkeypatch):
    def fail(self, key, count):
        raise MemoryError("no room")

    source = SecureNoiseAhead()
    monkeypatch.setattr(SecureNoise, "normals", fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="could not be prepared") as told:
            source.normals(KEY, 5)
        assert isinstance(told.value.__cause__, MemoryError)
    source.close()
    monkeypatch.undo()
    assert len(source.normals(KEY, 5)) == 5
    source.close()
