"""Similarity of descriptors versus similarity of data (papers/001 §4, "Analysis of Client Descriptors", Figure 3)."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

CURVE = 2000
"""Maximum number of rounds for which the correlation is kept."""

MAPS = 5
"""Number of rounds for which a run keeps a map of its descriptors."""

TIE_DECIMALS = 6
"""Number of decimals up to which equal distances of class proportions are ties.

Proportions are ratios of counts, so many of their distances are equal (two classes per client: three values). Their
squares are summed in an order that depends on the classes, and the last bit would break those ties; six decimals leave
room for proportions in float32."""


@dataclass(frozen=True, eq=False)
class DescriptorCorrelation:
    """Rank correlation of descriptor distances with class-mix distances, over unseen clients.

    Attributes
    ----------
    per_client
        ``[m]`` float64, Spearman's coefficient of each client in ``rows``.
    rows
        ``[m]`` int64, positions of the unseen clients that have a coefficient.
    excluded
        Number of unseen clients without one, because all their distances of one kind are equal.
    """

    per_client: Tensor
    rows: Tensor
    excluded: int

    @property
    def mean(self) -> float | None:
        """Mean over clients, the value of Figure 3; None if there is none."""
        return float(self.per_client.mean()) if len(self.per_client) else None

    @property
    def std(self) -> float | None:
        """Population standard deviation over clients (ddof = 0), None if there is none."""
        return float(self.per_client.std(correction=0)) if len(self.per_client) else None

    def as_json(self) -> dict[str, Any]:
        """Return ``{mean, std, clients, excluded}``, as under ``spearman`` in ``metrics.jsonl``."""
        return {"mean": self.mean, "std": self.std, "clients": len(self.per_client), "excluded": self.excluded}


def average_ranks(x: Tensor) -> Tensor:
    """Return ranks from 1 along the last axis, ties sharing their mean rank; ``[..., n] -> [..., n]`` float64."""
    sorted_values = x.sort(dim=-1).values.contiguous()
    below = torch.searchsorted(sorted_values, x.contiguous(), side="left")
    up_to = torch.searchsorted(sorted_values, x.contiguous(), side="right")
    return (below + up_to + 1).double() / 2


def spearman(x: Tensor, y: Tensor) -> Tensor:
    """Return Spearman's rank correlation along the last axis, Pearson's of the average ranks: ``[..., n] -> [...]``.

    It is float64 in [-1, 1]; NaN where ``x`` or ``y`` is constant (always for n < 2).
    """
    a, b = average_ranks(x), average_ranks(y)
    a, b = a - a.mean(-1, keepdim=True), b - b.mean(-1, keepdim=True)
    return ((a * b).sum(-1) / (a.square().sum(-1) * b.square().sum(-1)).sqrt()).clamp(-1, 1)


def descriptor_correlation(
    v: Tensor, pi: Tensor, unseen: Tensor, present: Tensor | None = None
) -> DescriptorCorrelation:
    """Rank-correlate descriptor similarity with true similarity, for each unseen client (papers/001 §4).

    For an unseen client i this is Spearman's coefficient of d_i^v = (|v_i - v_1|, ..., |v_i - v_n|) with
    d_i^π = (|π_i - π_1|, ..., |π_i - π_n|). As in the paper, both vectors run over all n clients, seen and unseen,
    including i itself (a pair of zeros).

    Parameters
    ----------
    v
        ``[n, l]`` descriptors.
    pi
        ``[n, C]`` class proportions of the train splits, rows summing to one.
    unseen
        ``[n]`` bool: the clients i.
    present
        ``[n]`` bool: clients with a descriptor; the others are left out of all vectors. All by default.

    """
    present = torch.ones(len(v), dtype=torch.bool) if present is None else present
    those = present.nonzero().squeeze(1)
    targets = (present & unseen).nonzero().squeeze(1)
    # Rounding restores ties among π's distances; those of the descriptors are used as they are.
    coefficients = spearman(
        _distances(v[targets], v[those]), _distances(pi[targets], pi[those]).round(decimals=TIE_DECIMALS)
    )
    is_defined = ~coefficients.isnan()
    return DescriptorCorrelation(coefficients[is_defined], targets[is_defined], int((~is_defined).sum()))


def principal_axes(v: Tensor) -> Tensor:
    """Return the first two principal components of descriptors, ``[n, l] -> [2, l]`` float64, orthonormal rows.

    The sign of a component is fixed by making its entry of largest magnitude (the first, on ties) positive. A missing
    component (l = 1, n < 3, equal descriptors) is zero.
    """
    axes = torch.zeros(2, v.shape[1], dtype=torch.float64)
    if len(v) == 0:
        return axes
    centred = v.double() - v.double().mean(0)
    _, s, components = torch.linalg.svd(centred, full_matrices=False)
    for k in range(min(2, len(s))):
        if s[k] > torch.finfo(torch.float64).eps * max(centred.shape) * s[0]:
            axes[k] = components[k] * components[k][components[k].abs().argmax()].sign()
    return axes


def project_descriptors(v: Tensor, axes: Tensor) -> tuple[Tensor, Tensor]:
    """Return coordinates of descriptors ``[n, l]`` on two axes, and the share of their variance along these.

    ``axes`` are ``[2, l]`` from :func:`principal_axes`, of these or other descriptors. Coordinates are ``[n, 2]``
    float64, centred; the ``[2]`` fractions of the variance are zero for equal descriptors.
    """
    if len(v) == 0:
        return torch.zeros(0, 2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    centred = v.double() - v.double().mean(0)
    xy = centred @ axes.double().T
    total = centred.square().sum()
    return xy, xy.square().sum(0) / total if total > 0 else torch.zeros(2, dtype=torch.float64)


def descriptor_document(
    previous: Mapping[str, Any] | None,
    round: int,
    correlation: DescriptorCorrelation,
    *,
    v: Tensor,
    pi: Tensor,
    clients: Sequence[str],
    seen: Tensor,
    present: Tensor | None = None,
) -> dict[str, Any]:
    """Add a round to the content of ``descriptors.json``.

    Maps are kept for the first evaluated round, the last, and at most three in between: those whose index in the list
    of evaluated rounds is a multiple of the smallest power of two that leaves so few. The choice depends only on the
    number of rounds, so a resumed run ends with the same maps as an uninterrupted one. All maps use the principal axes
    of the *last* one, which makes them comparable; the descriptors are kept for that reason.

    Parameters
    ----------
    previous
        Content so far, None at first. Rounds from this one on are dropped, so that a resumed run may rewrite them.
    v, pi, clients, seen, present
        ``[n, l]``, ``[n, C]``, n ids, ``[n]`` bool, ``[n]`` bool; see :func:`descriptor_correlation`.

    Returns
    -------
    dict
        Lists by evaluated round (beyond :data:`CURVE`, by every second, fourth, ... and the last), clients, and maps;
        see docs/evaluation.md.
    """
    rounds_before = curve(previous["round"], round) if previous else []
    new = {
        "round": round,
        "spearman": correlation.mean,
        "spearman_std": correlation.std,
        "excluded": correlation.excluded,
    }
    document: dict[str, Any] = {
        key: [*(previous[key][i] for i in rounds_before), value] if previous else [value] for key, value in new.items()
    }
    document["clients"] = {
        "ids": list(clients),
        "class": pi.argmax(1).tolist() if len(pi) else [],
        "seen": seen.bool().tolist(),
    }
    present = torch.ones(len(v), dtype=torch.bool) if present is None else present.bool()
    axes = principal_axes(v[present])
    rounds = _mapped(document["round"])
    earlier = [m for m in previous["maps"] if m["round"] in rounds and m["round"] < round] if previous else []
    document["maps"] = [_map(m["round"], *_unpacked(m), axes) for m in earlier]
    document["maps"].append(_map(round, v, present, axes))
    return document


def curve(rounds: Sequence[int], new: int) -> list[int]:
    """Return the positions of the rounds to keep when a new one is added: all, or those at a wider spacing."""
    spacing = max(1, rounds[1] - rounds[0]) if len(rounds) > 1 else 1
    while new >= CURVE * spacing:
        spacing *= 2
    wide = 2 * new >= CURVE * spacing  # otherwise none was left out
    return [i for i, r in enumerate(rounds) if r < new and not (wide and r % spacing)]


def _mapped(rounds: Sequence[int]) -> list[int]:
    """Return the evaluated rounds for which a map is kept."""
    stride = 1
    while stride * (MAPS - 1) < len(rounds) - 1:
        stride *= 2
    return [*rounds[:-1:stride], rounds[-1]]


def _map(round: int, v: Tensor, present: Tensor, axes: Tensor) -> dict[str, Any]:
    xy, explained = project_descriptors(v[present], axes)
    points = iter([[float(f"{x:.5g}") for x in point] for point in xy.tolist()])
    values = (v * present[:, None]).float().contiguous().numpy().astype("<f4")
    return {
        "round": round,
        "explained": explained.tolist(),
        "xy": [next(points) if is_present else None for is_present in present.tolist()],
        "descriptors": base64.b64encode(values.tobytes()).decode("ascii"),
    }


def _unpacked(packed: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the descriptors ``[n, l]`` and the presence ``[n]`` of a map."""
    values = np.frombuffer(base64.b64decode(packed["descriptors"]), dtype="<f4").astype(np.float32)
    present = torch.tensor([point is not None for point in packed["xy"]], dtype=torch.bool)
    return torch.from_numpy(values).view(len(present), -1), present


def _distances(a: Tensor, b: Tensor) -> Tensor:
    """Return Euclidean distances ``[m, l], [n, l] -> [m, n]`` in float64, without rounding by |a|²+|b|²-2ab."""
    return torch.cdist(a.double(), b.double(), compute_mode="donot_use_mm_for_euclid_dist")
