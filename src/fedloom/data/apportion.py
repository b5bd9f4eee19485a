"""Apportionment: turn class mixes into whole numbers of examples."""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedloom.core.keyed import make_rng, shuffled

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
    held = np.empty((clients, per_client), dtype=np.int64)
    for chosen, client in enumerate(shuffled(generator, clients)):
        picked = [int(c) for c in np.flatnonzero(places == clients - chosen)]
        free = places.copy()
        free[picked] = 0
        while len(picked) < per_client:
            drawn = int(np.searchsorted(np.cumsum(free), int(generator.random() * free.sum()), side="right"))
            picked.append(drawn)
            free[drawn] = 0
        # Shuffled, so that a client's share of a class does not depend on whether the class had to be taken.
        held[client] = np.asarray(picked)[shuffled(generator, per_client)]
        places[picked] -= 1
    return held


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
        chosen = [c for c in order if spare[c] > 0 and open_to[client, c]][: missing[client]]
        counts[client, chosen] += 1
        spare[chosen] -= 1
        open_to[client, chosen] = False
        missing[client] -= len(chosen)
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


def stratified(labels: NDArray[np.int64], size: int, generator: np.random.Generator) -> NDArray[np.bool_]:
    """Draw ``size`` of the m examples with these labels at random, ``[m]`` bool.

    Each class is drawn in proportion to its frequency, rounded by largest remainders.
    """
    counts = np.bincount(labels)
    share = largest_remainders(counts * (size / max(len(labels), 1)))
    order = shuffled(generator, len(labels))
    order = order[np.argsort(labels[order], kind="stable")]  # class by class, each in a random order
    place = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    drawn = np.zeros(len(labels), dtype=np.bool_)
    drawn[order[place < np.repeat(share, counts)]] = True
    return drawn
