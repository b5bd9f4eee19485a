"""nginx and Envoy between workers and aggregator, restarted in the middle of rounds, also with faulty connections."""

from __future__ import annotations

import shutil
import time
from contextlib import ExitStack, closing
from functools import partial
from random import Random

from proxies import ReverseProxy

from faults.cuts import METHODS, PROMISE
from faults.kills import Federation
from faults.place import Place
from faults.proxy import Proxy, Weather
from faults.table import Fault, Tried

CALM = Weather()
SECTIONS = {"ended there": "TLS termination", "passed on": "TLS passthrough"}
"""Suffixes of the headings in docs/running-a-federation.md, by ``how``."""


def behind(place: Place, random: Random, how: str, weather: Weather = CALM, restarts: int = 0) -> Tried:
    """Start a federation whose workers reach the aggregator through nginx or Envoy.

    Parameters
    ----------
    how
        ``ended there``: TLS and tokens to the proxy; ``passed on``: mutual TLS through it.
    weather
        Faults of the connection between workers and the proxy.
    restarts
        Number of times the proxy is killed and started, or reloaded.
    """
    kind = random.choice(("nginx", "Envoy"))
    experiment = place.experiment(random.choice(METHODS), rounds=20)
    proxies: list[ReverseProxy] = []
    lines: list[Proxy] = []
    done = 0
    with ExitStack() as stack:

        def proxied(run: Federation) -> str:
            assert run.members is not None
            folder = place.new()
            shutil.copytree(run.members / "aggregator", folder / "fl")
            changes = {"shutdown_timeout 30s": "shutdown_timeout 200ms"} if kind == "nginx" else None
            proxies.append(ReverseProxy(f"{kind}, {SECTIONS[how]}", folder, run.listen, changes))
            stack.callback(proxies[0].end)
            lines.append(stack.enter_context(closing(Proxy(proxies[0].address, weather, Random(random.random())))))
            return lines[0].address

        run = Federation(
            place, experiment, stack, through=proxied, secure=how == "passed on", ended=how == "ended there"
        )
        while done < restarts and not run.over():
            time.sleep(random.uniform(0.05, 0.4))
            if kind == "nginx" and random.random() < 0.5:
                proxies[0].reload()
            else:
                proxies[0].restart()
            done += 1
        run.finish()
        for name in ("worker-0", "worker-1"):
            run.processes[name].wait(0)
    place.check(run.out, experiment)
    return Tried(done + lines[0].cuts + lines[0].flips or 1)


def cut(place: Place, random: Random, how: str) -> Tried:
    """Cut the connection to the proxy at any byte."""
    return behind(place, random, how, Weather(cut_every=random.uniform(5e4, 1.5e5)))


def half_open(place: Place, random: Random, how: str) -> Tried:
    """Close one direction of the connection."""
    return behind(place, random, how, Weather(cut_every=random.uniform(1e5, 3e5), half=0.7))


def slow(place: Place, random: Random, how: str) -> Tried:
    """Make the connection slow and narrow."""
    return behind(place, random, how, Weather(delay_s=random.uniform(0.001, 0.01), rate=random.choice((0.0, 2e6))))


def flip(place: Place, random: Random, how: str) -> Tried:
    """Flip bits on the connection."""
    return behind(place, random, how, Weather(flip_every=random.uniform(5e4, 3e5), faults=40))


def restart(place: Place, random: Random, how: str) -> Tried:
    """Kill and start the proxy, or reload it, in the middle of rounds."""
    return behind(place, random, how, restarts=random.randint(2, 6))


FAULTS = tuple(
    Fault(
        f"proxy-{name}-{'ended' if how == 'ended there' else 'passed'}",
        "proxies",
        f"TLS {'terminated' if how == 'ended there' else 'passed through'} by nginx or Envoy: {fault}",
        PROMISE,
        partial(trial, how=how),
        goal=goal,
        short=int((name, how) == ("restart", "ended there")),
    )
    for name, fault, trial, goal in (
        ("restart", "the proxy is killed or reloaded in the middle of rounds", restart, 8),
        ("cut", "the connection to it is cut at any byte", cut, 8),
        ("half-open", "one direction of the connection to it is closed", half_open, 4),
        ("slow", "the connection to it is slow and has little bandwidth", slow, 3),
        ("flip", "a bit is flipped on the connection to it", flip, 4),
    )
    for how in ("ended there", "passed on")
)
