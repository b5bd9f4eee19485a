"""Connections that are cut, slow, half open or damaged: results are unchanged, and no client is lost."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from random import Random

from faults.kills import Federation
from faults.place import Place
from faults.proxy import Proxy, Weather
from faults.table import Fault, Tried
from fedloom.runs.folder import RunFolder

METHODS = ("pefll", "pefll", "fedrep")
"""Three exchanges in a conversation; clients that keep a state."""


def through(
    place: Place,
    random: Random,
    weather: Weather,
    methods: Sequence[str] = METHODS,
    rounds: int = 12,
    *,
    secure: bool = False,
) -> Tried:
    """Start a federation whose workers reach the aggregator through a proxy."""
    experiment = place.experiment(random.choice(methods), rounds=rounds)
    made: list[Proxy] = []
    with ExitStack() as stack:

        def proxied(run: Federation) -> str:
            made.append(stack.enter_context(closing(Proxy(run.listen, weather, Random(random.random())))))
            return made[0].address

        run = Federation(place, experiment, stack, through=proxied, secure=secure)
        run.finish()
        for name in ("worker-0", "worker-1"):  # they learn of the end even if their connection is cut just then
            run.processes[name].wait(0)
    (proxy,) = made
    place.check(run.out, experiment)
    refused = sum(n for line in RunFolder(run.out).lines("journal.jsonl") for n in line["refused"].values())
    return Tried(proxy.cuts + proxy.flips or 1, {"refused": refused} if weather.flip_every else {})


def cut(place: Place, random: Random, secure: bool = False) -> Tried:
    """Run PeFLL, whose first messages take 100 kB, with a cut for every 50 to 150 kB."""
    weather = Weather(cut_every=random.uniform(5e4, 1.5e5))
    return through(place, random, weather, ("pefll",), rounds=20, secure=secure)


def half_open(place: Place, random: Random, secure: bool = False) -> Tried:
    """Close one direction while the other continues."""
    return through(place, random, Weather(cut_every=random.uniform(1e5, 3e5), half=0.7), secure=secure)


def slow(place: Place, random: Random, secure: bool = False) -> Tried:
    """Delay every block, with some narrow connections."""
    weather = Weather(delay_s=random.uniform(0.001, 0.02), rate=random.choice((0.0, 2e6)))
    return through(place, random, weather, rounds=6, secure=secure)


def flip(place: Place, random: Random, secure: bool = False) -> Tried:
    """Flip bits in headers, envelopes, tensors and handshakes."""
    return through(place, random, Weather(flip_every=random.uniform(5e4, 3e5), faults=40), secure=secure)


PROMISE = "results are bit-identical; no client is lost"
FAULTS = (
    Fault("cut", "connections", "a connection is cut at any byte (PeFLL)", PROMISE, cut, goal=60, short=1),
    Fault("half-open", "connections", "one direction of a connection is closed", PROMISE, half_open, goal=10),
    Fault("slow", "connections", "a connection is slow and has little bandwidth", PROMISE, slow, goal=5),
    Fault("flip", "connections", "a bit is flipped in transit", PROMISE, flip, goal=20, short=1),
    *(
        Fault(f"{name}-tls", "tls", f"{fault}, over mutual TLS", PROMISE, partial(trial, secure=True), goal=goal)
        for name, fault, trial, goal in (
            ("cut", "a connection is cut at any byte (PeFLL)", cut, 40),
            ("half-open", "one direction of a connection is closed", half_open, 8),
            ("slow", "a connection is slow and has little bandwidth", slow, 4),
            ("flip", "a bit is flipped in transit", flip, 8),
        )
    ),
)
