"""Masks: what cancels, what a server sees, and what a site refuses to send."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from scipy import stats

from xcal.dp.distributed import DistributedGrid, Part
from xcal.federation import masks
from xcal.federation.masks import (
    Announcement,
    Attempt,
    Masked,
    MaskKeys,
    MaskRefusal,
    Roster,
    masked_sum,
)

SIZE = 4000
IDENTITIES = {name: Ed25519PrivateKey.generate() for name in "abcdef"}


def roster_of(count: int = 4, honest: int | None = None) -> Roster:
    names = "abcdef"[:count]
    keys = {name: IDENTITIES[name].public_key().public_bytes_raw() for name in names}
    return Roster(keys, honest or count - 1)


def grid_of(sites: int = 4, honest: int = 3) -> DistributedGrid:
    return DistributedGrid((Part("gradient", SIZE, 1.0, 2.0),), sites, honest, 100)


def attempt_of(roster: Roster, round_number: int = 0, number: int = 0, **other: str) -> Attempt:
    return Attempt(
        "run", round_number, number, tuple(sorted(roster.keys)), **{"terms": "t", **other}
    )


class Sites:
    """Sites that have met."""

    def __init__(self, folder: Path, roster: Roster, run: str = "run") -> None:
        self.roster, self.folder = roster, folder
        self.keys = {
            n: MaskKeys(folder / n, run, n, IDENTITIES[n], roster) for n in sorted(roster.keys)
        }
        self.announced = {n: k.announce() for n, k in self.keys.items()}
        for key in self.keys.values():
            key.meet(self.announced)

    def messages(
        self, attempt: Attempt, grid: DistributedGrid, numbers: dict[str, np.ndarray]
    ) -> dict[str, Masked]:
        return {n: self.keys[n].mask(attempt, grid, numbers[n]) for n in attempt.sites}


def numbers_of(sites: str | list[str], seed: int = 0, high: int = 1 << 20) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {n: rng.integers(-high, high, SIZE) for n in sites}


def is_uniform(words: np.ndarray, grid: DistributedGrid) -> bool:
    data = np.frombuffer(grid.pack(words & grid.mask), dtype=np.uint8)
    return float(stats.chisquare(np.bincount(data, minlength=256)).pvalue) > 1e-6


@pytest.mark.parametrize("count", [3, 6])
def test_masks_cancel_in_the_sum_of_all_and_in_no_other(tmp_path: Path, count: int) -> None:
    roster = roster_of(count)
    sites, grid, attempt = Sites(tmp_path, roster), grid_of(count, count - 1), attempt_of(roster)
    numbers = {n: v // 1000 for n, v in numbers_of(list(roster.keys)).items()}
    messages = sites.messages(attempt, grid, numbers)
    total = masked_sum(roster, attempt, grid, messages)
    assert np.array_equal(total, grid.wrap(sum(numbers.values())))
    words = {n: grid.unpack(m.numbers) for n, m in messages.items()}
    plain = {n: grid.wrap(v) for n, v in numbers.items()}
    assert not any(is_uniform(v, grid) for v in plain.values())  # what would be seen without
    for size in range(1, count):
        for some in itertools.combinations(roster.keys, size):
            seen = sum(words[n] for n in some)
            assert is_uniform(seen, grid), some  # the server's view of any part
            assert is_uniform(seen - sum(plain[n] for n in some), grid), some
    with pytest.raises(MaskRefusal, match="void"):
        masked_sum(roster, attempt, grid, dict(list(messages.items())[:-1]))


def test_a_server_with_a_colluding_site_sees_only_the_honest_sum(tmp_path: Path) -> None:
    roster, grid = roster_of(4), grid_of()
    sites, attempt = Sites(tmp_path, roster), attempt_of(roster_of(4))
    numbers = numbers_of("abcd", high=1 << 10)
    messages = sites.messages(attempt, grid, numbers)
    colluder = sites.keys["d"]
    # Take off every mask that the colluder shares: what is left of one honest site is uniform.
    left = {n: grid.unpack(messages[n].numbers) - colluder._stream(attempt, grid, n) for n in "abc"}
    for size in (1, 2):
        for some in itertools.combinations("abc", size):
            assert is_uniform(sum(left[n] for n in some), grid), some
    honest = sum(left.values()) & grid.mask
    assert np.array_equal(honest, grid.wrap(numbers["a"] + numbers["b"] + numbers["c"]))


def test_keys_are_of_one_run_one_round_and_one_attempt(tmp_path: Path) -> None:
    roster, grid = roster_of(3), grid_of(3, 2)
    sites = Sites(tmp_path / "one", roster)
    same = {n: np.zeros(SIZE, dtype=np.int64) for n in "abc"}
    seen = []
    for where, number in ((0, 0), (0, 1), (1, 0), (2, 0)):
        attempt = attempt_of(roster, where, number)
        message = sites.messages(attempt, grid, same)["a"]
        seen.append(grid.unpack(message.numbers))
    other = Sites(tmp_path / "two", roster, "other run")
    attempt = replace(attempt_of(roster), run="other run")
    seen.append(grid.unpack(other.messages(attempt, grid, same)["a"].numbers))
    for one, two in itertools.combinations(seen, 2):
        assert is_uniform(one - two, grid)  # a key used twice would leave the difference of sums


def test_sites_that_were_told_different_things_do_not_cancel(tmp_path: Path) -> None:
    roster, grid = roster_of(3), grid_of(3, 2)
    sites = Sites(tmp_path, roster)
    numbers = numbers_of("abc", high=100)
    told, other = attempt_of(roster), attempt_of(roster, terms="other weights")
    parts = [
        sites.keys[n].mask(attempt, grid, numbers[n])
        for n, attempt in (("a", told), ("b", told), ("c", other))
    ]
    assert is_uniform(sum(grid.unpack(m.numbers) for m in parts), grid)
    with pytest.raises(MaskRefusal, match="is not what it sent"):
        masked_sum(roster, told, grid, {m.site: m for m in parts})


def test_a_tampered_message_is_noticed(tmp_path: Path) -> None:
    roster, grid = roster_of(3), grid_of(3, 2)
    sites, attempt = Sites(tmp_path, roster), attempt_of(roster_of(3))
    messages = sites.messages(attempt, grid, numbers_of("abc"))
    good = messages["b"]
    flipped = bytes([good.numbers[0] ^ 1]) + good.numbers[1:]
    for bad in (
        replace(good, numbers=flipped),
        replace(good, numbers=good.numbers[:-1]),
        replace(good, site="a"),
        replace(good, context="0" * 64),
        replace(good, signature=bytes(64)),
        messages["a"],
    ):
        with pytest.raises(MaskRefusal):
            masked_sum(roster, attempt, grid, {**messages, "b": bad})
    later = replace(attempt, round=1)
    with pytest.raises(MaskRefusal):  # an old round's answers in a new one
        masked_sum(roster, later, grid, messages)


def test_a_site_sends_one_value_under_one_key(tmp_path: Path) -> None:
    roster, grid = roster_of(3), grid_of(3, 2)
    sites, numbers = Sites(tmp_path, roster), numbers_of("abc")
    attempt = attempt_of(roster, 1, 0)
    first = sites.keys["a"].mask(attempt, grid, numbers["a"])
    for again in (sites, Sites(tmp_path, roster)):  # also after a restart
        key = again.keys["a"]
        assert key.mask(attempt, grid, numbers["a"]) == first  # the same message
        with pytest.raises(MaskRefusal, match="other numbers"):
            key.mask(attempt, grid, numbers["b"])
        with pytest.raises(MaskRefusal, match="other terms"):
            key.mask(replace(attempt, terms="u"), grid, numbers["a"])
        for old in (attempt_of(roster, 0, 0), attempt_of(roster, 0, 7)):
            with pytest.raises(MaskRefusal, match="before one"):
                key.mask(old, grid, numbers["a"])
    assert sites.keys["a"].mask(attempt_of(roster, 1, 1), grid, numbers["b"])
    assert len((tmp_path / "a" / masks.SENT).read_text().splitlines()) == 2


def test_what_left_a_killed_process_is_remembered(tmp_path: Path) -> None:
    roster, grid, numbers = roster_of(3), grid_of(3, 2), numbers_of("abc")
    announced = Sites(tmp_path, roster).announced
    attempt = attempt_of(roster)
    child = os.fork()
    if child == 0:  # masks, and is gone without any farewell
        key = MaskKeys(tmp_path / "a", "run", "a", IDENTITIES["a"], roster)
        key.meet(announced)
        key.mask(attempt, grid, numbers["a"])
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    after = Sites(tmp_path, roster)
    assert after.announced == announced  # the run's secret is still the same
    with pytest.raises(MaskRefusal, match="other numbers"):
        after.keys["a"].mask(attempt, grid, numbers["b"])
    # A line that was cut off was not sent: recording comes first, and it did not end.
    path = tmp_path / "a" / masks.SENT
    whole = path.read_bytes()
    path.write_bytes(whole + b"1 0 abc")
    again = Sites(tmp_path, roster)
    assert path.read_bytes() == whole
    assert again.keys["a"].mask(attempt_of(roster, 1), grid, numbers["b"])
    path.write_bytes(b"what is this\n")
    with pytest.raises(MaskRefusal, match="restore"):
        Sites(tmp_path, roster)


def test_nobody_can_stand_in_between(tmp_path: Path) -> None:
    roster = roster_of(3)
    sites = Sites(tmp_path, roster)
    stranger = masks.X25519PrivateKey.generate().public_key().public_bytes_raw()
    honest = sites.announced["b"]
    for bad in (
        replace(honest, key=stranger),  # the server's key under the site's signature
        Announcement("b", stranger, IDENTITIES["d"].sign(b"b")),
        replace(honest, site="c"),
        sites.announced["c"],
        Sites(tmp_path / "elsewhere", roster, "another run").announced["b"],
    ):
        with pytest.raises(MaskRefusal, match="not signed"):
            sites.keys["a"].meet({**sites.announced, "b": bad})
    with pytest.raises(MaskRefusal, match="No key"):
        sites.keys["a"].meet({"b": honest})
    with pytest.raises(MaskRefusal, match="by its own key"):
        MaskKeys(tmp_path / "d", "run", "a", IDENTITIES["d"], roster)
    assert (tmp_path / "a" / masks.KEY).stat().st_mode & 0o077 == 0
    # Sites with other rosters, or another number of honest ones, cannot even meet.
    with pytest.raises(MaskRefusal, match="not signed"):
        Sites(tmp_path / "x", roster_of(4, 3)).keys["a"].meet(
            {**Sites(tmp_path / "y", roster_of(3)).announced, "d": honest}
        )


def test_too_few_sites_or_too_little_noise_are_refused(tmp_path: Path) -> None:
    roster = roster_of(5, 4)
    sites, numbers = Sites(tmp_path, roster), numbers_of("abcde")
    key = sites.keys["a"]

    def asked(names: str, honest: int, sites: int | None = None) -> None:
        attempt = Attempt("run", 0, 0, tuple(names), "t")
        key.check(attempt, grid_of(sites or len(names), honest))

    asked("abcde", 4)
    asked("abcd", 3)  # one is missing, who may be honest: the share grows
    for names, honest, count in (
        ("abcde", 5, None),  # a share by N
        ("abcd", 4, None),  # a share as if the missing one had not been honest
        ("abcd", 3, 5),
        ("abc", 2, None),  # fewer than are assumed honest
        ("bcde", 3, None),  # without this site
        ("abcz", 3, None),
        ("abdc", 3, None),
    ):
        with pytest.raises(MaskRefusal):
            asked(names, honest, count)
    with pytest.raises(MaskRefusal, match="another run"):
        key.check(Attempt("other", 0, 0, tuple("abcde"), "t"), grid_of(5, 4))
    alone = MaskKeys(tmp_path / "b", "run", "b", IDENTITIES["b"], roster)
    with pytest.raises(MaskRefusal, match="before the sites' keys"):
        alone.mask(Attempt("run", 0, 0, tuple("abcde"), "t"), grid_of(5, 4), numbers["b"])
    for count, honest in ((2, 1), (3, 1), (3, 3), (4, 2)):
        with pytest.raises(MaskRefusal, match="more than half"):
            roster_of(count, honest)
    with pytest.raises(MaskRefusal, match="one key"):
        Roster({"a": bytes(32), "b": bytes(32), "c": b"1" * 32}, 2)


def test_the_rest_go_on_after_a_void_attempt_with_a_larger_share(tmp_path: Path) -> None:
    roster = roster_of(5, 4)
    sites, numbers = Sites(tmp_path, roster), numbers_of("abcde", high=1000)
    full = grid_of(5, 4)
    for name in "abcd":  # e does not answer
        sites.keys[name].mask(attempt_of(roster), full, numbers[name])
    rest = Attempt("run", 0, 1, tuple("abcd"), "t")
    smaller = grid_of(4, roster.honest_of(4))
    share = {g: g.scale / g.fineness(g.parts[0]) for g in (full, smaller)}
    assert share[smaller] / share[full] == pytest.approx((4 / 3) ** 0.5, rel=1e-3)
    messages = sites.messages(rest, smaller, numbers)
    total = masked_sum(roster, rest, smaller, messages)
    assert np.array_equal(total, smaller.wrap(sum(numbers[n] for n in "abcd")))


def test_after_the_run_the_secret_is_gone(tmp_path: Path) -> None:
    roster = roster_of(3)
    sites = Sites(tmp_path, roster)
    sites.keys["a"].forget()
    assert not (tmp_path / "a" / masks.KEY).exists()
    with pytest.raises(MaskRefusal, match="before the sites' keys"):
        sites.keys["a"].mask(attempt_of(roster), grid_of(3, 2), numbers_of("a")["a"])
