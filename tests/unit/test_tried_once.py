"""A network of the package is tried once in a process, whatever else an experiment changes."""

import inspect
import re

import pytest

from xcal.config import Experiment
from xcal.errors import UserError
from xcal.federation import preflight
from xcal.models.model_registry import build_network


def test_the_trial_is_known_by_all_that_shapes_a_network():
    read = set(re.findall(r"experiment\.(\w+)", inspect.getsource(build_network)))
    assert read == {*preflight.SHAPING, "seed"}


def test_another_seed_is_not_tried_again_and_another_side_is(monkeypatch):
    tried = []
    check = preflight._check_answers
    monkeypatch.setattr(
        preflight, "_check_answers", lambda *given: (tried.append(given[2:]), check(*given))
    )
    monkeypatch.setattr(preflight, "_SEEN", {})
    preflight.check_network.cache_clear()
    for seed, side in ((0, 16), (1, 16), (1, 24)):
        experiment = Experiment(method="fl-dp", pool_views="none", seed=seed)
        assert preflight.check_network(experiment, 4, side) is None
    assert tried == [(4, 16), (4, 24)]


def test_a_refusal_is_not_remembered_as_an_answer(monkeypatch):
    monkeypatch.setattr(preflight, "_SEEN", {})
    preflight.check_network.cache_clear()
    for seed in (0, 1):
        experiment = Experiment(method="fl-dp", pool_views="none", seed=seed)
        with pytest.raises(UserError, match="cannot take 1 image of 1×1"):
            preflight.check_network(experiment, 4, 1)
    assert not preflight._SEEN
