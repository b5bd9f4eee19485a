"""The short form of ``make faults``, and faults with their own exit code or message (docs/federation.md, "Faults")."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from facts import tells
from forked import children, cmdline
from run_processes import alive, losses, rounds

from faults.all import FAULTS
from faults.kills import Federation
from faults.place import Place, Running, wait_until
from faults.table import Fault, Tally, markdown, summary, try_once

pytestmark = [pytest.mark.data, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.group("faults")]

SEED = 1000


@pytest.fixture(scope="session")
def place(fresh_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("faults"), fresh_root, None, thorough=False)


FIRST = ("kill-federation-tls", "cut", "file-size", "damaged-tensors", "frames", "books")
"""One fault of each kind, which `make test` tries; `make test-all` tries all that have a short form."""


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault.name, marks=() if fault.name in FIRST else pytest.mark.exhaustive)
        for fault in FAULTS
        if fault.short
    ],
)
def test_the_guarantee_holds_under_faults(place: Place, fault: Fault) -> None:
    for seed in range(SEED, SEED + fault.short):
        outcome, _ = try_once(fault, place, seed)
        if isinstance(outcome, Exception):
            raise outcome


def test_a_violated_guarantee_is_reported_with_its_seed() -> None:
    tally = Tally()
    tally.add(7, 1.0, "two bits differ")
    output = markdown(summary({FAULTS[0]: tally}, "make faults", 1.0))
    assert f"KINDS={FAULTS[0].name} SEED=7" in output
    assert "two bits differ" in output


# --- codes and words --------------------------------------------------------------------------------------------------


@pytest.fixture
def experiment(place: Place) -> Path:
    """Write FedAvg with enough rounds for a signal to arrive during the run."""
    return place.experiment("fedavg", every=20, rounds=40)


@pytest.fixture
def run(place: Place, experiment: Path) -> Iterator[Running]:
    """Start it with two workers, and wait for the first round."""
    with place.start(*order(place, experiment, place.folder / "run-1"), "--workers", 2) as running:
        out = place.folder / "run-1"
        wait_until(lambda: out.is_dir() and rounds(out) >= 1, "the first round")
        yield running
    out.rename(place.new())


def order(place: Place, experiment: Path, out: Path) -> tuple[object, ...]:
    return ("run", experiment, "--partition", place.partition, "--out", out)


def worker(run: Running, name: str) -> int | None:
    return next((pid for pid in children(run.pid) if name in cmdline(pid)), None)


def gone(pids: list[int]) -> None:
    wait_until(lambda: not any(alive(pid) for pid in pids), f"the end of {pids}")


def test_a_worker_that_keeps_crashing_stops_the_run_resumably(place: Place, experiment: Path, run: Running) -> None:
    others, killed = children(run.pid), set[int]()
    while len(killed) < 3:
        wait_until(lambda: worker(run, "worker-0") not in {None, *killed}, "a restart")
        victim = worker(run, "worker-0")
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        killed.add(victim)
    run.wait(7)
    assert tells(run.said, "worker-0", "signal 9", "2 restarts"), run.said
    assert "--resume" in run.said
    gone([*others, *killed])
    out = place.folder / "run-1"
    assert "ended with code -9" in (out / "logs" / "aggregator.jsonl").read_text()
    with place.start(*order(place, experiment, out), "--resume") as again:
        again.wait(0)
    place.check(out, experiment)


def test_ctrl_c(place: Place, experiment: Path, run: Running) -> None:
    workforce = children(run.pid)
    os.kill(run.pid, signal.SIGINT)
    run.wait(130)
    assert tells(run.said, "error: ", "of 40", "--resume")
    gone(workforce)
    out = place.folder / "run-1"
    with place.start(*order(place, experiment, out), "--resume") as again:
        again.wait(0)
    place.check(out, experiment)


def test_a_suspended_worker_loses_its_clients_at_the_round_timeout(place: Place) -> None:
    experiment = place.experiment("fedavg", every=50, rounds=150, deadline_s=1.0)
    with ExitStack() as stack:
        federation = Federation(place, experiment, stack)
        wait_until(lambda: rounds(federation.out) >= 1, "the first round")
        os.kill(federation.processes["worker-1"].pid, signal.SIGSTOP)
        wait_until(lambda: losses(federation.out), "a client is lost")
        os.kill(federation.processes["worker-1"].pid, signal.SIGCONT)
        federation.finish()
    assert all(tells(reason, "no answer", "1.0 s") for _, _, reason in losses(federation.out))
    place.check(federation.out, experiment, nobody_lost=False)


def test_a_run_whose_last_step_failed_can_be_completed_with_workers(place: Place) -> None:
    """Retry a failed last step, for which the clients are measured again."""
    experiment = place.experiment("fedavg")
    with ExitStack() as stack:
        federation = Federation(place, experiment, stack, workers=0)
        (federation.out / "clients.csv").mkdir()
        federation.start("worker-0")
        federation.aggregator.wait(6)
        assert "clients.csv cannot be written" in federation.aggregator.said
        (federation.out / "clients.csv").rmdir()
        federation.start("aggregator")
        federation.aggregator.wait(0)
        federation.processes["worker-0"].wait(0)
    place.check(federation.out, experiment)


def test_a_taken_port_a_wrong_partition_and_clients_shared_by_workers(place: Place) -> None:
    experiment, other = place.experiment("fedavg"), place.other_partition()
    with ExitStack() as stack:
        federation = Federation(place, experiment, stack, workers=0)
        second = place.new()
        taken = ("aggregator", experiment, "--listen", federation.listen, "--partition", place.partition)
        with place.start(*taken, "--out", second) as refused:
            refused.wait(2)
            assert "is taken" in refused.said
        assert not second.exists()
        serve = ("worker", "--aggregator", federation.listen)
        with place.start(*serve, "--partition", other, "--name", "lost") as lost:
            lost.wait(3)
            assert "fedloom partition" in lost.said
        halves = [",".join(place.clients[:3]), ",".join(place.clients[3:])]
        workers = [
            stack.enter_context(
                place.start(*serve, "--partition", place.partition, "--name", f"half-{n}", "--clients", half)
            )
            for n, half in enumerate(halves)
        ]
        for running in (federation.aggregator, *workers):
            running.wait(0)
    place.check(federation.out, experiment)
