"""XCal-FL: federated training of image classifiers under a hard differential-privacy budget.

`xcal.plan(...)` says what noise a target (ε, δ) needs; `xcal.run(...)` trains. Both take the keys
of an experiment (`xcal.config.Experiment`) by name. `xcal.load(...)` gives a trained run's model.
`xcal.PrivacyEngine` makes a torch training loop of your own private, with the calls of Opacus.
`xcal.fix` makes a network fit for it, `xcal.Ledger` reads what it charged, `xcal.policy` holds it
to what a site allows. `xcal.explain` makes and measures explanations of any torch network.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xcal.version import VERSION

if TYPE_CHECKING:
    from xcal import explain as explain
    from xcal.dp.calibration import Plan
    from xcal.dp.engine import PrivacyEngine
    from xcal.dp.fix import fix
    from xcal.dp.ledger.reading import Ledger
    from xcal.federation.admission import policy
    from xcal.federation.local import Progress
    from xcal.federation.loggers import Logger
    from xcal.report.trained import Trained

__version__ = VERSION
__all__ = [
    "Ledger",
    "PrivacyEngine",
    "__version__",
    "explain",
    "fix",
    "load",
    "plan",
    "policy",
    "run",
]

# What needs torch or the accountant is imported when it is asked for.
_LAZY = {
    "Ledger": "xcal.dp.ledger.reading",
    "PrivacyEngine": "xcal.dp.engine",
    "fix": "xcal.dp.fix",
    "policy": "xcal.federation.admission",
}


def __getattr__(name: str) -> Any:
    if name == "explain":
        return import_module("xcal.explain")
    if name not in _LAZY:
        raise AttributeError(f"module 'xcal' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load(run: str | os.PathLike[str], *, model: Any = None, layer: Any = None) -> Trained:
    """A finished run's model, with all that it takes to use it.

    Args:
        run: the folder of the run, as `xcal.run` or `xcal run --out` made it.
        model: where the run's network was given as an object: the same again, whose weights are
            replaced by the run's.
        layer: as it was given to `xcal.run`.

    Returns:
        `.model`, an nn.Module in evaluation mode; `.classes`, the names in the order of the
        logits; `.preprocess(image)` from a path, PIL image or array to the tensor that the model
        takes; `.predict(images)` with `.names` and `.confidences`; `.calibrated()`, the same with
        one temperature fitted on public validation images.

    Raises:
        UserError: where there is no run, it is not finished, or its weights are damaged.

    Guarantee: the model is what the run released, under the privacy statement in its folder; using
    it costs no budget.
    """
    from xcal.report.trained import load as load_trained

    return load_trained(run, model=model, layer=layer)


def plan(*, units: int, **keys: Any) -> Plan:
    """The noise plan of one client with `units` units.

    Args:
        units: how many units (images, or people) the client has.
        **keys: keys of an experiment by name, as `epsilon`, `delta`, `method`, `rounds`
            (docs/configuration.md); others keep their defaults.

    Returns:
        Steps, sampling rate, noise multipliers and the budget that they are charged to.

    Raises:
        UserError: for an impossible target, or a key that is not known.

    Guarantee: whatever the method's signal says, steps charged by this plan's filter are together
    (ε, δ)-DP for one unit.

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
    out: str | os.PathLike[str],
    *,
    progress: Progress | None = None,
    resume: bool = False,
    logger: str | Logger | None = None,
    model: Any = None,
    layer: Any = None,
    data: Any = None,
    groups: Any = None,
    classes: Any = None,
    loss: Any = None,
    **keys: Any,
) -> dict[str, Any]:
    """Train one experiment into the folder `out` and return its result (also in `result.json`).

    Args:
        out: the run's folder; must not exist yet, unless the run is resumed.
        progress: is told of rounds and steps while it trains; None: nobody is.
        resume: continue the run that stands in `out`, with no keys but `workers`, which change no
            result; objects that it began with are given again.
        logger: "tensorboard", "mlflow", "wandb", or an object with `log(values, step)` and
            `close()`: is given what was released or is public of each round.
        model: a network as an object: an nn.Module, which trains from the weights that it has, or a
            function or class that makes one, of (classes, *, seed), (classes) or nothing.
        layer: the layer of that network whose output explanations are made of, by dotted name or,
            of a module, as a module. None: its attribute `cam_layer`, or no explanations.
        data: a data set's name, or one as objects: (train, validation, test), each a torch Dataset
            of (image, label) or (image, label, group), a tuple of such arrays, or None. Images are
            PIL, uint8, or floats in [0, 1]; they are normalized here.
        groups: whose the training images are, one id each, or a tuple of three such lists; with
            groups the unit of privacy is one group.
        classes: the names of the classes of such data, or their number.
        loss: a function (logits, labels) that gives one number per image, by that image alone, or a
            torch loss. None: cross-entropy.
        **keys: keys of an experiment by name, as `method`, `epsilon`, `network`
            (docs/configuration.md); others keep their defaults.

    Returns:
        The result: metrics on the test images, what every client spent, and how it was made.

    Raises:
        UserError: for what cannot be run; nothing was charged and `out` was not made.

    Guarantee: nothing is released from a client before its ledger has recorded the payment,
    durably; `statement.txt` in the folder says what holds for this run. Of objects of your own it
    names what is your word: who is one unit, and that the network treats every image by itself.
    """
    from xcal.federation.given_objects import run_given
    from xcal.federation.loggers import check_logger

    if isinstance(logger, str):
        check_logger(logger)
    objects = {"model": model, "layer": layer, "loss": loss}
    objects |= {"data": data, "groups": groups, "classes": classes}
    return run_given(Path(out), objects, keys, progress, resume=resume, logger=logger)
