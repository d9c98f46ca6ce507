"""A cell of the declared studies: one of anybody's, and small maps of a few test images.

Where onnxruntime is installed, what a frozen backbone makes of images comes from there.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from reproduce.fast import fast_probe, fill_features, kept_maps
from xcal.data.images import Images
from xcal.data.normalize import to_tensor
from xcal.explain.choosing import added, parts_of
from xcal.explain.gradcam import closed_form_maps, gradcam_maps, head_weight_of
from xcal.explain.inference import predict_logits
from xcal.explain.occlusion import map_grid, occlusion_maps
from xcal.explain.road import RoadSettings, road
from xcal.federation.setup import DATA_SEED, Federation
from xcal.studies.cell import Measuring, main, packed_scores
from xcal.studies.store import pack

PANEL_IMAGES = 4


def panel_images(test: Images, classes: int, count: int = PANEL_IMAGES) -> NDArray[np.int64]:
    """The same few test images for every cell: of each class in turn."""
    generator = np.random.default_rng([DATA_SEED, 13])
    by_class = [generator.permutation(np.flatnonzero(test.labels == k)) for k in range(classes)]
    deepest = max((len(members) for members in by_class), default=0)
    order = [
        int(members[depth])
        for depth in range(deepest)
        for members in by_class
        if depth < len(members)
    ]
    return np.array(order[:count], dtype=np.int64)


def maps_of(model: nn.Module, federation: Federation) -> dict[str, Any]:
    """What the figure of maps needs: the class that the model gives each image, and its map."""
    test, device = federation.data.test, federation.experiment.device
    chosen = panel_images(test, len(federation.data.classes))
    inputs = to_tensor(np.asarray(test.pixels[chosen])).to(device)
    confidence = predict_logits(model, inputs).double().softmax(dim=1).nan_to_num(0.0)
    predicted = confidence.argmax(dim=1)
    maps = gradcam_maps(model, inputs, predicted).double().nan_to_num(0.0).cpu()
    entries = []
    for i, k, row, saliency in zip(chosen, predicted, confidence, maps, strict=True):
        top = float(saliency.max())
        levels = saliency / top * 255 if top > 0 else saliency
        entries.append(
            {
                "image": int(i),
                "label": int(test.labels[i]),
                "predicted": int(k),
                "confidence": round(float(row[int(k)]), 4),
                "shape": list(saliency.shape),
                "map": pack(levels.round().numpy().astype(np.uint8)),
            }
        )
    return {"maps": entries}


ALSO = {"occlusion": "gradcam"}
"""Where a cell's maps are of the first kind, ROAD of the second is told as well."""


class Declared(Measuring):
    """Small maps of a few images, ROAD of Grad-CAM beside other maps', a faster backbone."""

    def __init__(self) -> None:
        self._fast: tuple[nn.Module, nn.Module] | None = None  # a network, and what answers for it

    def prepare(self, federation: Federation) -> None:
        fill_features(federation)

    def answering(self, model: nn.Module) -> nn.Module:
        if self._fast is None or self._fast[0] is not model:
            self._fast = (model, fast_probe(model))
        return self._fast[1]

    def maps(self, model: nn.Module, images: Tensor, method: str) -> Tensor:
        fast = self.answering(model)
        if method == "gradcam" and (weight := head_weight_of(model)) is not None:
            features = kept_maps(model, images)
            if features is not None:
                return closed_form_maps(features, weight, predict_logits(fast, images).argmax(1))
        if fast is model or "occlusion" not in parts_of(method):
            return super().maps(model, images, method)
        covered = occlusion_maps(fast, images, grid=map_grid(model, images))
        others = [part for part in parts_of(method) if part != "occlusion"]
        return added([covered, *(super().maps(model, images, part) for part in others)])

    def further(
        self, model: nn.Module, federation: Federation, images: Tensor, temperature: float | None
    ) -> dict[str, Any]:
        values = maps_of(model, federation)
        also = ALSO.get(federation.experiment.map_method)
        if also is None or temperature is None:
            return values
        found = road(self.answering(model), images, self.maps(model, images, also), RoadSettings())
        raw, matched = packed_scores(found.scores), packed_scores(found.matched(temperature))
        return values | {"road_also": {also: {"raw": raw, "matched": matched}}}


if __name__ == "__main__":
    sys.exit(main(Declared()))
