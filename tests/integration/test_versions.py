"""Tests of aggregators and workers of different versions over real sockets (docs/wire.md, "Versions")."""

import contextlib
import io
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from facts import tells
from rich.console import Console
from transport_support import CLIENTS_OF_ALL, Hostile, Worker, make_aggregator, start_call, until

import fedloom
from fedloom.cli.status import status_lines
from fedloom.errors import AbandonedError, RefusedError
from fedloom.transport import dispatcher, versions, worker_connection
from fedloom.transport.aggregator import Aggregator
from fedloom.transport.control import from_wire, to_wire
from fedloom.transport.frames import Refusal, parse_frame, seal_frame, serialize
from fedloom.transport.stream import METHOD, SERVICE
from fedloom.transport.versions import OLDEST, PROTOCOL, NotAdmitted, Protocols
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


# ---- workers that are too new or too old


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(worker_connection, "UPGRADE_S", 0.05)


def release(monkeypatch, newest, oldest):
    """Let aggregators speak these protocols from now on, as another release does."""
    monkeypatch.setattr(versions, "PROTOCOL", newest)
    monkeypatch.setattr(versions, "OLDEST", oldest)
    monkeypatch.setattr(versions, "SPOKEN", Protocols(newest, oldest))


@pytest.mark.parametrize(("protocols", "algorithms", "needed"), [
    ((PROTOCOL + 2, PROTOCOL + 1), {"toy": 1}, ("fedloom 7.8", f"needs protocol {PROTOCOL + 1}", "9 to 10")),
    ((PROTOCOL, PROTOCOL), {"toy": 2}, ("toy is version 2", "needs version 1")),
])  # fmt: skip
def test_a_worker_that_is_too_new_waits_for_the_upgrade(monkeypatch, caplog, impatient, protocols, algorithms, needed):
    """It is shown with what it has and what is needed, and joins once the aggregator has been upgraded."""
    caplog.set_level("INFO", "fedloom")
    monkeypatch.setattr(worker_connection, "SPOKEN", Protocols(*protocols, package="7.8"))
    with serving() as aggregator:
        worker = Worker(aggregator.address, "early", CLIENTS_OF_ALL, algorithms=algorithms, reconnect_s=2.0)
        until(lambda: aggregator.refusals.counts.get(Refusal.HELLO, 0) > 30)
        shown = from_wire(to_wire(aggregator.activity()))
        assert list(shown.too_new) == ["early"]
        assert tells(shown.too_new["early"], *needed, "upgrade the aggregator")
        console = Console(width=300, file=io.StringIO())
        assert any(tells(line.plain, "too new", "early", *needed) for line in status_lines(shown, console))
        logged = [text for each in caplog.records if "to be upgraded" in (text := each.getMessage())]
        assert len(logged) == 1
        assert tells(logged[0], aggregator.address, *needed)
        assert not worker.joined
        assert worker.thread.is_alive()
    release(monkeypatch, PROTOCOL + 1, PROTOCOL)
    upgraded = make_aggregator(version=algorithms["toy"])
    upgraded.start(aggregator.address)
    upgraded.wait_for(set(CLIENTS_OF_ALL), 30)
    assert not upgraded.activity().too_new
    worker.leave()
    assert worker.error is None
    upgraded.stop()


def test_a_waiting_worker_is_no_longer_shown_once_it_joins():
    with serving() as aggregator:
        early = Hostile(aggregator.address, protocol=PROTOCOL + 1, package="9.9")
        assert early.join().WhichOneof("part") == "refused"
        assert list(aggregator.activity().too_new) == ["hostile"]
        peer = Hostile(aggregator.address)
        assert peer.join().WhichOneof("part") == "welcome"
        until(lambda: not aggregator.activity().too_new)
        again = Hostile(aggregator.address, protocol=PROTOCOL + 1)  # under the name of a connected worker
        assert again.join().WhichOneof("part") == "refused"
        assert not aggregator.activity().too_new
        for each in (early, peer, again):
            each.leave()


def test_invented_workers_that_are_too_new_are_bounded_and_printable(monkeypatch):
    monkeypatch.setattr(dispatcher, "MOST_AWAY", 3)
    with serving() as aggregator:
        for name in ("\x1b[2J" * 100, "a", "b", "c", "d"):
            peer = Hostile(aggregator.address, name=name, protocol=LARGEST, package="\u202e" * 10_000)
            assert peer.join().WhichOneof("part") == "refused"
            shown = aggregator.activity().too_new
            assert all(text.isprintable() and len(text) < 500 for pair in shown.items() for text in pair)
            peer.leave()
        assert list(shown) == ["b", "c", "d"]


@pytest.mark.parametrize("protocols", [(8, 8), (8, 7), (1, 1)])
def test_a_worker_that_is_too_old_ends_with_the_release_to_install(monkeypatch, protocols):
    monkeypatch.setattr(worker_connection, "SPOKEN", Protocols(*protocols, package="0.0.9"))
    with serving() as aggregator:
        worker = Worker(aggregator.address, "w", CLIENTS_OF_ALL)
        worker.thread.join(30)
        assert isinstance(worker.error, RefusedError)
        assert worker.error.exit_code == 4
        assert tells(str(worker.error), "0.0.9", f"protocol {protocols[0]}", f"install fedloom {fedloom.__version__}")
        assert not aggregator.activity().too_new


# ---- aggregators written by hand


class HandWritten:
    """Aggregator that answers the n-th Hello with the n-th part (the last one for all further ones), and hangs up."""

    def __init__(self, *answers) -> None:
        self.hellos: list = []
        self._answers = answers

    def __enter__(self):
        self._server = grpc.server(ThreadPoolExecutor(4))
        handler = grpc.stream_stream_rpc_method_handler(self._join)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        return self

    def __exit__(self, *_):
        self._server.stop(0).wait()

    def _join(self, frames, context):
        answer = self._answers[min(len(self.hellos), len(self._answers) - 1)]
        self.hellos.append(parse_frame(wire.WorkerFrame, next(frames)).parts[0].hello)
        yield seal_frame(serialize(answer))
        if answer.WhichOneof("part") == "refused":
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "refused")


def refused(code=wire.REFUSAL_CODE_PROTOCOL, **fields):
    return wire.AggregatorPart(refused=wire.Refused(code=code, reason="\x1b[2Jno", **fields))


def welcome(protocol=None, incarnation="i"):
    part = wire.Welcome(run="r", incarnation=incarnation, experiment="{}", protocol=protocol)
    return wire.AggregatorPart(welcome=part)


def test_an_aggregator_of_protocol_9_is_met_with_9_and_later_with_the_newest_again():
    with HandWritten(refused(), welcome(), refused(), welcome(incarnation="j"), welcome(10, "k")) as old:
        worker = Worker(old.address, "w", ("a", "b"), reconnect_s=30)
        until(lambda: len(worker.joined) >= 3)
        worker.leave()
    spoken = [(each.protocol, each.oldest_protocol, each.package) for each in old.hellos[:5]]
    new = (PROTOCOL, OLDEST, fedloom.__version__)
    assert spoken == [new, (9, 0, "0.1.0"), new, (9, 0, "0.1.0"), new]
    assert [each.protocol for each in worker.joined[:3]] == [9, 9, 10]
    first, second = old.hellos[:2]
    for name in ("worker", "incarnation", "clients", "device", "algorithms", "announced"):
        assert getattr(first, name) == getattr(second, name)


@pytest.mark.parametrize("protocol", [1, 8, 11, LARGEST])
def test_a_protocol_that_was_not_offered_is_not_used(protocol):
    with HandWritten(welcome(protocol=protocol)) as hostile:
        worker = Worker(hostile.address, "w", ("a",), reconnect_s=1.0)
        until(lambda: not worker.thread.is_alive())
        assert isinstance(worker.error, AbandonedError)
        assert not worker.joined


def test_a_worker_that_introduced_itself_with_9_does_not_take_10():
    with HandWritten(refused(), welcome(protocol=10)) as hostile:
        worker = Worker(hostile.address, "w", ("a",), reconnect_s=30)
        until(lambda: len(worker.joined) >= 1)
        worker.leave()
    assert [each.protocol for each in hostile.hellos[:3]] == [10, 9, 10]  # the last one was offered 10, and joined
    assert worker.joined[0].protocol == 10


@pytest.mark.parametrize("answer", [
    refused(), refused(protocol=8), refused(protocol=1, oldest_protocol=LARGEST),
    refused(wire.REFUSAL_CODE_ALGORITHM, algorithm="toy", algorithm_version=1),
])  # fmt: skip
def test_an_aggregator_that_is_older_is_asked_calmly(monkeypatch, caplog, answer):
    """Also one that only says so: it can make a worker wait, as by silence, and not spin."""
    monkeypatch.setattr(worker_connection, "UPGRADE_S", 1000.0)
    with HandWritten(answer) as old:
        worker = Worker(old.address, "w", ("a",), algorithms={"toy": 2}, reconnect_s=0.3)
        until(lambda: "to be upgraded" in caplog.text)
        threading.Event().wait(1.0)
        assert worker.thread.is_alive()
        assert len(old.hellos) <= 2
        assert "\x1b" not in caplog.text
        worker.leave()
        assert worker.error is None


@pytest.mark.parametrize("answer", [
    refused(protocol=LARGEST, oldest_protocol=11), refused(protocol=10), refused(protocol=9, oldest_protocol=9),
    refused(wire.REFUSAL_CODE_ALGORITHM), refused(wire.REFUSAL_CODE_ALGORITHM, algorithm="toy", algorithm_version=2),
    refused(wire.REFUSAL_CODE_ALGORITHM, algorithm="toy", algorithm_version=3),
    refused(wire.REFUSAL_CODE_ALGORITHM, algorithm="other", algorithm_version=1),
    refused(wire.REFUSAL_CODE_HELLO, algorithm="toy", algorithm_version=1, protocol=1),
    refused(wire.REFUSAL_CODE_PACKAGE, protocol=1), refused(99, protocol=1),
])  # fmt: skip
def test_a_refusal_without_hope_ends_the_worker(answer):
    with HandWritten(answer) as aggregator:
        worker = Worker(aggregator.address, "w", ("a",), algorithms={"toy": 2})
        until(lambda: not worker.thread.is_alive())
        assert isinstance(worker.error, RefusedError)
        assert len(aggregator.hellos) == 1
