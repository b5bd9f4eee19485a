"""The aggregator's dispatcher against a simple model, with random joins, leaves, answers, repeats and silence."""

from __future__ import annotations

from random import Random

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from transport_support import expected, key, start_call, step_call

from faults.fuzz import dispatcher, link, quiet, reply
from faults.place import Broken, Place
from faults.table import Fault, Tried
from fedloom.federation.transport import Call, Lost
from fedloom.transport.codec import Cutter
from fedloom.transport.exchanges import Arrived, Exchange, Link
from fedloom.transport.frames import WireError, pack_parts, parse_frame, seal_frame, serialize
from fedloom.transport.stream import key_from_wire, key_to_wire
from fedloom.transport.wire import federation_pb2 as wire

CLIENTS = ("c0", "c1", "c2", "c3")
SERVES = {"a": CLIENTS, "b": CLIENTS, "c": CLIENTS[:2], "d": CLIENTS[2:]}
"""Workers, and the clients that each may serve."""

NAMES = st.sampled_from(sorted(SERVES))
D = 3
STEPS = 40


class Books(RuleBasedStateMachine):
    """State machine of the aggregator: connected workers, open calls, and the outcome of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.board = dispatcher()
        self.links: dict[str, Link] = {}
        self.cutters: dict[str, Cutter] = {}
        self.asked: dict[str, list[tuple[Call, int]]] = {}  # requests sent to each stream, row by row
        self.sent: list[tuple[str, bytes]] = []  # answers, to be repeated
        self.calls: list[Call] = []
        self.exchange: Exchange | None = None
        self.outcomes: dict[int, Arrived | Lost] = {}
        self.may_lose: set[int] = set()
        self.round = self.incarnations = 0

    # ---- workers

    @rule(name=NAMES)
    def join(self, name: str) -> None:
        """Let a process join, unless one of its name is connected."""
        if name in self.links:
            return
        self.incarnations += 1
        self.links[name] = link(name, *SERVES[name], incarnation=f"i{self.incarnations}")
        self.cutters[name], self.asked[name] = Cutter(wire.WorkerPart), []
        self.board.enter(self.links[name])
        self.look()

    @rule(name=NAMES)
    def leave(self, name: str) -> None:
        """End a worker's stream."""
        if name in self.links:
            self.board.leave(self.links.pop(name))
            self.look()

    def say(self, name: str, frame: bytes) -> None:
        """Send a message of a worker; a stream that is closed for it has left."""
        try:
            self.board.receiver.take(self.links[name], frame)
        except WireError:
            self.board.leave(self.links.pop(name))
        self.look()

    def request(self, name: str, at: int) -> tuple[Call, int] | None:
        """Return one of the rows requested from a worker: still awaited, or late by now."""
        return self.asked[name][at % len(self.asked[name])] if name in self.links and self.asked[name] else None

    def requests(self, name: str, at: int, count: int) -> tuple[Call, list[int]] | None:
        """Return up to so many rows of one exchange that were requested from a worker, in ascending order."""
        if not (found := self.request(name, at)):
            return None
        call, row = found
        others = {other for asked, other in self.asked[name] if asked is call} - {row}
        return call, sorted([row, *sorted(others)[: count - 1]])

    @rule(name=NAMES, at=st.integers(0, 9), count=st.integers(1, 4))
    def answer(self, name: str, at: int, count: int) -> None:
        """Answer some rows in one transfer."""
        if found := self.requests(name, at, count):
            call, rows = found
            self.sent.append((name, seal_frame([reply(self.cutters[name], call, rows, values(call, rows))])))
            self.say(*self.sent[-1])

    @rule(name=NAMES, at=st.integers(0, 9), count=st.integers(1, 4))
    def half(self, name: str, at: int, count: int) -> None:
        """Begin an answer after another part, and do not complete it."""
        if found := self.requests(name, at, count):
            call, rows = found
            whole = parse_frame(
                wire.WorkerFrame, seal_frame([reply(self.cutters[name], call, rows, values(call, rows) + 1.0)])
            )
            self.say(name, seal_frame([piece for part in whole.parts[:2] for piece in serialize(part)]))

    @rule(at=st.integers(0, 9))
    def repeat(self, at: int) -> None:
        """Repeat a frame, perhaps on another stream of the same worker."""
        if self.sent and self.sent[at % len(self.sent)][0] in self.links:
            self.say(*self.sent[at % len(self.sent)])

    @rule(name=NAMES, at=st.integers(0, 9), given_up=st.booleans())
    def lack(self, name: str, at: int, given_up: bool) -> None:
        """Report a missing conversation, or give a row up."""
        if not (found := self.request(name, at)):
            return
        call, row = found
        about = {"conversation": key_to_wire(call.key), "exchange": call.exchange}
        if given_up:
            part = wire.WorkerPart(row_lost=wire.RowLost(row=row, reason="x", **about))
            self.may_lose.add(row)
        else:
            part = wire.WorkerPart(missing=wire.Missing(rows=[row], **about))
        self.say(name, seal_frame(serialize(part)))

    @rule()
    def wait(self) -> None:
        """Let time pass, so that other workers are asked, too."""
        for stream in self.links.values():
            stream.sign_at -= 1e6
        if self.exchange is not None:
            self.exchange.asked_at = {stream: since - 1e6 for stream, since in self.exchange.asked_at.items()}
        self.board.ask_others()
        self.look()

    # ---- the round loop

    @precondition(lambda self: self.exchange is None)
    @rule(new=st.booleans())
    def ask(self, new: bool) -> None:
        """Start the next exchange, with those that answered the last, or another conversation."""
        alive = [row for row, outcome in sorted(self.outcomes.items()) if isinstance(outcome, Arrived)]
        if new or not self.calls or not alive:
            if self.calls:
                self.board.close(self.calls[0].key)
            self.round += 1
            self.calls = [start_call(CLIENTS, deadline_s=300.0, d=D, the_key=key(round=self.round))]
        else:
            clients = [CLIENTS[row] for row in alive]
            one = step_call(
                clients, len(self.calls), deadline_s=300.0, d=D, rows=tuple(alive), the_key=key(round=self.round)
            )
            self.calls.append(one)
        self.outcomes, self.may_lose = {}, set()
        self.exchange = Exchange(self.calls[-1])
        self.board.open(self.exchange)
        self.look()

    @precondition(lambda self: self.exchange is not None and not self.exchange.outstanding)
    @rule()
    def answered(self) -> None:
        """Return True if every row is settled."""
        self.done()

    @precondition(lambda self: self.exchange is not None)
    @rule()
    def deadline(self) -> None:
        """Reach the deadline: rows without an answer are lost, and their later answers are late."""
        assert self.exchange is not None
        for row in self.exchange.call.rows:
            self.outcomes.setdefault(row, Lost("deadline"))
        self.done()

    def done(self) -> None:
        """Read the answers in the round loop: their memory has not been overwritten since they arrived."""
        assert self.exchange is not None
        self.board.finish(self.exchange)
        for row, outcome in self.outcomes.items():
            self.right(self.exchange.call, row, outcome)
        self.exchange = None

    def right(self, call: Call, row: int, outcome: Arrived | Lost) -> None:
        """Check that an answer belongs to its row and this exchange."""
        if isinstance(outcome, Arrived):
            found = outcome.message().x
            assert torch.equal(found, value(call, row)), f"row {row} has the answer to something else"

    # ---- invariants

    def look(self) -> None:
        """Read the messages sent to streams, and the outcomes of rows: each row is settled once, and correctly."""
        for name, to in self.links.items():
            for frame in pack_parts(iter(to.outbox._next, ())):
                for part in parse_frame(wire.AggregatorFrame, frame).parts:
                    about = part.begin.envelope
                    if part.WhichOneof("part") == "begin" and not about.replay:
                        self.note(name, about)
        if self.exchange is None:
            return
        while not self.exchange.inbox.empty():
            item = self.exchange.inbox.get_nowait()
            assert not isinstance(item, Exception), item
            row, outcome = item
            assert row not in self.outcomes, f"row {row} was settled twice"
            self.outcomes[row] = outcome
            if isinstance(outcome, Lost):
                assert row in self.may_lose, f"row {row} was lost: {outcome.reason}"
            self.right(self.exchange.call, row, outcome)

    def note(self, name: str, about: wire.Envelope) -> None:
        """Record the rows requested from a worker: only of clients that it may serve."""
        assert set(about.clients) <= set(SERVES[name]), f"{name} was asked for {about.clients}"
        if key_from_wire(about.conversation) == self.calls[0].key:
            self.asked[name] += [(self.calls[about.exchange], row) for row in about.rows]

    @invariant()
    def awaited(self) -> None:
        """Check that open rows are awaited from connected workers that may serve them, and no other rows are."""
        if self.exchange is None:
            return
        assert self.exchange.outstanding == set(self.exchange.call.rows) - set(self.outcomes)
        for row in self.exchange.outstanding:
            able = [name for name in self.links if CLIENTS[row] in SERVES[name]]
            first, second = self.exchange.sent.get(row), self.exchange.second.get(row)
            assert (first is None) == (not able), f"row {row} is awaited from {first}, able are {able}"
            assert second is None or second is not first, f"row {row} is asked of {first} twice"
            for holder in (first, second):
                assert holder is None or self.links.get(holder.name) is holder, f"row {row} is awaited from the gone"


def value(call: Call, row: int) -> torch.Tensor:
    """Return a row's reply, which differs in each exchange of each round."""
    return expected([start_call(call.clients, d=D)], call.rows.index(row)) + 100.0 * call.key.round + call.exchange


def values(call: Call, rows: list[int]) -> torch.Tensor:
    """Return the replies of these rows, ``[rows, D]``."""
    return torch.cat([value(call, row) for row in rows])


def books(place: Place, random: Random) -> Tried:
    """Run state machines of forty steps."""
    stories = 100 if place.thorough else 20
    limits = settings(
        max_examples=stories, stateful_step_count=STEPS, deadline=None, database=None, print_blob=False,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    with quiet():
        try:
            run_state_machine_as_test(seed(random.getrandbits(32))(Books), settings=limits)
        except AssertionError as error:
            raise Broken(str(error)) from error
    return Tried(stories)


FAULTS = (
    Fault(
        "books", "garbage", "workers join, leave, answer late and twice, in any order",
        "each row is settled once, with its own answer, and awaited from a connected worker only",
        books, goal=20, short=1,
    ),
)  # fmt: skip
