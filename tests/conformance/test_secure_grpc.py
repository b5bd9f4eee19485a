"""Secure sums over real gRPC streams, with killed workers and aggregators and cut connections."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
from conformance_kit import Faulty, Federation, Killed, assert_equal_but_for_traffic, same_bits, state
from ports import free_address
from test_grpc import aggregator_of, make_aggregator, work
from test_secure_conformance import (
    AT,
    MEMBERS,
    SUMMED_ALREADY,
    at,
    calls_of,
    disturbed,
    of_sum,
    rounds_of,
    training,
)
from transport_support import Proxy

from fedloom.federation.transport import Call
from fedloom.sums.messages import KeyRoster, ShareDelivery
from fedloom.transport.aggregator import Aggregator


class Member:
    """Worker in a thread. A successor of the same name has none of its conversations."""

    def __init__(self, wire: Wire, name: str, clients: Sequence[str], address: str) -> None:
        self._stop = threading.Event()
        given = (wire.tiny, name, clients, address, wire.tiny.tmp / wire.name / "states", self._stop)
        self._thread = threading.Thread(target=work, args=given, daemon=True)
        self._thread.start()

    def kill(self) -> None:
        """End the worker without notifying the aggregator."""
        self._stop.set()
        self._thread.join(10)
        assert not self._thread.is_alive()


class Wire:
    """An aggregator, which may be replaced by another at the same address, and its workers."""

    def __init__(self, tiny: Federation, name: str) -> None:
        self.tiny, self.name = tiny, name
        self.everyone = [entry.id for entry in tiny.dataset.manifest.clients]
        self.address = free_address()
        self._incarnations = 0
        self.members: dict[str, Member] = {}
        self.server = self.aggregator()

    def aggregator(self) -> Aggregator:
        """Start an aggregator without the conversations of an earlier one."""
        self._incarnations += 1
        self.server = make_aggregator(self.tiny, f"a{self._incarnations}")
        self.server.start(self.address)
        return self.server

    def member(self, name: str, clients: Sequence[str], address: str | None = None) -> None:
        self.members[name] = Member(self, name, clients, address or self.address)

    def ready(self) -> None:
        self.server.wait_for(self.everyone, 30.0, len(self.members))

    def close(self) -> None:
        self.server.stop(finished=True)
        for member in self.members.values():
            member.kill()


@contextlib.contextmanager
def wire_of(tiny: Federation, name: str, client: str, through: Callable[[str], str] | None = None) -> Iterator[Wire]:
    """Yield a wire whose worker ``alone`` serves one client, and another all others."""
    wire = Wire(tiny, name)
    try:
        wire.member("alone", [client], through(wire.address) if through else None)
        wire.member("others", [other for other in wire.everyone if other != client])
        wire.ready()
        yield wire
    finally:
        wire.close()


def once(call: Call, act: Callable[[], None]) -> Callable[[Call], None]:
    """Return a callback that acts once, before the first attempt's exchange of this number."""
    left = [act]

    def before(other: Call) -> None:
        here = (other.key.conversation, other.exchange) == (call.key.conversation, call.exchange)
        if training(other) and other.key.attempt == 1 and here and left:
            left.pop()()

    return before


def sums_of(tiny: Federation) -> tuple[Federation, list[Call], str]:
    """Return the federation under secure aggregation, the exchanges of its sum, and a client of the cohort."""
    secure = disturbed(tiny)
    calls = of_sum(calls_of(secure, "whole"))
    assert len(calls[0].clients) == MEMBERS
    return secure, calls, calls[0].clients[1]


@pytest.mark.parametrize("workers", [1, 2])
def test_grpc_gives_the_bits_of_one_process(tiny: Federation, summed: str, workers: int) -> None:
    secure = disturbed(tiny)
    secure.recorded("whole")
    with aggregator_of(secure, secure.tmp / "wire" / "states", workers) as server:
        secure.run("wire", server)
        assert len(server.workers()) == workers
    assert_equal_but_for_traffic(secure, "wire", "whole")


def test_a_worker_killed_at_a_step_is_restarted(tiny: Federation, summed: str) -> None:
    """The worker has lost its secrets: once its keys are known its client is lost, once it has answered it is summed.

    The others are the survivors: results equal those of one process that loses the same client there. The first and the
    last of these runs are evaluated, and all if clients keep states, which only an evaluation shows.
    """
    secure, calls, client = sums_of(tiny)
    secure.trained("advanced")
    for call in calls:
        name = f"killed-{call.exchange}"
        measured = secure.parts.client_algorithm().stateful or call in (calls[0], calls[-1])
        run, whole = (secure.run, "whole") if measured else (secure.advance, "advanced")
        with wire_of(secure, name, client) as wire:

            def start_again(wire: Wire = wire) -> None:
                wire.members["alone"].kill()
                wire.member("alone", [client])
                wire.ready()

            run(name, Faulty(wire.server, before=once(call, start_again)))
        (attempt,) = (a for a in rounds_of(secure, name) if a.round == AT)
        lost = [(loss.client, loss.exchange) for loss in attempt.conversations[call.key.conversation].lost]
        if isinstance(call.message, (KeyRoster, ShareDelivery)):
            assert lost == [(client, call.exchange)]
            run(f"{name}-alike", Faulty(secure.transport(f"{name}-alike"), at(call, 1)))
            assert_equal_but_for_traffic(secure, name, f"{name}-alike")
            run(f"{name}-replayed", replay=name)
            assert_equal_but_for_traffic(secure, f"{name}-replayed", name)
        else:
            assert lost == []
            assert_equal_but_for_traffic(secure, name, whole)


def test_cutting_a_workers_connection_at_every_step_loses_nothing(tiny: Federation, summed: str) -> None:
    secure, _, client = sums_of(tiny)
    proxies: list[Proxy] = []

    def through(address: str) -> str:
        proxies.append(Proxy(address))
        return proxies[0].address

    with wire_of(secure, "cut", client, through) as wire:
        secure.run("cut", Faulty(wire.server, before=lambda call: proxies[0].cut() if training(call) else None))
    assert not any(c.lost for a in rounds_of(secure, "cut") for c in a.conversations)
    assert_equal_but_for_traffic(secure, "cut", "whole")


def test_an_aggregator_killed_during_a_secure_sum_is_resumed(tiny: Federation, summed: str) -> None:
    """The attempt is lost; the workers, which hold answers for it, start a new one with the next aggregator."""
    secure, calls, client = sums_of(tiny)

    def die() -> None:
        raise Killed

    for call in calls[1:]:
        name = f"aggregator-{call.exchange}"
        with wire_of(secure, name, client) as wire:
            with pytest.raises(Killed):
                secure.run(name, Faulty(wire.server, before=once(call, die)))
            wire.server.stop()
            loop = secure.loop(name, wire.aggregator())
            wire.ready()
            loop.resume()
            loop.run()
        assert_equal_but_for_traffic(secure, name, "whole")
        assert len(rounds_of(secure, name)) == len(rounds_of(secure, "whole"))
        assert not any(c.lost for a in rounds_of(secure, name) for c in a.conversations)


def test_the_sum_includes_a_worker_absent_at_its_end(tiny: Federation, summed: str) -> None:
    """The deadline passes without the worker; the sum still includes its answer."""
    secure, calls, client = sums_of(tiny)
    short = secure.changed(federation__deadline_s=2.0)
    call = next(call for call in calls if isinstance(call.message, SUMMED_ALREADY))
    with wire_of(short, "away", client) as wire:
        loop = short.loop("away", Faulty(wire.server, before=once(call, lambda: wire.members["alone"].kill())))
        loop.run()  # the evaluation lacks the client
    whole = secure.loop("whole")
    whole.resume()
    assert same_bits(state(loop), state(whole))
    (attempt,) = (a for a in rounds_of(short, "away") if a.round == AT)
    assert attempt.conversations[call.key.conversation].lost == []
