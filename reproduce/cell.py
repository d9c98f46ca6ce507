"""A cell of the declared studies: one of anybody's, and small maps of a few test images."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from xcal.data.images import Images
from xcal.data.normalize import to_tensor
from xcal.explain.gradcam import gradcam_maps
from xcal.explain.inference import predict_logits
from xcal.federation.setup import DATA_SEED, Federation
from xcal.studies.cell import main
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


def maps_of(model: torch.nn.Module, federation: Federation) -> dict[str, Any]:
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


if __name__ == "__main__":
    sys.exit(main(maps_of))
