"""What a federation is doing, asked over real sockets, and how it is controlled."""

from __future__ import annotations

import threading

import pytest
from transport_support import Worker, key, make_aggregator, start_call, until

CLIENTS = ("anna", "bo", "carla")


def test_an_aggregator_tells_who_is_connected_and_who_is_awaited() -> None:
    aggregator = make_aggregator()
    with pytest.raises(RuntimeError):
        aggregator.activity()
    address = aggregator.start("127.0.0.1:0")
    go_on = threading.Event()
    worker = Worker(address, "w1", CLIENTS)
    worker.before = lambda client, exchange: None if client == "anna" else go_on.wait(30) and None
    aggregator.wait_for(CLIENTS, 10)
    asking = threading.Thread(target=aggregator.exchange, args=(start_call(CLIENTS, 60.0),))
    asking.start()
    until(lambda: aggregator.activity().awaited == 2)  # anna has answered; bo is at work, carla waits for her turn
    now = aggregator.activity()
    assert [(each.client, each.worker) for each in now.awaiting] == [("bo", "w1"), ("carla", "w1")]
    (told,) = now.workers
    assert (told.name, told.identity, told.clients) == ("w1", None, 3)
    assert told.since <= now.time
    assert now.totals.bytes_down > 0
    go_on.set()
    asking.join(30)
    assert aggregator.activity().awaited == 0
    worker.leave()
    until(lambda: not aggregator.activity().workers)
    asking = threading.Thread(target=aggregator.exchange, args=(start_call(CLIENTS, 1.0, the_key=key(1)),))
    asking.start()
    until(lambda: aggregator.activity().late == 3)  # nobody serves them
    assert all(each.worker is None and each.deadline is not None for each in aggregator.activity().awaiting)
    asking.join(30)
    aggregator.stop()
    with pytest.raises(RuntimeError):
        aggregator.activity()
