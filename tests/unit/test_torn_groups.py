"""A guarantee per group needs whole groups: torn ones are refused, or named."""

from __future__ import annotations

import pytest

from support import TINY
from xcal.errors import UserError
from xcal.experiments import make_experiment
from xcal.federation.setup import prepare


def test_torn_groups_cannot_be_units() -> None:
    keys = {**TINY, "method": "fl-dp", "unit": "group", "keep_groups": False, "batch": 5}
    with pytest.raises(UserError, match="group"):
        prepare(make_experiment(keys))
