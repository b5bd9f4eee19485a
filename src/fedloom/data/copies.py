"""Duplicate inputs, and draws that keep them together so that no input is both trained and tested on.

Examples with equal inputs form a *group*, named by the position of its first example. An example without duplicates is
a group of its own. A group belongs to the class of its first example. All draws here take whole groups; where no
input is repeated, they equal draws of single examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedloom.core.keyed import make_rng, shuffled
from fedloom.data.apportion import held_out, largest_remainders, stratified
from fedloom.data.input_spec import RawInputs, named_arrays

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
    chosen = np.zeros(len(sizes), dtype=np.bool_)
    left = target
    for place, size in enumerate(sizes.tolist()):
        if left <= 0:
            break
        if size <= 2 * left:
            chosen[place] = True
            left -= size
    if target > 0 and len(sizes) > 1 and not chosen.any():
        chosen[int(sizes.argmin())] = True
    if len(sizes) > 1 and chosen.all() and target < sizes.sum():
        chosen[-1] = False
    return chosen


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
        drawn = stratified(labels[firsts], held_out(fraction, len(firsts)), generator(place))
        split[firsts[drawn]] = place
        firsts = firsts[~drawn]
    found: Positions = split[group]
    return found


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
    wanted = largest_remainders(np.array([sizes[of_class].sum() for of_class in firsts]) * fraction)
    rank, out = np.zeros(len(group), dtype=np.int64), np.zeros(len(group), dtype=np.bool_)
    for c, of_class in enumerate(firsts):
        order = of_class[shuffled(make_rng(seed, "validation", c), len(of_class))]
        rank[order] = np.arange(len(order))
        out[order[choose_about(sizes[order], int(wanted[c]))]] = True
    kept, held = [], []
    for members in train:
        ordered = members[np.argsort(rank[group[members]], kind="stable")]
        is_out = out[group[ordered]]
        kept.append(ordered[~is_out])
        held.append(ordered[is_out])
    return kept, held


def fill_pools(members: Sequence[Positions], needed: NDArray[np.int64], group: Positions) -> list[list[Positions]]:
    """Return pools of exact numbers of examples of each class, filled one after another; each group is in one pool.

    Duplicates that exceed the room in the pool of their group are left out.

    Parameters
    ----------
    members
        Positions of the examples of each class, in the order in which they are taken.
    needed
        ``[C, pools]``: number of examples of each class that each pool takes; it gets fewer if a class runs out.
    """
    pool_of: dict[int, int] = {}
    filled: list[list[Positions]] = [[] for _ in range(needed.shape[1])]
    for of_class, room in zip(members, needed.tolist(), strict=True):
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
            filled[pool].append(np.array(part, dtype=np.int64))
    return filled
