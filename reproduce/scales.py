"""Three sizes of the same studies: a test, an evening on a laptop, the printed settings.

Everything that shapes a cell is pinned here, and not taken from defaults or presets: a committed
result must go on meaning what it meant when it was made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from xcal.config import nearest
from xcal.errors import UserError
from xcal.experiments import KEYS, experiment_type
from xcal.first_edition import BEFORE_THE_KEY
from xcal.methods.registry import METHODS as KNOWN_METHODS
from xcal.studies import grid
from xcal.studies.grid import PROBE, Cell
from xcal.studies.store import CellResult

# Methods whose noise no ε decides: one run serves every ε.
WITHOUT_EPSILON = ("centralized", "fl")
# Keys that a method uses and that cells of these scales do not pin: they were made before it said
# so, at the values of `SIGNAL`, and their names stay.
MADE_BEFORE = ("smoke", "laptop")
NOT_PINNED: Mapping[str, frozenset[str]] = {
    "agp": frozenset({"rho", "band"}),
    "centralized": frozenset({"clients", "partition"}),
}
SMALLER_RATE = "η / 10"
# Keys that came after the first cells: left at their defaults, which is what those cells mean.
CAME_LATER = ("noise_kind",)
METHODS = ("fl-dp", "fl", "agp", "xcal-paper", "xcal-steered", "centralized")

# The paper's sets, by the name an import gives them. Dermoscopy stands in for the paper's melanoma
# set, any finding for its pneumonia, which is too rare in the part of the archive at hand.
PAPER_SET = {
    "blood-cells": "Blood Cells",
    "blood-cells-as-shipped": "Blood Cells",
    "ham10000": "Melanoma",
    "chest-xray14": "Chest X-rays",
}
PAPER_NETWORK = {"efficientnet_b0": "EfficientNet-B0", "resnet18": "ResNet-18"}
PAPER_PIXELS = {"blood-cells": 150, "ham10000": 64, "chest-xray14": 128}

SIGNAL: Mapping[str, Any] = {
    "q": 0.2,
    "alpha": 1.0,
    "beta": 1.0,
    "gamma": 1.0,
    "rho": 0.1,
    "band": 0.2,
    "w": 0.5,
    "kappa": 5.0,
    "slow_tau": 0.01,
    "reference": "running",
    "contrast": 0.1,
    "signal_every": 4,
    "signal_fraction": 1.0,
    "signal_source": "model",
}
TAU = {"xcal-paper": 0.2, "xcal-steered": 0.05}


@dataclass(frozen=True)
class Scale:
    """What one can afford."""

    name: str
    data: tuple[str, ...]
    networks: tuple[str, ...]
    epsilons: tuple[float, ...]  # in the order of their worth
    seeds: Mapping[str, int]  # by network
    common: Mapping[str, Any]
    by_network: Mapping[str, Mapping[str, Any]]
    by_epsilon: Mapping[tuple[str, float], Mapping[str, Any]]
    plain: Mapping[str, Mapping[str, Any]]  # without clipping, by network
    explained: int
    methods: tuple[str, ...] = METHODS  # of the main tables
    beside_static: tuple[str, ...] = ("fl", "fl-dp", "xcal-paper", "xcal-steered")  # of the others
    client_epsilons: tuple[float, ...] = (0.5, 5.0)

    def values(
        self, method: str, data: str, network: str, epsilon: float | None, seed: int
    ) -> dict[str, Any]:
        """All keys of one experiment; later layers win, and none knows which method is ours."""
        values = {**SIGNAL, **self.common, "network": network, **self.by_network[network]}
        if epsilon is not None:
            values |= self.by_epsilon.get((network, epsilon), {})
        if method in WITHOUT_EPSILON:
            values |= self.plain[network]
        values |= {"method": method, "data": data, "seed": seed}
        values |= {"epsilon": epsilon, "tau": TAU.get(method, 0.05)}
        return values

    def explains(self, data: str, seed: int) -> int:
        """Of how many test images maps are measured."""
        return self.explained

    def explains_beside(self, study: str, data: str, seed: int) -> int:
        """The same in cells of another study that the main tables do not have."""
        return self.explains(data, seed)

    def at_clients(self, values: Mapping[str, Any], count: int) -> dict[str, Any]:
        """The same cell with `count` clients: a small one cannot draw a large expected batch."""
        most = max(8, (values.get("train_images") or 10_000) // (2 * count))
        batch = min(values["expected_batch_size"], most)
        return {**values, "clients": count, "expected_batch_size": batch}

    def with_groups(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The same cell with whole groups as the unit of privacy.

        They are few, so the expected batch is small; noise on its mean is as much larger, so the
        rate is as much smaller.
        """
        batch = min(8 if self.name == "smoke" else 32, values["expected_batch_size"])
        lr = values["lr"] * batch / values["expected_batch_size"]
        whole = {"unit": "group", "expected_batch_size": batch, "lr": lr, "images_per_unit": 4}
        return {**values, **whole}

    def covers(self, values: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
        """Cells that differ in what the signal covers, by variant."""
        return {}

    def also(self, method: str, values: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
        """Further cells of the main tables beside this one, by variant."""
        return {}


@dataclass(frozen=True)
class PinnedScale(Scale):
    """Every cell pins every key that its method uses, defaults too."""

    def values(
        self, method: str, data: str, network: str, epsilon: float | None, seed: int
    ) -> dict[str, Any]:
        fields = experiment_type().model_fields.items()
        defaults = {name: field.default for name, field in fields if name not in CAME_LATER}
        return {**defaults, **super().values(method, data, network, epsilon, seed)}


class PaperScale(PinnedScale):
    def values(
        self, method: str, data: str, network: str, epsilon: float | None, seed: int
    ) -> dict[str, Any]:
        values = super().values(method, data, network, epsilon, seed)
        if data in PAPER_PIXELS:
            values["pixels"] = PAPER_PIXELS[data]
        return {**values, "maps": "occlusion" if method == "xcal" else "gradcam"}

    def also(self, method: str, values: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
        """Under noise the printed rate may learn nothing: once more with a tenth of it."""
        private = method not in WITHOUT_EPSILON
        return {SMALLER_RATE: {**values, "lr": values["lr"] / 10}} if private else {}


COMMON: Mapping[str, Any] = {
    "clients": 3,
    "partition": "iid",
    "concentration": 0.5,
    "local_epochs": 1,
    "average": 0.5,
    "max_grad_norm": 1.0,
    "optimizer": "sgd",
    "delta": 1e-5,
    "unit": "record",
    "paired": True,
}

SMOKE = Scale(
    name="smoke",
    data=("smear",),
    networks=("small",),
    epsilons=(5.0,),
    seeds={"small": 1},
    common={
        **COMMON,
        "rounds": 2,
        "train_images": 240,
        "expected_batch_size": 16,
        "validation_images": 60,
        "road_images": 8,
        "road_every": 2,
    },
    by_network={"small": {"pixels": 32, "lr": 1.0}},
    by_epsilon={},
    plain={"small": {"lr": 0.3}},
    explained=20,
    methods=("fl-dp", "fl", "xcal-steered"),
    beside_static=("fl-dp", "xcal-steered"),
    client_epsilons=(5.0,),
)

LAPTOP = Scale(
    name="laptop",
    data=("blood-cells", "ham10000", "chest-xray14"),
    networks=("small", "efficientnet_b0", PROBE),
    epsilons=(0.5, 5.0, 0.05, 50.0),
    seeds={"small": 5, PROBE: 5, "efficientnet_b0": 3, "resnet18": 3},
    common={
        **COMMON,
        "rounds": 10,
        "train_images": 3000,
        "expected_batch_size": 64,
        "validation_images": 500,
        "road_images": 64,
        "road_every": 2,
    },
    by_network={
        "small": {"pixels": 64, "lr": 1.5},
        "efficientnet_b0": {
            "pixels": 64,
            "lr": 0.1,
            "average": 0.2,
            "norm": "frozen",
            "output_stride": 16,
            "train": "last:2",
            "weights": "imagenet",
        },
        # What learnt best under noise (docs/recipes.md), cut to this scale; the rates lie in the
        # middle of those that the recipes have for the three sets.
        PROBE: {
            "network": "efficientnet_b0",
            "pixels": 64,
            "expected_batch_size": 256,
            "lr": 0.2,
            "max_grad_norm": 8.0,
            "average": 0.2,
            "norm": "frozen",
            "output_stride": 32,
            "head_reads": "stages:4-6",
            "train": "head",
            "weights": "imagenet",
            # Forty steps are taken: only a signal in each comes to say anything before the end.
            "signal_every": 1,
            "signal_fraction": 0.5,
        },
        "resnet18": {
            "pixels": 64,
            "lr": 1.0,
            "norm": "group",
            "output_stride": 16,
            "train": "all",
        },
    },
    by_epsilon={
        ("efficientnet_b0", 0.05): {"lr": 0.03},
        ("efficientnet_b0", 0.5): {"lr": 0.05},
        (PROBE, 0.05): {"lr": 0.02},
        (PROBE, 0.5): {"lr": 0.05},
    },
    plain={
        "small": {"lr": 0.3},
        "efficientnet_b0": {"lr": 0.001},  # without clipping 0.02 and more diverges
        PROBE: {"lr": 0.03},
        "resnet18": {"lr": 0.1},
    },
    explained=500,
)

# The printed settings. Whether the paper began from published weights it does not say; ours do
# where there are any. What it prints of σ follows from no single rate and number of steps, so σ
# is computed here as everywhere; a plan that is fixed beforehand by the tight accountant.
PAPER = PaperScale(
    name="paper",
    data=("blood-cells", "chest-xray14", "ham10000"),
    networks=("efficientnet_b0", "resnet18"),
    epsilons=(0.5, 5.0, 0.05, 50.0),
    seeds={"efficientnet_b0": 5, "resnet18": 5, "small": 5},
    common={
        **COMMON,
        "accountant": "auto",
        "rounds": 30,
        "expected_batch_size": 32,
        "lr": 1e-3,
        "average": 1.0,
        "validation_images": 500,
        "road_images": 64,
        "road_every": 1,
    },
    by_network={
        "small": {"pixels": 64},
        "efficientnet_b0": {
            "pixels": 128,
            "norm": "frozen",
            "output_stride": 32,
            "train": "all",
            "weights": "imagenet",
        },
        "resnet18": {"pixels": 128, "norm": "group", "output_stride": 32, "train": "all"},
    },
    by_epsilon={},
    plain={"small": {}, "efficientnet_b0": {}, "resnet18": {}},
    explained=1_000_000,
    methods=("fl-dp", "fl", "agp", "xcal-paper", "xcal", "centralized"),
    beside_static=("fl", "fl-dp", "xcal-paper", "xcal"),
)

SCALES = {scale.name: scale for scale in (SMOKE, LAPTOP, PAPER)}  # `probe.py` adds its own


def get_scale(name: str) -> Scale:
    if name not in SCALES:
        raise UserError(
            f"Unknown scale {name!r}.{nearest(name, tuple(SCALES))} Known: {', '.join(SCALES)}."
        )
    return SCALES[name]


def make_cell(scale: str, values: Mapping[str, Any], explained: int, variant: str = "") -> Cell:
    """A cell under the name it has among the committed ones."""
    return grid.make_cell(
        scale, values, explained, variant, pinned_for(str(values["method"]), scale)
    )


def pinned_for(method: str, scale: str) -> frozenset[str]:
    """What a declared cell pins. A method of somebody else's own may use anything, and is not
    loaded because results name it."""
    if method not in KNOWN_METHODS:
        return frozenset(KEYS)
    older = NOT_PINNED.get(method, frozenset()) if scale in MADE_BEFORE else frozenset()
    return KNOWN_METHODS[method].uses - older


def older_note(cells: Iterable[CellResult]) -> str:
    """A sentence on cells that pin less than their method uses by now; empty where none does."""
    counted: dict[str, int] = {}
    for cell in cells:
        method = str(cell.keys["method"])
        if method in KNOWN_METHODS:
            lacks = KNOWN_METHODS[method].uses & {*SIGNAL, *BEFORE_THE_KEY} - set(cell.keys)
            counted |= {key: counted.get(key, 0) + 1 for key in lacks}
    if not counted:
        return ""
    told = ", ".join(f"{key} ({count})" for key, count in sorted(counted.items()))
    return (
        "Cells made before their method said that it uses a key do not pin it, and mean what it was"
        f" then: {told}."
    )
