"""What secure noise and secret draws are made of: the operating system's entropy, nothing else.

`os.urandom` is replaced. Where it says the same, a stream must be the same whatever anybody else
knows or chooses (global seeds, the experiment's seed, names, rounds); where it says something
else, nothing may be left of the stream.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import xcal
from commands import told_by_a_fork
from made_sites import make_sites, tiny_site
from support import TINY, tiny
from wire import KEYS, a_request, ask, changed, real
from xcal.dp import noise as noises
from xcal.dp.ledger import ledger
from xcal.dp.ledger.rows import Terms, read_rows, runs_of
from xcal.dp.noise import NoiseKey, NoiseSource, SecureNoise
from xcal.dp.noise_ahead import SecureNoiseAhead
from xcal.experiments import LOCAL_KEYS, make_experiment
from xcal.federation.folder import RunFolder
from xcal.federation.ledgers_of import find_ledgers
from xcal.federation.local import server_noise
from xcal.federation.messages import Refusal, Reply
from xcal.federation.setup import prepare, prepare_remote
from xcal.federation.site_directory import SiteDirectory
from xcal.methods.client_data import LocalData

KEY = NoiseKey("0", "xcal", 0, 0, "gradient")
OTHERS = (
    replace(KEY, client="1"),
    replace(KEY, method="fl-dp"),
    replace(KEY, round=7),
    replace(KEY, step=7),
    replace(KEY, block="signal"),
)
SOURCES = [SecureNoise, SecureNoiseAhead]


class Entropy:
    """An operating system whose entropy is known; remembers what it gave."""

    def __init__(self, salt: int) -> None:
        self._salt = salt
        self.given: list[bytes] = []

    def urandom(self, count: int) -> bytes:
        text = f"{self._salt} {len(self.given)}".encode()
        self.given.append(hashlib.shake_256(text).digest(count))
        return self.given[-1]


@contextmanager
def entropy(salt: int) -> Iterator[Entropy]:
    system = Entropy(salt)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "urandom", system.urandom)
        yield system


@contextmanager
def global_seeds(seed: int) -> Iterator[None]:
    """Every generator that a program could have seeded, and as it was afterwards."""
    before, legacy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(before)
            np.random.set_state(legacy)


def drawn(source: NoiseSource, key: NoiseKey = KEY) -> tuple[Any, ...]:
    """Something of everything that a source gives."""
    found = (
        source.uniforms(key, 64).tobytes(),
        source.normals(key, 64).numpy().tobytes(),
        source.scalar(key),
    )
    if isinstance(source, SecureNoiseAhead):
        source.close()
    return found


def share_nothing(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return all(a != b for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("make", SOURCES)
def test_the_system_s_entropy_decides_and_nothing_else(make: Callable[[], NoiseSource]) -> None:
    found = []
    for seed in (0, 1):
        with global_seeds(seed), entropy(5):
            found.append(drawn(make()))
    assert found[0] == found[1]  # whatever was seeded
    for salt in (6, 7):
        with global_seeds(0), entropy(salt):
            assert share_nothing(drawn(make()), found[0])


@pytest.mark.parametrize("key", OTHERS, ids=lambda key: "/".join(map(str, vars(key).values())))
@pytest.mark.parametrize("make", SOURCES)
def test_what_noise_is_for_changes_nothing_of_it(
    make: Callable[[], NoiseSource], key: NoiseKey
) -> None:
    """A key that anybody can guess has no part in it."""
    found = []
    for one in (KEY, key):
        with entropy(5):
            found.append(drawn(make(), one))
    assert found[0] == found[1]


@pytest.mark.parametrize("make", SOURCES)
def test_keys_have_256_bits_and_come_as_the_system_gave_them(
    make: Callable[[], NoiseSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[bytes] = []
    starts: list[bytes] = []
    aes, counter = noises.algorithms.AES, noises.modes.CTR

    def noted(kept: list[bytes], kind: Any) -> Any:
        def make_one(value: bytes) -> Any:
            kept.append(value)
            return kind(value)

        return make_one

    monkeypatch.setattr(noises.algorithms, "AES", noted(keys, aes))
    monkeypatch.setattr(noises.modes, "CTR", noted(starts, counter))
    with entropy(5) as system:
        drawn(make())
    assert len(keys) == len(starts) == (2 if make is SecureNoiseAhead else 1)
    assert {len(key) for key in keys} == {32}
    assert {len(start) for start in starts} == {16}
    assert sorted(keys + starts) == sorted(system.given)  # each used once, none left over


@pytest.mark.parametrize("make", SOURCES)
def test_every_source_has_a_stream_of_its_own(make: Callable[[], NoiseSource]) -> None:
    with entropy(5):
        assert share_nothing(drawn(make()), drawn(make()))
    assert share_nothing(drawn(make()), drawn(make()))


def test_prepared_noise_and_direct_noise_have_streams_of_their_own() -> None:
    with entropy(5):
        source = SecureNoiseAhead()
        prepared = source.normals(KEY, 64)
        source.close()
        assert not torch.equal(prepared, source._direct.normals(KEY, 64))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.parametrize("make", SOURCES)
def test_a_forked_child_repeats_nothing(make: Callable[[], NoiseSource]) -> None:
    """Neither what its parent goes on to draw, nor what another child draws."""
    source = make()
    source.normals(KEY, 64)
    told = [told_by_a_fork(lambda: b"".join(drawn_bytes(source))) for _ in range(2)]
    ours = b"".join(part for _ in range(4) for part in drawn_bytes(source))
    words = [set(np.frombuffer(part, np.uint64).tolist()) for part in (*told, ours)]
    assert min(len(w) for w in words) > 64
    assert not (words[0] & words[1] or words[0] & words[2] or words[1] & words[2])
    if isinstance(source, SecureNoiseAhead):
        source.close()


def drawn_bytes(source: NoiseSource) -> tuple[bytes, ...]:
    scalar = np.float64(source.scalar(KEY)).tobytes()
    return source.uniforms(KEY, 64).tobytes(), source.normals(KEY, 64).numpy().tobytes(), scalar


# --- draws ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["record", "group"])
def test_who_is_drawn_and_how_is_decided_by_entropy_alone(unit: str) -> None:
    """Units, their images and their views."""
    data = LocalData(tiny(train=150).train, unit=unit, images_per_unit=2, views=3)

    def rows(key: NoiseKey) -> tuple[list[int], list[int]]:
        batch = data.draw(0.5, SecureNoise(), key)
        return batch.inputs.images.tolist(), batch.inputs.views.tolist()

    found = []
    for seed, key in enumerate((KEY, *OTHERS)):
        with global_seeds(seed), entropy(5):
            found.append(rows(key))
    assert all(one == found[0] for one in found)
    for salt in (6, 7):
        with global_seeds(0), entropy(salt):
            other = rows(KEY)
        assert other[0] != found[0][0]
        assert other[1] != found[0][1]
    assert rows(KEY) != rows(KEY)


# --- who uses it ----------------------------------------------------------------------------------


def secure_stream(source: NoiseSource) -> tuple[Any, ...]:
    assert isinstance(source, SecureNoiseAhead)
    return drawn(source)


def test_a_deployed_client_draws_from_its_system_whatever_a_request_says(tmp_path: Path) -> None:
    path = real(tiny_site(tmp_path))
    asked = {**KEYS, "noise": "seeded", "paired": True, "seed": 3}
    found = []
    for keys, seed in ((dict(KEYS), 0), (dict(KEYS), 1), (asked, 2)):
        site_dir = SiteDirectory.open(path)
        experiment = site_dir.experiment(keys, seed)
        assert (experiment.noise_source, experiment.paired) == ("secure", False)
        with entropy(5):
            found.append(secure_stream(site_dir.hold(experiment).site.noise))
    assert found[0] == found[1] == found[2]
    with entropy(6):
        assert share_nothing(secure_stream(SiteDirectory.open(path).noise()), found[0])


@pytest.mark.parametrize("key", ["noise", "paired", "seed"])
def test_a_request_that_speaks_of_noise_is_refused(key: str, tmp_path: Path) -> None:
    assert key in LOCAL_KEYS
    value = {"noise": "seeded", "paired": True, "seed": 3}[key]
    told = ask(real(tiny_site(tmp_path)), changed(**{key: value}))
    assert isinstance(told, Refusal)
    assert told.code == "key-not-allowed"


def test_two_answers_of_one_client_to_one_request_share_no_noise(tmp_path: Path) -> None:
    """Two copies of one site: the same data, request, names, rounds and seeds."""
    weights = []
    for copy in ("a", "b"):
        with global_seeds(0):
            reply = ask(real(tiny_site(tmp_path / copy)), a_request())
        assert isinstance(reply, Reply)
        assert reply.answer.report.noise == "secure"
        weights.append(reply.answer.weights)
    assert all(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("given", ["noise", "sites"])
def test_the_local_engine_gives_every_site_a_stream_of_its_own(given: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {**TINY, "method": "xcal-steered", "noise": "secure"}
    if given == "sites":
        del keys["noise"]
        sites = [tmp_path / f"site {client}" for client in range(3)]
        for site_dir in sites:
            ledger.create(site_dir / "ledger.sqlite", Terms(site_dir.name, "record", 100.0, 1e-2))
        keys["sites"] = tuple(str(site_dir) for site_dir in sites)
    streams = []
    for seed in (0, 1):
        federation = prepare(make_experiment({**keys, "seed": seed}))
        folder = RunFolder.create(tmp_path / f"run {seed}", federation.experiment, ())
        with entropy(5):
            streams.append([secure_stream(s.noise) for s in make_sites(folder, federation)])
    assert streams[0] == streams[1]  # the experiment's seed has no part in it
    assert len({stream[0] for stream in streams[0]}) == 3


def test_two_runs_at_given_sites_share_no_noise(tmp_path: Path) -> None:
    weights = []
    for copy in ("a", "b"):
        sites = [tmp_path / copy / str(client) for client in range(3)]
        for site_dir in sites:
            ledger.create(site_dir / "ledger.sqlite", Terms(site_dir.name, "record", 100.0, 1e-2))
        keys = {**TINY, "sites": tuple(map(str, sites)), "rounds": 1, "road_images": 0}
        result = xcal.run(tmp_path / f"run {copy}", **{**keys, "method": "fl-dp"})
        assert result["noise"] == "secure"
        for site_dir in sites:
            (path,) = find_ledgers(site_dir)
            assert [run.noise for run in runs_of(read_rows(path)).values()] == ["secure"]
        weights.append((tmp_path / f"run {copy}" / "model.safetensors").read_bytes())
    assert weights[0] != weights[1]


def test_a_server_s_noise_for_clients_elsewhere_is_the_system_s() -> None:
    found = []
    for seed in (0, 1):
        keys = {**TINY, "method": "dp-fedavg", "seed": seed}
        there = prepare_remote(make_experiment(keys), ("a", "b", "c"))
        with entropy(5):
            found.append(secure_stream(server_noise(there)))
    assert found[0] == found[1]
