"""What travels between server and client: plain data and raw arrays, never code.

A message is one block of bytes in the safetensors layout: a JSON header with names, types and
shapes, then the raw numbers. Reading one allocates no more than its own size, which is bounded
first, and runs nothing from it. The engines carry these bytes as they are.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, NoReturn, TypeVar

import safetensors
import torch
from pydantic import Field, TypeAdapter
from safetensors.torch import load as bytes_to_tensors
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from xcal.config import Experiment
from xcal.dp.ledger.rows import Head
from xcal.experiments import (
    KEYS,
    LOCAL_KEYS,
    experiment_type,
    make_experiment,
    names_of_today,
    travels,
)
from xcal.federation.exchange import ClientReport, RoundReply, SumRequest, Weights
from xcal.federation.masks import Announcement, Attempt, Masked
from xcal.federation.request_refusals import CODES, Refused
from xcal.first_edition import BEFORE_THE_KEY
from xcal.methods.context import StepRecord, digest_tensors
from xcal.methods.registry import method_of
from xcal.version import VERSION

FORMAT = 1  # what this program speaks: it stands in every message, and is read first
NUMBERS = "numbers"  # the array of a reply that is a part of a masked sum


@dataclass(frozen=True)
class Edition:
    """How the requests of a minor version differ from today's."""

    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys that now have another
    unknown: frozenset[str] = frozenset()  # keys that it does not know
    reads_counts: bool = True  # whether its servers understand exact counts


# The minor versions that are spoken here, as server and as site. A key that is added or gets
# another default makes a new minor version, and the old one's entry says what it lacks.
EDITIONS: dict[str, Edition] = {
    "0.1": Edition(
        {"pool_views": "none"},
        unknown=frozenset({"cover", "noise_kind", "steering", "whiten"}),
        reads_counts=False,
    ),
    "0.2": Edition(),
}
QUESTIONS = ("request", "final", "keys", "statistics")
MAX_HEADER = 16 << 20  # bytes of names, keys and step records
MAX_TABLE = 1 << 20  # entries: a confusion matrix of a thousand classes

# What fields of a message may hold.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, lt=2**63)]
People = Annotated[int, Field(ge=1, lt=2**31)]
Number = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True)
class Request:
    """What a server asks of one client in one round."""

    client: str
    run: str
    round: int
    own_rounds: tuple[int, ...]
    experiment: dict[str, Any]  # what `travels` only
    initial_seed: int  # of the network's first weights; never of noise or draws
    frozen: str  # digest of what does not train
    head: Head | None  # the client's ledger as the server last saw it
    weights: Weights
    validation_losses: tuple[float, ...] = ()  # of earlier rounds, on public images
    final: bool = False  # the run is over: these are its model's weights, and nothing is trained
    keys: bool = False  # asks for the key that hides the client's part of sums, and for no training
    sum: SumRequest | None = None  # the round is one masked sum
    edition: str = field(default="", compare=False)  # in whose words it came; "": it did not travel


@dataclass(frozen=True)
class StatisticsRequest:
    """A server's question before any training: how many units has each class?"""

    client: Name
    run: Name  # under whose name the answer is charged
    unit: Name
    pixels: Count
    classes: Count
    epsilon: Annotated[Number, Field(gt=0)]
    delta: Annotated[Number, Field(gt=0, lt=1)]


@dataclass(frozen=True)
class Disclosure:
    """A client's answer that is no training: tables with noise, or exact counts above a floor.

    Nothing of both where the policy sends none.
    """

    client: Name
    run: Name
    tables: Mapping[str, Annotated[tuple[Number, ...], Field(max_length=MAX_TABLE)]]  # charged for
    noise: Number | None = None  # the deviation on every entry
    epsilon: Number | None = None
    delta: Number | None = None
    # People by true and predicted class, row by row; None: fewer than `floor`. Without guarantee.
    counts: Annotated[tuple[People | None, ...], Field(max_length=MAX_TABLE)] | None = None
    floor: People | None = None

    def values(self) -> dict[str, Any]:
        """Its fields; those of exact counts only where there are some, as before there were any."""
        exact = {} if self.counts is None else {"counts": list(self.counts), "floor": self.floor}
        return {**{f: getattr(self, f) for f in ("client", "run", "tables", *_TERMS)}, **exact}


@dataclass(frozen=True)
class Introduction:
    """A client's answer before the first masked sum: its keys, and how many units it has."""

    client: Name
    run: Name
    units: Annotated[Count, Field(ge=1)]
    identity: Digest  # the public key it signs with
    key: Digest  # of this run, for its masks
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]


@dataclass(frozen=True)
class Reply:
    """A client's answer to the request that it names."""

    client: str
    run: str
    round: int
    answer: RoundReply


@dataclass(frozen=True)
class Refusal:
    """A client's no: a fixed code (`refusals.CODES`) and no private detail."""

    client: str
    code: str
    version: str = field(default="", compare=False)  # what the client speaks, where it says so

    def text(self) -> str:
        """The code; where versions do not fit, with both numbers."""
        if self.code != "other-version":
            return self.code
        return f"{self.code}: server {VERSION}, site {self.version or 'older than 0.1'}"


def edition_of(version: str) -> str:
    """The minor version, which is what fits or does not."""
    return ".".join(version.split(".")[:2])


def _defaults(edition: str) -> dict[str, Any]:
    """What a request of that edition means by a key that it does not carry."""
    about, kind = EDITIONS[edition], experiment_type()
    now = {k: f.get_default() for k, f in kind.model_fields.items() if k not in LOCAL_KEYS}
    return {k: v for k, v in {**now, **about.defaults}.items() if k not in about.unknown}


def _carried(experiment: Mapping[str, Any], edition: str) -> dict[str, Any]:
    """The keys that differ from the defaults of an edition; all of a method from elsewhere, whose
    own defaults are known to its code alone."""
    if ":" in str(experiment.get("method", "")):
        return dict(experiment)
    known, today = _defaults(edition), _defaults(edition_of(VERSION))
    # What an older edition does not know it does as it did then; what no step looks at is not sent.
    meant, newer = {**today, **BEFORE_THE_KEY, **known}, today.keys() - known.keys()
    if newer:
        newer -= method_of(make_experiment({k: experiment[k] for k in today})).uses
    sent = {k: v for k, v in experiment.items() if k not in newer}
    same = {k: meant.get(k, _NOTHING) for k in sent}
    return {k: v for k, v in sent.items() if type(v) is not type(same[k]) or v != same[k]}


_NOTHING = object()


def public_keys(experiment: Experiment) -> dict[str, Any]:
    """The part of an experiment that a request carries."""
    values = experiment.model_dump(mode="json")
    return {k: v for k, v in values.items() if travels(type(experiment), k)}


def frozen_digest(model: torch.nn.Module) -> str:
    """A fingerprint of the model's tensors that do not train, so never travel."""
    trains = {name for name, p in model.named_parameters() if p.requires_grad}
    return digest_tensors(sorted((n, t) for n, t in model.state_dict().items() if n not in trains))


# --- to bytes -------------------------------------------------------------------------------------


def _encode(kind: str, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    head = {"format": FORMAT, "version": VERSION, "kind": kind}
    text = json.dumps({**head, **values}, allow_nan=False)
    plain = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    data: bytes = tensors_to_bytes(plain, {"xcal": text})
    return data


def encode_request(request: Request, edition: str | None = None) -> bytes:
    """A request, in the words of an edition: today's, or one that the client says it speaks."""
    spoken = edition or edition_of(VERSION)
    values = {
        "edition": spoken,
        "client": request.client,
        "run": request.run,
        "round": request.round,
        "own_rounds": list(request.own_rounds),
        "experiment": _carried(request.experiment, spoken),
        "initial_seed": request.initial_seed,
        "frozen": request.frozen,
        "head": None if request.head is None else [request.head.count, request.head.hash],
        "validation_losses": list(request.validation_losses),
        "weights_hash": digest_tensors(sorted(request.weights.items())),
    }
    if request.sum is not None:
        values["sum"] = _sum_values(request.sum)
    kind = "final" if request.final else "keys" if request.keys else "request"
    return _encode(kind, values, request.weights)


def _sum_values(asked: SumRequest) -> dict[str, Any]:
    attempt = asked.attempt
    return {
        "number": attempt.number,
        "sites": list(attempt.sites),
        "terms": attempt.terms,
        "sigma": asked.sigma,
        "units": asked.units,
        "clip": asked.clip,
        "keys": {a.site: [a.key.hex(), a.signature.hex()] for a in asked.announced},
    }


def encode_statistics(request: StatisticsRequest) -> bytes:
    return _encode("statistics", {"edition": edition_of(VERSION), **asdict(request)}, {})


def encode_introduction(introduction: Introduction) -> bytes:
    return _encode("introduction", asdict(introduction), {})


def encode_disclosure(disclosure: Disclosure) -> bytes:
    return _encode("disclosure", disclosure.values(), {})


def encode_reply(reply: Reply) -> bytes:
    answer = reply.answer
    values = {
        "client": reply.client,
        "run": reply.run,
        "round": reply.round,
        "trained": answer.weights is not None,
        "report": asdict(answer.report),
        # columns, not rows: a name is sent once
        "trace": {
            f.name: [getattr(record, f.name) for record in answer.trace] for f in fields(StepRecord)
        },
    }
    if answer.masked is None:
        return _encode("reply", values, answer.weights or {})
    sent = answer.masked
    values["masked"] = {"context": sent.context, "signature": sent.signature.hex()}
    numbers = torch.frombuffer(bytearray(sent.numbers), dtype=torch.uint8)
    return _encode("reply", values, {NUMBERS: numbers})


def encode_refusal(refusal: Refusal) -> bytes:
    return _encode("refusal", {"client": refusal.client, "code": refusal.code}, {})


# --- from bytes -----------------------------------------------------------------------------------


def _malformed(what: str) -> Refused:
    return Refused("malformed", f"A message was not understood: {what}.")


def _no_constant(text: str) -> NoReturn:
    raise ValueError(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _header(data: bytes) -> dict[str, Any]:
    """The JSON part of a message. Raises `Refused`."""
    size = int.from_bytes(data[:8], "little") if len(data) >= 8 else -1
    if not 0 < size <= min(len(data) - 8, MAX_HEADER):
        raise _malformed("its header has no possible size")
    try:
        header = json.loads(data[8 : 8 + size])
        values = json.loads(
            header["__metadata__"]["xcal"], parse_constant=_no_constant, parse_float=_finite
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _malformed("its header cannot be read") from None
    if not isinstance(values, dict):
        raise _malformed("its header is not a table")
    return values


def _decode(data: bytes, limit: int) -> tuple[str, dict[str, Any], Weights, str]:
    if len(data) > limit:
        raise Refused(
            "too-large", f"A message of {len(data)} bytes came, and {limit} are allowed: refused."
        )
    values = _header(data)
    if values.pop("format", None) != FORMAT:
        raise _malformed("it is of another format's version")
    kind, version = values.pop("kind", None), values.pop("version", "")
    if not isinstance(version, str) or not re.fullmatch(
        r"([0-9]+\.[0-9][0-9A-Za-z.+-]{0,30})?", version
    ):
        raise _malformed("its version is none")
    if kind in QUESTIONS and str(values.get("edition")) not in EDITIONS:
        raise Refused(
            "other-version",
            f"The server speaks {version or 'an edition older than 0.1'} and this site {VERSION}:"
            " install versions that fit (docs/deploy.md, Upgrades).",
        )
    try:
        tensors = bytes_to_tensors(data)
    except (safetensors.SafetensorError, ValueError, KeyError, RuntimeError):
        raise _malformed("its arrays cannot be read") from None
    return str(kind), values, tensors, version


@dataclass(frozen=True)
class _AskedHeader:
    """What a request, a question for keys or a final model says beside its weights."""

    edition: str
    client: Name
    run: Name
    round: Count
    own_rounds: tuple[Annotated[int, Field(ge=0)], ...]
    experiment: dict[str, Any]
    initial_seed: Count
    frozen: Digest
    head: tuple[Count, Digest] | None
    validation_losses: tuple[Number, ...]
    weights_hash: Digest
    sum: dict[str, Any] | None = None


@dataclass(frozen=True)
class _SumHeader:
    number: Count
    sites: tuple[Name, ...]
    terms: Digest
    sigma: Number
    units: Count
    clip: Number
    keys: dict[Name, tuple[str, str]]  # key and signature of each site


@dataclass(frozen=True)
class _ReplyHeader:
    client: Name
    run: Name
    round: Count
    trained: bool
    report: dict[str, Any]
    trace: dict[str, list[Any]]
    masked: dict[str, Any] | None = None


@dataclass(frozen=True)
class _MaskedHeader:
    context: Digest
    signature: str


@dataclass(frozen=True)
class _RefusalHeader:
    client: str
    code: str


_KINDS = (
    *(_AskedHeader, _SumHeader, _ReplyHeader, _MaskedHeader, _RefusalHeader),
    *(ClientReport, StepRecord, StatisticsRequest, Introduction, Disclosure),
)
_ADAPTERS: dict[type, TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in _KINDS}
T = TypeVar("T")


def _checked(cls: type[T], values: Any, left_out: tuple[str, ...] = ()) -> T:
    """Values of exactly these names and types.

    `left_out`: fields that may not be there; where they are, they hold something.
    """
    names = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    if not isinstance(values, dict) or not names - {*left_out} <= set(values) <= names:
        raise _malformed(f"its {cls.__name__} has other fields than known")
    try:
        if any(values.get(name, True) is None for name in left_out):
            raise ValueError
        # strict but for whole numbers that stand where a fraction may
        made: T = _ADAPTERS[cls].validate_json(json.dumps(values), strict=True)
    except (ValueError, RecursionError):
        raise _malformed(f"its {cls.__name__} holds values of another type") from None
    return made


def decode_request(data: bytes, limit: int) -> Request | StatisticsRequest:
    """A request, checked as far as that goes without knowing the network. Raises `Refused`."""
    kind, values, weights, version = _decode(data, limit)
    if kind not in QUESTIONS:
        raise _malformed("it is not a request")
    if kind == "statistics":
        if type(values.pop("edition")) is not str:
            raise _malformed("its edition is none")
        return _checked(StatisticsRequest, values)
    told = _checked(_AskedHeader, values, ("sum",))
    if list(told.own_rounds) != sorted(set(told.own_rounds)):
        raise _malformed("its own rounds are not ascending numbers")
    experiment = names_of_today(told.experiment)
    # Keys of a method from elsewhere are known only to its code, which no message may run.
    extra = set(experiment) & LOCAL_KEYS
    if ":" not in str(experiment.get("method", "")):
        strange = set(experiment) - set(KEYS)
        if strange and not extra and version != VERSION:
            raise Refused(
                "other-version",
                f"The server, {version}, sets keys that this site's {VERSION} does not know:"
                f" {', '.join(map(repr, sorted(strange)))[:200]}.",
            )
        extra |= strange
        experiment = {**_defaults(told.edition), **experiment}
    if extra:
        raise Refused(
            "key-not-allowed",
            "The request sets keys that no server may set here:"
            f" {', '.join(map(repr, sorted(extra)))[:200]}.",
        )
    try:
        found_digest = digest_tensors(sorted(weights.items()))
    except TypeError:  # such as bfloat16, in which no network here is trained
        raise Refused("weights-mismatch", "The weights received are of a foreign type.") from None
    if told.weights_hash != found_digest:
        raise _malformed("its weights are not those of its hash")
    return Request(
        client=told.client,
        run=told.run,
        round=told.round,
        own_rounds=told.own_rounds,
        experiment=experiment,
        initial_seed=told.initial_seed,
        frozen=told.frozen,
        head=None if told.head is None else Head(*told.head),
        weights=weights,
        validation_losses=told.validation_losses,
        final=kind == "final",
        keys=kind == "keys",
        sum=None if told.sum is None else _sum(told.sum, told.run, told.round),
        edition=told.edition,
    )


def _sum(values: dict[str, Any], run: str, round_number: int) -> SumRequest:
    told = _checked(_SumHeader, values)
    try:
        announced = tuple(
            Announcement(site, bytes.fromhex(key), bytes.fromhex(signature))
            for site, (key, signature) in told.keys.items()
        )
    except ValueError:
        raise _malformed("a key of its sites is none") from None
    attempt = Attempt(run, round_number, told.number, told.sites, told.terms)
    return SumRequest(attempt, told.sigma, told.units, told.clip, announced)


def _trace(columns: dict[str, list[Any]]) -> tuple[StepRecord, ...]:
    names = [f.name for f in fields(StepRecord)]
    if set(columns) != set(names):
        raise _malformed("its steps have other fields than known")
    if len({len(c) for c in columns.values()}) != 1:
        raise _malformed("its steps are of unlike lengths")
    rows = zip(*(columns[n] for n in names), strict=True)
    return tuple(_checked(StepRecord, dict(zip(names, row, strict=True))) for row in rows)


_TERMS = ("noise", "epsilon", "delta")


def _disclosure(values: dict[str, Any]) -> Disclosure:
    made = _checked(Disclosure, values, ("counts", "floor"))
    if any((getattr(made, term) is None) == bool(made.tables) for term in _TERMS):
        raise _malformed("its tables have no terms, or its terms no tables")
    if made.counts is None and made.floor is None:
        return made
    if made.counts is None or made.floor is None or made.tables:
        raise _malformed("its counts have no floor, or stand beside tables")
    if any(count is not None and count < made.floor for count in made.counts):
        raise _malformed("its counts are not numbers from its floor on")
    return made


def decode_answer(data: bytes, limit: int) -> Reply | Refusal | Disclosure | Introduction:
    """A client's answer, for the server. Raises `Refused` where it is none."""
    kind, values, weights, version = _decode(data, limit)
    if kind == "refusal":
        no = _checked(_RefusalHeader, values)
        if no.code not in CODES:
            raise _malformed("its code is unknown")
        return Refusal(no.client[:100], no.code, version)
    if kind == "disclosure":
        return _disclosure(values)
    if kind == "introduction":
        return _checked(Introduction, values)
    if kind != "reply":
        raise _malformed("it is not an answer")
    told = _checked(_ReplyHeader, values, ("masked",))
    report = _checked(ClientReport, told.report)
    if report.client != told.client or report.units < 1:
        raise _malformed("its report is another client's, or of no units")
    masked = None if told.masked is None else _masked(told.masked, told.client, weights)
    answer = RoundReply(report, weights if told.trained else None, _trace(told.trace), masked)
    return Reply(told.client, told.run, told.round, answer)


def _masked(values: dict[str, Any], client: str, arrays: Weights) -> Masked:
    told, numbers = _checked(_MaskedHeader, values), arrays.get(NUMBERS)
    if numbers is None or len(arrays) > 1 or numbers.dtype != torch.uint8 or numbers.dim() != 1:
        raise _malformed("its part of a sum is none")
    try:
        signature = bytes.fromhex(told.signature)
    except ValueError:
        raise _malformed("its signature is none") from None
    return Masked(client, told.context, numbers.numpy().tobytes(), signature)


def fields_of(data: bytes) -> dict[str, int]:
    """Names and sizes in bytes of all that a message of ours holds, read off the bytes sent."""
    values = _header(data)
    found: dict[str, int] = {}
    for name, value in values.items():
        inner = value.items() if isinstance(value, dict) else ()
        if isinstance(value, dict):
            found |= {f"{name}.{key}": len(json.dumps(v)) for key, v in inner}
        else:
            found[name] = len(json.dumps(value))
    arrays = len(data) - 8 - int.from_bytes(data[:8], "little")
    return {**found, NUMBERS if "masked" in values else "weights": arrays} if arrays else found
