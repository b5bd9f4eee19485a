"""False claims of members about their clients, over real sockets: each is rejected without affecting other members."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from facts import tells
from transport_support import Hostile, Sum, make_aggregator, until

from fedloom.data.own import Own
from fedloom.errors import QuorumError
from fedloom.federation.measuring import VOCABULARY, InputMoments, measured_normalization
from fedloom.federation.roster import AvailableClients
from fedloom.transport.wire import federation_pb2 as wire

OWN = Own(kind="pixels", input_shape=(1, 2, 2), classes=("x", "y"))
HONEST = {"train": 10, "validation": 2, "test": 3, "labelled": True, "class_counts": [4, 6]}


@pytest.fixture
def aggregator() -> Iterator[Any]:
    """Start an aggregator of an open federation, with an honest member that has client ``anna``."""
    presence = AvailableClients()
    aggregator = make_aggregator(presence=presence, classes=2, clients=(), vocabulary={"Sum": Sum, **VOCABULARY})
    address = aggregator.start("127.0.0.1:0")
    joined: list[Hostile] = []

    def member(name: str, clients: tuple[str, ...], reported: list[dict[str, Any]]) -> tuple[Hostile, Any]:
        announced = [wire.Announced(**one) for one in reported]
        joined.append(Hostile(address, name, clients, announced=announced))
        return joined[-1], joined[-1].join()

    aggregator.member = member
    member("honest", ("anna",), [HONEST])
    until(lambda: aggregator.workers())
    yield aggregator
    for each in joined:
        each.leave()
    aggregator.stop()


LIES = {
    "no announcement": (("mallory",), [], "own"),
    "one too few": (("mallory", "moe"), [HONEST], "own"),
    "no examples": (("mallory",), [{**HONEST, "train": 0, "class_counts": []}], "0"),
    "no test examples": (("mallory",), [{**HONEST, "test": 0}], "0"),
    "more examples than there are": (("mallory",), [{**HONEST, "train": 1 << 63, "class_counts": []}], "1,000,000,000"),
    "class counts that do not add up": (("mallory",), [{**HONEST, "class_counts": [4, 5]}], "10"),
    "class counts that wrap around": (("mallory",), [{**HONEST, "class_counts": [(1 << 64) - 1, 11]}], "10"),
    "classes that there are not": (("mallory",), [{**HONEST, "class_counts": [4, 5, 1]}], "2"),
    "one client twice": (("mallory", "mallory"), [HONEST, HONEST], "twice"),
    "a path": (("../../etc/passwd",), [HONEST], "letters"),
    "control characters": (("a\x1b[2J",), [HONEST], "letters"),
    "an id without end": (("a" * 129,), [HONEST], "128"),
    "another's client": (("anna",), [HONEST], "anna"),
    "one of its own and another's": (("mallory", "anna"), [HONEST, HONEST], "anna"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_member_with_false_claims_about_its_clients_cannot_join(aggregator: Any, lie: str) -> None:
    clients, reported, fact = LIES[lie]
    before = [worker.name for worker in aggregator.workers()]
    _, part = aggregator.member("liar", clients, reported)
    taken = "another" in lie
    assert part.refused.code == (wire.REFUSAL_CODE_CLIENT_TAKEN if taken else wire.REFUSAL_CODE_CLIENTS)
    assert tells(part.refused.reason, fact)
    assert "\x1b" not in part.refused.reason
    assert [worker.name for worker in aggregator.workers()] == before
    assert [worker.members for worker in aggregator.workers() if "mallory" in worker.clients] == []


def moments(count: float, total: float, squares: float) -> InputMoments:
    return InputMoments(*(torch.tensor([[value]], dtype=torch.float64) for value in (count, total, squares)))


@pytest.mark.parametrize(
    "lie",
    [
        (1e15, 1e15, 1e15),  # from more examples than it has
        (40, -1.0, 5.0),
        (40, 10_201.0, 1e7),  # brighter than white
        (40, 100.0, 25_501.0),
        (40, 4_000.0, 399_999.0),  # less than the square of its mean
        (40.5, 0.0, 0.0),
        (40, 1e300, 1e300),
    ],
)
def test_impossible_sums_are_excluded_from_the_normalization(aggregator: Any, lie: tuple[float, ...]) -> None:
    """Ten images of four pixels: half of the honest pixels are black and half are white."""
    liar, _ = aggregator.member("liar", ("mallory",), [HONEST])
    honest, _ = aggregator.member("second", ("bo",), [HONEST])
    until(lambda: len(aggregator.workers()) == 3)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(measured_normalization, aggregator, OWN, {"bo": 10, "mallory": 10}, 20.0)
        for peer, output in ((honest, (40, 20 * 255.0, 20 * 255.0**2)), (liar, lie)):
            peer.send(peer.transfer(peer.request(), moments(*output)))
        normalization = found.result(30)
    assert (normalization.mean, normalization.std) == ((0.5,), (0.5,))


def test_without_plausible_sums_there_is_no_normalization(aggregator: Any) -> None:
    liar, _ = aggregator.member("liar", ("mallory",), [HONEST])
    until(lambda: len(aggregator.workers()) == 2)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(measured_normalization, aggregator, OWN, {"mallory": 10}, 20.0)
        liar.send(liar.transfer(liar.request(), moments(1e15, 0.0, 0.0)))
        with pytest.raises(QuorumError) as error:
            found.result(30)
    assert error.value.key == "data.own.normalization"


@pytest.mark.parametrize(
    "name", ["antigravity.fly", "antigravity:fly", "os.system", "builtins.eval", "InputMoments\0", ""]
)
def test_a_name_in_a_message_imports_nothing(aggregator: Any, name: str) -> None:
    """A class is looked up among the expected ones, never imported."""
    liar, _ = aggregator.member("liar", ("mallory",), [HONEST])
    until(lambda: len(aggregator.workers()) == 2)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(measured_normalization, aggregator, OWN, {"mallory": 10}, 20.0)
        parts = liar.transfer(liar.request(), moments(40, 0.0, 0.0))
        parts[0].begin.envelope.message = name
        liar.send(parts)
        with pytest.raises(QuorumError, match="unknown message"):
            found.result(30)
    assert "antigravity" not in sys.modules
