"""XCal-FL: federated training of image classifiers under a hard differential-privacy budget.

`xcal.plan(...)` says what noise a target (ε, δ) needs; `xcal.run(...)` trains. Both take the keys
of an experiment (`xcal.config.Experiment`) by name. `xcal.PrivacyEngine` makes a torch training
loop of your own private, with the calls of Opacus; `xcal.fix` makes a network fit for it,
`xcal.Ledger` reads what it charged, `xcal.policy` holds it to what a site allows.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xcal.dp.calibration import Plan
    from xcal.dp.engine import PrivacyEngine
    from xcal.dp.fix import fix
    from xcal.dp.ledger.reading import Ledger
    from xcal.federation.local import Progress
    from xcal.federation.loggers import Logger
    from xcal.federation.own_loop import policy

__version__ = "0.1.0"
__all__ = ["Ledger", "PrivacyEngine", "__version__", "fix", "plan", "policy", "run"]

# What needs torch or the accountant is imported when it is asked for.
_LAZY = {
    "Ledger": "xcal.dp.ledger.reading",
    "PrivacyEngine": "xcal.dp.engine",
    "fix": "xcal.dp.fix",
    "policy": "xcal.federation.own_loop",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'xcal' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def plan(*, units: int, **keys: Any) -> Plan:
    """The noise plan of one client with `units` units.

    Guarantee: whatever the method's signal says, steps charged by this plan's filter are together
    (ε, δ)-DP for one unit. Raises `xcal.errors.UserError` for impossible targets.

    >>> xcal = __import__("xcal")
    >>> target = {"epsilon": 0.5, "delta": 1e-5}
    >>> p = xcal.plan(method="fl-dp", **target, units=3332, expected_batch_size=32, rounds=30)
    >>> p.steps, round(p.sigma_ref, 2)
    (3150, 3.89)
    """
    from xcal.experiments import make_experiment
    from xcal.methods.registry import plan_for

    return plan_for(make_experiment(keys, "xcal.plan"), units)


def run(
    out: str | Path,
    *,
    progress: Progress | None = None,
    resume: bool = False,
    logger: str | Logger | None = None,
    **keys: Any,
) -> dict[str, Any]:
    """Train one experiment into the folder `out` and return its result (also in `result.json`).

    `resume=True` continues the run that stands in `out` and takes no keys but `workers`, which
    change no result. `logger`: "tensorboard", "mlflow", "wandb", or an object with
    `log(values, step)` and `close()`, for what was released or is public of each round.
    Guarantee: nothing is released from a client before its ledger has recorded the payment,
    durably.
    """
    from xcal.errors import UserError
    from xcal.experiments import make_experiment
    from xcal.federation.folder import RunFolder
    from xcal.federation.local import run_experiment
    from xcal.federation.loggers import check_logger
    from xcal.federation.setup import prepare

    if isinstance(logger, str):
        check_logger(logger)
    if resume:
        workers = make_experiment({"workers": keys.pop("workers", None)}, "xcal.run").workers
        if keys:
            raise UserError("A resumed run keeps its configuration: give no keys with resume.")
        return run_experiment(RunFolder.find(Path(out)), progress, workers=workers, logger=logger)
    else:
        federation = prepare(make_experiment(keys, "xcal.run"))  # refuse before DIR is made
        folder = RunFolder.create(Path(out), federation.experiment, sorted(keys))
    return run_experiment(folder, progress, federation, logger=logger)
