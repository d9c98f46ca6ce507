"""`xcal`: static noise with all that was found to help at a given ε, each part a key of its own.

The step is that of `fl-dp`. What differs is what it learns from and how it is explained: the head
reads the mean of an image's views (`pool_views`) in whitened channels (`whiten`), the multiplier is
that of the tight accountant (`accountant`), and answers are explained by the map that holds best on
public images (`maps`). None of that costs privacy: every part is a function of one unit, of public
images or of the released model. Which part gives how much is told in docs/recipes.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from xcal.config import Experiment, sent
from xcal.methods.base import Method
from xcal.methods.fl_dp import StaticNoise
from xcal.methods.xcal_steered import Steered


class XcalParameters(Experiment):
    """The keys of `xcal`."""

    steering: Literal["none", "signal"] = sent(
        "none",
        description="xcal: static noise, or moved in time by the signal, which is `xcal-steered`",
    )


@dataclass(frozen=True)
class OurXcal(StaticNoise):
    name: str = "xcal"
    title: str = "XCal-FL"
    parameters: type[Experiment] = XcalParameters

    def variant(self, experiment: XcalParameters) -> Method:
        """Itself, or what this name stood for in the first edition."""
        return FIRST_EDITION if experiment.steering == "signal" else self


@dataclass(frozen=True)
class FirstEdition(Steered):
    name: str = "xcal"

    @property
    def uses(self) -> frozenset[str]:
        return super().uses | {"steering"}


XCAL = OurXcal()
FIRST_EDITION = FirstEdition()
