"""Matching of neurons across networks by MAP inference in a Beta-Bernoulli process, and the merged networks.

M. Yurochkin, M. Agarwal, S. Ghosh, K. Greenewald, T. N. Hoang, Y. Khazaeni, Bayesian nonparametric federated learning
of neural networks, ICML 2019, arXiv 1905.12022, §3. A neuron is a vector v of K numbers, drawn around an atom
N(μ0, σ0²) with a precision for each number; J networks have L neurons each, matched to different atoms.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Assign = Callable[[Tensor], Tensor]
"""Assignment ``[L, I] -> [L]`` of rows to distinct columns with the largest sum."""


def pool(
    neurons: Tensor, precisions: Tensor, assignment: Tensor, prior: float, centre: Tensor | float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return μ0/σ0² + Σ p v, 1/σ0² + Σ p, and the number of neurons of each atom: ``[I, K], [I, K], [I]``.

    Parameters
    ----------
    neurons
        ``[J, L, K]`` float64.
    precisions
        ``[J, K]``.
    assignment
        ``[J, L]`` atoms 0 ... I - 1, each assigned at least once.
    prior
        1/σ0².
    centre
        μ0, the mean of an atom: one number, or ``[K]``.
    """
    width = int(assignment.max()) + 1 if assignment.numel() else 0
    total = neurons.new_zeros(width, neurons.shape[2]) + prior * centre
    precision, count = torch.full_like(total, prior), neurons.new_zeros(width)
    for v, p, atoms in zip(neurons, precisions, assignment, strict=True):
        total[atoms] += p * v
        precision[atoms] += p
        count[atoms] += 1
    return total, precision, count


def gains(
    v: Tensor, p: Tensor, total: Tensor, precision: Tensor, count: Tensor, networks: int, prior: float, gamma: float,
    new: int, centre: Tensor | float = 0.0,
) -> Tensor:  # fmt: skip
    """Return each neuron's gain in twice the log posterior, by atom: ``[L, I + new]`` (eq. 9 and 10).

    Parameters
    ----------
    v, p
        Neurons ``[L, K]`` of the network and their precisions ``[K]``.
    total, precision, count
        Values of :func:`pool` for the atoms of the other networks.
    networks
        J, including this one.
    new
        Number of columns for atoms that are not yet assigned.
    centre
        As for :func:`pool`.
    """
    a, q = p * v, precision + p
    old = (total.square() / q - total.square() / precision).sum(1) + 2 * (count / (networks - count)).log()
    old = old + 2 * a @ (total / q).T + a.square() @ (1 / q).T
    empty = torch.zeros_like(p) + prior * centre
    fresh = ((empty + a).square() / (prior + p) - empty.square() / prior).sum(1, keepdim=True)
    fresh = fresh + 2 * math.log(gamma / networks)
    return torch.cat([old, fresh - 2 * torch.arange(1, new + 1, dtype=v.dtype).log()], dim=1)


def match(
    neurons: Tensor,
    precisions: Tensor,
    assignment: Tensor,
    assign: Assign,
    *,
    prior: float,
    gamma: float,
    cap: int,
    sweeps: int,
    generator: torch.Generator,
    centre: Tensor | float = 0.0,
) -> Tensor:
    """Match the neurons of J networks, each in turn given the others, in ``sweeps`` passes in random order.

    Parameters
    ----------
    neurons, precisions, prior, centre
        As for :func:`pool`.
    assignment
        Initial assignment, ``[J, L]``; -1 in the row of a network without one.
    cap
        Maximum number of atoms, at least L.

    Returns
    -------
    Tensor
        ``[J, L]``, atoms 0 ... I - 1.
    """
    assignment, length = assignment.clone(), assignment.shape[1]
    for _ in range(sweeps):
        for j in torch.randperm(len(neurons), generator=generator).tolist():
            others = assignment[:, 0] >= 0
            others[j] = False
            assignment[others] = without_gaps(assignment[others])
            total, precision, count = pool(neurons[others], precisions[others], assignment[others], prior, centre)
            new = min(length, cap - len(count))
            args = total, precision, count, len(neurons), prior, gamma, new, centre
            assignment[j] = assign(gains(neurons[j], precisions[j], *args))
    return without_gaps(assignment)


def without_gaps(assignment: Tensor) -> Tensor:
    """Return the assignment with its atoms renumbered 0 ... I - 1 in the same order."""
    used = torch.bincount(assignment.flatten()) > 0
    return (used.cumsum(0) - 1)[assignment]
