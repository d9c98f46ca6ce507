"""Any configuration that is accepted trains a step, or is refused before the first."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fuzzing import LONG, one_sentence, within
from support import TINY
from xcal.config import parse_set, to_toml
from xcal.dp.clipping.named import trainable
from xcal.dp.ledger.rows import read_rows
from xcal.errors import UserError
from xcal.experiments import KEYS, experiment_type, make_experiment, read_pinned
from xcal.federation.answer import respond
from xcal.federation.coordinator import NullCallback
from xcal.federation.exchange import Question, RoundRequest
from xcal.federation.folder import RunFolder
from xcal.federation.local import make_clients, run_experiment
from xcal.federation.setup import Federation, prepare
from xcal.methods.registry import METHODS as CLIENT_METHODS
from xcal.models.model_registry import build_network

# Values that a person, a script or a mischief-maker may give; a few of them fit many keys.
WHOLE = (-1, 0, 1, 2, 3, 7, 10, 32, 151, 10**4, 10**7, 10**12, 2**63, 2**64)
REAL = (
    -1.0, -1e-9, 0.0, 1e-300, 1e-12, 1e-5, 1e-3, 0.05, 0.5, 0.999999, 1.0, 1.5, 3.0, 8.0, 50.0,
    1e3, 1e9, 1e300, float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
TEXT = (
    "", "xcal", "xcal-steered", "xcal-paper", "fl-dp", "fl", "centralized", "smear ", "small",
    "support:tiny", "support:micro",
    "support:nothing", "os:getcwd", ":", "a:b:c", "../x", "record", "group",
    "seeded", "secure", "head", "last:2", "last:0", "last:x", "all", "adam", "momentum", "label",
    "label-extreme", "covariate", "absolute", "image-mean", "cuda", "\x00", "é", "x" * 300,
)  # fmt: skip
OTHER: tuple[Any, ...] = (None, True, False, [], [1], ["a", "b", "c"], {}, {"a": 1})
# Whatever is larger is refused by its bound, and whatever is as large would only take long here.
SMALL_ENOUGH = {"pixels": (8, 15, 16, 17, 24, 33, 1025, 10**6, "16", 16.5, None)}


def values_of(key: str) -> st.SearchStrategy[Any]:
    """Mostly values of the kind the key takes, so that many configurations come through."""
    if key in SMALL_ENOUGH:
        return st.sampled_from(SMALL_ENOUGH[key])
    field = experiment_type().model_fields[key]
    usual: tuple[Any, ...] = TEXT
    if isinstance(field.default, bool):
        usual = (True, False)
    elif isinstance(field.default, int) or key in OPTIONAL_WHOLE:
        usual = WHOLE[2:9]
    elif isinstance(field.default, float) or key == "tau":
        usual = REAL[4:15]
    elif get_origin(field.annotation) is Literal:
        usual = get_args(field.annotation)
    wild = st.one_of(*(st.sampled_from(pool) for pool in (WHOLE, REAL, TEXT, OTHER)))
    return st.one_of(*[st.sampled_from(usual)] * 6, wild)


OPTIONAL_WHOLE = ("participants", "units_per_client", "group_cap", "train_images")
METHODS = tuple(CLIENT_METHODS)


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    values = {**TINY, "method": draw(st.sampled_from(METHODS))}
    keys = draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True))
    values |= {key: draw(values_of(key)) for key in keys}
    return values


class Enough(BaseException):
    """The first step was made."""


def first_step(values: dict[str, Any], folder: Path) -> str:
    """`refused`, or `trained`; anything else raises."""
    try:
        experiment = make_experiment(values)
        federation = prepare(experiment)
    except UserError as error:
        one_sentence(error)
        return "refused"
    run = RunFolder.create(folder / "run", experiment, sorted(values))
    client = next(c for c in federation.schedule[0])
    asked = make_clients(run, federation, set())[client]
    request = RoundRequest("run", 0, federation.own_rounds(client), experiment)
    network = build_network(experiment, len(federation.data.classes))
    weights = {name: p.detach().clone() for name, p in trainable(network).items()}

    def stop(count: int) -> None:
        raise Enough

    if experiment.trust == "masked":  # one step is one round, and the server's part of it
        return first_round(run, federation)
    try:
        reply = respond(asked, Question(str(client), request, weights), stop)
    except Enough:
        charged = [r for r in read_rows(asked.owner.ledger_path) if r.kind == "charge"]
        assert len(charged) == (1 if federation.plans[client] is not None else 0)
        return "trained"
    except UserError as error:
        raise AssertionError(f"accepted, and refused in its first step: {error}") from error
    raise AssertionError(f"accepted, and no step was made: {reply.report}")


def first_round(run: RunFolder, federation: Federation) -> str:
    class Stop(NullCallback):
        def round(self, record: dict[str, Any]) -> None:
            raise Enough

    try:
        run_experiment(run, Stop(), federation)
    except Enough:
        return "trained"
    except UserError as error:
        raise AssertionError(f"accepted, and refused in its first round: {error}") from error
    raise AssertionError("accepted, and no round was made")


@settings(
    max_examples=1000 if LONG else 40,
    derandomize=not LONG,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(configurations())
def test_an_accepted_configuration_trains_one_step(values: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder, within(60, str(values)):
        first_step(values, Path(folder))


@settings(max_examples=5000 if LONG else 300, derandomize=not LONG, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), st.one_of(*map(values_of, KEYS)), max_size=6))
@example({"method": "fl", "epsilon": math.nan})  # which does not use it, and TOML cannot have it
@example({"delta": -math.inf})
def test_what_is_accepted_survives_its_own_file(values: dict[str, Any]) -> None:
    """Written into the run's folder and read again it is the same experiment."""
    try:
        experiment = make_experiment(values)
    except UserError as error:
        one_sentence(error)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "experiment.toml"
        path.write_text(to_toml(experiment.resolved()), encoding="utf-8")
        assert read_pinned(path) == experiment


@settings(max_examples=5000 if LONG else 300, derandomize=not LONG, deadline=None)
@given(st.text(max_size=40), st.text(max_size=40))
def test_any_text_after_set_is_a_value_or_a_refusal(key: str, value: str) -> None:
    for words in (f"{key}={value}", key, f"epsilon={value}", f"sites={value}", f"seed={value}"):
        try:
            name, given_value = parse_set(words)
            make_experiment({name: given_value})
        except UserError as error:
            one_sentence(error)
