"""Tests of aggregators and workers of different versions over real sockets (docs/wire.md, "Versions")."""

import contextlib
from collections.abc import Iterator

import pytest
from transport_support import CLIENTS_OF_ALL, Hostile, Worker, make_aggregator, start_call

import fedloom
from fedloom.transport import versions, worker_connection
from fedloom.transport.aggregator import Aggregator
from fedloom.transport.versions import PROTOCOL, NotAdmitted, Protocols
from fedloom.transport.wire import federation_pb2 as wire

LARGEST = 2**32 - 1


@contextlib.contextmanager
def serving(**changes) -> Iterator[Aggregator]:
    aggregator = make_aggregator(**changes)
    aggregator.address = aggregator.start("127.0.0.1:0")
    try:
        yield aggregator
    finally:
        aggregator.stop()


# ---- the rules


@pytest.mark.parametrize("ours", [(n, o) for n in (1, 9, 10, 11, LARGEST) for o in (1, 9, 10, 11, LARGEST) if o <= n])
@pytest.mark.parametrize("theirs", [(n, o) for n in (0, 1, 9, 10, 11, LARGEST) for o in (0, 1, 9, 10, 11, LARGEST)])
def test_the_newest_protocol_in_common_is_chosen(monkeypatch, ours, theirs):
    newest, oldest = theirs
    both = set(range_of(*ours)) & set(range_of(newest, oldest or newest))
    with monkeypatch.context() as patch:
        patch.setattr(versions, "PROTOCOL", ours[0])
        patch.setattr(versions, "OLDEST", ours[1])
        patch.setattr(versions, "SPOKEN", Protocols(*ours))
        hello = wire.Hello(protocol=newest, oldest_protocol=oldest, package="x", algorithms={"toy": 1})
        if newest == 0 or oldest > newest:
            with pytest.raises(NotAdmitted) as refusal:
                versions.negotiate(hello, "toy", 1)
            assert refusal.value.part.code == wire.REFUSAL_CODE_HELLO
            assert not refusal.value.too_new
        elif both:
            assert versions.negotiate(hello, "toy", 1) == max(both)
        else:
            with pytest.raises(NotAdmitted) as refusal:
                versions.negotiate(hello, "toy", 1)
            part = refusal.value.part
            assert part.code == wire.REFUSAL_CODE_PROTOCOL
            assert (part.protocol, part.oldest_protocol) == ours
            assert refusal.value.too_new == ((oldest or newest) > ours[0])


def range_of(newest: int, oldest: int) -> list[int]:
    """Return those protocols of a range that these tests name."""
    return [protocol for protocol in (1, 9, 10, 11, LARGEST) if oldest <= protocol <= newest]


# ---- streams


@pytest.mark.parametrize(("hello", "protocol"), [
    ({"protocol": 10, "oldest_protocol": 9}, 10), ({"protocol": 9}, 9), ({"protocol": 10}, 10),
    ({"protocol": LARGEST, "oldest_protocol": 1}, 10), ({"protocol": 9, "oldest_protocol": 8, "package": "7"}, 9),
])  # fmt: skip
def test_welcome_and_status_tell_the_protocol(hello, protocol):
    with serving() as aggregator:
        peer = Hostile(aggregator.address, **hello)
        assert peer.join().welcome.protocol == protocol
        aggregator.wait_for({"mallory"}, 30)
        (worker,) = aggregator.activity().workers
        assert (worker.protocol, worker.package) == (protocol, hello.get("package", fedloom.__version__))
        peer.leave()


@pytest.mark.parametrize("protocols", [(9, 9), (10, 9), (10, 10), (11, 10)])
def test_workers_of_neighbouring_releases_work(monkeypatch, protocols):
    monkeypatch.setattr(worker_connection, "SPOKEN", Protocols(*protocols, package="7.8"))
    with serving() as aggregator:
        worker = Worker(aggregator.address, "w", CLIENTS_OF_ALL)
        aggregator.wait_for(set(CLIENTS_OF_ALL), 30)
        assert len(aggregator.exchange(start_call(("a", "b")))) == 2
        (shown,) = aggregator.activity().workers
        assert worker.joined[0].protocol == shown.protocol == min(protocols[0], PROTOCOL)
        assert shown.package == "7.8"
        worker.leave()
