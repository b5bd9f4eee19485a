"""Apportionment: class mixes become whole numbers of examples."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedloom.data.keyed import keyed_generator, shuffled

Mixes: TypeAlias = NDArray[np.float64]
"""``[n, C]``; rows sum to one."""


def deal_classes(clients: int, classes: int, per_client: int, seed: int) -> NDArray[np.int64]:
    """Give k distinct classes to every client, each class as often as any other (±1); ``[n, k]``, in the order drawn.

    Each of the C classes gets ⌊nk/C⌋ or ⌈nk/C⌉ places, at random where they are not equal. Clients choose in
    random order. With R clients still to choose, a class that has R places left must go to every one of them; the
    rest are drawn at random, in proportion to the places left. Then no class has more than R - 1 places left for the
    R - 1 clients that remain and the places add up to k(R - 1): so there are always k distinct classes to choose from,
    and the draw ends, whatever the seed.
    """
    generator = keyed_generator(seed, "classes")
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
        # Mixed, so that a share is not tied to the classes that had to be taken.
        held[client] = np.asarray(picked)[shuffled(generator, per_client)]
        places[picked] -= 1
    return held


def feasible_sizes(mixes: Mixes, available: NDArray[np.int64], cap: int | None = None) -> NDArray[np.int64]:
    """Return how many examples each client gets of a pool, ``[n]``.

    N_i = ⌊min_{c: π_ic > 0} p_c / Σ_j π_jc⌋, at most ``cap``. Equal mixes share a pool equally; under Dirichlet
    mixes, where every π_ic > 0, all clients get the same size, and the class in greatest demand sets it.

    Parameters
    ----------
    mixes
        π, ``[n, C]``.
    available
        p, ``[C]``: examples of each class in the pool.
    """
    demand = mixes.sum(0)
    per_unit = np.divide(available, demand, out=np.full(len(demand), np.inf), where=demand > 0)
    largest = np.where(mixes > 0, per_unit, np.inf).min(1)
    # What should be a whole number may come out just below it.
    whole: NDArray[np.int64] = np.floor(largest * (1 + 1e-12) + 1e-9).astype(np.int64)
    return whole if cap is None else np.minimum(whole, cap)


def quotas(
    mixes: Mixes, size: NDArray[np.int64], available: NDArray[np.int64], seed: int, split: str
) -> NDArray[np.int64]:
    """Round N_i π_i to whole examples by largest remainders, ``[n, C]``; no class exceeds ``available``.

    Each client first gets ⌊N_i π_ic⌋ of each class; the N_i - Σ_c ⌊N_i π_ic⌋ left over go to its classes of largest
    remainder that have examples to spare, clients choosing in random order. Where a pool is used up to its last
    examples, the last to choose may find none to spare in their classes: then another client gives one up and takes
    one of another class. Where no exchange is left either, a client goes without (fewer than C examples).
    """
    exact = mixes * size[:, None]
    counts: NDArray[np.int64] = np.floor(exact + 1e-9).astype(np.int64)
    remainders = exact - counts
    open_to = remainders > 1e-9  # [n, C]: may still be rounded up
    spare = available - counts.sum(0)
    missing = size - counts.sum(1)
    for client in shuffled(keyed_generator(seed, "round", split), len(size)):
        # Ties go to the class with most to spare.
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
    """Get a client one more example by an exchange with another; False if there is no such exchange.

    Of all the others that hold a rounded-up example of a class that the client is open to, and are open to a class
    with examples to spare, the one whose mix suffers least.
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
    """Round numbers so that their sum is the rounded sum: down, then up where the remainder is largest."""
    counts: NDArray[np.int64] = np.floor(exact + 1e-9).astype(np.int64)
    missing = round(round(float(exact.sum()), 9)) - int(counts.sum())  # a half is a half, whatever its floats add up to
    counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1
    return counts


def stratified(labels: NDArray[np.int64], size: int, generator: np.random.Generator) -> NDArray[np.bool_]:
    """Draw ``size`` of m examples at random, each class in proportion to how often it occurs (largest remainders).

    Parameters
    ----------
    labels
        ``[m]``.
    size
        At most m.

    Returns
    -------
    NDArray
        ``[m]`` bool: the examples drawn.
    """
    counts = np.bincount(labels)
    share = largest_remainders(counts * (size / max(len(labels), 1)))
    order = shuffled(generator, len(labels))
    order = order[np.argsort(labels[order], kind="stable")]  # class by class, each in a random order
    place = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    drawn = np.zeros(len(labels), dtype=np.bool_)
    drawn[order[place < np.repeat(share, counts)]] = True
    return drawn
