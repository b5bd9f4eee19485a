"""Exchanges over real loopback sockets: answers, placement, reconnects, replays, deadlines, refusals."""

import dataclasses
import http.server
import logging
import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import grpc
import pytest
import torch
from facts import refusing, tells
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from transport_support import (
    Hostile,
    Proxy,
    Sum,
    Worker,
    expected,
    key,
    make_aggregator,
    start_call,
    step_call,
    until,
)
from work import lines_run

from fedloom.errors import AbandonedError, ExitCode, ExperimentError, QuorumError, RefusedError, StorageError
from fedloom.federation.monitor import Monitor
from fedloom.federation.standing import Standing
from fedloom.federation.transport import Lost
from fedloom.transport import codec
from fedloom.transport.connected import ConnectedWorkers
from fedloom.transport.exchanges import Clients, WorkerInfo
from fedloom.transport.frames import Refusal
from fedloom.transport.server import SERVER_OPTIONS

CLIENTS = ("anna", "bo", "carla", "dai", "emil")


@pytest.fixture
def aggregator():
    before = threading.active_count()
    aggregator = make_aggregator()
    aggregator.address = aggregator.start("127.0.0.1:0")
    yield aggregator
    aggregator.stop()
    assert not any(thread.name == "aggregator" for thread in threading.enumerate()), before


@pytest.fixture
def worker(aggregator):
    """Start workers; they leave at the end."""
    started = []

    def start(name="w1", clients=CLIENTS, address=None, **options):
        started.append(Worker(address or aggregator.address, name, clients, **options))
        return started[-1]

    yield start
    for each in started:
        each.leave()


@pytest.fixture
def background():
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


def check(answers, *calls):
    for row, answer in zip(calls[-1].rows, answers, strict=True):
        assert isinstance(answer, Sum), answer
        assert torch.equal(answer.x, expected(calls, row))


def test_a_conversation_with_one_worker(aggregator, worker):
    served = worker()
    aggregator.wait_for(set(CLIENTS), 30)
    calls = [start_call(CLIENTS), step_call(CLIENTS, 1), step_call(CLIENTS, 2)]
    for i, call in enumerate(calls):
        check(aggregator.exchange(call), *calls[: i + 1])
    aggregator.close(key())
    until(lambda: served.session.closed == [key()])
    assert served.joined[0].experiment == '{"name": "toy"}'
    assert served.session.computed == 15
    assert aggregator.refusals.counts == {}
    payload = sum(call.message.x.numel() * 4 for call in calls)
    assert payload < aggregator.traffic.down < payload + 20_000
    assert payload < aggregator.traffic.up < payload + 20_000


def test_workers_get_equal_shares_and_each_broadcast_once(aggregator, worker):
    first, second = worker("w1"), worker("w2")
    aggregator.wait_for(set(CLIENTS), 5, workers=2)
    calls = [start_call(CLIENTS), step_call(CLIENTS, 1)]
    check(aggregator.exchange(calls[0]), calls[0])
    assert sorted(row for _, row in first.session.held) == [0, 1, 2]
    assert sorted(row for _, row in second.session.held) == [3, 4]
    check(aggregator.exchange(calls[1]), *calls)
    assert (first.session.computed, second.session.computed) == (6, 4)


def test_data_on_one_worker_are_served_there_and_client_ids_may_repeat(aggregator, worker):
    first, second = worker("w1", ("anna", "bo")), worker("w2", ("bo", "carla"))
    cohort = ("anna", "bo", "bo", "carla")
    aggregator.wait_for(set(cohort), 30)
    call = start_call(cohort)
    check(aggregator.exchange(call), call)
    assert {row for _, row in first.session.held} == {0, 1}
    assert {row for _, row in second.session.held} == {2, 3}


def test_conversations_can_be_interleaved(aggregator, worker, background):
    worker()
    aggregator.wait_for(set(CLIENTS), 30)
    calls = [start_call(CLIENTS, the_key=key(number)) for number in range(4)]
    for call, answers in zip(calls, [background(aggregator.exchange, call) for call in calls], strict=True):
        check(answers.result(10), call)


def test_replies_stream_while_later_rows_are_computed_and_a_lost_row_loses_no_other(aggregator, worker, background):
    served = worker()
    go_on = threading.Event()

    def before(client, exchange):
        if client == "emil":
            go_on.wait(5)
        return {"bo": Lost("no data today"), "carla": Lost("KeyError (m.py, line 3)", is_bug=True)}.get(client)

    served.before = before
    aggregator.wait_for(set(CLIENTS), 30)
    up = aggregator.traffic.up
    call = start_call(CLIENTS)
    answers = background(aggregator.exchange, call)
    until(lambda: aggregator.traffic.up - up > 2 * call.message.x[0].numel() * 4)
    assert not answers.done()
    go_on.set()
    answers = answers.result(10)
    assert answers[1:3] == [Lost("no data today"), Lost("KeyError (m.py, line 3)", is_bug=True)]
    assert all(torch.equal(answers[row].x, expected([call], row)) for row in (0, 3, 4))


def test_dropped_rows_are_not_forwarded(aggregator, worker):
    worker()
    aggregator.wait_for(set(CLIENTS), 30)
    first = start_call(CLIENTS)
    aggregator.exchange(first)
    second = step_call(CLIENTS[1:4], 1, rows=(1, 2, 3))
    check(aggregator.exchange(second), first, second)


def test_a_cut_connection_loses_no_client_and_repeats_no_computation(aggregator, worker, background):
    proxy = Proxy(aggregator.address)
    served = worker(address=proxy.address)
    aggregator.wait_for(set(CLIENTS), 30)
    calls = [start_call(CLIENTS), step_call(CLIENTS, 1)]
    check(aggregator.exchange(calls[0]), calls[0])
    cut = threading.Event()

    def before(client, exchange):
        if client == "carla" and not cut.is_set():
            proxy.cut()
            until(lambda: not aggregator.workers())
            cut.set()

    served.before = before
    check(aggregator.exchange(calls[1]), *calls)
    assert cut.is_set()
    assert len(served.sessions) == 1
    assert served.session.computed == 10
    proxy.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(3))
def test_randomly_cut_connections_change_nothing(aggregator, worker, background, seed):
    """Two workers, three conversations at once, connections cut every few milliseconds: every answer is right."""
    proxies = [Proxy(aggregator.address) for _ in range(2)]
    for i, proxy in enumerate(proxies):
        worker(f"w{i}", address=proxy.address)
    aggregator.wait_for(set(CLIENTS), 30)
    over = threading.Event()

    def cut():
        rng = random.Random(seed)
        while not over.wait(rng.uniform(0.02, 0.2)):
            rng.choice(proxies).cut()

    def converse(number):
        calls = []
        for exchange in range(4):
            make = start_call if exchange == 0 else partial(step_call, exchange=exchange)
            calls.append(make(CLIENTS, deadline_s=30, the_key=key(number)))
            check(aggregator.exchange(calls[-1]), *calls)
        aggregator.close(key(number))

    cutting = background(cut)
    try:
        for conversation in [background(converse, number) for number in range(3)]:
            conversation.result(60)
    finally:
        over.set()
        cutting.result(30)
    assert set(aggregator.refusals.counts) <= {Refusal.LATE}
    for proxy in proxies:
        proxy.close()


@pytest.mark.parametrize("seed", range(2))
def test_connections_cut_every_few_kilobytes_lose_no_client(aggregator, worker, seed):
    """Most cuts happen during an earlier message: only what has arrived may be taken for known."""
    d, calls = 1_000, []
    proxies = [Proxy(aggregator.address, cut_after=30_000, seed=10 * seed + i) for i in range(2)]
    for i, proxy in enumerate(proxies):
        worker(f"w{i}", address=proxy.address, reconnect_s=60)
    aggregator.wait_for(set(CLIENTS), 30)
    while len(calls) < 12 or min(proxy.cuts for proxy in proxies) <= 5:
        assert len(calls) < 100  # the number of cuts depends on which worker serves which client
        make = partial(step_call, exchange=len(calls)) if calls else start_call
        calls.append(make(CLIENTS, deadline_s=60, d=d))
        check(aggregator.exchange(calls[-1]), *calls)
    for proxy in proxies:
        proxy.close()


@pytest.mark.parametrize(
    ("up", "word", "damaged_word"),
    [
        (True, b"w1", b"w3"),  # in the Hello
        (False, b'"name"', b'"nane"'),  # in the Welcome
        (False, b"carla", b"carlb"),  # in a request
        (False, b"train", b"trbin"),
        (True, b"train", b"trbin"),  # in a reply
        (True, b"Sum", b"Sun"),
    ],
)
def test_damaged_frames_are_resent(aggregator, worker, up, word, damaged_word):
    """The damage is well-formed: without a checksum it would be another name, learning rate or client."""
    damaged = []

    def damage(data, upwards):
        if upwards is not up or damaged or word not in data:
            return data
        damaged.append(word)
        return data.replace(word, damaged_word, 1)

    proxy = Proxy(aggregator.address, damage=damage)
    served = worker(address=proxy.address)
    aggregator.wait_for(set(CLIENTS), 10)
    calls = [start_call(CLIENTS, d=10), step_call(CLIENTS, 1, d=10)]
    for i in (1, 2):
        check(aggregator.exchange(calls[i - 1]), *calls[:i])
    assert damaged == [word]
    assert served.joined[0].experiment == '{"name": "toy"}'
    assert served.session.computed == 10
    assert aggregator.refusals.counts == ({Refusal.CHECKSUM: 1} if up else {})
    proxy.close()


def test_complete_transfers_are_not_repeated(aggregator, worker, background):
    proxy = Proxy(aggregator.address)
    served = worker(address=proxy.address)
    aggregator.wait_for(set(CLIENTS), 30)
    calls = [start_call(CLIENTS), step_call(CLIENTS, 1)]
    check(aggregator.exchange(calls[0]), calls[0])
    before = aggregator.traffic.down

    def cut(client, exchange):
        if client == "anna":
            proxy.cut()
            until(lambda: not aggregator.workers())

    served.before = cut
    check(aggregator.exchange(calls[1]), *calls)
    assert aggregator.traffic.down - before < 1.5 * calls[1].message.x.nbytes
    assert served.session.computed == 10
    proxy.close()


def test_a_worker_with_a_failing_session_exits_and_another_takes_over(aggregator, worker):
    failing = worker("w1")
    aggregator.wait_for(set(CLIENTS), 30)

    def before(client, exchange):
        if client == "carla":
            worker("w2")
            raise MemoryError("no room")

    failing.before = before
    call = start_call(CLIENTS)
    check(aggregator.exchange(call), call)
    failing.thread.join(30)
    assert isinstance(failing.error, MemoryError)


def test_a_worker_with_a_failing_stream_exits_and_another_takes_over(aggregator, worker, background, monkeypatch):
    """Without memory for a request, a worker that stays alive would never serve anyone again."""
    failing = worker("w1")
    aggregator.wait_for(set(CLIENTS), 30)

    allocate = codec._small_or_memory

    def none_left(nbytes):
        if threading.current_thread().name == "worker-stream":
            raise RuntimeError("can't allocate memory")
        return allocate(nbytes)

    monkeypatch.setattr(codec, "_small_or_memory", none_left)
    call = start_call(CLIENTS)
    answers = background(aggregator.exchange, call)
    failing.thread.join(30)
    assert not failing.thread.is_alive()
    assert isinstance(failing.error, RuntimeError)
    monkeypatch.undo()
    worker("w2")
    check(answers.result(10), call)


def test_a_request_that_is_too_large_loses_only_its_rows(aggregator, worker, monkeypatch):
    monkeypatch.setattr("fedloom.transport.worker_requests.REQUEST_BYTES", 4 << 20)
    served = worker()
    aggregator.wait_for(set(CLIENTS), 30)
    began = time.monotonic()
    answers = aggregator.exchange(start_call(CLIENTS, deadline_s=30))
    assert time.monotonic() - began < 10
    assert all(isinstance(answer, Lost) for answer in answers)
    assert "4194304 bytes" in answers[0].reason
    aggregator.close(key())
    fewer = start_call(CLIENTS[:2], the_key=key(attempt=1))
    check(aggregator.exchange(fewer), fewer)
    assert len(served.joined) == 1
    assert aggregator.refusals.counts == {}


def test_a_restarted_worker_replays_the_conversation(aggregator, worker):
    calls = [start_call(CLIENTS), step_call(CLIENTS, 1), step_call(CLIENTS, 2)]
    first = worker("w1")
    aggregator.wait_for(set(CLIENTS), 30)
    for i in (1, 2):
        check(aggregator.exchange(calls[i - 1]), *calls[:i])
    first.leave()
    until(lambda: not aggregator.workers())
    again = worker("w1")
    check(aggregator.exchange(calls[2]), *calls)
    assert again.session.computed == 15
    assert aggregator.refusals.counts == {}


def test_another_worker_takes_over_in_the_middle_of_an_exchange(aggregator, worker):
    first, second = worker("w1"), worker("w2")
    aggregator.wait_for(set(CLIENTS), 5, workers=2)
    calls = [start_call(CLIENTS), step_call(CLIENTS, 1)]
    aggregator.exchange(calls[0])

    def before(client, exchange):
        if client == "bo":
            first.stop.set()

    first.before = before
    check(aggregator.exchange(calls[1]), *calls)
    assert second.session.computed > 4


def test_clients_of_a_replaced_worker_are_charged_before_they_are_asked_again(aggregator, worker):
    """The noise of a private answer is a secret of the worker's process: another worker gives another answer."""
    first = worker("w1")
    aggregator.wait_for(set(CLIENTS), 30)
    reported = []
    counted = threading.Event()

    def tell(clients):
        reported.extend(clients)
        counted.set()

    def before(client, exchange):
        if exchange == 0 and client == "bo":
            first.stop.set()

    first.before = before
    call = dataclasses.replace(start_call(CLIENTS), told_again=tell)
    until_joined = threading.Timer(1.0, lambda: worker("w2"))
    until_joined.start()
    check(aggregator.exchange(call), call)
    until_joined.join()
    assert counted.is_set()
    assert set(reported) <= set(CLIENTS)
    assert len(reported) == len(set(reported))
    # A conversation that moves to another worker is replayed there, and earlier answers are not requested again.
    aggregator.exchange(step_call(CLIENTS, 1))
    assert len(reported) == len(set(reported))


def test_a_client_that_cannot_be_charged_is_not_asked_again(aggregator, worker):
    first = worker("w1")
    aggregator.wait_for(set(CLIENTS), 30)

    def full(clients):
        raise StorageError("no room")

    def before(client, exchange):
        if client == "bo":
            first.stop.set()

    first.before = before
    until_joined = threading.Timer(1.0, lambda: second.append(worker("w2")))
    second = []
    until_joined.start()
    with pytest.raises(StorageError, match="no room"):
        aggregator.exchange(dataclasses.replace(start_call(CLIENTS), told_again=full))
    until_joined.join()
    assert second[0].sessions == [] or second[0].session.computed == 0


def test_a_worker_that_lost_the_conversation_requests_a_replay(aggregator, worker):
    served = worker()
    aggregator.wait_for(set(CLIENTS), 30)
    calls = [start_call(CLIENTS), step_call(CLIENTS, 1)]
    aggregator.exchange(calls[0])
    for row in (1, 3):
        del served.session.held[key(), row]
    check(aggregator.exchange(calls[1]), *calls)
    assert served.session.computed == 5 + 3 + 2 * 2


def test_a_restarted_aggregator_starts_a_new_session(worker, aggregator):
    served = worker(reconnect_s=10)
    aggregator.wait_for(set(CLIENTS), 30)
    aggregator.exchange(start_call(CLIENTS, d=10))
    aggregator.stop()
    successor = make_aggregator("a2")
    until(lambda: aggregator._thread is None or not aggregator._thread.is_alive())
    successor.start(aggregator.address)
    try:
        successor.wait_for(set(CLIENTS), 10)
        call = start_call(CLIENTS)
        check(successor.exchange(call), call)
        assert [joined.incarnation for joined in served.joined] == ["a1", "a2"]
    finally:
        successor.stop()


def test_a_worker_past_its_deadline_is_silent_until_it_replies(aggregator, worker):
    """Also if its answer is no longer awaited, and the conversation is closed."""
    served, release = worker(), threading.Event()
    served.before = lambda client, exchange: release.wait(20) and None
    aggregator.wait_for(set(CLIENTS), 30)
    aggregator.exchange(start_call(CLIENTS, deadline_s=1))
    assert aggregator.silence.silent == set(CLIENTS)
    assert 1 <= aggregator.silence.waited_s < 5
    aggregator.close(key())
    time.sleep(0.3)
    assert aggregator.silence.silent == set(CLIENTS)
    release.set()
    until(lambda: not aggregator.silence.silent)
    again = start_call(CLIENTS, the_key=key(attempt=1))
    check(aggregator.exchange(again), again)


def test_a_silent_worker_that_joins_again_is_asked_again(aggregator, worker):
    served, release = worker(), threading.Event()
    served.before = lambda client, exchange: release.wait(20) and None
    aggregator.wait_for(set(CLIENTS), 30)
    aggregator.exchange(start_call(CLIENTS, deadline_s=1))
    assert aggregator.silence.silent == set(CLIENTS)
    aggregator.start_new_session("a2", "{}")  # all streams end
    until(lambda: not aggregator.silence.silent)
    release.set()


def test_the_deadline_loses_only_late_clients(aggregator, worker):
    served = worker()
    slept = threading.Event()

    def before(client, exchange):
        if client == "dai" and not slept.is_set():
            slept.set()
            time.sleep(1.8)  # the request arrived before that: its deadline is past then

    served.before = before
    aggregator.wait_for(set(CLIENTS), 30)
    call = start_call(CLIENTS, deadline_s=1.5)
    began = time.monotonic()
    answers = aggregator.exchange(call)
    assert time.monotonic() - began >= 1.5
    assert all(torch.equal(answers[row].x, expected([call], row)) for row in (0, 1, 2))
    assert [(type(answer), tells(answer.reason, "no answer", "1.5 s")) for answer in answers[3:]] == [(Lost, True)] * 2
    aggregator.close(key())
    again = start_call(CLIENTS, the_key=key(attempt=1))
    check(aggregator.exchange(again), again)
    assert set(aggregator.refusals.counts) <= {Refusal.LATE}
    assert served.session.computed == 4 + 5, "a worker does not go on with what nobody waits for"


def test_the_deadline_ends_an_exchange_without_workers(aggregator):
    answers = aggregator.exchange(start_call(CLIENTS, d=10, deadline_s=0.1))
    assert all(isinstance(answer, Lost) for answer in answers)


def test_an_exchange_waits_for_a_worker_to_connect(aggregator, worker, background):
    call = start_call(CLIENTS, deadline_s=None)
    answers = background(aggregator.exchange, call)
    worker()
    check(answers.result(10), call)


def test_clients_without_a_worker_are_reported_with_their_deadline(worker, aggregator, background):
    output: list[str] = []
    ours = make_aggregator(say=output.append)
    address = ours.start("127.0.0.1:0")
    served = worker(address=address)
    ours.wait_for(set(CLIENTS), 30)
    busy, release = threading.Event(), threading.Event()

    def hold(client, exchange):
        busy.set()
        release.wait(10)

    served.before = hold
    call = start_call(CLIENTS, d=10, deadline_s=15)
    answers = background(ours.exchange, call)
    assert busy.wait(10)
    assert not output, "nothing while all is well"
    served.stop.set()
    release.set()
    until(lambda: output)
    assert "w1" in output[0], "who left"
    assert "of 5 clients" in output[0]
    assert "deadline_s" in output[0]
    worker("w2", address=address)
    check(answers.result(10), call)
    assert len(output) == 2, output
    ours.stop()


def test_an_unreachable_aggregator_is_logged_once_and_then_rarely(worker, caplog, monkeypatch):
    monkeypatch.setattr("fedloom.transport.absence.FIRST_NOTICE_S", 0.4)
    with caplog.at_level(logging.INFO, "fedloom.transport.worker"):
        alone = worker(address="127.0.0.1:1", reconnect_s=1.5)
        alone.thread.join(10)
    reported = [record.getMessage() for record in caplog.records if "127.0.0.1:1" in record.getMessage()]
    assert 2 <= len(reported) <= 3, reported
    assert "still trying" in reported[1]
    for text in (*reported, str(alone.error)):
        assert not re.search("UNAVAILABLE|ipv4:|last error", text), text


def test_an_address_without_an_aggregator_is_reported_in_one_sentence(worker):
    class Web(http.server.BaseHTTPRequestHandler):
        """An HTTP server in place of an aggregator."""

    server = http.server.HTTPServer(("127.0.0.1", 0), Web)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    lost = worker(address=f"127.0.0.1:{server.server_port}", reconnect_s=0.3)
    lost.thread.join(10)
    assert isinstance(lost.error, AbandonedError)
    assert "not a FedLoom aggregator" in str(lost.error)
    server.shutdown()
    server.server_close()


def test_clients_without_a_worker_are_named(aggregator, worker):
    worker("w1", ("anna",))
    aggregator.wait_for({"anna"}, 30)
    with pytest.raises(QuorumError, match=r"2 of 3 clients: bo, carla .*w1"):
        aggregator.wait_for({"anna", "bo", "carla"}, 0.05)


def test_waiting_for_too_many_workers_times_out_or_stops(aggregator, worker, background):
    worker("w1")
    with pytest.raises(QuorumError, match="1 of 2 workers"):
        aggregator.wait_for(set(CLIENTS), 1, workers=2)
    waiting = background(aggregator.wait_for, {"nobody"}, 60)
    aggregator.stop()
    with pytest.raises(QuorumError, match="stopped"):
        waiting.result(30)
    assert aggregator.exchange(start_call(CLIENTS, d=10)) == [Lost("the aggregator stopped")] * 5
    aggregator.close(key())


def test_exchanges_out_of_order_raise_an_error(aggregator, worker):
    worker()
    aggregator.wait_for(set(CLIENTS), 30)
    with pytest.raises(ValueError, match="not open"):
        aggregator.exchange(step_call(CLIENTS, 1, d=10))
    aggregator.exchange(start_call(CLIENTS, d=10))
    with refusing(ValueError, "exchange 2", "exchange 0"):
        aggregator.exchange(step_call(CLIENTS, 2, d=10))
    aggregator.close(key())
    aggregator.close(key())


def test_a_taken_port_is_reported(aggregator):
    port = aggregator.address.rsplit(":", 1)[1]
    with pytest.raises(ExperimentError, match=f"port {port} is taken") as caught:
        make_aggregator().start(aggregator.address)
    assert caught.value.exit_code == ExitCode.EXPERIMENT


def test_an_invalid_port_is_reported():
    with pytest.raises(ExperimentError, match=r"HOST:PORT.*127\.0\.0\.1:99999"):
        make_aggregator().start("127.0.0.1:99999")


@pytest.mark.parametrize(
    ("change", "output"),
    [
        ({"algorithms": {"toy": 0}}, ["toy", "0", "1", "install fedloom"]),
        ({"algorithms": {}}, ["toy"]),
    ],
)
def test_a_client_of_another_version_is_rejected(aggregator, worker, change, output):
    refused = worker(**change)
    refused.thread.join(30)
    assert isinstance(refused.error, RefusedError)
    assert tells(str(refused.error), "algorithm", *output)
    assert aggregator.refusals.counts == {Refusal.HELLO: 1}


def test_a_second_worker_with_the_same_name_waits(aggregator, worker):
    first = worker("w1")
    aggregator.wait_for(set(CLIENTS), 30)
    second = worker("w1", reconnect_s=30)
    until(lambda: aggregator.refusals.counts.get(Refusal.NAME, 0) >= 3)
    calls = [start_call(CLIENTS, d=10), step_call(CLIENTS, 1, d=10)]
    check(aggregator.exchange(calls[0]), calls[0])
    assert first.session.computed == 5
    assert second.error is None
    first.leave()
    check(aggregator.exchange(calls[1]), *calls)
    assert second.session.computed == 10


def test_workers_beyond_the_join_limit_retry(worker, monkeypatch):
    monkeypatch.setattr("fedloom.transport.worker_streams.JOINS", (1.5, 0.25))  # a Hello costs 1, and its bytes
    aggregator = make_aggregator()
    address = aggregator.start("127.0.0.1:0")
    first = worker("w1", address=address)
    aggregator.wait_for(set(CLIENTS), 30)
    second = worker("w2", address=address, reconnect_s=30)
    until(lambda: aggregator.refusals.counts.get(Refusal.JOINS, 0) >= 2)
    assert aggregator.refusals.counts.keys() == {Refusal.JOINS}
    assert [w.name for w in aggregator.workers()] == ["w1"]
    aggregator.wait_for(set(CLIENTS), 30, workers=2)
    assert (first.error, second.error) == (None, None)
    aggregator.stop()


def test_the_cost_of_a_join_does_not_depend_on_other_clients():
    """Do not check each client of each connected worker, which would be ten times as expensive for 10,000."""

    def join_and_leave(clients: int) -> int:
        ids = [f"c{i}" for i in range(clients)]
        connected = ConnectedWorkers(ids)

        def info(name, its):
            return WorkerInfo(name, "i", Clients(connected.index, its), "cpu")

        for i in range(20):
            connected.change(info(f"w{i}", ids), None)
        one = info("new", ids[:1])

        def come_and_go():
            connected.change(one, None)
            connected.change(None, one)

        come_and_go()
        assert connected.unserved(ids) == ()
        return lines_run(come_and_go)

    assert join_and_leave(10_000) < 2 * join_and_leave(1_000)


def test_a_restarted_worker_joins_though_its_old_stream_is_half_open(worker, monkeypatch):
    """End the stream of a vanished machine by keepalive, the only way to detect it."""
    often = {"grpc.keepalive_time_ms": 500, "grpc.keepalive_timeout_ms": 500, "grpc.http2.ping_timeout_ms": 500}
    options = tuple({**dict(SERVER_OPTIONS), **often}.items())
    monkeypatch.setattr("fedloom.transport.aggregator.SERVER_OPTIONS", options)
    aggregator = make_aggregator()
    proxy = Proxy(aggregator.start("127.0.0.1:0"))
    worker("w1", address=proxy.address)
    aggregator.wait_for(set(CLIENTS), 30)
    proxy.freeze()
    again = worker("w1", address=f"127.0.0.1:{proxy.target[1]}")
    until(lambda: again.joined, 20)
    call = start_call(CLIENTS, d=10)
    check(aggregator.exchange(call), call)
    assert again.session.computed == 5
    proxy.close()
    aggregator.stop()


def test_a_lost_stream_is_reported_as_lost_and_not_as_a_failed_connection(aggregator, worker, caplog):
    with caplog.at_level(logging.INFO, "fedloom.transport.worker"):
        alone = worker(reconnect_s=0.5)
        aggregator.wait_for(set(CLIENTS), 30)
        aggregator.stop()
        alone.thread.join(20)
    reported = [record.getMessage() for record in caplog.records if aggregator.address in record.getMessage()]
    assert [line.split(" at ")[0] for line in reported[:2]] == ["joined run run-1", "lost the aggregator"]


def test_a_stopped_aggregator_ends_its_workers(worker):
    began = time.monotonic()
    alone = worker(address="127.0.0.1:1", reconnect_s=0.3)
    alone.thread.join(30)
    assert isinstance(alone.error, AbandonedError)
    assert "127.0.0.1:1 for 0.3 s" in str(alone.error)
    assert time.monotonic() - began < 3


def test_workers_leave_at_the_end_of_a_run(aggregator, worker):
    served = worker()
    aggregator.wait_for(set(CLIENTS), 30)
    aggregator.stop(finished=True)
    served.thread.join(30)
    assert not served.thread.is_alive()
    assert served.error is None


@pytest.mark.parametrize("resumed", [False, True])
def test_a_worker_that_connects_at_the_end_of_a_run_is_notified(worker, background, monkeypatch, resumed):
    """A worker that lost its connection, to this aggregator or the previous one, learns of the end."""
    monkeypatch.setattr("fedloom.transport.connected.LINGER_S", 3.0 if resumed else 60.0)
    monkeypatch.setattr("fedloom.transport.absence.LAST_BACKOFF_S", 0.2)
    aggregator = make_aggregator()
    address = aggregator.start("127.0.0.1:0")
    proxy = Proxy(address)
    served = worker(address=proxy.address, reconnect_s=60)
    aggregator.wait_for(set(CLIENTS), 30)
    there, proxy.target = proxy.target, ("127.0.0.1", 1)
    proxy.cut()
    until(lambda: not aggregator.workers())
    if resumed:
        aggregator.stop()
        aggregator = make_aggregator("a2")
        aggregator.start(address)
    aggregator.shutdown_workers(finished=True)
    waiting = background(aggregator.drain, resumed)
    proxy.target = there
    waiting.result(30)
    aggregator.stop(finished=True)
    served.thread.join(10)
    assert served.over is True
    proxy.close()


def test_shutdown_returns_once_every_worker_is_notified(aggregator, worker):
    served = worker()
    aggregator.wait_for(set(CLIENTS), 30)
    began = time.monotonic()
    aggregator.shutdown_workers(finished=True)
    served.thread.join(10)
    aggregator.drain(resumed=False)
    assert time.monotonic() - began < 5
    assert served.over is True


def test_stopping_ends_a_waiting_exchange(aggregator, background):
    answers = background(aggregator.exchange, start_call(CLIENTS, d=10, deadline_s=None))
    until(lambda: aggregator.activity().awaited)
    aggregator.stop()
    assert answers.result(30) == [Lost("the aggregator stopped")] * 5


def test_health_and_reflection(aggregator):
    with grpc.insecure_channel(aggregator.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "fedloom.v1.Federation"):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        (answer,) = stub.ServerReflectionInfo(iter([request]), timeout=5)
        assert "fedloom.v1.Federation" in {service.name for service in answer.list_services_response.service}


def test_a_worker_reconnects_after_the_aggregator_changes(aggregator) -> None:
    """Otherwise it keeps the previous session, and never answers."""
    peers = [Hostile(aggregator.address, f"w{i}", clients=("anna",)) for i in range(12)]
    last = ""
    with ThreadPoolExecutor(len(peers)) as threads:
        try:
            reported = [threads.submit(peer.join) for peer in peers]
            everyone = False
            while not everyone:
                everyone = all(each.done() for each in reported)
                last = f"a{time.monotonic_ns()}"
                aggregator.start_new_session(last, "new")
            stale = [
                threads.submit(peer.status)
                for peer, first in zip(peers, reported, strict=True)
                if first.result().welcome.incarnation != last
            ]
            assert stale
            assert {each.result(10) for each in stale} == {(grpc.StatusCode.OK, "")}
        finally:
            for peer in peers:
                peer.leave()


def test_members_are_told_the_standing_before_later_requests():
    """Tell the best round right after an evaluation, and at the end what changed last."""
    monitor = Monitor("run", "toy", 9, "a1")
    aggregator = make_aggregator(monitor=monitor)
    serving = Worker(aggregator.start("127.0.0.1:0"), "w", CLIENTS)
    try:
        aggregator.wait_for(CLIENTS, 30)
        until(lambda: serving.told)
        assert (serving.told[0].phase, serving.told[0].rounds, serving.told[0].best_round) == ("waiting", 9, None)
        monitor.evaluated({"round": 4}, 4)
        aggregator.exchange(start_call(CLIENTS))
        assert serving.told[-1].best_round == 4
        monitor.enter("finished")
        aggregator.stop(finished=True)
        until(lambda: serving.over)
    finally:
        aggregator.stop()
        serving.leave()
    assert (serving.told[-1].phase, serving.told[-1].best_round) == ("finished", 4)


def test_a_standing_that_cannot_be_read_breaks_the_connection(aggregator, worker, monkeypatch, caplog):
    monkeypatch.setattr(Standing, "to_json", lambda self: '{"phase": "asleep"}')
    with caplog.at_level(logging.INFO, "fedloom"):
        serving = worker()
        until(lambda: "a standing that cannot be read" in caplog.text)
    assert not serving.told
