"""Parameters of secure sums: graphs, thresholds, and sufficient numbers of neighbours."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from secure_sums import parameters

from fedloom.errors import ExperimentError
from fedloom.privacy.settings import SecureAggregation
from fedloom.sums.session import Graph, default_degree, default_threshold
from fedloom.sums.vector import weaker_graph


@pytest.mark.parametrize(
    ("n", "absent", "degree"), [(7, 0, 6), (8, 2, 6), (9, 1, 8), (40, 0, 20), (41, 7, 20), (5, 0, 4)]
)
def test_the_graph_is_regular_and_symmetric(n: int, absent: int, degree: int) -> None:
    present = np.arange(n) >= absent
    graph = Graph(os.urandom(32), present, degree)
    assert graph.degree == min(degree, n - absent - 1)
    for u in range(absent, n):
        neighbours = graph.neighbours(u).tolist()
        assert len(set(neighbours)) == graph.degree
        assert u not in neighbours
        assert present[neighbours].all()
        for a, v in enumerate(neighbours):
            assert graph.neighbours(v).tolist().index(u) == graph.degree - 1 - a


def test_neighbours_are_random() -> None:
    counts = np.zeros(20, int)
    present = np.ones(21, bool)
    for seed in range(2000):
        counts[Graph(seed.to_bytes(32, "big"), present, 4).neighbours(20)] += 1
    assert stats.chisquare(counts).pvalue > 1e-6
    assert Graph(bytes(32), present, 4).neighbours(3).tolist() == Graph(bytes(32), present, 4).neighbours(3).tolist()


@pytest.mark.parametrize("n", [100, 300, 1000, 2001])
def test_the_default_degree_is_the_smallest_that_meets_the_bounds(n: int) -> None:
    colluding = dropped = -(-n // 20)

    def holds(k: int) -> bool:
        t = default_threshold(k)
        insecure = stats.hypergeom(n - 1, colluding, k).sf(2 * t - k - 1)
        failing = stats.hypergeom(n - 1, dropped, k).sf(k - t)
        return n * insecure <= 2.0**-64 and n * failing <= 1e-3

    k = default_degree(n)
    assert holds(k)
    assert not any(holds(fewer) for fewer in range(20, k, 2))


def test_defaults() -> None:
    assert [default_degree(n) for n in (3, 10, 21, 22, 100)] == [2, 9, 20, 20, 20]
    assert 80 <= default_degree(2001) <= 120
    for n in (3, 4, 10, 21, 22, 100, 1000):
        degree = default_degree(n)
        assert degree / 2 < default_threshold(degree) <= degree


def test_the_minimum_is_two_thirds() -> None:
    assert [parameters(n).minimum for n in (3, 4, 5, 6, 9, 10, 100)] == [3, 3, 4, 4, 6, 7, 67]


def test_every_parameter_is_in_the_digest() -> None:
    first = parameters(9, 8, 6)
    members = tuple("abcdefghi")
    others = [
        replace(first, session=bytes(16)),
        replace(first, threshold=7),
        replace(first, bits=64),
        replace(first, degree=6),
        replace(first, members=first.members[::-1]),
        replace(first, members=members),
        replace(first, members=("ab", "", *members[2:])),
        replace(first, members=("a", "b", *members[2:-1], "")),
    ]
    assert len({p.digest for p in [first, *others]}) == len(others) + 1
    assert replace(first).digest == first.digest


def test_invalid_parameters() -> None:
    p = parameters(9)
    for wrong in [{"session": b"short"}, {"bits": 16}, {"members": ("a",) * 9}, {"members": ()}, {"threshold": 0}]:
        with pytest.raises(ExperimentError):
            replace(p, **wrong)


@pytest.mark.parametrize(
    ("members", "keys", "is_weaker"),
    [
        (1000, {}, False),
        (1000, {"neighbours": 20}, True),
        (1000, {"neighbours": 20, "threshold": 14}, True),
        (1000, {"neighbours": 88}, True),
        (1000, {"neighbours": 90}, False),
        (1000, {"neighbours": 120, "threshold": 100}, False),
        (1000, {"neighbours": 120, "threshold": 80}, True),
        (10, {"neighbours": 8}, True),
        (5, {"neighbours": 4}, False),
        (5, {"neighbours": 100}, False),
    ],
)
def test_graphs_that_protect_less_than_the_default_are_known(
    members: int, keys: dict[str, int], is_weaker: bool
) -> None:
    """2^-9 in place of 2^-64: that of 20 neighbours among 1,000 members."""
    assert (weaker_graph(SecureAggregation(**keys), members) is not None) == is_weaker
