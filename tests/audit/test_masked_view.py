"""What a server sees of masked sums, alone and with as many sites as may collude with it."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from scipy import stats

from xcal.audit.bound import epsilon_bound
from xcal.dp.account import Account
from xcal.dp.calibration import calibrate
from xcal.dp.distributed import DistributedGrid, DistributedMechanism, Part
from xcal.dp.ledger.ledger import Ledger, create
from xcal.dp.ledger.rows import RunTerms, Terms, charges_of, read_rows
from xcal.dp.noise import NoiseKey, SecureNoise
from xcal.federation.masks import Attempt, MaskKeys, Roster

CANARIES, GUESSES, EPSILON, DELTA = 4000, 200, 2.0, 1e-7
NAMES = "abcdefghi"


class Sites:
    """Sites that have met; `honest` of them are assumed to be so, the last ones are not."""

    def __init__(self, folder: Path, count: int, honest: int) -> None:
        self.names, self.folder = NAMES[:count], folder
        identities = {n: Ed25519PrivateKey.generate() for n in self.names}
        public = {n: k.public_key().public_bytes_raw() for n, k in identities.items()}
        self.roster = Roster(public, honest)
        self.keys = {
            n: MaskKeys(folder / n, "run", n, identities[n], self.roster) for n in self.names
        }
        announced = {n: k.announce() for n, k in self.keys.items()}
        for key in self.keys.values():
            key.meet(announced)

    def attempt(self, number: int = 0) -> Attempt:
        return Attempt("run", 0, number, tuple(self.names), "t")

    def grid(self, attempt: Attempt, size: int, sigma: float) -> DistributedGrid:
        """As a site makes it: how many it counts on, its roster says."""
        honest = self.roster.check(attempt)
        return DistributedGrid(
            (Part("gradient", size, 1.0, sigma),), len(attempt.sites), honest, CANARIES
        )


def right_guesses(folder: Path, *, colluders: int, noise_share: float = 1.0) -> int:
    """One step, every canary a direction of its own at site a: how many guesses come true.

    Nine sites, five honest: the server has what up to four tell it of their own numbers.
    """
    sigma = calibrate(EPSILON, DELTA, 1.0, 1, whole_orders=True).sigma
    sites = Sites(folder, 9, 5)
    attempt = sites.attempt()
    grid = sites.grid(attempt, CANARIES, sigma)
    coins = np.random.default_rng(5).random(CANARIES) < 0.5
    total, known = np.zeros(CANARIES, dtype=np.uint64), np.zeros(CANARIES, dtype=np.int64)
    for name in sites.names:
        value = torch.from_numpy(coins.astype(np.float64)) if name == "a" else torch.zeros(CANARIES)
        noise = SecureNoise().discrete_normals(
            NoiseKey(name, "", 0, 0, "share"), CANARIES, grid.scale
        )
        numbers = grid.round({"gradient": value}) + (noise * noise_share).astype(np.int64)
        total = total + grid.unpack(sites.keys[name].mask(attempt, grid, numbers).numbers)
        if name in sites.names[len(sites.names) - colluders :]:
            known = known + numbers  # which tell the server what they added
    seen = grid.decode((total - grid.wrap(known)) & grid.mask)["gradient"]
    order = np.argsort(seen)
    return int((~coins[order[:GUESSES]]).sum() + coins[order[-GUESSES:]].sum())


@pytest.mark.parametrize("colluders", [0, 4])
def test_what_server_and_colluders_see_does_not_refute_the_promise(
    tmp_path: Path, colluders: int
) -> None:
    right = right_guesses(tmp_path, colluders=colluders)
    found = epsilon_bound(CANARIES, 2 * GUESSES, right, delta=DELTA, confidence=0.95)
    assert found <= EPSILON
    if colluders:  # the noise that was charged is all there is: the attack sees something
        assert found > 0.1


def test_a_mutant_with_a_fifth_of_the_share_is_caught(tmp_path: Path) -> None:
    right = right_guesses(tmp_path, colluders=4, noise_share=0.2)
    assert epsilon_bound(CANARIES, 2 * GUESSES, right, delta=DELTA, confidence=0.95) > EPSILON


def test_the_honest_add_the_noise_that_ledgers_say(tmp_path: Path) -> None:
    """Five honest sites of nine, nothing drawn: what is left of their sum is the charged noise."""
    sites, size = Sites(tmp_path / "masks", 9, 5), 20_000
    grid = sites.grid(sites.attempt(), size, 2.0)
    path = tmp_path / "ledger.sqlite"
    create(path, Terms("p", "record", 100.0, 1e-3, simulated=True))
    left = np.zeros(size, dtype=np.int64)
    with Ledger(path) as ledger:
        terms = RunTerms("r", "fl-dp", "record", 1.0, 1e-5, 8, 1e3, 10)
        account = Account(ledger, terms, replayable=False)
        for step in range(5):
            charged = DistributedMechanism.of(0.01, grid).charge(
                account,
                0,
                step,
                inputs=None,
                noise=SecureNoise(),
                key=lambda block: NoiseKey("0", "fl-dp", 0, 0, block),
            )
            nothing = {"gradient": torch.zeros(size)}
            left += charged.contribute(nothing, sensitivities={"gradient": 1.0})
    (release,) = charges_of(read_rows(path), "r")[0].releases
    assert left.std() / grid.fineness(grid.parts[0]) == pytest.approx(release.noise, rel=0.03)
    assert release.noise == pytest.approx(2.0, rel=2e-3)  # σC


def uniform(words: np.ndarray, grid: DistributedGrid) -> bool:
    data = np.frombuffer(grid.pack(words & grid.mask), dtype=np.uint8)
    return float(stats.chisquare(np.bincount(data, minlength=256)).pvalue) > 1e-6


def test_two_attempts_give_nothing_away_beside_their_sums(tmp_path: Path) -> None:
    """All the server has of two attempts: each message, and any difference of two, is uniform."""
    sites, size = Sites(tmp_path, 4, 3), 4000
    messages, grids = [], []
    for number in range(2):
        attempt = sites.attempt(number)
        grid = sites.grid(attempt, size, 2.0)
        grids.append(grid)
        for name in sites.names:
            numbers = np.full(size, 7 if name == "a" else 0)
            messages.append(grid.unpack(sites.keys[name].mask(attempt, grid, numbers).numbers))
    for one in messages:
        assert uniform(one, grids[0])
    for one, other in itertools.combinations(messages, 2):
        assert uniform(one - other, grids[0])
    assert math.isclose(grids[0].sigma, 2.0)
    total = sum(messages[:4]) & grids[0].mask
    assert np.array_equal(total, np.full(size, 7, dtype=np.uint64))
