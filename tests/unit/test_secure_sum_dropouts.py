"""Secure sums whose members drop out at any time: a state machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from secure_sums import Session, parameters, vectors

from fedloom.errors import QuorumError, RefusedError

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
            lambda i: lambda: self.members[i].mask(values[i], self.shares[i], self.present[i]),
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
