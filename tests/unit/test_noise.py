"""The noise sources' rules of use; their statistics are tested elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from xcal.dp.noise import NoiseKey, SecureNoise, SeededNoise, release_grid, release_tensors


def key(step: int, round_number: int = 0, block: str = "gradient", client: str = "0") -> NoiseKey:
    return NoiseKey(client, "xcal", round_number, step, block)


@pytest.mark.parametrize("kind", ["normals", "uniforms", "scalar"])
def test_a_key_serves_one_query_in_its_life(kind):
    noise = SeededNoise(1)

    def use(step: int, round_number: int = 0) -> None:
        arguments = () if kind == "scalar" else (3,)
        getattr(noise, kind)(key(step, round_number), *arguments)

    use(0)
    use(1)
    for step in (1, 0):  # nor may an earlier one be asked for
        with pytest.raises(RuntimeError, match="was used already"):
            use(step)
    use(0, round_number=1)
    with pytest.raises(RuntimeError, match="was used already"):
        use(5, round_number=0)


def test_kinds_of_query_share_a_key_s_life():
    """One key, whatever is drawn from it: the streams of two kinds are related."""
    noise = SeededNoise(1)
    noise.normals(key(0), 3)
    with pytest.raises(RuntimeError, match="was used already"):
        noise.scalar(key(0))


def test_blocks_and_clients_have_lives_of_their_own():
    noise = SeededNoise(1)
    for block in ("draw", "views", "gradient", "signal"):
        for client in ("0", "1"):
            noise.scalar(key(0, block=block, client=client))


def test_the_error_names_no_seed():
    noise = SeededNoise(987654321)
    noise.scalar(key(0))
    with pytest.raises(RuntimeError) as caught:
        noise.scalar(key(0))
    assert "987654321" not in str(caught.value)


def test_keys_do_not_run_together():
    """Parts that read the same when put in a row are still different keys."""
    one = SeededNoise(1).scalar(NoiseKey("1", "x", 1, 11, "a"))
    two = SeededNoise(1).scalar(NoiseKey("1", "x", 11, 1, "a"))
    three = SeededNoise(1).scalar(NoiseKey("1', 'x", "x", 1, 11, "a"))
    assert len({one, two, three}) == 3


def test_names_tell_the_sources_apart():
    assert (SeededNoise.name, SecureNoise.name) == ("seeded", "secure")


def test_secure_noise_keeps_no_memory_of_keys():
    noise = SecureNoise()
    assert noise.scalar(key(0)) != noise.scalar(key(0))


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("source", [SeededNoise(2), SecureNoise()], ids=["seeded", "secure"])
def test_small_and_empty_requests(source, count):
    block = f"small {count}"
    assert len(source.normals(key(0, block=block), count)) == count
    assert len(source.uniforms(key(1, block=block), count)) == count


@pytest.mark.parametrize("scale", [1e-300, 1e-9, 0.9999, 1.0, 1.0001, 1e9])
def test_the_grid_is_a_power_of_two_below_the_noise(scale):
    grid = release_grid(scale)
    mantissa, _ = np.frexp(grid)
    assert mantissa == 0.5
    assert 2**-13 < grid / scale <= 2**-12


def test_released_tensors_share_no_memory_with_the_sums():
    sums = {"a": torch.zeros(4), "b": torch.zeros(2, 2)}
    released = release_tensors(sums, 1.0, SecureNoise(), key(0))
    for name, value in released.items():
        value.zero_()
        assert value.data_ptr() != sums[name].data_ptr()


def test_the_blocks_of_one_release_have_noise_of_their_own():
    sums = {"a": torch.zeros(50), "b": torch.zeros(50)}
    for source in (SeededNoise(1), SecureNoise()):
        released = release_tensors(sums, 1.0, source, key(0))
        assert not torch.equal(released["a"], released["b"])
