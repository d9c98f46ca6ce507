"""How a training set is laid out over the clients of a simulated federation.

Clients hold equally many images, or as nearly as whole groups allow. Groups stay together unless
the caller asks otherwise. What came of it (a unit at several clients, a group torn apart) is read
off the result, not off the intention, because a privacy statement quotes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from xcal.data.images import Images
from xcal.dp.sampling import Unit, UnitTable
from xcal.errors import UserError

Kind = Literal["iid", "label", "label-extreme", "covariate"]
Indices = NDArray[np.int64]

DARKEST_TO_BRIGHTEST = (0.6, 1.4)


@dataclass(frozen=True)
class Shard:
    """One client's part: indices into the training split, ascending and distinct."""

    indices: Indices
    brightness: float = 1.0
    """Factor on this client's pixels (covariate shift)."""


@dataclass(frozen=True)
class Partition:
    """All clients' parts, and what a privacy statement must say about them."""

    shards: tuple[Shard, ...]
    shared_units: bool
    """Some unit of privacy stands at several clients: it pays the sum of their losses."""
    groups_split: bool
    """Some group has images at several clients."""


def partition(
    images: Images,
    clients: int,
    *,
    kind: Kind = "iid",
    concentration: float = 0.5,
    seed: int = 0,
    units_per_client: int | None = None,
    keep_groups: bool = True,
    unit: Unit = "record",
) -> Partition:
    """Lay `images` out over `clients`; the same arguments give the same partition.

    - `iid`: at random.
    - `label`: every client has class preferences drawn from a Dirichlet distribution of the given
      `concentration` (small: few classes a client) and is served by them until a class runs out.
    - `label-extreme`: images sorted by class are cut into as many pieces as there are clients, so
      that each holds as few classes as possible.
    - `covariate`: at random, and brightness rises linearly from the first client to the last.

    Without `units_per_client` every image goes to exactly one client, and sizes differ by at most
    one image, or where groups are kept by the largest group (`label-extreme`: each size differs
    by at most that from the mean). For `unit="group"` this holds of the numbers of groups. With
    it, every client gets exactly so many units (images, or groups for `unit="group"`), distinct
    within the client; where the set has too few for all clients, clients draw from the whole set
    and share units.

    A group of several classes counts as the class most of its images have.
    """
    _check(images, clients, kind, concentration, units_per_client, keep_groups, unit)
    rng = np.random.default_rng(seed)
    table = UnitTable.of("group" if keep_groups else "record", images.groups)
    # Below, an item is what is handed out whole: a group, or an image where groups may be torn.
    weights = np.ones(table.n_units, np.int64) if unit == "group" else table.sizes
    classes = (
        np.zeros(table.n_units, np.int64)
        if images.multi_label
        else _class_of_items(table, images.labels)
    )

    if kind == "label-extreme":
        order = rng.permutation(table.n_units)
        turn_of_class = rng.permutation(int(images.labels.max()) + 1)
        order = order[np.argsort(turn_of_class[classes[order]], kind="stable")]
        parts = _cut(order, weights, clients)
        if _falls_short(parts, weights, units_per_client):
            parts = _windows(order, weights, clients)
    else:
        if kind == "label":
            wishes = rng.dirichlet(
                np.full(int(images.labels.max()) + 1, concentration), size=clients
            )
        else:
            classes = np.zeros_like(classes)
            wishes = np.ones((clients, 1))
        parts = _deal(rng, classes, weights, wishes, units_per_client, shared=False)
        if _falls_short(parts, weights, units_per_client):
            parts = _deal(rng, classes, weights, wishes, units_per_client, shared=True)

    shifted = kind == "covariate" and clients > 1
    levels = np.linspace(*DARKEST_TO_BRIGHTEST, clients) if shifted else np.ones(clients)
    shards = []
    for part, level in zip(parts, levels, strict=True):
        items = part if units_per_client is None else _enough(part, weights, units_per_client)
        held = [table.images[table.starts[i] : table.starts[i + 1]] for i in items]
        indices = np.concatenate(held)
        if units_per_client is not None and unit == "record":
            # The last group may be larger than needed; the surplus stays unused.
            indices = indices[:units_per_client]
        shards.append(Shard(np.sort(indices), float(level)))
    groups_split = _at_several([images.groups[shard.indices] for shard in shards])
    if unit == "group":
        shared_units = groups_split
    else:
        shared_units = _at_several([shard.indices for shard in shards])
    return Partition(tuple(shards), shared_units, groups_split)


def _check(
    images: Images,
    clients: int,
    kind: str,
    concentration: float,
    units_per_client: int | None,
    keep_groups: bool,
    unit: Unit,
) -> None:
    if kind not in get_args(Kind):
        raise UserError(f"partition: kind is {kind!r}, but must be {', '.join(get_args(Kind))}.")
    if images.multi_label and kind in ("label", "label-extreme"):
        raise UserError(
            f"partition = {kind!r} spreads images by their class, and images of this data set show "
            "several findings at once: choose iid or covariate."
        )
    if clients < 1:
        raise UserError(f"partition: clients is {clients}, but must be at least 1.")
    if kind == "label" and not (concentration > 0 and np.isfinite(concentration)):
        raise UserError(f"partition: concentration is {concentration}, but must be positive.")
    if unit == "group" and not keep_groups:
        raise UserError(
            "partition: the unit of privacy is the group, so groups cannot be split over clients; "
            "set keep_groups = true."
        )
    groups = len(np.unique(images.groups))
    if units_per_client is None:
        items, what = (groups, "groups") if keep_groups else (len(images), "images")
        if items < clients:
            raise UserError(
                f"partition: {clients} clients cannot share {items} {what}; use fewer clients, "
                "or give units_per_client to let clients share."
            )
        return
    available = groups if unit == "group" else len(images)
    if not 1 <= units_per_client <= available:
        raise UserError(
            f"partition: units_per_client is {units_per_client}, but must lie between 1 and the "
            f"{available} {'groups' if unit == 'group' else 'images'} of the training split."
        )


def _class_of_items(table: UnitTable, labels: Indices) -> Indices:
    """The commonest class of every item, the lower one of two that are equally common."""
    item_of = np.repeat(np.arange(table.n_units), table.sizes)
    counts = np.zeros((table.n_units, int(labels.max()) + 1), np.int64)
    np.add.at(counts, (item_of, labels[table.images]), 1)
    return counts.argmax(axis=1).astype(np.int64)


def _falls_short(parts: list[Indices], weights: Indices, quota: int | None) -> bool:
    return quota is not None and any(int(weights[items].sum()) < quota for items in parts)


def _enough(items: Indices, weights: Indices, quota: int) -> Indices:
    """The first items that together reach the quota."""
    return items[: int(np.searchsorted(np.cumsum(weights[items]), quota)) + 1]


def _deal(
    rng: np.random.Generator,
    classes: Indices,
    weights: Indices,
    wishes: NDArray[np.float64],
    quota: int | None,
    shared: bool,
) -> list[Indices]:
    """Hand out items in turns, the turn always going to the client that holds least.

    A client's turn draws a class by its `wishes` among the classes that are left and takes the
    next item of it. Clients that share draw from the whole set, each for itself.
    """
    n_clients, n_classes = wishes.shape
    order = rng.permutation(len(classes))
    if quota is None:
        # Heavy items leave the pile first, so that light ones even out the sizes at the end.
        order = order[np.argsort(weights[order], kind="stable")]
    piles = [order[classes[order] == c].tolist() for c in range(n_classes)]
    piles_of = [
        [rng.permutation(pile).tolist() for pile in piles] if shared else piles
        for _ in range(n_clients)
    ]
    held: list[list[int]] = [[] for _ in range(n_clients)]
    load = np.zeros(n_clients, np.int64)
    while True:
        hungry = np.arange(n_clients) if quota is None else np.flatnonzero(load < quota)
        if not len(hungry):
            break
        client = int(hungry[np.argmin(load[hungry])])
        left = np.array([len(pile) > 0 for pile in piles_of[client]])
        if not left.any():
            break
        wish = np.where(left, wishes[client], 0.0)
        if not wish.sum() > 0:  # all that this client wished for is gone
            wish = left.astype(np.float64)
        edges = np.cumsum(wish)
        chosen = int(np.searchsorted(edges, rng.random() * edges[-1], side="right"))
        item = piles_of[client][chosen].pop()
        held[client].append(item)
        load[client] += weights[item]
    return [np.array(items, np.int64) for items in held]


def _cut(order: Indices, weights: Indices, clients: int) -> list[Indices]:
    """Consecutive pieces of `order`, one a client, of equal weight as nearly as items allow."""
    # An item belongs to the client in whose stretch its middle lies.
    ends = np.cumsum(weights[order])
    middle = 2 * ends - weights[order]
    client_of = middle * clients // (2 * int(weights.sum()))
    client_of = _leave_none_empty(client_of, clients)
    return [order[client_of == client] for client in range(clients)]


def _windows(order: Indices, weights: Indices, clients: int) -> list[Indices]:
    """The whole of `order` for every client, each starting further on: pieces that overlap."""
    ends = np.cumsum(weights[order])
    starts = np.searchsorted(ends, np.arange(clients) * int(ends[-1]) / clients, side="right")
    return [np.roll(order, -int(start)) for start in starts]


def _leave_none_empty(client_of: Indices, clients: int) -> Indices:
    """Move borders so that every client has an item, keeping the order of clients."""
    items = len(client_of)
    # The first item of client c stands at c or later, and leaves items for the clients after it.
    first = np.searchsorted(client_of, np.arange(clients))
    for client in range(1, clients):
        first[client] = max(first[client], first[client - 1] + 1)
    for client in range(clients - 1, 0, -1):
        first[client] = min(first[client], items - (clients - client))
    return np.searchsorted(first, np.arange(items), side="right").astype(np.int64) - 1


def _at_several(held: list[Indices]) -> bool:
    """Whether some value stands at more than one client."""
    distinct = [np.unique(values) for values in held]
    everything = np.concatenate(distinct)
    return len(np.unique(everything)) < len(everything)
