"""Draws of examples: whole numbers from class mixes, and equal inputs kept together.

Examples with equal inputs form a *group*, named by the position of its first example. An example without duplicates is
a group of its own. A group belongs to the class of its first example. Draws take whole groups, so that no input is both
trained and tested on; where no input is repeated, they equal draws of single examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedloom.core.keyed import make_rng, shuffled
from fedloom.data.spec import RawInputs, named_arrays

Mixes: TypeAlias = NDArray[np.float64]
"""``[n, C]``; rows sum to one."""


def partition_classes(clients: int, classes: int, per_client: int, seed: int) -> NDArray[np.int64]:
    """Assign k distinct classes to every client, each class equally often (±1); ``[n, k]``, in the order drawn.

    Each of the C classes gets ⌊nk/C⌋ or ⌈nk/C⌉ places; which classes get the extra one is random. Clients choose in
    random order. With R clients still to choose, a class that has R places left must go to each of them; the other
    classes are drawn at random, in proportion to the places left. No class then has more than R - 1 places left for the
    R - 1 clients that remain, and the places add up to k(R - 1). There are therefore always k distinct classes to
    choose from, and the draw ends for every seed.
    """
    generator = make_rng(seed, "classes")
    places = np.full(classes, clients * per_client // classes)
    places[shuffled(generator, classes)[: clients * per_client % classes]] += 1
    classes_held = np.empty((clients, per_client), dtype=np.int64)
    for position, client in enumerate(shuffled(generator, clients)):
        candidates = [int(c) for c in np.flatnonzero(places == clients - position)]
        free = places.copy()
        free[candidates] = 0
        while len(candidates) < per_client:
            client_class = int(np.searchsorted(np.cumsum(free), int(generator.random() * free.sum()), side="right"))
            candidates.append(client_class)
            free[client_class] = 0
        # Shuffled, so that a client's share of a class does not depend on whether the class had to be taken.
        classes_held[client] = np.asarray(candidates)[shuffled(generator, per_client)]
        places[candidates] -= 1
    return classes_held


def feasible_sizes(mixes: Mixes, available: NDArray[np.int64], cap: int | None = None) -> NDArray[np.int64]:
    """Return the number of examples that each client with mix π_i gets of a pool with p_c of each class, ``[n]``.

    N_i = ⌊min_{c: π_ic > 0} p_c / Σ_j π_jc⌋, at most ``cap``. Equal mixes share a pool equally. Under Dirichlet
    mixes, where every π_ic > 0, all clients get the same size, which the class in greatest demand determines.
    """
    demand = mixes.sum(0)
    per_unit = np.divide(available, demand, out=np.full(len(demand), np.inf), where=demand > 0)
    largest = np.where(mixes > 0, per_unit, np.inf).min(1)
    # Rounding errors can leave a whole number slightly too small.
    whole: NDArray[np.int64] = np.floor(largest * (1 + 1e-12) + 1e-9).astype(np.int64)
    return whole if cap is None else np.minimum(whole, cap)


def quotas(
    mixes: Mixes, size: NDArray[np.int64], available: NDArray[np.int64], seed: int, split: str
) -> NDArray[np.int64]:
    """Round N_i π_i to whole examples by largest remainders, ``[n, C]``; no class exceeds ``available``.

    Each client first gets ⌊N_i π_ic⌋ examples of each class. The remaining N_i - Σ_c ⌊N_i π_ic⌋ come from its classes
    of largest remainder that have spare examples; clients choose in random order. When a pool is nearly used up, the
    last clients may find no spare examples in their classes. Another client then gives one up and takes one of another
    class. If no such exchange is possible, the client gets fewer examples (fewer than C are missing).
    """
    exact = mixes * size[:, None]
    counts: NDArray[np.int64] = np.floor(exact + 1e-9).astype(np.int64)
    remainders = exact - counts
    open_to = remainders > 1e-9  # [n, C]: may still be rounded up
    spare = available - counts.sum(0)
    missing = size - counts.sum(1)
    for client in shuffled(make_rng(seed, "round", split), len(size)):
        # Ties go to the class with most spare examples.
        order = np.lexsort((-spare, -np.round(remainders[client], 9)))
        receivers = [c for c in order if spare[c] > 0 and open_to[client, c]][: missing[client]]
        counts[client, receivers] += 1
        spare[receivers] -= 1
        open_to[client, receivers] = False
        missing[client] -= len(receivers)
    for client in np.flatnonzero(missing):
        while missing[client] and _exchange(int(client), counts, open_to, spare, remainders):
            missing[client] -= 1
    return counts


def _exchange(
    client: int,
    counts: NDArray[np.int64],
    open_to: NDArray[np.bool_],
    spare: NDArray[np.int64],
    remainders: NDArray[np.float64],
) -> bool:
    """Get a client one more example through an exchange with another client; return False if no exchange is possible.

    The other client must hold a rounded-up example of a class open to this client, and be open to a class with spare
    examples. Among all such exchanges, choose the one that distorts the other client's mix least.
    """
    rounded_up = (remainders > 1e-9) & ~open_to
    instead = np.where(open_to & (spare > 0), remainders, -np.inf)
    best = instead.max(1)
    for c in np.flatnonzero(open_to[client]):
        gain = np.where(rounded_up[:, c], best - remainders[:, c], -np.inf)
        other = int(gain.argmax())
        if gain[other] > -np.inf:
            d = int(instead[other].argmax())
            counts[other, c] -= 1
            counts[other, d] += 1
            counts[client, c] += 1
            spare[d] -= 1
            open_to[other, c], open_to[other, d], open_to[client, c] = True, False, False
            return True
    return False


def largest_remainders(exact: NDArray[np.floating]) -> NDArray[np.int64]:
    """Round numbers so that their sum is the rounded sum: round down, then up where the remainder is largest."""
    counts: NDArray[np.int64] = np.floor(exact + 1e-9).astype(np.int64)
    missing = round(round(float(exact.sum()), 9)) - int(counts.sum())  # a half stays a half despite float errors
    counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1
    return counts


def held_out(fraction: float, count: int) -> int:
    """Return how many of ``count`` examples are held out: the fraction, rounded half up, but at least one."""
    return min(max(1, math.floor(fraction * count + 0.5)), count)


def stratified_sample(labels: NDArray[np.int64], size: int, generator: np.random.Generator) -> NDArray[np.bool_]:
    """Draw ``size`` of the m examples with these labels at random, ``[m]`` bool.

    Each class is drawn in proportion to its frequency, rounded by largest remainders.
    """
    counts = np.bincount(labels)
    share = largest_remainders(counts * (size / max(len(labels), 1)))
    order = shuffled(generator, len(labels))
    order = order[np.argsort(labels[order], kind="stable")]  # class by class, each in a random order
    place = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    selected = np.zeros(len(labels), dtype=np.bool_)
    selected[order[place < np.repeat(share, counts)]] = True
    return selected


Positions: TypeAlias = NDArray[np.int64]


def equal_inputs(x: RawInputs) -> Positions:
    """Return the position of the first example with the same input, or the same named inputs, ``[n]``."""
    groups = [_equal_rows(each) for each in named_arrays(x).values()]
    return groups[0] if len(groups) == 1 else _equal_rows(np.stack(groups, 1))


def _equal_rows(x: NDArray[Any]) -> Positions:
    rows = np.ascontiguousarray(x.reshape(len(x), -1) + x.dtype.type(0))  # -0.0 becomes 0.0
    raw = rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).reshape(-1)
    _, first, inverse = np.unique(raw, return_index=True, return_inverse=True)
    group: Positions = first[inverse.reshape(-1)].astype(np.int64)
    return group


def input_digests(x: RawInputs) -> list[bytes]:
    """Return a digest of each input, ``[n]``: equal inputs have equal digests, which need far less memory."""
    parts = [each.reshape(len(each), -1) for each in named_arrays(x).values()]
    whole = (b"".join((row + row.dtype.type(0)).tobytes() for row in rows) for rows in zip(*parts, strict=True))
    return [blake2b(content, digest_size=16).digest() for content in whole]


def firsts_of(positions: Positions, group: Positions) -> Positions:
    """Return the first of these positions in each group; both in ascending order."""
    return positions[np.sort(np.unique(group[positions], return_index=True)[1])]


def choose_about(sizes: Positions, target: int) -> NDArray[np.bool_]:
    """Choose groups, in the order given, whose sizes ``[g]`` add up to about ``target``; ``[g]`` bool.

    A group is chosen if it brings the sum nearer to the target. If there are two or more groups, at least one is chosen
    unless the target is 0, and at least one is left unless the target is everything.
    """
    selected = np.zeros(len(sizes), dtype=np.bool_)
    remaining = target
    for place, size in enumerate(sizes.tolist()):
        if remaining <= 0:
            break
        if size <= 2 * remaining:
            selected[place] = True
            remaining -= size
    if target > 0 and len(sizes) > 1 and not selected.any():
        selected[int(sizes.argmin())] = True
    if len(sizes) > 1 and selected.all() and target < sizes.sum():
        selected[-1] = False
    return selected


def draw_splits(
    labels: Positions, group: Positions, fractions: Mapping[int, float], generator: Callable[[int], np.random.Generator]
) -> Positions:
    """Draw the split of each example, ``[n]``, class by class; groups stay whole, with the label of the first.

    Parameters
    ----------
    fractions
        Fraction of the remaining examples drawn for each split, in this order; the rest is in split 0.
    generator
        Returns the generator for a split.
    """
    firsts = np.unique(group)
    split = np.zeros(len(group), dtype=np.int64)
    for place, fraction in fractions.items():
        selected = stratified_sample(labels[firsts], held_out(fraction, len(firsts)), generator(place))
        split[firsts[selected]] = place
        firsts = firsts[~selected]
    places: Positions = split[group]
    return places


def first_groups(sizes: Positions, target: int) -> NDArray[np.bool_]:
    """Choose the first groups whose sizes add up to about ``target``, ``[g]`` bool; a larger target only adds some."""
    return np.asarray(2 * np.cumsum(sizes) - sizes <= 2 * target)


def hold_out(
    train: Sequence[Positions], group: Positions, fraction: float, seed: int
) -> tuple[list[Positions], list[Positions]]:
    """Split the ascending positions of each class into those kept and a fraction held out for validation.

    ``group`` is the group of each example of the data set, ``[n]``.
    """
    sizes = np.bincount(np.concatenate([np.zeros(0, dtype=np.int64), *(group[members] for members in train)]))
    firsts = [members[group[members] == members] for members in train]
    counts = largest_remainders(np.array([sizes[of_class].sum() for of_class in firsts]) * fraction)
    rank, out = np.zeros(len(group), dtype=np.int64), np.zeros(len(group), dtype=np.bool_)
    for c, of_class in enumerate(firsts):
        order = of_class[shuffled(make_rng(seed, "validation", c), len(of_class))]
        rank[order] = np.arange(len(order))
        out[order[choose_about(sizes[order], int(counts[c]))]] = True
    training, validation = [], []
    for members in train:
        candidates = members[np.argsort(rank[group[members]], kind="stable")]
        is_out = out[group[candidates]]
        training.append(candidates[~is_out])
        validation.append(candidates[is_out])
    return training, validation


def fill_pools(members: Sequence[Positions], demand: NDArray[np.int64], group: Positions) -> list[list[Positions]]:
    """Return pools of exact numbers of examples of each class, filled one after another; each group is in one pool.

    Duplicates that exceed the room in the pool of their group are left out.

    Parameters
    ----------
    members
        Positions of the examples of each class, in the order in which they are taken.
    demand
        ``[C, pools]``: number of examples of each class that each pool takes; it gets fewer if a class runs out.
    """
    pool_of: dict[int, int] = {}
    pools: list[list[Positions]] = [[] for _ in range(demand.shape[1])]
    for of_class, room in zip(members, demand.tolist(), strict=True):
        parts: list[list[int]] = [[] for _ in room]
        for position, its_group in zip(of_class.tolist(), group[of_class].tolist(), strict=True):
            pool = pool_of.get(its_group)
            if pool is None:
                pool = next((p for p, part in enumerate(parts) if len(part) < room[p]), None)
                if pool is None:
                    continue
                pool_of[its_group] = pool
            if len(parts[pool]) < room[pool]:
                parts[pool].append(position)
        for pool, part in enumerate(parts):
            pools[pool].append(np.array(part, dtype=np.int64))
    return pools
