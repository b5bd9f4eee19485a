"""Secure sums: their parameters, exact sums for every pattern of dropouts, and a state machine of dropouts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import combinations_with_replacement, product
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from scipy import stats
from secure_sums import STEPS, Session, parameters, vectors

from fedloom.errors import ExperimentError, QuorumError, RefusedError
from fedloom.privacy.settings import SecureAggregation
from fedloom.sums.session import Graph, SessionParameters, default_degree, default_threshold
from fedloom.sums.vector import weaker_graph


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


@pytest.mark.parametrize(("n", "threshold"), [(4, 2), (4, 3), (5, 3), (5, 4)])
def test_every_pattern_of_dropouts(n: int, threshold: int) -> None:
    hold_all(parameters(n, threshold=threshold), combinations_with_replacement(range(-1, len(STEPS)), n))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("n", "threshold"), [(4, 2), (4, 3)])  # with five, a minute for the same cases
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


SHAPES = [(4, 3, 2), (5, 4, 3), (6, 5, 3), (9, 4, 3), (10, 9, 6), (12, 6, 4), (14, 6, 5)]

WHICH = st.integers(0, 13)
"""Members. The graph is random, so that what is drawn must not depend on what has happened."""


class Dropouts(RuleBasedStateMachine):
    """One session: its members answer, repeat answers, and drop out, before and during every step.

    An independent model of the thresholds predicts when a member must refuse, and when the session must fail.
    """

    @initialize(shape=st.sampled_from(SHAPES), bits=st.sampled_from([32, 64]))
    def begin(self, shape: tuple[int, int, int], bits: int) -> None:
        n, k, self.t = shape
        self.session = Session(parameters(n, k, self.t, bits), vectors(n, 3, bits))
        self.aggregator, self.members = self.session.aggregator, self.session.members
        self.alive, self.step, self.over = set(range(n)), 0, False
        self.asked: dict[int, Callable[[], Any]] = {}  # the last request that each member has answered

    @rule(which=WHICH)
    def drop_out(self, which: int) -> None:
        """Lose a member between two steps."""
        self.alive.discard(which)

    @rule(which=WHICH)
    def ask_again(self, which: int) -> None:
        """Repeat the last request to a member."""
        if which not in self.asked or which not in self.alive:
            return
        first, second = self.asked[which](), self.asked[which]()
        for a, b in zip(np.atleast_1d(first), np.atleast_1d(second), strict=True):
            assert np.array_equal(getattr(a, "values", a), getattr(b, "values", b))

    @rule()
    def go_on(self) -> None:
        """Run the next step with the remaining members."""
        if self.over:
            return
        hold = (self.advertise, self.share, self.mask, self.confirm, self.unmask)[self.step]
        self.session.last = {i: self.step - 1 for i in range(len(self.members)) if i not in self.alive}
        expected = len(self.alive) >= self.session.parameters.minimum if self.step < 3 else bool(self.alive)
        try:
            lost = not expected or hold() is False
        except QuorumError:
            lost = True
            assert not self.possible()
        self.over = lost or self.step == 4
        self.step += 1

    def possible(self) -> bool:
        """Return True if the current step could succeed, by counting."""
        if self.step == 0:
            return len(self.alive) >= max(self.session.parameters.minimum, self.t + 1)
        if self.step < 3:
            return len(self.alive) >= self.session.parameters.minimum
        return all(len(self.near(i) & self.alive) >= self.t for i in self.shared)

    def near(self, i: int) -> set[int]:
        return set(self.aggregator.neighbours(i).tolist())

    def ask(self, must: Callable[[int], bool], question: Callable[[int], Callable[[], Any]]) -> dict[int, Any]:
        """Ask all remaining members; those that must refuse drop out."""
        answers = {}
        for i in sorted(self.alive):
            ask = question(i)
            try:
                answers[i] = ask()
            except RefusedError:
                assert not must(i)
                self.alive.discard(i)
            else:
                assert must(i)
                self.asked[i] = ask
        return answers

    def advertise(self) -> None:
        self.keys, self.signatures = self.session.advertise()

    def share(self) -> None:
        answers = self.ask(lambda _: True, lambda i: lambda: self.members[i].share(self.keys, self.signatures))
        self.shared = set(answers)
        self.shares, self.present = self.aggregator.forward_shares(
            self.session.gather(1, answers), self.session.answering(1)
        )

    def mask(self) -> None:
        values = self.session.values
        answers = self.ask(
            lambda i: len(self.near(i) & self.shared) >= self.t,
            lambda i: lambda: self.members[i].mask(values[i].copy(), self.shares[i], self.present[i]),
        )
        for i, masked in answers.items():
            self.aggregator.add(i, masked)
        self.summed = set(answers)
        self.survivors, self.receipts = self.aggregator.survivors()
        assert set(np.flatnonzero(self.survivors)) == self.summed

    def confirm(self) -> bool:
        answers = self.ask(
            lambda i: len(self.near(i) & self.summed) >= self.t,
            lambda i: lambda: self.members[i].confirm(self.survivors, self.receipts[i]),
        )
        if answers:
            there = np.isin(np.arange(len(self.members)), list(answers))
            self.confirmed = set(answers)
            self.confirmations = self.aggregator.forward_confirmations(self.session.gather(3, answers), there)
        return bool(answers)

    def unmask(self) -> bool:
        answers = self.ask(
            lambda i: len(self.near(i) & self.confirmed) >= self.t,
            lambda i: lambda: self.members[i].unmask(self.confirmations[i]),
        )
        if answers:
            there = np.isin(np.arange(len(self.members)), list(answers))
            total = self.aggregator.sum(self.session.gather(4, answers), there)
            assert self.possible()
            values = self.session.values
            assert np.array_equal(total, values[sorted(self.summed)].sum(axis=0, dtype=values.dtype))
        return bool(answers)


TestDropouts = Dropouts.TestCase
TestDropouts.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)


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
def test_graphs_that_protect_less_than_default_are_known(members: int, keys: dict[str, int], is_weaker: bool) -> None:
    """2^-9 in place of 2^-64: that of 20 neighbours among 1,000 members."""
    assert (weaker_graph(SecureAggregation(**keys), members) is not None) == is_weaker
