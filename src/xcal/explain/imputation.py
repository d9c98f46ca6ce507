"""Noisy linear imputation: removed pixels become the weighted mean of their neighbors.

Every removed pixel p obeys `sum_q w_pq (x_p - x_q) = 0` over the neighbors q inside the image,
with w = 1/6 for the four direct and 1/12 for the four diagonal ones (Rong et al. 2022). Removed
neighbors are unknowns themselves, so this is one linear system per image and mask, the same for
all channels. Numbered row by row the unknowns couple only to those at most a row and a pixel
away, and the matrix is symmetric positive definite as long as one pixel is left: a banded
Cholesky factorization solves it exactly, and was measured faster than a general sparse one.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy.linalg.lapack import dpbsv
from threadpoolctl import ThreadpoolController

DIRECT_WEIGHT = 1 / 6
DIAGONAL_WEIGHT = 1 / 12

# Each pair of neighbors once: the step (down, right) from the first to the second.
_NEIGHBOURS = (
    (0, 1, DIRECT_WEIGHT),
    (1, 0, DIRECT_WEIGHT),
    (1, 1, DIAGONAL_WEIGHT),
    (1, -1, DIAGONAL_WEIGHT),
)


def impute(image: NDArray[np.floating], removed: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The values (C, n) of the n removed pixels, in row order, from the pixels that are left.

    `image` is (C, H, W); what it holds at removed pixels is not looked at, unless every pixel is
    removed, which determines nothing and is refused.
    """
    unknowns = int(removed.sum())
    if unknowns == removed.size:
        raise ValueError("every pixel is removed: there is nothing to impute from")
    channels = image.shape[0]
    if unknowns == 0:
        return np.empty((channels, 0))
    known = np.where(removed, 0.0, image)
    right_side = neighbor_sum(known)[:, removed].T
    degree = neighbor_sum(np.ones((1, *removed.shape)))[0, removed]
    number = np.cumsum(removed).reshape(removed.shape) - 1
    pairs = []
    for down, right, weight in _NEIGHBOURS:
        first, second = _pair_slices(removed.shape, down, right)
        both = removed[first] & removed[second]
        earlier = number[first][both]
        pairs.append((earlier, number[second][both] - earlier, weight))
    bandwidth = max((int(distance.max(initial=0)) for _, distance, _ in pairs), default=0)
    # LAPACK's lower band storage: row d holds the d-th subdiagonal.
    band = np.zeros((bandwidth + 1, unknowns), order="F")
    band[0] = degree
    for earlier, distance, weight in pairs:
        band[distance, earlier] = -weight
    # On systems of a few thousand unknowns BLAS threads gain nothing, and where another process
    # wants the cores they wait for each other: a hundred systems took twenty seconds instead of
    # half a one.
    with _blas().limit(limits=1, user_api="blas"):
        _, solution, failed = dpbsv(band, right_side, lower=1, overwrite_ab=1, overwrite_b=1)
    if failed:
        raise ArithmeticError(f"the imputation system could not be factorized (code {failed})")
    return solution.T


@cache
def _blas() -> ThreadpoolController:
    """The process's BLAS libraries, looked for once: that takes as long as a small system."""
    return ThreadpoolController()


def neighbor_sum(images: NDArray[np.floating]) -> NDArray[np.float64]:
    """For each pixel of (C, H, W) the weighted sum of its neighbors inside the image."""
    # The weights are ([1, 2, 1] x [1, 2, 1] without its center) / 12: two passes instead of eight.
    padded = np.pad(np.asarray(images, dtype=np.float64), ((0, 0), (1, 1), (1, 1)))
    columns = padded[:, :-2] + 2 * padded[:, 1:-1] + padded[:, 2:]
    full = columns[:, :, :-2] + 2 * columns[:, :, 1:-1] + columns[:, :, 2:]
    result: NDArray[np.float64] = (full - 4 * padded[:, 1:-1, 1:-1]) / 12
    return result


def _pair_slices(
    shape: tuple[int, ...], down: int, right: int
) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
    """Views that hold, at equal places, a pixel and its neighbor `down` and `right` of it."""
    height, width = shape
    first = slice(0, height - down), slice(max(0, -right), width - max(0, right))
    second = slice(down, height), slice(max(0, right), width + min(0, right))
    return first, second
