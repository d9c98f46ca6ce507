"""An experiment: flat keys, frozen, checked before anything runs."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from xcal.errors import UserError
from xcal.presets import PRESETS

# Bounds that nobody meets on purpose: beyond them float32 overflows or lists outgrow the memory.
Positive = Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False)]
Weight = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Whole = Annotated[int, Field(ge=1, le=1_000_000)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]

# Images in every pass of a client whose noise is secure: fewer are slower, and more are filled up
# with more rows that count for nothing.
SECURE_ROWS = 32


Unit = Literal["record", "group"]

# Keys that came when runs were recorded already: left out where they are not set, so that digests
# of older runs stay what they were.
_LATER = ("public_validation", "public_validation_by", "workers")


class Experiment(BaseModel):
    """One training. Every key has a default; the descriptions are the manual."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)

    preset: str | None = Field(
        None, description="a layer of defaults beneath the other keys, by name"
    )
    # what is trained, on what
    method: str = Field("xcal", description="a method's name, or package.module:name")
    data: str = Field("smear", description="a data set's name, or package.module:name")
    pixels: Annotated[int, Field(ge=16, le=1024)] = Field(64, description="side of the images")
    train_images: Annotated[int, Field(ge=1)] | None = Field(
        None, description="use at most this many training images"
    )
    network: str = Field("small", description="a network's name, or package.module:name")
    norm: Literal["group", "frozen"] = Field(
        "group", description="group norm from scratch, or frozen published batch norm"
    )
    output_stride: Literal[16, 32] = Field(32, description="16 makes the last stage's map finer")
    head_reads: str = Field(
        "last",
        description="what the head reads: last (the last map), or stages:a-b (maps and squares of"
        " these stages, standardised by public constants in the weights file)",
    )
    train: str = Field(
        "all", description="what trains: all, head, head+norm, head+norm:k or last:k stages"
    )
    train_norm: bool = Field(False, description="whether a frozen norm's scale and shift train")
    weights: str | None = Field(None, description="published weights, .safetensors or .pth")
    # the federation
    clients: Whole = Field(3, description="number of clients N")
    participants: Whole | None = Field(None, description="clients a round m; all if not given")
    rounds: Whole = Field(8, description="communication rounds T")
    local_epochs: Whole = Field(1, description="local epochs E")
    quorum: Whole | None = Field(
        None, description="fewest answers that make a round; all who were asked if not given"
    )
    round_timeout: Positive | None = Field(
        None, description="seconds the server waits for a round's answers; for ever if not given"
    )
    average: Annotated[float, Field(ge=1e-6, le=1)] = Field(
        0.5, description="share of a round's weights in the reported model's running average"
    )
    aggregation: Literal["mean", "median", "trimmed-mean"] = Field(
        "mean", description="what the server makes of a round's answers; the last two by coordinate"
    )
    trim: Annotated[float, Field(gt=0, lt=0.5)] = Field(
        0.2, description="share of the answers that trimmed-mean drops at each end, rounded up"
    )
    partition: Literal["iid", "label", "label-extreme", "covariate"] = Field(
        "iid", description="how the training images are spread over the clients"
    )
    concentration: Positive = Field(0.5, description="Dirichlet concentration of a label shift")
    units_per_client: Whole | None = Field(
        None, description="units at each client; drawn with replacement where too few"
    )
    keep_groups: bool = Field(True, description="keep a group's images at one client")
    homes: tuple[str, ...] | None = Field(
        None, description="client homes with ledgers of their own, one a client"
    )
    # the guarantee
    epsilon: float = Field(5.0, description="target ε over all rounds")
    delta: float = Field(1e-5, description="target δ")
    accountant: Literal["auto", "renyi"] = Field(
        "auto",
        description="auto: privacy-loss distributions where a method's noise is fixed beforehand,"
        " else the Rényi filter; renyi: the filter for all, to compare methods",
    )
    unit: Unit | None = Field(
        None,
        description="what the guarantee protects: record (one image) or group (all images of one"
        " patient); by default group where the data set names groups, else record",
    )
    images_per_unit: Whole = Field(4, description="images used of a drawn group")
    group_cap: Whole | None = Field(
        None, description="most images of one group that a record-level run uses; enforced"
    )
    noise: Literal["seeded", "secure"] | None = Field(
        None,
        description="seeded (default of simulations) or secure (default where homes are given)",
    )
    paired: bool = Field(
        False,
        description="simulations: methods of one seed share draws and noise, for comparing them",
    )
    public_validation: bool | None = Field(
        None,
        description="homes of a real population: true lets the data set's validation and test"
        " images be measured, which no guarantee covers; else no such image is used",
    )
    public_validation_by: str | None = Field(
        None, description="who agreed to public_validation = true, by name"
    )
    # local training
    batch: Whole = Field(64, description="expected batch B")
    lr: Annotated[float, Field(gt=0, le=1e30)] = Field(1.5, description="learning rate η")
    clip: Positive = Field(1.0, description="clipping norm C; in dp-fedavg S, of a client's update")
    optimizer: Literal["sgd", "momentum", "adam"] = Field("sgd", description="the local optimiser")
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="for momentum")
    views: Whole = Field(
        1, description="views of an image whose mean gradient is clipped; the plain one is first"
    )
    augment: Literal["turns", "shifts"] = Field(
        "turns", description="what views are: turned and mirrored, or mirrored and moved a little"
    )
    average_steps: Share = Field(
        0.0, description="share of a round's last steps whose weights are averaged into the answer"
    )
    # the signal
    q: Annotated[float, Field(ge=1e-6, le=1)] = Field(0.2, description="share of cells masked")
    alpha: Weight = Field(1.0, description="weight of the logit change")
    beta: Weight = Field(1.0, description="weight of the margin")
    gamma: Weight = Field(1.0, description="exponent of concentration")
    fill: Literal["imagenet", "image-mean"] = Field("imagenet", description="what masks cells")
    tau: Annotated[float, Field(ge=1e-6, le=1)] | None = Field(
        None, description="smoothing of the signal (xcal-paper 0.2, xcal 0.05)"
    )
    # xcal-paper
    rho: Annotated[float, Field(ge=0, lt=1)] = Field(0.1, description="the signal's share of ε")
    band: Annotated[float, Field(ge=0, le=1)] = Field(0.2, description="half-width b of the band")
    # xcal
    w: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.5, description="how far the signal moves a share"
    )
    kappa: Positive = Field(5.0, description="price of the signal: 1/(2κ²) more noise")
    slow_tau: Annotated[float, Field(ge=1e-6, le=1)] = Field(0.01, description="smoothing of s̄")
    reference: Literal["running", "absolute"] = Field(
        "running", description="what s is held against"
    )
    contrast: Positive = Field(0.1, description="smallest Δ, the scale of s − s̄")
    signal_every: Whole = Field(4, description="a signal every k-th step")
    signal_fraction: Annotated[float, Field(ge=1e-6, le=1)] = Field(
        1.0, description="share p of the drawn units that enter the signal"
    )
    signal_source: Literal["model", "constant", "noise", "decay", "rise"] = Field(
        "model", description="the model, or what replaces it at the same cost, to see what it does"
    )
    # where the noise goes
    protected: Share = Field(
        0.2, description="share r of the CAM layer's channels, the most important, to be spared"
    )
    protection: Annotated[float, Field(ge=1, le=16)] = Field(
        2.0, description="how many times less noise than the others the spared channels get"
    )
    geometry: Literal["none", "importance"] = Field(
        "none", description="xcal: noise alike everywhere, or less on the channels that matter"
    )
    # how much a unit may contribute
    clipping: Literal["fixed", "quantile"] = Field(
        "fixed", description="xcal: clip always to C, or follow a quantile of the norms"
    )
    level: Literal["record", "client"] = Field(
        "record",
        description="adaptive-clip: at the client, or on updates at the server",
    )
    quantile: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.5, description="share γ of the norms that the clipping norm should not cut"
    )
    clip_rate: Annotated[float, Field(gt=0, le=2)] = Field(
        0.2, description="how fast the clipping norm follows: C ← C·exp(−η(b̃ − γ))"
    )
    kappa_b: Positive = Field(5.0, description="price of the count: 1/(8κ²) more noise")
    count_noise: Positive | None = Field(
        None, description="adaptive-clip: deviation σ_b of the count's noise, instead of κσ"
    )
    # adap-dpfl
    clip_factor: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        5.0, description="C over the norm of the gradients released last round; 0 keeps C"
    )
    sigma_decay: Annotated[float, Field(ge=1e-6, le=1)] = Field(
        0.999, description="β: noise after three rounds of falling loss on public images"
    )
    # measuring and running
    validation_images: Annotated[int, Field(ge=0)] = Field(
        500, description="size of the fixed public validation subset measured every round"
    )
    road_images: Annotated[int, Field(ge=0)] = Field(
        32, description="how many of them are also explained and scored by ROAD"
    )
    road_every: Whole = Field(2, description="in every k-th round, and in the last")
    road_test_images: Annotated[
        Annotated[int, Field(ge=0)] | None, BeforeValidator(lambda v: None if v == "all" else v)
    ] = Field(200, description="test images explained at the end, a fixed sample; or 'all'")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(0, description="of all but secure noise")
    threads: Annotated[int, Field(ge=0, le=256)] = Field(
        1, description="torch threads of each process; 0 takes all cores"
    )
    workers: Annotated[int, Field(ge=1, le=256)] | None = Field(
        None,
        description="processes of one thread each that a round's clients train in, side by side; as"
        " many as there are cores if not given, 1 where threads are more; does not change the"
        " result",
    )
    chunk: Whole = Field(256, description="images processed at once; does not change the result")
    pass_rows: Annotated[int, Field(ge=0, le=64)] | None = Field(
        None,
        description="images in every pass, filled up; 0: as many as are drawn; by default 32 where"
        " noise is secure, else 0",
    )
    keep_mb: Annotated[int, Field(ge=0)] = Field(
        512,
        description="memory a client may use to keep what a frozen beginning makes of its images",
    )
    device: Literal["cpu", "cuda"] = Field("cpu", description="where tensors live")

    @property
    def noise_source(self) -> str:
        """What noise comes from: homes are real, so only secure noise is charged to them."""
        return self.noise or ("seeded" if self.homes is None else "secure")

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
        return {k: v for k, v in values.items() if v is not None or k not in _LATER}

    def identity(self) -> dict[str, Any]:
        """`resolved` as it was before keys came that change nothing here: what digests are of."""
        before, values = BEFORE_THE_KEY, self.resolved()
        values.pop("workers", None)  # which never change anything
        return {k: v for k, v in values.items() if k not in before or v != before[k]}


KEYS = tuple(Experiment.model_fields)
# What a run, a request or a study's cell meant that was written down before the key was there.
BEFORE_THE_KEY: Mapping[str, Any] = {"accountant": "renyi"}


def nearest(word: str, known: Sequence[str]) -> str:
    """' Did you mean …?' where something known is close, else the empty string."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def with_preset(values: Mapping[str, Any], where: str = "the experiment") -> dict[str, Any]:
    """The values on top of the layer of defaults that their `preset` names, if any."""
    name = values.get("preset")
    if name is None:
        return dict(values)
    if not isinstance(name, str) or name not in PRESETS:
        raise UserError(
            f"Unknown preset {name!r} in {where}.{nearest(str(name), tuple(PRESETS))}"
            f" Known: {', '.join(PRESETS)}."
        )
    return {**PRESETS[name](values), **values}


def make_experiment(values: Mapping[str, Any], where: str = "the experiment") -> Experiment:
    """Check values into an Experiment; the first problem becomes one sentence.

    A preset is a layer beneath the values given here, and is resolved into plain keys.
    """
    for key in values:
        if key not in KEYS:
            raise UserError(f"Unknown key {key!r} in {where}.{nearest(str(key), KEYS)}")
    values = with_preset(values, where)
    try:
        made = Experiment(**values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"][:1]) or "?"
        what = first["msg"][:1].lower() + first["msg"][1:]
        raise UserError(
            f"{key} = {values.get(key)!r} in {where} is not accepted: {what}"
            f" ({Experiment.model_fields[key].description})."
        ) from None
    if (made.public_validation is True) != bool((made.public_validation_by or "").strip()):
        raise UserError(
            f'public_validation = true and public_validation_by = "who agreed" go together, and'
            f" {where} has only one of them: give both, or neither."
        )
    return made


def read_toml(path: Path) -> dict[str, Any]:
    """An experiment file's keys."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"There is no experiment file {path}: check the path.") from None
    except (OSError, UnicodeDecodeError):
        raise UserError(f"The experiment file {path} cannot be read as text.") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"The experiment file {path} is not valid TOML: {error}.") from None


def read_pinned(path: Path) -> Experiment:
    """A run's resolved configuration: a key that is not in the file is None, not a preset's."""
    unset = {name: None for name, f in Experiment.model_fields.items() if f.default is None}
    unset["road_test_images"] = None  # all of them, which a file cannot say otherwise
    return make_experiment({**unset, **BEFORE_THE_KEY, **read_toml(path)}, str(path))


def parse_set(text: str) -> tuple[str, Any]:
    """`key=value` as the command line gives it; the value is read as TOML, else taken as text."""
    key, sign, raw = text.partition("=")
    if not sign or not key.strip():
        raise UserError(f"--set takes key=value, not {text!r}.")
    try:
        value = tomllib.loads(f"v = {raw.strip()}")["v"]
    except tomllib.TOMLDecodeError:
        value = raw.strip()
    return key.strip(), value


def load_experiment(path: Path | None, sets: Sequence[str] = ()) -> tuple[Experiment, set[str]]:
    """File, then settings on top of it; also which keys were given and not defaulted."""
    values = {} if path is None else read_toml(path)
    where = "the settings" if path is None else str(path)
    make_experiment(values, where)  # so that an error in the file names the file
    for text in sets:
        key, value = parse_set(text)
        values[key] = value
    return make_experiment(values, where if not sets else "the settings"), set(values)


def to_toml(values: Mapping[str, Any]) -> str:
    """Flat keys as TOML; None is left out, since TOML has no null."""
    lines = []
    for key, value in values.items():
        if value is not None:
            lines.append(f"{key} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"
