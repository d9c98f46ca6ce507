"""An experiment: flat keys, frozen, checked before anything runs."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from xcal.errors import UserError
from xcal.first_edition import BEFORE_THE_KEY, FIRST_EDITION, RENAMED

# Bounds that nobody meets on purpose: beyond them float32 overflows or lists outgrow the memory.
Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False)]
Weight = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Whole = Annotated[int, Field(ge=1, le=1_000_000)]
Count = Annotated[int, Field(ge=0)]
CountOrAll = Annotated[Count | None, BeforeValidator(lambda v: None if v == "all" else v)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]

# Images in every pass of a client whose noise is secure: fewer are slower, and more are filled up
# with more rows that count for nothing.
SECURE_ROWS = 32


Unit = Literal["record", "group"]


def _known_device(value: object) -> object:
    if not isinstance(value, str) or not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?|mps", value):
        raise PydanticCustomError("device", "a device is cpu, cuda, cuda:0, cuda:1 … or mps")
    return value


Device = Annotated[str, BeforeValidator(_known_device)]

# Keys that came when runs were recorded already: left out where they are not set, so that digests
# of older runs stay what they were.
_LATER = (
    "public_validation public_validation_by workers log precision trust honest noise_kind".split()
)


def key(default: Any, description: str, *, travels: bool, **limits: Any) -> Any:
    """A key of an experiment: its default, its line in the manual, its limits.

    `travels`: whether a server sends it to its clients. The rest is the server's own business, or
    what only a client's owner decides: data, noise, machine. A request that carries it is refused.
    """
    return Field(default, description=description, json_schema_extra={"travels": travels}, **limits)


sent = partial(key, travels=True)
kept = partial(key, travels=False)


class Experiment(BaseModel):
    """The keys that every method has; a method's own keys stand in its file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)

    preset: str | None = kept(None, "a layer of defaults beneath the other keys, by name")
    # what is trained, on what
    method: str = sent("xcal", "a method's name, or package.module:name")
    data: str = kept("smear", "a data set's name, or package.module:name")
    pixels: Annotated[int, Field(ge=16, le=1024)] = sent(64, "side of the images")
    train_images: Annotated[int, Field(ge=1)] | None = kept(
        None, "use at most this many training images"
    )
    network: str = sent("small", "a network's name, or package.module:name")
    norm: Literal["group", "frozen"] = sent(
        "group", "group norm from scratch, or frozen published batch norm"
    )
    output_stride: Literal[16, 32] = sent(32, "16 makes the last stage's map finer")
    head_reads: str = sent(
        "last",
        "what the head reads: last (the last map), or stages:a-b (maps and squares of"
        " these stages, standardized by public constants in the weights file)",
    )
    pool_views: Literal["auto", "none", "turns", "mirrored-turns", "shifts"] = sent(
        "auto",
        "whether the head reads the mean over views of an image: turns (four),"
        " mirrored-turns (eight), or shifts (plain, mirrored, moved left and right, closer); auto:"
        " xcal takes those that a set's symmetry allows, where only a head trains; else none",
    )
    whiten: Weight | None = sent(
        None,
        "a head that reads several stages: 0 reads them standardized; else whitened by"
        " the covariance of public images, shrunk by so many times its mean eigenvalue; by default"
        " xcal takes 10 where that was measured to help (docs/recipes.md), else 0",
    )
    train: str = sent("all", "what trains: all, head, head+norm, head+norm:k or last:k stages")
    train_norm: bool = sent(False, "whether a frozen norm's scale and shift train")
    weights: str | None = kept(None, "published weights, .safetensors or .pth")
    # the federation
    clients: Whole = kept(3, "number of clients N")
    participants: Whole | None = kept(None, "clients a round m; all if not given")
    rounds: Whole = sent(8, "communication rounds T")
    local_epochs: Whole = sent(1, "local epochs E")
    quorum: Whole | None = kept(
        None, "fewest answers that make a round; all who were asked if not given"
    )
    round_timeout: Positive | None = kept(
        None, "seconds the server waits for a round's answers; for ever if not given"
    )
    average: Annotated[float, Field(ge=1e-6, le=1)] = kept(
        0.5, "share of a round's weights in the reported model's running average"
    )
    aggregation: Literal["mean", "median", "trimmed-mean"] = kept(
        "mean", "what the server makes of a round's answers; the last two by coordinate"
    )
    trim: Annotated[float, Field(gt=0, lt=0.5)] = kept(
        0.2, "share of the answers that trimmed-mean drops at each end, rounded up"
    )
    partition: Literal["iid", "label", "label-extreme", "covariate"] = kept(
        "iid", "how the training images are spread over the clients"
    )
    concentration: Positive = kept(0.5, "Dirichlet concentration of a label shift")
    units_per_client: Whole | None = kept(
        None,
        "units at each client; where there are too few, clients share some, which sites"
        " of a real population refuse",
    )
    keep_groups: bool = kept(True, "keep a group's images at one client")
    sites: tuple[str, ...] | None = kept(None, "sites with ledgers of their own, one a client")
    # the guarantee
    epsilon: Finite = sent(5.0, "target ε over all rounds")
    delta: Finite = sent(1e-5, "target δ")
    accountant: Literal["auto", "renyi"] = sent(
        "auto",
        "auto: privacy-loss distributions where a method's noise is fixed beforehand,"
        " else the Rényi filter; renyi: the filter for all, to compare methods",
    )
    unit: Unit | None = sent(
        None,
        "what the guarantee protects: record (one image) or group (all images of one"
        " patient); by default group where the data set names groups, else record",
    )
    images_per_unit: Whole = sent(4, "images used of a drawn group")
    group_cap: Whole | None = kept(
        None, "most images of one group that a record-level run uses; enforced"
    )
    trust: Literal["site", "masked"] = kept(
        "site",
        "site: every site is protected by its own noise alone; masked: the server sees"
        " only the masked sum, one step a round, and sites share the noise, which rests on `honest`"
        " of them (docs/guarantee.md §10)",
    )
    honest: Whole | None = kept(
        None,
        "masked: how many of the sites are assumed to add their noise and to keep it"
        " secret; all but one if not given",
    )
    noise_kind: Literal["gaussian", "discrete"] = sent(
        "gaussian",
        "what a site's own noise is: gaussian, rounded with the sum to a public grid, or"
        " discrete: whole numbers on sums that are rounded before it, with rounding charged, and"
        " plans at a whole Rényi order (docs/guarantee.md §10); shared noise always is",
    )
    noise: Literal["seeded", "secure"] | None = kept(
        None, "seeded (default of simulations) or secure (default where sites are given)"
    )
    paired: bool = kept(
        False, "simulations: methods of one seed share draws and noise, for comparing them"
    )
    public_validation: bool | None = kept(
        None,
        "sites of a real population: true lets the data set's validation and test"
        " images be measured, which no guarantee covers; else no such image is used",
    )
    public_validation_by: str | None = kept(None, "who agreed to public_validation = true, by name")
    # local training
    expected_batch_size: Whole = sent(64, "expected batch size B")
    lr: Annotated[float, Field(gt=0, le=1e30)] = sent(1.5, "learning rate η")
    max_grad_norm: Positive = sent(1.0, "clipping norm C; in dp-fedavg S, of a client's update")
    loss: str | None = kept(
        None,
        "package.module:name of a function (logits, labels) that gives one number per"
        " image, or of a torch loss; by default cross-entropy",
    )
    optimizer: Literal["sgd", "momentum", "adam"] = sent("sgd", "the local optimizer")
    momentum: Annotated[float, Field(ge=0, lt=1)] = sent(0.9, "for momentum")
    views: Whole = sent(
        1, "views of an image whose mean gradient is clipped; the plain one is first"
    )
    augment: Literal["turns", "shifts"] = sent(
        "turns", "what views are: turned and mirrored, or mirrored and moved a little"
    )
    average_steps: Share = sent(
        0.0, "share of a round's last steps whose weights are averaged into the answer"
    )
    # measuring and running
    validation_images: Count = kept(
        500, "size of the fixed public validation subset measured every round"
    )
    road_images: Count = kept(32, "how many of them are also explained and scored by ROAD")
    road_every: Whole = kept(2, "in every k-th round, and in the last")
    road_test_images: CountOrAll = kept(
        200, "test images explained at the end, a fixed sample; or 'all'"
    )
    maps: str | None = kept(
        None,
        "how answers are explained at the end: gradcam, gradcam++, hirescam, layercam,"
        " occlusion, cell-occlusion, rise, two of them joined by +, or auto: the best by ROAD on"
        " public validation images; rounds are always scored with gradcam; by default auto in xcal,"
        " else gradcam",
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = kept(0, "of all but secure noise")
    threads: Annotated[int, Field(ge=0, le=256)] = kept(
        1, "torch threads of each process; 0 takes all cores"
    )
    workers: Annotated[int, Field(ge=1, le=256)] | None = kept(
        None,
        "processes of one thread each that a round's clients train in, side by side; as"
        " many as there are cores if not given, 1 where threads are more; does not change the"
        " result",
    )
    chunk: Whole = kept(256, "images processed at once; does not change the result")
    pass_rows: Annotated[int, Field(ge=0, le=64)] | None = kept(
        None,
        "images in every pass, filled up; 0: as many as are drawn, which sites of a"
        " real population refuse; by default 32 where noise is secure, else 0",
    )
    feature_cache_mb: Count = kept(
        512, "memory a client may use to keep what a frozen backbone makes of its images"
    )
    device: Device = kept(
        "cpu", "where tensors live: cpu, cuda, cuda:1 (the second GPU), or mps (Apple's)"
    )
    precision: Literal["single", "bf16"] | None = kept(
        None,
        "of training passes: single (float32, the default), or bf16: products in"
        " bfloat16, as torch.autocast rounds them; what is clipped and released is float32 either"
        " way. Runs of the local engine without sites",
    )
    log: Literal["none", "tensorboard", "mlflow", "wandb"] = kept(
        "none",
        "where released and public numbers of each round also go; does not change the result",
    )

    @property
    def map_method(self) -> str:
        """How answers are explained at the end, settled when an experiment is made."""
        return self.maps or "gradcam"

    @property
    def noise_source(self) -> str:
        """What noise comes from: sites are real, so only secure noise is charged to them."""
        return self.noise or ("seeded" if self.sites is None else "secure")

    @property
    def only_local(self) -> str | None:
        """A key that clients elsewhere do not take, where it is set."""
        if self.loss is not None:
            return "loss"
        return "precision" if self.precision == "bf16" else None

    @property
    def honest_sites(self) -> int:
        """How many sites shared noise counts on."""
        return self.clients - 1 if self.honest is None else self.honest

    @property
    def discrete(self) -> bool:
        """Whether noise is discrete: a site's own, or one that sites share."""
        return self.trust == "masked" or self.noise_kind == "discrete"

    @property
    def rows(self) -> int:
        """Images in every pass, 0 for as many as are drawn: fixed where somebody is protected."""
        if self.pass_rows is not None:
            return self.pass_rows
        return SECURE_ROWS if self.noise_source == "secure" else 0

    @property
    def privacy_unit(self) -> Unit:
        """The unit, settled: preparing an experiment sets it where none was given."""
        if self.unit is None:
            raise RuntimeError("the unit is settled when an experiment is prepared")
        return self.unit

    def resolved(self) -> dict[str, Any]:
        """Every key with its value, ready for JSON."""
        values = self.model_dump(mode="json")
        fields = type(self).model_fields
        return {k: v for k, v in values.items() if k not in _LATER or v != fields[k].default}

    def identity(self) -> dict[str, Any]:
        """What digests are of: `resolved`, with the names and in the order of the first edition.

        Keys that came later stand behind, where they change something.
        """
        values = self.resolved()
        for name in ("workers", "log"):  # which never change anything
            values.pop(name, None)
        known = {old: values.pop(new) for old, new in FIRST_EDITION.items() if new in values}
        found = {**known, **values}
        return {k: v for k, v in found.items() if k not in BEFORE_THE_KEY or v != BEFORE_THE_KEY[k]}


def nearest(word: str, known: Sequence[str]) -> str:
    """' Did you mean …?' where something known is close, else the empty string."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def decimal_point(value: object) -> str:
    """' Did you mean 0.5?' of '0,5', else the empty string."""
    if isinstance(value, str) and re.fullmatch(r"-?\d+,\d+(e-?\d+)?", value.strip()):
        return f" Did you mean {value.strip().replace(',', '.')}?"
    return ""


def read_toml(path: Path, what: str = "experiment file") -> dict[str, Any]:
    """A file's keys; whatever is wrong with it is one sentence about `what`."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"There is no {what} {path}: check the path.") from None
    except (OSError, UnicodeDecodeError):
        raise UserError(f"The {what} {path} cannot be read as text.") from None
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        meant = re.search(r"^\s*[\w-]+\s*=\s*(-?\d+,\d+)\s*(?:#.*)?$", text, re.MULTILINE)
        hint = decimal_point(meant[1]) if meant else ""
        raise UserError(f"The {what} {path} is not valid TOML: {error}.{hint}") from None
    for old, new in RENAMED.items():
        if old in values and new in values:
            raise UserError(
                f"{path} has both {old!r} and {new!r}, which are one key: drop {old!r}."
            )
    return values


def parse_set(text: str) -> tuple[str, Any]:
    """`key=value` as the command line gives it; the value is read as TOML, else taken as text."""
    key, sign, raw = text.partition("=")
    if not sign or not key.strip():
        raise UserError(f"--set takes key=value, not {text!r}.")
    return key.strip(), toml_value(raw.strip())


def toml_value(text: str) -> Any:
    """A value as TOML has it; what is none is text."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def to_toml(values: Mapping[str, Any]) -> str:
    """Flat keys as TOML; None is left out, since TOML has no null."""
    lines = (f"{key} = {json.dumps(v)}\n" for key, v in values.items() if v is not None)
    return "".join(lines) or "\n"
