"""Secure sums: exact for every pattern of dropouts that the thresholds allow, rejected for the others."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations_with_replacement, product

import numpy as np
import pytest
from secure_sums import STEPS, Session, parameters, vectors

from fedloom.errors import ExperimentError, QuorumError, RefusedError
from fedloom.sums.session import SessionParameters


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize(("n", "degree"), [(3, None), (4, None), (10, None), (12, 6), (40, 20), (41, 20)])
def test_the_sum_is_exact(n: int, degree: int | None, bits: int) -> None:
    session = Session(parameters(n, degree, bits=bits), vectors(n, 1000, bits))
    assert np.array_equal(session.hold(), session.values.sum(axis=0, dtype=session.values.dtype))


def outcome(p: SessionParameters, last: dict[int, int]) -> bool:
    """Return whether a session in a complete graph succeeds, by the thresholds alone."""
    n, t = len(p.members), p.threshold
    answering = [{i for i in range(n) if last.get(i, len(STEPS)) >= step} for step in range(len(STEPS))]
    if any(len(rows) < p.minimum for rows in answering[:3]):
        return False
    if len(answering[0]) - 1 < t or any(len(answering[1] - {i}) < t for i in answering[2]):
        return False
    if any(len(answering[2] - {i}) < t for i in answering[3]) or any(len(answering[3] - {i}) < t for i in answering[4]):
        return False
    return all(len(answering[4] - {i}) >= t for i in answering[1])


@pytest.mark.parametrize(("n", "threshold"), [(4, 2), (4, 3), (5, 3)])
def test_every_pattern_of_dropouts(n: int, threshold: int) -> None:
    hold_all(parameters(n, threshold=threshold), combinations_with_replacement(range(-1, len(STEPS)), n))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("n", "threshold"), [(4, 2), (4, 3), (5, 3), (5, 4)])
def test_every_pattern_of_dropouts_by_member(n: int, threshold: int) -> None:
    hold_all(parameters(n, threshold=threshold), product(range(-1, len(STEPS)), repeat=n))


def hold_all(p: SessionParameters, patterns: Iterable[tuple[int, ...]]) -> None:
    """Run a session for every pattern: the last step that each member answers."""
    values, done = vectors(len(p.members), 3), 0
    for pattern in patterns:
        session = Session(p, values, dict(enumerate(pattern)))
        if outcome(p, session.last):
            assert np.array_equal(session.hold(), session.expected()), pattern
            done += 1
        else:
            with pytest.raises((QuorumError, RefusedError)):
                session.hold()
    assert done


@pytest.mark.parametrize("seed", range(3))
def test_sparse_graph_with_dropouts_at_every_step(seed: int) -> None:
    n = 60
    rng = np.random.default_rng(seed)
    last = {int(i): step for step, i in enumerate(rng.permutation(n)[:4], start=-1)}
    session = Session(parameters(n, 20, bits=64), vectors(n, 50, 64), last)
    assert np.array_equal(session.hold(), session.expected())


def test_cohorts_of_two_are_rejected() -> None:
    for n in (1, 2):
        with pytest.raises(ExperimentError):
            parameters(n)
    for degree, threshold in [(5, 4), (10, 7), (4, 2), (4, 5), (9, 4)]:
        with pytest.raises(ExperimentError):
            parameters(10, degree, threshold)
