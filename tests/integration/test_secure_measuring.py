"""Normalization measured in a secure sum: exact, in process and over gRPC, with dropouts, liars and restarts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from facts import mentions
from transport_support import make_aggregator, until

from fedloom.data.moments import Moments, pooled_normalization
from fedloom.data.own import ClientCard, Own, read_card
from fedloom.data.pack import PackSettings, pack
from fedloom.data.pack.examples import Request
from fedloom.data.spec import Normalization
from fedloom.errors import QuorumError
from fedloom.federation.client_side import ClientSide, InProcess
from fedloom.federation.measuring import (
    VOCABULARY,
    MeasuredClients,
    measured_normalization,
    measuring_side,
)
from fedloom.federation.roster import AvailableClients, Member
from fedloom.federation.transport import Call, Lost, Transport
from fedloom.messages import Message
from fedloom.privacy.settings import SecureAggregation
from fedloom.security.signing import NO_SIGNING
from fedloom.sums.measuring import securely_measured_normalization, securely_measuring_side
from fedloom.sums.messages import VOCABULARY as OF_SUMS
from fedloom.sums.messages import (
    ConfirmationDelivery,
    KeyRoster,
    MaskedAnswer,
    ShareDelivery,
    SumSession,
    Survivors,
)
from fedloom.sums.revealed_sums import RevealedSums
from fedloom.transport.stream import Introduction
from fedloom.transport.worker import serve

SECURE = SecureAggregation(signatures="none")
FEATURES = Own(kind="features", input_shape=(4,), classes=("x", "y"))
PIXELS = Own(kind="pixels", input_shape=(2, 3, 3), classes=("x", "y"))
CLIENTS = 7


def inputs(own: Own, client: int) -> np.ndarray:
    rng = np.random.default_rng(client)
    n = 20 + client
    if own is PIXELS:
        return rng.integers(0, 256, (n, 2, 3, 3), dtype=np.uint8)
    # a large mean, values of many sizes, subnormal numbers
    x = rng.normal(size=(n, 4)) * [1, 1e-3, 10.0 ** rng.uniform(-12, 12), 1e-42] + [1e4, 0, 0, 0]
    return x.astype(np.float32)


@pytest.fixture(scope="module", params=[FEATURES, PIXELS], ids=lambda own: own.kind)
def packed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Own, dict[str, ClientCard]]:
    own, root, cards = request.param, tmp_path_factory.mktemp("packed"), {}
    for i in range(CLIENTS):
        x = inputs(own, i)
        np.savez(root / "source.npz", x=x, y=np.arange(len(x)) % 2)
        pack(root / "source.npz", root / f"c{i}", PackSettings(f"c{i}", Request(own.spec)))
        cards[f"c{i}"] = read_card(root / f"c{i}")
    return own, cards


def in_process(cards: Mapping[str, ClientCard], revealed: RevealedSums | None = None) -> InProcess:
    return InProcess(securely_measuring_side(cards, SECURE, NO_SIGNING, revealed), torch.float32)


def measure(
    transport: Transport, own: Own, cards: Mapping[str, ClientCard], clients: Sequence[str] = (), attempt: int = 0
) -> Normalization:
    examples = {client: cards[client].train for client in clients or cards}
    return securely_measured_normalization(
        transport, own, examples, SECURE, deadline_s=20.0, stop=threading.Event(), attempt=attempt
    )


def plain(own: Own, cards: Mapping[str, ClientCard], clients: Sequence[str] = ()) -> Normalization:
    return pooled_normalization(own.spec.measured, [cards[client].moments for client in clients or cards])


class Disturbed:
    """Transport that loses clients, or changes their answers, at chosen messages."""

    def __init__(self, inner: Transport, change: Callable[[Call, str, Message | Lost], Message | Lost]) -> None:
        self._inner, self._change = inner, change
        self.traffic, self.refusals, self.silence = inner.traffic, inner.refusals, inner.silence

    def exchange(self, call: Call) -> Sequence[Message | Lost]:
        answers = self._inner.exchange(call)
        return [self._change(call, client, answer) for client, answer in zip(call.clients, answers, strict=True)]

    def close(self, key: object) -> None:
        self._inner.close(key)  # type: ignore[arg-type]


def losing(inner: Transport, when: type[Message], *clients: str) -> Disturbed:
    return Disturbed(
        inner,
        lambda call, client, answer: Lost("gone") if isinstance(call.message, when) and client in clients else answer,
    )


Packed = tuple[Own, dict[str, ClientCard]]


def test_a_secure_sum_equals_plain_measuring_to_the_bit(packed: Packed) -> None:
    own, cards = packed
    found = measure(in_process(cards), own, cards)
    assert found == plain(own, cards)
    as_they_are = InProcess(measuring_side(cards, MeasuredClients(cards)), torch.float32)
    assert found == measured_normalization(as_they_are, own, {name: card.train for name, card in cards.items()}, 20.0)


@pytest.mark.parametrize("when", [SumSession, KeyRoster, ShareDelivery])
def test_a_client_that_drops_out_before_its_sums_arrive_is_excluded(packed: Packed, when: type[Message]) -> None:
    own, cards = packed
    found = measure(losing(in_process(cards), when, "c4"), own, cards)
    assert found == plain(own, cards, [client for client in cards if client != "c4"])


@pytest.mark.parametrize("when", [Survivors, ConfirmationDelivery])
def test_a_client_that_drops_out_later_is_included(packed: Packed, when: type[Message]) -> None:
    own, cards = packed
    assert measure(losing(in_process(cards), when, "c1"), own, cards) == plain(own, cards)


def test_a_sum_with_too_few_clients_fails_and_can_be_repeated(packed: Packed) -> None:
    own, cards = packed
    transport = in_process(cards, RevealedSums())
    with pytest.raises(QuorumError) as error:
        measure(losing(transport, ShareDelivery, "c0", "c1", "c2"), own, cards)
    assert error.value.key == "data.own.normalization"
    assert measure(transport, own, cards, attempt=1) == plain(own, cards)


# --- attacks ----------------------------------------------------------------------------------------------------------


def test_members_reveal_sums_of_their_inputs_over_one_set_alone(packed: Packed, tmp_path: Path) -> None:
    """The aggregator asks again over other clients; it may also claim that one was lost, or be another process."""
    own, cards = packed
    measure(in_process(cards, RevealedSums(tmp_path)), own, cards)
    again = in_process(cards, RevealedSums(tmp_path))  # the members have been restarted
    names = list(cards)
    for attempt, clients in enumerate((names[1:], names[:4], names[1:4], names[4:7]), start=1):
        with pytest.raises(QuorumError) as error:
            measure(again, own, cards, clients, attempt=attempt)
        assert mentions(str(error.value), "mean", "std")
    with pytest.raises(QuorumError):
        measure(losing(again, ShareDelivery, "c6"), own, cards, attempt=7)
    assert measure(again, own, cards, attempt=8) == plain(own, cards)


@pytest.mark.parametrize(("round", "purpose"), [(7, "measure"), (0, "train"), (0, "evaluate"), (0, "x")])
def test_members_are_measured_in_no_other_conversation(packed: Packed, round: int, purpose: str) -> None:
    own, cards = packed
    members = in_process(cards)

    class Renamed(InProcess):
        def exchange(self, call: Call) -> Sequence[Message | Lost]:
            return members.exchange(replace(call, key=replace(call.key, round=round, purpose=purpose)))

    with pytest.raises(QuorumError):
        measure(Renamed(securely_measuring_side(cards, SECURE, NO_SIGNING), torch.float32), own, cards)


def lying(card: ClientCard, **moments: tuple[float, ...]) -> ClientCard:
    return replace(card, moments=Moments(**{**vars(card.moments), **moments}))


@pytest.mark.parametrize("first", [1e30, -1e30])
def test_impossible_sums_are_rejected(packed: Packed, first: float) -> None:
    own, cards = packed
    false = cards | {"c3": lying(cards["c3"], sum=(first,) * own.spec.numbers)}
    with pytest.raises(QuorumError) as error:
        measure(in_process(false), own, cards)
    assert error.value.key == "data.own.normalization"


@pytest.mark.parametrize("moments", [{"sum": (1e43,)}, {"squares": (1e43,)}, {"sum": (2.0**-160,)}])
def test_overflowing_sums_are_excluded(packed: Packed, moments: dict[str, tuple[float]]) -> None:
    own, cards = packed
    wrong = {name: value * own.spec.numbers for name, value in moments.items()}
    found = measure(in_process(cards | {"c3": lying(cards["c3"], **wrong)}), own, cards)
    assert found == plain(own, cards, [client for client in cards if client != "c3"])


@pytest.mark.parametrize("seed", range(3))
def test_garbage_digits_give_no_normalization(packed: Packed, seed: int) -> None:
    own, cards = packed
    random = torch.Generator().manual_seed(seed)

    def garbage(call: Call, client: str, answer: Message | Lost) -> Message | Lost:
        if client != "c2" or not isinstance(answer, MaskedAnswer):
            return answer
        values = torch.randint(0, 256, answer.values.shape, dtype=torch.uint8, generator=random)
        return MaskedAnswer(values, answer.receipts)

    with pytest.raises(QuorumError) as error:
        measure(Disturbed(in_process(cards), garbage), own, cards)
    assert error.value.key == "data.own.normalization"


# --- gRPC ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def over_grpc(cards: Mapping[str, ClientCard], stops: Mapping[str, threading.Event]) -> Iterator[Transport]:
    """Serve each client by a separate worker."""
    aggregator = make_aggregator(
        presence=AvailableClients(), classes=2, clients=(), vocabulary={**VOCABULARY, **OF_SUMS}
    )
    address = aggregator.start("127.0.0.1:0")

    def work(client: str, card: ClientCard) -> None:
        member = Member(client, card.train, card.validation, card.test, True, False, ())

        def session(joined: object) -> ClientSide:
            return securely_measuring_side({client: card}, SECURE, NO_SIGNING)

        introduction = Introduction(client, [client], {"toy": 1}, members=[member])
        serve(address, introduction, make_session=session, stop=stops[client])

    threads = [threading.Thread(target=work, args=pair, daemon=True) for pair in cards.items()]
    for thread in threads:
        thread.start()
    try:
        until(lambda: len(aggregator.workers()) == len(cards))
        yield aggregator
    finally:
        aggregator.stop()
        for stop in stops.values():
            stop.set()
        for thread in threads:
            thread.join(10)


@pytest.mark.parametrize("changes", [{"purpose": "train"}, {"purpose": "x"}, {"round": 3}])
def test_members_over_grpc_are_measured_in_no_other_conversation(packed: Packed, changes: dict[str, object]) -> None:
    """The aggregator keeps its books as before, and renames what it sends."""
    own, cards = packed
    with over_grpc(cards, {client: threading.Event() for client in cards}) as aggregator:

        class Renamed(Disturbed):
            def exchange(self, call: Call) -> Sequence[Message | Lost]:
                return super().exchange(replace(call, key=replace(call.key, **changes)))  # type: ignore[arg-type]

        with pytest.raises(QuorumError):
            measure(Renamed(aggregator, lambda call, client, answer: answer), own, cards)


@pytest.mark.parametrize("when", [None, ShareDelivery])
def test_secure_measuring_over_grpc_survives_a_killed_worker(packed: Packed, when: type[Message] | None) -> None:
    own, cards = packed
    stops = {client: threading.Event() for client in cards}
    with over_grpc(cards, stops) as aggregator:

        class Killing(Disturbed):
            def exchange(self, call: Call) -> Sequence[Message | Lost]:
                if when is not None and isinstance(call.message, when):
                    stops["c5"].set()
                    until(lambda: "c5" not in [worker.name for worker in aggregator.workers()])  # type: ignore[attr-defined]
                return super().exchange(replace(call, deadline_s=2.0 if when else call.deadline_s))

        found = measure(Killing(aggregator, lambda call, client, answer: answer), own, cards)
    left = [client for client in cards if when is None or client != "c5"]
    assert found == plain(own, cards, left)
