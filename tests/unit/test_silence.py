"""Clients that miss deadlines: order of draws, exclusion from evaluations, and its duration."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain

import pytest
import torch

from fedloom.federation.cohort import RoundConfig
from fedloom.federation.round_attempt import RoundAttempt
from fedloom.federation.silence import FIRST_REST_S, PATIENCE, Silence
from fedloom.runs.journal import Attempt

HONEST = ("h-1", "h-2", "h-3")
GHOSTS = tuple(f"g-{i}" for i in range(50))
EVERYONE = (*GHOSTS, *HONEST)


@pytest.fixture
def silence() -> Silence:
    """Return three members with a client each, and one with fifty."""
    silence = Silence()
    for client in HONEST:
        silence.join([client], f"worker of {client}", f"owner of {client}")
    silence.join(GHOSTS, "ghosts", "mallory")
    return silence


def drawn(silence: Silence, least: int, roster: Sequence[str] = EVERYONE) -> set[str]:
    return set(chain.from_iterable(silence.groups(roster, least)))


def test_cohorts_are_drawn_from_all_clients_while_none_is_silent(silence: Silence) -> None:
    assert silence.groups(EVERYONE, 3) == [EVERYONE]
    silence.end(EVERYONE, (), 1.0)
    assert silence.groups(EVERYONE, 3) == [EVERYONE]
    assert silence.waited_s == 0.0


def test_all_clients_of_a_silent_worker_come_last(silence: Silence) -> None:
    silence.end(HONEST[:1], GHOSTS[:2], 5.0)
    assert silence.silent == set(GHOSTS)
    assert silence.waited_s == 5.0
    assert drawn(silence, 3) == set(HONEST)
    assert drawn(silence, 4) == set(EVERYONE)  # others do not suffice


def test_a_worker_that_answers_for_others_loses_only_its_silent_clients(silence: Silence) -> None:
    silence.end(GHOSTS[:1], GHOSTS[1:3], 5.0)
    assert silence.silent == set(GHOSTS[1:3])
    assert drawn(silence, 3) == set(EVERYONE) - set(GHOSTS[1:3])


def test_other_workers_of_a_silent_owner_come_after_other_owners(silence: Silence) -> None:
    silence.join(["g-x"], "another of mallory's", "mallory")
    silence.end((), GHOSTS[:1], 5.0)
    assert "g-x" not in silence.silent
    assert drawn(silence, 3, (*EVERYONE, "g-x")) == set(HONEST)
    assert drawn(silence, 4, (*EVERYONE, "g-x")) == {*HONEST, "g-x"}
    silence.end(["g-x"], (), 1.0)
    assert drawn(silence, 3, (*EVERYONE, "g-x")) == {*HONEST, "g-x"}


def test_after_a_silent_attempt_answering_clients_come_first(
    silence: Silence,
) -> None:
    silence.end(HONEST, (), 1.0)
    silence.end((), GHOSTS[:3], 5.0)
    silence.sign(GHOSTS, "ghosts", "mallory")
    assert silence.groups(EVERYONE, 3) == [EVERYONE]
    assert drawn_after(silence, 3, GHOSTS[:3]) == [set(HONEST)]
    assert drawn_after(silence, 4, GHOSTS[:3]) == [set(HONEST), set(GHOSTS)]


def test_owners_of_lost_clients_come_last_in_the_next_attempt(
    silence: Silence,
) -> None:
    silence.end(EVERYONE, (), 1.0)
    assert drawn_after(silence, 3, GHOSTS[:3]) == [set(HONEST)]
    assert silence.groups(EVERYONE, 3) == [EVERYONE]
    silence.leave(HONEST[:1])
    silence.join(HONEST[:1], "worker of h-1", "owner of h-1")
    assert drawn_after(silence, 3, GHOSTS[:3]) == [set(HONEST[1:]), set(HONEST[:1])]  # answering clients first


def drawn_after(silence: Silence, least: int, lost: Sequence[str]) -> list[set[str]]:
    return [set(group) for group in silence.groups(EVERYONE, least, lost) if group]


def test_a_client_that_joins_again_counts_as_new(silence: Silence) -> None:
    silence.end((), GHOSTS, 5.0)
    silence.leave(GHOSTS)
    assert silence.silent == frozenset()
    silence.sign(GHOSTS, "ghosts", "mallory")
    silence.join(GHOSTS, "ghosts", "mallory")
    assert drawn(silence, 3) == set(EVERYONE)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_refusing_client_is_drawn_only_if_there_are_too_few_others() -> None:
    clock = Clock()
    silence = Silence(clock)
    for client in HONEST:
        silence.join([client], f"worker of {client}", f"owner of {client}")
    silence.join(GHOSTS, "ghosts", "mallory")
    silence.refuse(GHOSTS[:2], ())
    assert silence.refusing == set(GHOSTS)  # no client of that owner took part
    silence.end(GHOSTS, (), 1.0)  # in an evaluation
    silence.sign(GHOSTS, "ghosts", "mallory")
    silence.leave(GHOSTS)
    silence.join(GHOSTS, "ghosts", "mallory")
    assert drawn(silence, 3) == set(HONEST)
    assert drawn(silence, 4) == set(EVERYONE)
    clock.now += FIRST_REST_S
    assert silence.groups(EVERYONE, 3) == [EVERYONE]
    silence.refuse(GHOSTS[:1], HONEST)
    clock.now += 1.5 * FIRST_REST_S  # it now rests for twice as long
    assert drawn(silence, 3) == set(HONEST)
    silence.take_part(GHOSTS[:1])
    assert silence.refusing == frozenset()


def test_a_refusing_client_rests_while_others_of_its_owner_take_part(silence: Silence) -> None:
    silence.refuse(GHOSTS[:2], GHOSTS[2:3])
    assert silence.refusing == set(GHOSTS[:2])
    silence.end((), HONEST[:1], 5.0)
    silence.refuse((*GHOSTS[:2], *HONEST[:1]), GHOSTS[2:3])
    assert silence.refusing == set(GHOSTS[:2])  # the other is silent, until it shows activity


def test_an_evaluation_skips_silent_clients_and_later_new_ones(silence: Silence) -> None:
    silence.end(HONEST[:1], (), 1.0)
    silence.end((), GHOSTS, 5.0)
    deadline_s = 10.0
    assert set(silence.skipped(EVERYONE, 0.0, deadline_s)) == set(GHOSTS)
    assert set(silence.skipped(EVERYONE, PATIENCE * deadline_s, deadline_s)) == {*GHOSTS, *HONEST[1:]}
    silence.sign(GHOSTS, "ghosts", "mallory")
    assert silence.skipped(EVERYONE, 0.0, deadline_s) == {}


def test_in_a_closed_run_only_clients_that_were_asked_are_silent() -> None:
    silence = Silence()
    silence.end(("a",), ("b",), 5.0)
    assert set(silence.skipped(("a", "b", "c"), 0.0, 1.0)) == {"b"}
    silence.sign(("b", "c"), "w", None)
    assert silence.skipped(("a", "b", "c"), 0.0, 1.0) == {}


def cohort_of(silence: Silence | None, **how: object) -> tuple[str, ...]:
    """Return the cohort of five of round 7, as the loop draws it."""
    sizes = dict.fromkeys(EVERYONE, 1)
    rules = RoundConfig(3, 5, 1.0, 1, {}, None, lambda client, answer: None)  # type: ignore[arg-type]
    groups = None if silence is None else partial(silence.groups, least=1)
    session = RoundAttempt(Attempt(7, 1), "train", EVERYONE, sizes, None, rules, None, None, groups)  # type: ignore[arg-type]
    return session.sample(**how).clients  # type: ignore[arg-type]


def test_draws_are_unchanged_if_every_client_answers(silence: Silence) -> None:
    assert cohort_of(silence) == cohort_of(None)
    silence.end((), GHOSTS[:1], 5.0)
    assert cohort_of(silence) == cohort_of(silence, size=3) == HONEST  # leaves no room for others
    assert set(cohort_of(silence, size=2)) < set(HONEST)
    weights = torch.ones(len(EVERYONE), dtype=torch.float64)
    assert cohort_of(silence, weights=weights) == cohort_of(None, weights=weights)
    assert cohort_of(silence, always=GHOSTS[:1]) == cohort_of(None, always=GHOSTS[:1])
