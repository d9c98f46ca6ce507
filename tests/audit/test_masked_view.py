"""One-run audit of a masked sum, from the view of the server and of the server with a colluder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from xcal.audit.bound import epsilon_bound
from xcal.dp.calibration import calibrate
from xcal.dp.distributed import DistributedGrid, Part
from xcal.dp.noise import NoiseKey, SecureNoise
from xcal.federation.masks import Attempt, MaskKeys, Roster

CANARIES, GUESSES, EPSILON, DELTA = 4000, 200, 2.0, 1e-7
NAMES = "abcd"


def right_guesses(folder: Path, *, colluder: bool, noise_share: float = 1.0) -> int:
    """One step, every canary a direction of its own at site a: how many guesses come true."""
    sigma = calibrate(EPSILON, DELTA, 1.0, 1, whole_orders=True).sigma
    identities = {n: Ed25519PrivateKey.generate() for n in NAMES}
    roster = Roster({n: k.public_key().public_bytes_raw() for n, k in identities.items()}, 3)
    grid = DistributedGrid((Part("gradient", CANARIES, 1.0, sigma),), 4, 3, CANARIES)
    keys = {n: MaskKeys(folder / n, "run", n, identities[n], roster) for n in NAMES}
    announced = {n: k.announce() for n, k in keys.items()}
    for key in keys.values():
        key.meet(announced)
    coins = np.random.default_rng(5).random(CANARIES) < 0.5
    attempt = Attempt("run", 0, 0, tuple(NAMES), "t")
    total, known = np.zeros(CANARIES, dtype=np.uint64), np.zeros(CANARIES, dtype=np.int64)
    for name in NAMES:
        value = torch.from_numpy(coins.astype(np.float64)) if name == "a" else torch.zeros(CANARIES)
        noise = SecureNoise().discrete_normals(
            NoiseKey(name, "", 0, 0, "share"), CANARIES, grid.scale
        )
        numbers = grid.round({"gradient": value}) + (noise * noise_share).astype(np.int64)
        total = total + grid.unpack(keys[name].mask(attempt, grid, numbers).numbers)
        if name == "d" and colluder:
            known = numbers  # which tells the server what it added
    seen = grid.decode((total - grid.wrap(known)) & grid.mask)["gradient"]
    order = np.argsort(seen)
    return int((~coins[order[:GUESSES]]).sum() + coins[order[-GUESSES:]].sum())


@pytest.mark.parametrize("colluder", [False, True])
def test_what_server_and_colluder_see_does_not_refute_the_promise(
    tmp_path: Path, colluder: bool
) -> None:
    right = right_guesses(tmp_path, colluder=colluder)
    found = epsilon_bound(CANARIES, 2 * GUESSES, right, delta=DELTA, confidence=0.95)
    assert 0.1 < found <= EPSILON  # the attack sees something, and no more than is promised


def test_a_mutant_with_a_fifth_of_the_share_is_caught(tmp_path: Path) -> None:
    right = right_guesses(tmp_path, colluder=True, noise_share=0.2)
    assert epsilon_bound(CANARIES, 2 * GUESSES, right, delta=DELTA, confidence=0.95) > EPSILON
