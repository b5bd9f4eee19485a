"""Client states: a client continues from the last round that counted it, whatever happened to the rounds between."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from facts import tells
from federations import Federation, clients, federation, setup
from torch import Tensor

from fedloom.algorithms.base import Algorithm, ClientAlgorithm, ServerAlgorithm, conversation
from fedloom.core.settings import Settings
from fedloom.errors import DataError, FedloomError, RefusedError, StorageError
from fedloom.federation.states import States, Versions
from fedloom.messages import Message, Quantity, broadcast, rows
from fedloom.models.predictors import predictors_of
from fedloom.runs.journal import Attempt, ConversationRecord, Journal, Loss, Version
from fedloom.storage import Store
from fedloom.storage.folder import FolderStore
from fedloom.transport.stream import states_from_wire, states_to_wire

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class Ask(Message):
    round: Tensor = broadcast(Quantity.OTHER)


class Seen(Message):
    """The rounds whose states this client builds on, as bits."""

    rounds: Tensor = rows(Quantity.OTHER, 1)


class Thanks(Message):
    pass


class Personal(Message):
    pass


class Server(ServerAlgorithm):
    """Server that records the rounds that each client reports."""

    def __init__(self, settings: Settings, problem: Any, generator: torch.Generator) -> None:
        super().__init__(settings, problem)
        self.said: dict[int, list[int | None]] = {}
        self.state["rounds"] = torch.zeros(1, dtype=torch.int64)

    def train_round(self, round: Any) -> dict[str, float]:
        cohort = round.everyone()
        first = cohort.send(Ask(torch.tensor(round.number)), Seen)
        self.said[round.number] = [
            int(bits) if here else None for bits, here in zip(first.rounds, first.present, strict=True)
        ]
        cohort.send(Thanks(), Seen)
        self.state["rounds"] = self.state["rounds"] + 1
        return {"client_steps": 0.0}

    def personalize(self, cohort: Any) -> Any:
        return cohort.send(Personal())


class Client(ClientAlgorithm):
    """Client that records the rounds it was counted in."""

    stateful = True

    @conversation
    def train(self, group: Any, opening: Ask) -> Any:
        remembered = group.load_state("rounds", torch.zeros(len(group), 1, dtype=torch.int64))
        yield Seen(remembered)
        group.save_state(rounds=remembered | (1 << opening.round))
        yield Seen(remembered)

    @conversation
    def personalize(self, group: Any, opening: Personal) -> Any:
        remembered = group.load_state("rounds", torch.zeros(len(group), 1, dtype=torch.int64))
        thetas = remembered.double().expand(-1, self.setup.model.layout.size)
        with pytest.raises(RuntimeError, match="states"):
            group.save_state()
        return predictors_of(self.setup.model, personal=thetas)


class Remembers(Algorithm):
    name = "remembers"
    settings, server, client = Settings, Server, Client
    messages = (Ask, Seen, Thanks, Personal)


REMEMBERS = Remembers()


def bits(*rounds: int) -> int:
    return sum(1 << round for round in rounds)


def made(folder: Path, **kwargs: Any) -> Federation:
    return federation(folder, REMEMBERS, Settings(), setup(), clients([4, 5, 6]), **kwargs)


def remembered(f: Federation, round: int, client: str) -> int:
    return int(f.predictors[round, client]["personal"].tensors()["theta"][0])


def test_a_client_restores_every_round_that_counted_it(tmp_path: Path) -> None:
    f = made(tmp_path, rounds=3, unseen=["c2"])
    f.run()
    assert f.loop.server.said == {1: [0, 0], 2: [bits(1)] * 2, 3: [bits(1, 2)] * 2}
    assert remembered(f, 3, "c0") == bits(1, 2, 3)
    assert remembered(f, 3, "c2") == 0  # never seen: it has no state


@pytest.mark.parametrize("exchange", [0, 1])
def test_a_round_that_lost_a_client_is_forgotten_even_if_it_was_stored(tmp_path: Path, exchange: int) -> None:
    """At exchange 0 it never opens; at exchange 1 it is lost before it answers."""
    f = made(tmp_path, rounds=2, lost={exchange: 1})
    f.run()
    assert f.loop.server.said[2][0] == bits(1)
    assert f.loop.server.said[2][1] in (0, None)
    assert remembered(f, 2, "c1") == 0


def test_a_client_lost_after_its_answer_was_stored_restarts_from_before(tmp_path: Path) -> None:
    """Its state of round 2 exists, but the journal does not count it in round 2."""
    f = made(tmp_path, rounds=2)
    f.run()
    journal, attempts = f.loop.journal, f.loop.journal.attempts
    attempts[1].conversations[0].lost.append(Loss(1, "c1", 1, "late"))
    f.loop.folder.rewrite("journal.jsonl", map(dataclasses.asdict, attempts))
    again = Journal.read(f.loop.folder)
    assert again.version("c1", 2) == Version(1, 1, 0, 1, journal.life)
    assert again.version("c0", 2) == Version(2, 1, 0, 0, journal.life)
    assert list((tmp_path / "states" / "c1").glob("2-1-0-1-*.safetensors"))


def test_old_versions_are_removed_except_those_of_kept_checkpoints(tmp_path: Path) -> None:
    f = made(tmp_path, rounds=6)
    f.loop.schedule = dataclasses.replace(f.loop.schedule, checkpoint_every_s=0.0)
    f.run()
    kept = sorted(path.name for path in (tmp_path / "states" / "c0").iterdir())
    rounds = {int(name.split("-")[0]) for name in kept}
    needed = {f.loop.journal.version("c0", round).round for round in f.loop.checkpoints.rounds() if round}
    assert needed <= rounds
    assert {5, 6} <= rounds
    assert len(kept) <= 4  # the last checkpoints', the best's, and the newest


def test_versions_needed_by_a_checkpoint_are_kept_while_it_is_written(tmp_path: Path) -> None:
    """Rounds continue meanwhile; killed afterwards, the run resumes from that checkpoint."""
    f = made(tmp_path, rounds=5)
    f.loop._checkpoint()
    f.loop.checkpoints.wait()
    written = threading.Event()
    f.loop.checkpoints._before = written.wait
    for t in range(1, 6):
        f.loop._train_round()
        if t == 2:
            f.loop._checkpoint()
    assert f.loop.checkpoints.rounds() == [0]
    written.set()
    f.loop.checkpoints.close()
    again = made(tmp_path, rounds=5)
    again.loop.resume()
    assert again.loop.round == 2
    again.run()
    assert again.loop.server.said == {t: f.loop.server.said[t] for t in (3, 4, 5)}


@pytest.mark.parametrize("afresh", [False, True])
def test_a_missing_state_is_rejected_or_the_client_starts_afresh(tmp_path: Path, afresh: bool) -> None:
    f = made(tmp_path, rounds=1, start_afresh=afresh)
    f.run()
    for path in (tmp_path / "states" / "c1").iterdir():
        path.unlink()
    f.loop.schedule = dataclasses.replace(f.loop.schedule, rounds=2)
    f.loop._train_round()
    assert f.loop.server.said[2] == ([bits(1), 0, bits(1)] if afresh else [bits(1), None, bits(1)])
    if not afresh:
        assert "its state of round 1 is lost" in f.loop.journal.attempts[-1].conversations[0].lost[0].reason


def test_a_damaged_state_loses_only_its_client(tmp_path: Path) -> None:
    f = made(tmp_path, rounds=1)
    f.run()
    next((tmp_path / "states" / "c0").iterdir()).write_bytes(b"half a fi")
    f.loop.schedule = dataclasses.replace(f.loop.schedule, rounds=2)
    f.loop._train_round()
    assert f.loop.server.said[2] == [None, bits(1), bits(1)]
    reason = f.loop.journal.attempts[-1].conversations[0].lost[0].reason
    assert tells(reason, "c0", "1-1-0-0-", "not a client state")
    assert str(tmp_path) not in reason


def test_the_journal_names_versions_by_round_and_forgets_rewound_ones(tmp_path: Path) -> None:
    f = made(tmp_path, rounds=0)
    journal = Journal(f.loop.folder)
    life = journal.life
    journal.needed = range(4)
    assert journal.version("a", 10) is None
    for t, done in ((1, "done"), (2, "failed"), (3, "done")):
        conversation = ConversationRecord(["a", "b", "a"], [Loss(0, "a", 1, "late")])
        journal.append(Attempt(t, 1, done, [conversation], {"client_steps": 1.0}))
    assert [journal.version("a", t) for t in range(4)] == [
        None, Version(1, 1, 0, 2, life), Version(1, 1, 0, 2, life), Version(3, 1, 0, 2, life),
    ]  # fmt: skip
    journal = Journal.read(f.loop.folder, 2)
    journal.rewind()
    assert journal.version("a", 3) == Version(1, 1, 0, 2, life)
    assert journal.version("b", 3) == Version(1, 1, 0, 1, life)
    again = Journal.read(f.loop.folder)
    assert again.version("b", 3) == Version(1, 1, 0, 1, life)
    assert again.life > life


def test_a_generation_is_later_than_those_in_the_journal_for_any_clock(tmp_path: Path) -> None:
    f = made(tmp_path, rounds=0)
    attempts = [Attempt(t, 1, statistics={"client_steps": 0.0}, life=life) for t, life in ((1, 5), (2, 2**60))]
    f.loop.folder.rewrite("journal.jsonl", map(dataclasses.asdict, attempts))
    for upto in (None, 1):  # unselected versions exist, too
        assert Journal.read(f.loop.folder, upto).life == 2**60 + 1


def test_an_aggregator_thought_dead_does_not_harm_its_successor(tmp_path: Path) -> None:
    """It continues with rounds that the successor also runs; the successor's states do not change."""
    old = made(tmp_path, rounds=6)
    for _ in range(2):
        old.loop._train_round()
    old.loop._checkpoint()
    old.loop.checkpoints.wait()
    new = made(tmp_path, rounds=6)
    new.loop.resume()
    new.loop.journal.life = old.loop.journal.life + 1  # both may have started in one millisecond
    new.loop._train_round()
    for _ in range(3):
        old.loop._train_round()
    for _ in range(2):
        new.loop._train_round()
    assert new.loop.server.said == {t: [bits(*range(1, t))] * 3 for t in (3, 4, 5)}
    lives = {int(path.stem.split("-")[-1]) for path in (tmp_path / "states" / "c0").glob("[345]-*")}
    assert new.loop.journal.life in lives


@pytest.mark.parametrize(
    ("version", "gone"),
    [
        (Version(4, 1, 0, 0, 7), True),  # resumed from
        (Version(5, 1, 0, 0, 7), False),  # the start
        (Version(6, 1, 0, 0, 7), False),  # of the current attempt
        (Version(2, 1, 0, 0, 6), False),  # a checkpoint's
        (Version(2, 1, 0, 0, 7), True),
        (Version(9, 1, 0, 0, 6), True),  # kept by an earlier incarnation after its last checkpoint
        (Version(1, 1, 0, 0, 8), False),  # of a later incarnation
    ],
)
def test_superseded_states(version: Version, gone: bool) -> None:
    versions = Versions(Version(5, 1, 0, 0, 7), frozenset({Version(2, 1, 0, 0, 6)}), 7)
    assert versions.superseded(version) is gone
    assert not dataclasses.replace(versions, start=None).superseded(version)


def test_a_store_of_states(store: Store) -> None:
    folder = States(store)
    versions = [Version(t, 1, 0, 0) for t in (1, 2, 10)]
    for i, version in enumerate(versions):
        folder.save("c", version, {"x": torch.full((3, 2), i).t(), "n": torch.tensor(True)})
    found = folder.load("c", versions[2])
    assert torch.equal(found["x"], torch.full((2, 3), 2))
    assert found["n"].dtype == torch.bool
    assert folder.load("c", Version(3, 1, 0, 0)) is None
    assert folder.load("nobody", versions[0]) is None
    folder.forget("c", Versions(versions[2], frozenset(versions[:1])))
    assert [folder.load("c", version) is not None for version in versions] == [True, False, True]
    folder.forget("nobody", Versions(versions[2]))
    folder.save("c2", versions[0], {})
    folder.forget("c", Versions(Version(99, 1, 0, 0), frozenset(versions[:1])))
    assert [entry.name for entry in store.entries()] == [
        f"c/{versions[0]}.safetensors",
        f"c2/{versions[0]}.safetensors",
    ]
    store.write(f"c/{versions[0]}.safetensors", b"\x00")
    with pytest.raises(DataError, match="state"):
        folder.load("c", versions[0])


@pytest.mark.parametrize("failure", [StorageError, RefusedError])
@pytest.mark.parametrize("method", ["read", "write"])
def test_a_failing_store_is_no_failure_of_clients(tmp_path: Path, failure: type[FedloomError], method: str) -> None:
    """The run ends resumably; it does not continue without the clients whose states are unreachable."""
    states = Failing(tmp_path / "states", method, failure)
    f = made(tmp_path, rounds=3, states=states)
    with pytest.raises(failure, match="the bucket is gone"):
        f.run()
    assert f.loop.round == 1
    assert not any(c.lost for attempt in f.loop.journal.attempts for c in attempt.conversations)


class Failing(FolderStore):
    """Store that fails when a state of the first round is read, or one of the second is written."""

    def __init__(self, folder: Path, method: str, failure: type[FedloomError]) -> None:
        super().__init__(folder)
        self.method, self.failure = method, failure

    def read(self, name: str) -> bytes:
        if self.method == "read":
            raise self.failure("the bucket is gone")
        return super().read(name)

    def write_parts(self, name: str, parts: Sequence[ReadableBuffer]) -> None:
        if self.method == "write" and "/2-" in name:
            raise self.failure("the bucket is gone")
        super().write_parts(name, parts)


def test_partially_written_files_of_a_killed_worker_are_removed(tmp_path: Path) -> None:
    """Also without a run's folder: manually started workers share one for states."""
    states, version = States(FolderStore(tmp_path)), Version(1, 1, 0, 0)
    states.save("a", version, {"x": torch.zeros(1)})
    for client in ("a", "b"):
        (tmp_path / client).mkdir(exist_ok=True)
        (tmp_path / client / f".{version}.safetensors.77-1.partial").write_bytes(b"half")
    for client in ("a", "nobody"):
        states.forget(client, Versions(version))
    found = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {f"a/{version}.safetensors", f"b/.{version}.safetensors.77-1.partial"}


@pytest.mark.parametrize(
    "versions",
    [
        Versions(None),
        Versions(Version(3, 2, 1, 0)),
        Versions(Version(9, 1, 0, 4), frozenset({Version(0, 0, 0, 0), Version(5, 1, 0, 4, 2**41)}), 2**41 + 1),
    ],
)
def test_versions_are_sent_over_the_wire(versions: Versions) -> None:
    assert (
        states_from_wire(type(states_to_wire(versions)).FromString(states_to_wire(versions).SerializeToString()))
        == versions
    )
