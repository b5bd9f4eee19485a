"""The roster of an open federation, its record in the journal, and clients that stay silent."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom.data.manifest import Manifest
from fedloom.data.own import Own, own_manifest
from fedloom.data.spec import Normalization
from fedloom.errors import DataError, InterruptedRun
from fedloom.federation.cohort import RoundConfig
from fedloom.federation.roster import AvailableClients, Change, Member, OpenRoster, ReplayedRoster, Roster, between
from fedloom.federation.round_attempt import RoundAttempt
from fedloom.federation.silence import FIRST_REST_S, PATIENCE, Silence
from fedloom.runs.folder import RunFolder
from fedloom.runs.journal import EVALUATED, Attempt, ConversationRecord, Journal, Replay, fold

OWN = Own(kind="features", input_shape=(2,), classes=("a", "b", "c"))
MANIFEST = own_manifest(OWN, (), 1, Normalization((0.0, 0.0), (1.0, 1.0)))


def member(name: str, train: int = 10, **changes: Any) -> Member:
    return Member(name, train, 3, 4, **changes)


def opened(presence: AvailableClients, output: list[str] | None = None, **changes: Any) -> OpenRoster:
    settings = {"min_clients": 1, "heartbeat_timeout_s": 1000.0, "stop": threading.Event(), **changes}
    return OpenRoster(MANIFEST, presence, say=([] if output is None else output).append, **settings)


def ids(roster: OpenRoster | ReplayedRoster) -> list[str]:
    return [entry.id for entry in roster.manifest.clients]


def test_clients_are_ordered_by_id_and_leave_after_a_long_absence() -> None:
    presence = AvailableClients()
    roster = opened(presence)
    presence.change([member("b"), member("a", observer=True)], [])
    assert roster.settle(1, evaluating=False) == Change((member("a", observer=True), member("b")))
    assert (ids(roster), roster.manifest.roster, roster.here()) == (["a", "b"], ("b",), ("a", "b"))
    assert roster.settle(2, evaluating=False) == Change()

    presence.change([member("c")], [member("b")])
    assert roster.settle(3, evaluating=False) == Change((member("c"),))
    assert (ids(roster), roster.here()) == (["a", "b", "c"], ("a", "c"))  # absent, but not yet for long

    short = opened(presence, heartbeat_timeout_s=1e-9)
    short.restore({name: asdict(member(name)) for name in ("a", "b", "c")})
    assert short.settle(4, evaluating=False).left == ("a", "b")  # a has changed: it observes
    assert ids(short) == ["a", "c"]


def test_a_client_that_never_returned_is_absent_since_the_aggregators_start() -> None:
    presence = AvailableClients()
    presence.change([member("a")], [])
    for heartbeat_timeout_s, left in ((1000.0, ()), (1e-9, ("z",))):
        roster = opened(presence, heartbeat_timeout_s=heartbeat_timeout_s)
        roster.restore({"z": asdict(member("z"))})
        assert roster.settle(1, evaluating=False).left == left


def test_an_absent_client_leaves_in_time_without_other_changes() -> None:
    presence = AvailableClients()
    roster = opened(presence, heartbeat_timeout_s=0.05)
    presence.change([member("a"), member("b")], [])
    roster.settle(1, evaluating=False)
    presence.change([], [member("b")])
    left: list[str] = []
    for round in range(2, 1_000_000):
        left += roster.settle(round, evaluating=False).left
        if left:
            break
    assert (left, ids(roster)) == (["b"], ["a"])


def test_an_unchanged_roster_checks_no_client(monkeypatch: pytest.MonkeyPatch) -> None:
    presence = AvailableClients()
    roster = opened(presence)
    presence.change([member("a"), member("b")], [])
    presence.change([], [member("b")])
    roster.settle(1, evaluating=False)
    with monkeypatch.context() as patch:
        patch.setattr(presence, "now", None)
        assert roster.settle(2, evaluating=False) == Change()
    roster.restore({})
    assert [reported.id for reported in roster.settle(2, evaluating=False).joined] == ["a"]


def test_a_client_with_changed_data_leaves_and_joins() -> None:
    presence = AvailableClients()
    roster = opened(presence)
    presence.change([member("a", 10)], [])
    roster.settle(1, evaluating=False)
    presence.change([member("a", 11)], [member("a", 10)])
    assert roster.settle(2, evaluating=False) == Change((member("a", 11),), ("a",))
    assert roster.manifest.entry("a").train == 11


def test_rounds_wait_below_min_clients_and_observers_do_not_count() -> None:
    presence, output = AvailableClients(), list[str]()
    roster = opened(presence, output, min_clients=2)
    presence.change([member("a"), member("o", observer=True)], [])
    settled: list[Change] = []
    waiting = threading.Thread(target=lambda: settled.append(roster.settle(7, evaluating=False)))
    waiting.start()
    while not output:
        waiting.join(0.01)
    assert not settled
    assert "1 client" in output[0]
    assert "federation.min_clients" in output[0]
    presence.change([member("b")], [])
    waiting.join()
    assert [reported.id for reported in settled[0].joined] == ["a", "b", "o"]


def test_a_round_waits_for_training_clients_and_an_evaluation_does_not() -> None:
    presence, output, silence = AvailableClients(), list[str](), Silence()
    roster = opened(presence, output, silence=silence)
    presence.change([member("g")], [])
    silence.join(["g"], "ghosts", None)
    silence.refuse(["g"], ())
    roster.settle(0, evaluating=True)
    assert not output
    settled: list[Change] = []
    waiting = threading.Thread(target=lambda: settled.append(roster.settle(1, evaluating=False)))
    waiting.start()
    while not output:
        waiting.join(0.01)
    assert roster.waits_for_others(1)
    presence.change([member("h")], [])
    waiting.join()
    assert [reported.id for reported in settled[0].joined] == ["h"]


def test_a_round_waits_for_an_absent_member_only_for_a_limited_time() -> None:
    presence, silence = AvailableClients(), Silence()
    roster = opened(presence, silence=silence, heartbeat_timeout_s=0.05)
    presence.change([member("g")], [])
    silence.refuse(["g"], ())
    assert [reported.id for reported in roster.settle(1, evaluating=False).joined] == ["g"]
    assert not roster.waits_for_others(1)
    assert roster.waits_for_others(2)


def test_a_stop_ends_the_wait() -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(InterruptedRun):
        opened(AvailableClients(), stop=stop).settle(1, evaluating=False)
    presence = AvailableClients()
    presence.end()
    with pytest.raises(InterruptedRun):
        opened(presence).settle(1, evaluating=False)


def test_a_closed_roster_never_changes() -> None:
    manifest = own_manifest(OWN, [member("b").entry(3), member("a").entry(3)], 1, MANIFEST.spec.normalization)
    roster = Roster(manifest)
    assert roster.settle(1, evaluating=False) == Change()
    assert roster.here() == ("b", "a")


def test_a_members_entry_in_the_manifest() -> None:
    reported = member("a", 10, class_counts=(4, 6, 0)).entry(3)
    assert (reported.train, reported.validation, reported.test, reported.seen) == (10, 3, 4, True)
    assert reported.class_counts["train"] == (4, 6, 0)
    assert member("a").entry(3).class_counts["train"] == (0, 0, 0)
    manifest = own_manifest(OWN, [reported], 1, MANIFEST.spec.normalization)
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert Manifest.from_json(MANIFEST.to_json()) == MANIFEST  # without clients


NAMES = st.sampled_from("abcd")
ROSTERS = st.dictionaries(NAMES, st.integers(1, 3)).map(lambda sizes: {n: member(n, s) for n, s in sizes.items()})


@given(st.lists(ROSTERS, max_size=6))
def test_successive_changes_give_the_last_roster(rosters: list[dict[str, Member]]) -> None:
    reported: dict[str, Any] = {}
    before: dict[str, Member] = {}
    for after in rosters:
        fold(reported, *between(before, after).as_lines())
        before = after
        assert {name: Member.read(line) for name, line in reported.items()} == after


def journal(folder: Path) -> RunFolder:
    """Write a journal with two settings: an evaluation, a failed attempt, rounds 1 to 3, an evaluation after 2."""
    run = RunFolder(folder)
    run.make()
    written = Journal(run)
    statistics = {"client_steps": 1.0}
    a, b, c, o = member("a"), member("b"), member("c"), member("o", observer=True)

    def line(round: int, attempt: int, outcome: str, change: Change, experiment: str = "") -> None:
        joined, left = change.as_lines()
        cohort = [ConversationRecord(["a"])]
        reported = statistics if outcome == "done" else {}
        written.append(
            Attempt(round, attempt, outcome, cohort, reported, joined=joined, left=left, experiment=experiment)
        )

    line(0, 0, EVALUATED, Change((a, o)), "one")
    line(1, 1, "too few", Change((b,)))
    line(1, 2, "done", Change((), ("b",)))
    line(2, 1, "done", Change((c,)))
    line(2, 0, EVALUATED, Change((b,), ("c",)), "two")
    line(3, 1, "done", Change((c,)), "three")
    return run


def test_a_replay_restores_the_roster_of_each_round_from_the_journal(tmp_path: Path) -> None:
    run = journal(tmp_path)
    read = Journal.read(run)
    assert (sorted(read.members), sorted(read.ever), read.experiment) == (
        ["a", "b", "c", "o"],
        ["a", "b", "c"],
        "three",
    )
    assert sorted(Journal.read(run, upto=1).members) == ["a", "o"]
    assert Journal.read(run, upto=1).experiment == "one"

    replay = Replay(run)
    assert (replay.is_open, replay.rounds) == (True, 3)
    assert replay.experiments == [("one", 0, True), ("two", 2, True), ("three", 3, False)]
    roster = ReplayedRoster(MANIFEST, replay)
    for round, evaluating, expected in (
        (0, True, "ao"), (1, False, "ao"), (2, False, "aco"), (2, True, "abo"), (3, False, "abco"), (3, True, "abco"),
    ):  # fmt: skip
        roster.settle(round, evaluating=evaluating)
        assert "".join(ids(roster)) == expected, (round, evaluating)


def test_lines_of_a_closed_run_omit_open_fields(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.make()
    Journal(run).append(Attempt(1, 1, statistics={"client_steps": 1.0}))
    line = next(iter(run.objects("journal.jsonl")))
    assert not {"joined", "left", "experiment"} & set(line)
    assert not Replay(run).is_open


def test_an_entry_of_another_version_is_rejected() -> None:
    with pytest.raises(DataError, match="journal"):
        Member.read({"id": "a"})


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


def test_after_a_silent_attempt_answering_clients_come_first(silence: Silence) -> None:
    silence.end(HONEST, (), 1.0)
    silence.end((), GHOSTS[:3], 5.0)
    silence.sign(GHOSTS, "ghosts", "mallory")
    assert silence.groups(EVERYONE, 3) == [EVERYONE]
    assert drawn_after(silence, 3, GHOSTS[:3]) == [set(HONEST)]
    assert drawn_after(silence, 4, GHOSTS[:3]) == [set(HONEST), set(GHOSTS)]


def test_owners_of_lost_clients_come_last_in_the_next_attempt(silence: Silence) -> None:
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
