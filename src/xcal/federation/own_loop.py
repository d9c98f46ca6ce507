"""A training loop of somebody's own, in whatever federation, held to a site's `policy.toml`."""

from __future__ import annotations

import os
from pathlib import Path

from xcal.dp.calibration import Plan
from xcal.dp.engine import PolicyCheck
from xcal.dp.ledger.ledger import Ledger
from xcal.dp.ledger.rows import RunTerms
from xcal.federation.admission import admit_new
from xcal.federation.policy import admit_method, admit_plan, admit_target, read_policy
from xcal.federation.request_refusals import naming
from xcal.federation.site_directory import logged


def policy(path: str | os.PathLike[str]) -> PolicyCheck:
    """What a site allows, for `xcal.PrivacyEngine(ledger=…, policy=…)`.

    A training is asked about before its first charge, and again in every round: its ε and δ, those
    of all runs in the ledger together, its unit, steps, batch and noise. `methods` in the file must
    name `dp-sgd`, which every loop of one's own is; what the loop trains is the owner's to look at,
    so `networks` does not apply. A refusal is written into the site's refusal log.

    Args:
        path: the site's folder, or its `policy.toml`.

    Returns:
        What `xcal.PrivacyEngine` takes as `policy`.

    Raises:
        UserError: where the file is missing or not a policy. The engine's `make_private` then
            raises `xcal.federation.request_refusals.Refused`, with its code, for what is not
            allowed.

    Guarantee: a training beyond what the file allows is refused before its first charge.

    Example:
        >>> import tempfile, xcal
        >>> site = Path(tempfile.mkdtemp())
        >>> _ = xcal.Ledger.create(site, population="ward-7", unit="record", epsilon=8, delta=1e-3)
        >>> _ = (site / "policy.toml").write_text(
        ...     "epsilon_total = 8.0\\ndelta_total = 1e-3\\nepsilon_run = 2.0\\ndelta_run = 1e-4\\n"
        ...     "methods = ['dp-sgd']"
        ... )
        >>> engine = xcal.PrivacyEngine(ledger=site, policy=xcal.policy(site))
    """
    given = Path(path)
    file = given / "policy.toml" if given.is_dir() else given
    allowed = read_policy(file)

    def check(ledger: Ledger, run: RunTerms, plan: Plan) -> None:
        with logged(file.parent, {"run": run.run}), naming("ledger"):
            admit_method(allowed, plan.method)
            admit_target(allowed, plan.unit, plan.epsilon, plan.delta)
            admit_plan(allowed, run.run, plan, ledger.runs.values())
            if run.run not in ledger.runs:  # else the ledger admitted it when it was entered
                admit_new(ledger, run, plan, plan.units)

    return check
