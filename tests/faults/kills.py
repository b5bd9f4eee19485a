"""Every process of a run killed or stopped at random, and the run resumed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random

from forked import children, cmdline
from ports import free_address
from run_processes import alive, rounds

from faults.place import METHODS, Broken, Place, Running, durable, journal_lines, wait_until
from faults.table import Fault, Tried
from fedloom.algorithms.base import find_algorithm
from fedloom.runs.folder import RunFolder
from fedloom.runs.published import Publisher
from fedloom.security.certificates import make_ca, make_certificate
from fedloom.security.options import FILES
from fedloom.security.tokens import add_token
from fedloom.storage import open_store

TRAINED = tuple(method for method in METHODS if find_algorithm(method.partition(":")[0]).trains)
PROMISE = "after a resume, results are bit-identical; no durable round is repeated"


class Kept:
    """Durable part of a run, which must be unchanged after the run has been resumed and has continued."""

    def __init__(self, place: Place, out: Path, url: str | None) -> None:
        self._place, self._out, self._url = place, out, url
        self._round, self._lines = -1, list[str]()

    def look(self) -> None:
        """Compare with the files at the previous call.

        Raises
        ------
        Broken
            If a durable round is missing, or was repeated.
        """
        run = self._out if self._url is None else self._taken_up(self._url)
        if durable(run) < self._round or journal_lines(run, self._round) != self._lines:
            raise Broken(f"round {self._round} of {run} was durable, and is not what it was")
        self._round = durable(run)
        self._lines = journal_lines(run, self._round)

    def _taken_up(self, url: str) -> Path:
        """Restore the published run, as an aggregator on another machine would."""
        found = self._place.new()
        found.mkdir()
        Publisher(RunFolder(found), open_store(url, self._place.environment), "onlooker").restore()
        return found


def new_url(place: Place) -> str:
    """Return an unused place in the store for one run."""
    assert place.s3 is not None
    return f"s3://{place.s3.new_bucket()}/runs/one"


def in_process(place: Place, random: Random, published: bool = False) -> Tried:
    """Kill ``fedloom run --workers 0`` at a file operation or at any time, resume it, and kill it again."""
    experiment, out = place.experiment(random.choice(METHODS)), place.new()
    url = new_url(place) if published else None
    order = ("run", experiment, "--partition", place.partition, "--resume", *(("--publish", url) if url else ()))
    kept, kills = Kept(place, out, url), 0
    operations = place.operations(experiment) * (3 if url else 1)
    for _ in range(random.randint(2, 5)):
        given = {"FAULTS_UNDER": str(out)}
        if random.random() < 0.7:
            given["FAULTS_DIE_AT"] = str(random.randint(1, operations))
        with place.start(*order, "--out", out, **given) as run:
            if "FAULTS_DIE_AT" not in given:
                run.ended_within(random.uniform(0.05, 0.8))
                run.kill()
            over = run.wait(0, -signal.SIGKILL) == 0
        kills += not over
        kept.look()
        if url and random.random() < 0.5:
            out = place.new()  # another machine
            kept._out = out
    with place.start(*order, "--out", out) as run:
        run.wait(0)
    kept.look()
    place.check(out, experiment)
    if partial := [path.name for path in out.rglob("*.partial")]:
        raise Broken(f"{out} has parts of files: {partial}")
    return Tried(kills)


class Federation:
    """An aggregator and its workers, as processes that may end and be restarted; all end with the stack."""

    def __init__(
        self,
        place: Place,
        experiment: Path,
        stack: ExitStack,
        *,
        workers: int = 2,
        url: str | None = None,
        through: Callable[[Federation], str] = lambda run: run.listen,
        files: int = 4096,
        tolerated: tuple[int, ...] = (),
        secure: bool = False,
        ended: bool = False,
    ) -> None:
        """Create and start the federation.

        Parameters
        ----------
        through
            Address for workers to connect to; the aggregator listens by then.
        secure
            Mutual TLS.
        ended
            Workers use TLS and a token with a proxy, which connects to the aggregator in plaintext.
        """
        self.out = place.new()
        self.experiment = experiment
        self.listen = free_address()
        self._place, self._stack, self._url, self._files = place, stack, url, files
        self.tolerated = tolerated
        """Codes of the aggregator after which it is started again."""
        self.final: tuple[int, ...] = (0,)
        """Codes after which it is not."""
        self.processes: dict[str, Running] = {}
        self.members: Path | None = None
        """Certificates and tokens."""
        self._ended = ended
        if secure or ended:
            self.members = place.new()
            make_ca(self.members)
            self.renew()
            token, _ = add_token(self.members / "tokens.json", "worker")
            (self.members / "worker.token").write_text(token.get_secret_value())
        self.start("aggregator")
        wait_until(self._listening, "the aggregator listens")
        self.address = through(self)
        for number in range(workers):
            self.start(f"worker-{number}")

    def _listening(self) -> bool:
        return (self.out / "environment.json").exists() or self.aggregator.process.poll() is not None

    @property
    def aggregator(self) -> Running:
        """Return the present process of the aggregator."""
        return self.processes["aggregator"]

    def renew(self) -> None:
        """Replace the certificates of the aggregator and of the workers."""
        assert self.members is not None
        make_certificate("aggregator", self.members, self.members, hosts=["127.0.0.1"], replace=True)
        make_certificate("worker", self.members, self.members, replace=True)

    def _environment(self, name: str) -> dict[str, str]:
        if self.members is None:
            return {}
        whose = "aggregator" if name == "aggregator" else "worker"
        if self._ended and whose == "aggregator":
            return {"FEDLOOM_TOKENS": str(self.members / "tokens.json")}
        if self._ended:
            return {FILES["ca"]: str(self.members / "ca.crt"), FILES["token_file"]: str(self.members / "worker.token")}
        files = {"ca": "ca.crt", "certificate": f"{whose}/tls.crt", "key": f"{whose}/tls.key"}
        return {FILES[field]: str(self.members / file) for field, file in files.items()}

    def start(self, name: str) -> None:
        """Start or restart a process."""
        partition = ("--partition", self._place.partition)
        if name == "aggregator":
            publish = () if self._url is None else ("--publish", self._url)
            order: tuple[object, ...] = (
                "aggregator", self.experiment, *partition, "--listen", self.listen, "--out", self.out, "--resume",
                *publish,
            )  # fmt: skip
        else:
            states = self.out / "states" if self._url is None else f"{self._url}/states"
            order = ("worker", "--aggregator", self.address, *partition, "--name", name, "--states", states)
        limits = {"FAULTS_FILES": str(self._files)} if name == "aggregator" else {}
        self.processes[name] = self._stack.enter_context(self._place.start(*order, **limits, **self._environment(name)))

    def over(self) -> bool:
        """Restart killed processes; return True once the aggregator has succeeded.

        Raises
        ------
        Broken
            If the aggregator, or a worker, ended with an unexpected code.
        """
        codes = {name: running.process.poll() for name, running in self.processes.items()}
        for name, code in codes.items():
            if code is None or code in (self.final if name == "aggregator" else (0,)):  # workers learn of the end
                continue
            if code not in (-signal.SIGKILL, *(self.tolerated if name == "aggregator" else (8,))):
                raise Broken(f"{name} ended with {code}: {self.processes[name].said[-500:]}")
            self.start(name)
        return codes["aggregator"] in self.final

    def finish(self) -> None:
        """Let the run finish."""
        wait_until(self.over, "the end of the run")


def federation(place: Place, random: Random, published: bool = False, secure: bool = False) -> Tried:
    """Kill or suspend an aggregator and two workers at any time, and restart them."""
    method = random.choice(TRAINED)
    experiment = place.experiment(method, rounds=12)
    url = new_url(place) if published else None
    with ExitStack() as stack:
        run = Federation(place, experiment, stack, url=url, secure=secure)
        kept, signals = Kept(place, run.out, url), 0
        for _ in range(random.randint(3, 8)):
            if secure and random.random() < 0.5:
                run.renew()
            time.sleep(random.uniform(0.02, 0.4))
            name = random.choice(("aggregator", "aggregator", "worker-0", "worker-1"))
            if run.over():
                break
            if random.random() < 0.3:
                if run.processes[name].process.poll() is not None:
                    continue  # a worker that learned of the end before the aggregator exited
                pid = run.processes[name].pid
                os.kill(pid, signal.SIGSTOP)
                time.sleep(random.uniform(0.01, 0.3))
                os.kill(pid, signal.SIGCONT)
                signals += 1
            else:
                signals += run.processes[name].kill()
            if name == "aggregator":
                kept.look()
        run.finish()
        kept.look()
    place.check(run.out, experiment)
    return Tried(signals)


def with_workers(place: Place, random: Random) -> Tried:
    """Kill or suspend the workers of ``fedloom run --workers 2``, or the run itself."""
    experiment, out = place.experiment(random.choice(TRAINED), rounds=12), place.new()
    order = ("run", experiment, "--partition", place.partition, "--workers", 2, "--out", out, "--resume")
    kept, signals = Kept(place, out, None), 0
    for _ in range(random.randint(1, 3)):
        with place.start(*order) as run:
            for _ in range(random.randint(1, 4)):
                if run.ended_within(random.uniform(0.1, 0.7)):
                    break
                workers = [pid for pid in children(run.pid) if "worker" in cmdline(pid)]
                victim = random.choice([run.pid, *workers])
                stopping = random.random() < 0.3
                try:
                    os.kill(victim, signal.SIGSTOP if stopping else signal.SIGKILL)
                    if stopping:
                        time.sleep(random.uniform(0.01, 0.3))
                        os.kill(victim, signal.SIGCONT)
                except ProcessLookupError:
                    continue
                signals += 1
                if victim == run.pid and not stopping:
                    run.process.wait()
                    wait_until(lambda workers=workers: not any(map(alive, workers)), "the end of the workers", 30)
                    break
            run.wait(0, 7, -signal.SIGKILL)
        kept.look()
    with place.start(*order) as run:
        run.wait(0)
    kept.look()
    place.check(out, experiment)
    return Tried(signals)


def stopped_past_the_deadline(place: Place, random: Random, secure: bool = False) -> Tried:
    """Suspend a worker beyond the timeout of an exchange: its clients are lost, and the journal records it."""
    experiment = place.experiment(random.choice(TRAINED), rounds=8, deadline_s=1.0, attempts=20)
    with ExitStack() as stack:
        run = Federation(place, experiment, stack, tolerated=(5,), secure=secure)
        wait_until(lambda: rounds(run.out) >= 1, "the first round")
        victim = run.processes[random.choice(("worker-0", "worker-1"))].pid
        os.kill(victim, signal.SIGSTOP)
        time.sleep(random.uniform(1.2, 3.0))
        os.kill(victim, signal.SIGCONT)
        run.finish()
    place.check(run.out, experiment, nobody_lost=False)
    return Tried()


FAULTS = (
    Fault("kill-run", "kills", "a run in one process is killed", PROMISE, in_process, goal=40, short=2),
    Fault(
        "kill-published", "kills",
        "a published run in one process is killed, and resumed from the store, also in an empty folder",
        PROMISE, lambda place, random: in_process(place, random, published=True), goal=20, needs_store=True,
    ),
    Fault(
        "kill-federation", "kills", "aggregator and workers are killed or stopped", PROMISE,
        federation, goal=15, short=1,
    ),
    Fault(
        "kill-federation-tls", "tls",
        "aggregator and workers are killed or stopped over mutual TLS, while certificates are renewed", PROMISE,
        lambda place, random: federation(place, random, secure=True), goal=10, short=1,
    ),
    Fault(
        "kill-federation-published", "kills",
        "aggregator and workers of a published run are killed or stopped", PROMISE,
        lambda place, random: federation(place, random, published=True), goal=12, needs_store=True,
    ),
    Fault(
        "kill-workers", "kills", "a run or its worker processes are killed or stopped", PROMISE,
        with_workers, goal=20, short=1,
    ),
    Fault(
        "stop", "kills", "a worker is stopped past the deadline",
        "its clients are recorded as lost; the replay of the journal is bit-identical",
        stopped_past_the_deadline, goal=8,
    ),
    Fault(
        "kill-federation-published-tls", "tls", "aggregator and workers are killed over mutual TLS, with a store",
        PROMISE,
        lambda place, random: federation(place, random, published=True, secure=True), goal=6, needs_store=True,
    ),
    Fault(
        "stop-tls", "tls", "a worker is stopped past the deadline, over mutual TLS",
        "its clients are recorded as lost; the replay of the journal is bit-identical",
        partial(stopped_past_the_deadline, secure=True), goal=4,
    ),
)  # fmt: skip
