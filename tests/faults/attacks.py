"""An honest federation beside a hostile peer: it ends with the same bits, and the cost is measured."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random

from run_processes import losses, rounds

from faults import peers
from faults.kills import Federation
from faults.peers import Attack
from faults.place import Broken, Place, Running, wait_until
from faults.table import Fault, Tried
from fedloom.runs.checkpoint import Checkpoints
from fedloom.runs.folder import RunFolder
from fedloom.security.certificates import make_certificate
from fedloom.security.options import ClientOptions

ROUNDS = 30
GROWTH_MB = 150.0
LOG_KB = 1_000.0
PAUSE_S = 15.0
"""The longest that no round ends."""
FILES = 1024
"""Open files that the aggregator is allowed, as most machines have it."""


def attacked(
    place: Place,
    random: Random,
    attack: Callable[[Attack], None],
    *,
    exact: bool = True,
    may_fail: bool = False,
    deadline_s: float = 300.0,
    secure: bool = False,
) -> Tried:
    """Run beside an attack.

    Parameters
    ----------
    exact
        Require the undisturbed bits, or those of the replay of its journal if rows went to the peer; otherwise the
        peer's messages may count as answers, and must leave a finite state.
    may_fail
        The run may end for lack of answers (5); it is resumed without the peer.
    secure
        Over mutual TLS, with a certificate for the peer.
    """
    experiment = place.experiment("fedavg", every=20, rounds=ROUNDS, deadline_s=deadline_s)
    with ExitStack() as stack:
        run = Federation(place, experiment, stack, workers=1, files=FILES, secure=secure)
        wait_until(lambda: rounds(run.out) >= 1, "the first round")
        before, memory, descriptors = run.aggregator.memory_mb(), 0.0, 0
        identity = None if run.members is None else member(run.members, "mallory")
        given = Attack(run.address, Random(random.random()), str(place.partition), place.clients, identity)
        attacker = threading.Thread(target=attack, args=(given,), daemon=True)
        attacker.start()
        started = changed = time.monotonic()
        first = done = rounds(run.out)
        pause_s = 0.0
        run.final = (0, 5) if may_fail else (0,)
        try:
            while not run.over():
                memory = max(memory, _looked(run.aggregator.memory_mb))
                descriptors = max(descriptors, int(_looked(run.aggregator.descriptors)))
                now = time.monotonic()
                if done < ROUNDS:  # then it waits to notify peers that lost their connection
                    pause_s = max(pause_s, now - changed)
                if rounds(run.out) != done:
                    done, changed = rounds(run.out), now
                if pause_s > PAUSE_S:
                    raise Broken(f"nothing happened after round {done} for {PAUSE_S:g} s")
                time.sleep(0.02)
        finally:
            given.stop.set()
            attacker.join(20)
        speed = (done - first) / max(changed - started, 0.02)
        run.final, run.tolerated = (0,), (5,) if may_fail else ()
        run.finish()  # without the peer
        log = sum(path.stat().st_size for path in _logs(run.out, run.aggregator)) / 1000
    if exact:
        place.check(run.out, experiment, nobody_lost=False)
    finite(run.out)
    if memory - before > GROWTH_MB or log > LOG_KB:
        raise Broken(f"memory grew by {memory - before:.0f} MB, and the log to {log:,.0f} kB")
    measured = {
        "MB more": max(0.0, memory - before), "descriptors": descriptors, "log kB": log, "least rounds/s": speed,
        "longest pause s": pause_s, "rows lost": len(losses(run.out)),
    }  # fmt: skip
    return Tried(int(given.done.is_set()), measured)


def member(folder: Path, name: str) -> ClientOptions:
    """Create a certificate of a federation's authority in its folder."""
    made = make_certificate(name, folder, folder)
    return ClientOptions(ca=folder / "ca.crt", certificate=made.certificate, key=made.key)


def _looked(look: Callable[[], float]) -> float:
    try:
        return look()
    except OSError:  # it has just ended
        return 0


def _logs(out: Path, aggregator: Running) -> list[Path]:
    return [out / "logs" / "aggregator.jsonl", aggregator.said_in]


def finite(run: Path) -> None:
    """Check that a run's checkpoint, journal and summary contain only finite numbers."""
    state = Checkpoints(run / "checkpoints").load().state
    for name, tensor in state.items():
        if not bool(tensor.isfinite().all()):
            raise Broken(f"{name} of the last checkpoint is not finite")
    if RunFolder(run).lines("journal.jsonl").unreadable or RunFolder(run).lines("metrics.jsonl").unreadable:
        raise Broken("lines of the journal or of the metrics cannot be read")
    json.loads((run / "summary.json").read_text(), parse_constant=_refuse)


def _refuse(constant: str) -> None:
    raise Broken(f"summary.json holds {constant}")


def _fault(name: str, fault: str, promise: str, attack: Callable[[Attack], None], **options: object) -> Fault:
    trial = partial(attacked, attack=attack, **options)  # type: ignore[arg-type]
    short = int(name in ("wrong-class", "reasons", "stolen", "stale"))
    return Fault(name, "peers", fault, promise, trial, goal=20, short=short)


def _over_tls(fault: Fault) -> Fault:
    """Return a fault as caused by a peer that has an identity."""
    told = f"{fault.fault}, by a peer with a certificate"
    return Fault(f"{fault.name}-tls", "tls", told, fault.promise, partial(fault.trial, secure=True), goal=3)


SAME = "results are bit-identical; memory, descriptors and log stay bounded"
REPLAYED = "refused, or the client is recorded as lost; the replay of the journal is bit-identical"
FINITE = "refused, or the state stays finite; the run can be resumed"
PLAIN = (
    _fault("wrong-class", "answers of the wrong class", REPLAYED, peers.wrong_class),
    _fault(
        "absurd-counts", "steps, losses and metrics of 1.7e308, -1.7e308, 0.5", FINITE, peers.absurd_counts,
        exact=False, may_fail=True,
    ),
    _fault("absurd-updates", "updates of 3.4e38", FINITE, peers.absurd_updates, exact=False, may_fail=True),
    _fault("reasons", "reasons with control characters and U+2028", REPLAYED, peers.reasons),
    _fault("silent", "five peers that join and never answer", SAME, peers.silent, deadline_s=60.0),
    _fault("stale", "frames replayed and reordered", REPLAYED, peers.stale),
    _fault("ends", "megabytes of End for no transfer", SAME, peers.ends),
    _fault("missing", "megabytes of Missing for no row", SAME, peers.missing),
    _fault("heartbeats", "megabytes of Heartbeat", SAME, peers.heartbeats),
    _fault("unread", "refusals that the peer does not read", SAME, peers.unread),
    _fault("hello", "unbounded fields of a Hello", SAME, peers.endless_hello),
    _fault("invented", "thirty Hellos with 110,000 invented clients", SAME, peers.invented),
    _fault("stolen", "a Hello with a worker's name", SAME, peers.stolen),
    _fault("idle", "1,100 connections without a message", SAME, peers.idle),
    _fault("unfinished", "fifty unfinished messages of 4 MiB on a connection", SAME, peers.unfinished),
    _fault("protocols", "HTTP/1.1, TLS, noise, another version", SAME, peers.other_protocols),
    _fault("calm", "no attack, for comparison", SAME, Attack.over),
)  # fmt: skip
FAULTS = (*PLAIN, *map(_over_tls, PLAIN))
