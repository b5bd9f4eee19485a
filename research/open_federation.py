"""Federation of twelve members that come and go, with kills, rotated certificates and a revocation.

    .venv/bin/python research/open_federation.py digits|vowels [--out DIR] [--rounds 500] [--kills 20] [--seed 1]

``digits``: twelve QMNIST writers, each with a folder packed from a different format: images by class, npz,
safetensors, CSV, Parquet. ``vowels``: twelve speakers, from CSV and Parquet. They are two federations because a
federation has one kind of data. Everything uses the ``fedloom`` command as an operator and members would, over mutual
TLS with an identity file. The seed determines what happens in which round: members leave (stopped or killed) and
return, the aggregator is killed and resumed, all certificates are rotated, then again under a new authority, and a
member is revoked. At the end, the run is compared with the replay of its journal. A table summarizes the events from
DIR/NAME/found.json, which ``results.py fold open-federation DIR`` reads.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import yaml
from numpy.typing import NDArray
from pages_open_federation import FOUND, of_one

from fedloom.data import datasets
from fedloom.data.datasets import RawDataset
from fedloom.runs.folder import RunFolder
from fedloom.security.certificates import make_ca, make_certificate

MEMBERS = 12
OBSERVER = MEMBERS - 1
AT_FIRST = 8
FEWEST = 6
WAIT_S = 600.0
TLS = ("FEDLOOM_TLS_CA", "FEDLOOM_TLS_CERTIFICATE", "FEDLOOM_TLS_KEY")


@dataclass(frozen=True)
class Federation:
    """Definition of one federation.

    Attributes
    ----------
    source
        Data set whose owners become members.
    formats
        Format of each member's files.
    own, model, local
        Sections of the experiment.
    """

    source: str
    formats: tuple[str, ...]
    own: Mapping[str, Any]
    model: Mapping[str, Any]
    local: Mapping[str, Any]


DIGITS = Federation(
    "qmnist",
    ("images",) * 4 + ("npz", "npz", "safetensors", "safetensors", "csv", "csv", "parquet", "images"),
    {"kind": "pixels", "input_shape": [1, 28, 28], "classes": [str(digit) for digit in range(10)]},
    {"name": "lenet"},
    {"steps": 10, "batch_size": 16, "lr": 0.03},
)
VOWELS = Federation(
    "vowel",
    ("csv",) * 8 + ("parquet",) * 4,
    {"kind": "features", "input_shape": [9]},
    {"name": "mlp", "hidden": [32]},
    {"steps": 200, "batch_size": 8, "lr": 0.01},
)
FEDERATIONS = {"digits": DIGITS, "vowels": VOWELS}


def experiment_of(name: str, classes: Sequence[str], rounds: int) -> dict[str, Any]:
    """Return the content of the experiment file."""
    about = FEDERATIONS[name]
    return {
        "name": name,
        "seed": 1,
        "data": {"own": {**about.own, "classes": list(classes)}},
        "model": dict(about.model),
        "algorithm": {"name": "fedavg", "local": dict(about.local), "personalize_steps": 10},
        "federation": {
            "rounds": rounds,
            "clients_per_round": 6,
            "min_clients": 3,
            "heartbeat_timeout_s": 15.0,
            "deadline_s": 10.0,
            "checkpoint_every_s": 1.0,
        },
        "evaluation": {"every": 25, "cohort": MEMBERS},
    }


# --- members' data ----------------------------------------------------------------------------------------------------


def owners(official: RawDataset) -> list[tuple[NDArray[Any], NDArray[np.int64]]]:
    """Return inputs and labels of the owners with the most examples."""
    pools = (official.train, official.test)
    x, y, whose = (
        np.concatenate([np.asarray(getattr(p, part)) for p in pools]) for part in ("inputs", "labels", "owners")
    )
    ids, counts = np.unique(whose, return_counts=True)
    most = ids[np.argsort(-counts, kind="stable")][:MEMBERS]
    return [(x[whose == owner], y[whose == owner]) for owner in sorted(most)]


def write_source(at: Path, form: str, x: NDArray[Any], y: NDArray[np.int64], classes: Sequence[str]) -> Path:
    """Write one member's examples in a format; return the file or folder."""
    at.mkdir(parents=True)
    if form == "images":
        from PIL import Image

        for i, (image, label) in enumerate(zip(x, y, strict=True)):
            folder = at / "images" / classes[label]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.reshape(x.shape[-2:])).save(folder / f"{i:04d}.png")
        return at / "images"
    path = at / f"examples.{form}"
    if form == "npz":
        np.savez_compressed(path, x=x, y=y)
    elif form == "safetensors":
        safetensors.numpy.save_file({"x": np.ascontiguousarray(x), "y": y}, path)
    else:
        flat = x.reshape(len(x), -1)
        names = [f"x{i}" for i in range(flat.shape[1])]
        if form == "csv":
            with path.open("w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow([*names, "label"])
                writer.writerows([*row.tolist(), classes[label]] for row, label in zip(flat, y, strict=True))
        else:
            import pyarrow
            import pyarrow.parquet

            columns: dict[str, Any] = {name: flat[:, i] for i, name in enumerate(names)}
            pyarrow.parquet.write_table(pyarrow.table({**columns, "label": [classes[label] for label in y]}), path)
    return path


# --- the script -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Event:
    """Event that happens once a round is done."""

    round: int
    what: str  # kill, rotate, revoke, leave, crash, come
    member: int = -1
    after_s: float = 0.0


def script(seed: int, rounds: int, kills: int) -> list[Event]:
    """Draw the events from the seed; members return before the end."""
    drawn = random.Random(seed)
    events = [
        Event(round, "kill", after_s=drawn.uniform(0.0, 0.5))
        for round in sorted(drawn.sample(range(rounds // 20 + 1, rounds - rounds // 20), kills))
    ]
    events += [Event(rounds * third // 3 + drawn.randrange(max(1, rounds // 20)), "rotate") for third in (1, 2)]
    gone = drawn.randrange(FEWEST)  # will be revoked
    revoked = rounds // 2 + drawn.randrange(max(1, rounds // 10))
    events.append(Event(revoked, "revoke", gone))
    away_until = dict.fromkeys(range(MEMBERS), 0)
    for member in range(AT_FIRST, MEMBERS):
        away_until[member] = drawn.randrange(1, max(2, rounds // 5))
        events.append(Event(away_until[member], "come", member))
    for round in range(rounds // 25, rounds - rounds // 5, max(1, rounds // 25)):
        there = [member for member, until in away_until.items() if until < round and member != gone]
        if len(there) > FEWEST:
            member = drawn.choice(there)
            away_until[member] = round + drawn.randrange(max(2, rounds // 50), max(4, rounds // 12))
            events.append(Event(round, drawn.choice(["leave", "crash"]), member))
            events.append(Event(away_until[member], "come", member))
    return sorted(events)


# --- execution --------------------------------------------------------------------------------------------------------


@dataclass
class Found:
    """Record of what happened."""

    events: list[dict[str, Any]] = field(default_factory=list)
    durable: list[tuple[int, list[dict[str, Any]]]] = field(default_factory=list)
    """Round of the last checkpoint, and the journal's lines up to it, at each kill."""

    def add(self, event: Event, **told: Any) -> None:
        """Record an event and print it."""
        self.events.append({"round": event.round, "what": event.what, "member": event.member, **told})
        print(json.dumps(self.events[-1]), flush=True)

    def of(self, *what: str) -> list[dict[str, Any]]:
        """Return the events of these kinds."""
        return [event for event in self.events if event["what"] in what]


class Demonstration:
    """Processes, files and events of one federation."""

    def __init__(self, name: str, folder: Path, rounds: int, held: ExitStack) -> None:
        self.folder, self.run, self.trust, self._held = folder, folder / "run", folder / "trust", held
        self.rounds, self.experiment, self.name = rounds, folder / f"{name}.yaml", name
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        self.aggregator: subprocess.Popen[bytes] | None = None
        self.workers: dict[int, subprocess.Popen[bytes]] = {}
        self.revoked: set[int] = set()
        self.joins_before = 0  # joins before the aggregator's last start
        self.found = Found()

    def fedloom(self, *words: object) -> str:
        """Run a command to its end and return its output."""
        command = [sys.executable, "-m", "fedloom", *map(str, words)]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=1800)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def _start(self, log: str, files: Mapping[str, Path], *words: object) -> subprocess.Popen[bytes]:
        out = self._held.enter_context((self.folder / "logs" / log).open("ab"))
        environment = {**self.environment, **{name: str(path) for name, path in files.items()}}
        command = [sys.executable, "-m", "fedloom", *map(str, words)]
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, stdin=subprocess.DEVNULL)

        def end() -> None:
            process.kill()
            process.wait()

        self._held.callback(end)
        return process

    # ---- before the run

    def prepare(self) -> None:
        """Pack each member's data; create the authority, the certificates and the identity file."""
        about = FEDERATIONS[self.name]
        (self.folder / "logs").mkdir(parents=True)
        self.fedloom("data", "fetch", about.source)
        source = datasets.find_dataset(about.source)
        official = datasets.load_dataset(source)
        self.experiment.write_text(yaml.safe_dump(experiment_of(self.name, source.spec.class_names, self.rounds)))
        for member, ((x, y), form) in enumerate(zip(owners(official), about.formats, strict=True)):
            given = write_source(self.folder / "sources" / self.of(member), form, x, y, source.spec.class_names)
            packed = ("--out", self.data(member), "--id", self.of(member), "--experiment", self.experiment)
            print(self.fedloom("data", "pack", given, *packed).splitlines()[0], f"(from {form})", flush=True)
        make_ca(self.folder / "authority-1")
        self.trust.mkdir()
        (self.trust / "ca.crt").write_bytes((self.folder / "authority-1" / "ca.crt").read_bytes())
        self.certify("authority-1")
        self.tabulate()

    @staticmethod
    def of(member: int) -> str:
        """Return a member's name, which is also its client's id."""
        return f"member-{member:02d}"

    def data(self, member: int) -> Path:
        """Return a member's packed folder."""
        return self.folder / "packed" / self.of(member)

    def certify(self, authority: str) -> None:
        """Issue new certificates to the aggregator and all members that are not revoked."""
        ca = self.folder / authority
        make_certificate("aggregator", self.trust, ca, hosts=["127.0.0.1"], replace=True)
        for member in set(range(MEMBERS)) - self.revoked:
            make_certificate(self.of(member), self.trust, ca, replace=True)

    def tabulate(self) -> None:
        """Write the identity file atomically."""
        entries = [
            {
                "name": self.of(member),
                "certificate": f"URI:urn:fedloom:{self.of(member)}",
                "roles": ["observer" if member == OBSERVER else "worker"],
                "clients": [self.of(member)],
            }
            for member in sorted(set(range(MEMBERS)) - self.revoked)
        ]
        replace_file(self.trust / "identities.yaml", yaml.safe_dump({"version": 1, "identities": entries}).encode())

    def files(self, name: str) -> dict[str, Path]:
        """Return a process's TLS files by environment variable."""
        return dict(
            zip(TLS, (self.trust / "ca.crt", self.trust / name / "tls.crt", self.trust / name / "tls.key"), strict=True)
        )

    # ---- during the run

    def start(self, *more: str) -> None:
        """Start the aggregator, for the first time or again."""
        self.joins_before = len(list(self.audit("join")))
        files = {**self.files("aggregator"), "FEDLOOM_IDENTITIES": self.trust / "identities.yaml"}
        at = ("--listen", self.address, "--out", self.run, "--no-report")
        self.aggregator = self._start("aggregator.log", files, "aggregator", self.experiment, *at, *more)

    def join(self, member: int) -> None:
        """Start a member's worker."""
        option, name = "--observe" if member == OBSERVER else "--data", self.of(member)
        at = ("--aggregator", self.address, "--name", name, "--reconnect", WAIT_S)
        self.workers[member] = self._start(f"{name}.log", self.files(name), "worker", *at, option, self.data(member))

    def lines(self) -> list[dict[str, Any]]:
        """Return the journal so far, without a line that is still being written."""
        path = self.run / "journal.jsonl"
        whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
        return [json.loads(line) for line in whole.splitlines()]

    def round(self) -> int:
        """Return the last completed round."""
        return max((line["round"] for line in tail(self.run / "journal.jsonl")), default=0)

    def until(self, condition: Callable[[], object], what: str) -> float:
        """Wait for a condition; return the seconds waited."""
        started = time.monotonic()
        while not condition():
            if time.monotonic() > started + WAIT_S:
                raise SystemExit(f"timeout while waiting for {what}; see {self.folder / 'logs'}")
            if self.aggregator is not None and self.aggregator.poll() is not None and not condition():
                raise SystemExit(f"the aggregator ended with {self.aggregator.poll()}; see {self.folder / 'logs'}")
            time.sleep(0.02)
        return time.monotonic() - started

    def audit(self, event: str) -> Iterator[dict[str, Any]]:
        """Yield the audit log's lines for an event."""
        path = self.run / "logs" / "audit.jsonl"
        for line in path.read_text().splitlines() if path.exists() else ():
            told = json.loads(line)
            if told["event"] == event:
                yield told

    def happen(self, event: Event) -> None:
        """Carry out one event."""
        time.sleep(event.after_s)
        {
            "kill": self._kill, "rotate": self._rotate, "revoke": self._revoke,
            "leave": self._leave, "crash": self._leave, "come": self._come,
        }[event.what](event)  # fmt: skip

    def _come(self, event: Event) -> None:
        self.join(event.member)
        self.found.add(event)

    def _leave(self, event: Event) -> None:
        worker = self.workers.pop(event.member)
        worker.send_signal(signal.SIGTERM if event.what == "leave" else signal.SIGKILL)
        self.found.add(event, exit_code=worker.wait(WAIT_S))

    def _kill(self, event: Event) -> None:
        assert self.aggregator is not None
        self.aggregator.kill()
        self.aggregator.wait()
        durable = max(
            int(path.stem.rpartition("-")[2]) for path in (self.run / "checkpoints").glob("round-*.safetensors")
        )
        lines = self.lines()
        reached = max((line["round"] for line in lines), default=0)
        self.found.durable.append((durable, upto(lines, durable)))
        self.start("--resume")
        seconds = self.until(lambda: self.round() > reached, "a round after the resumption")
        self.found.add(event, seconds=round(seconds, 1), durable=durable, again=reached - durable)

    def _rotate(self, event: Event) -> None:
        """Rotate all certificates; the second time under a new authority, which all trust before it is used."""
        before, since = len(self.lines()), {line["credential"] for line in self.audit("join")}
        second, authority = bool(self.found.of("rotate")), "authority-1"
        ca = self.trust / "ca.crt"
        if second:
            authority = "authority-2"
            make_ca(self.folder / authority)
            replace_file(ca, ca.read_bytes() + (self.folder / authority / "ca.crt").read_bytes())
            time.sleep(5.0)  # all have reloaded it
        started = time.monotonic()
        self.certify(authority)
        there = {self.of(member) for member, worker in self.workers.items() if worker.poll() is None}

        def anew() -> set[str]:
            return {line["identity"] for line in self.audit("join") if line["credential"] not in since}

        self.until(lambda: there <= anew(), "all members come with their new certificates")
        seconds = time.monotonic() - started
        if second:
            replace_file(ca, (self.folder / authority / "ca.crt").read_bytes())
        self.until(lambda: self.round() > event.round + 2, "more rounds")
        rows_lost = lost_rows(self.lines()[before:])
        self.found.add(event, members=len(there), seconds=round(seconds, 1), authority=second, rows_lost=rows_lost)

    def _revoke(self, event: Event) -> None:
        def joined() -> list[str]:
            return [line["identity"] for line in self.audit("join")][self.joins_before :]

        self.until(lambda: self.of(event.member) in joined(), "who will be revoked is connected")
        worker = self.workers.pop(event.member)
        self.revoked.add(event.member)
        started = time.monotonic()
        self.tabulate()
        code = worker.wait(WAIT_S)
        seconds = time.monotonic() - started
        told = [line["identity"] for line in self.audit("revoked")]
        self.found.add(event, seconds=round(seconds, 2), exit_code=code, told=told, at=self.round())

    def carry_out(self, events: Sequence[Event]) -> None:
        """Start the federation, carry out all events, and wait for the end."""
        self.start()
        for member in range(AT_FIRST):
            self.join(member)
        for event in events:
            self.until(lambda event=event: self.round() >= event.round, f"round {event.round}")  # type: ignore[misc]
            self.happen(event)
        assert self.aggregator is not None
        self.until(lambda: self.aggregator is not None and self.aggregator.poll() is not None, "the end")
        codes = {self.of(member): worker.wait(WAIT_S) for member, worker in self.workers.items()}
        if self.aggregator.returncode or any(codes.values()):
            raise SystemExit(
                f"exit codes: aggregator {self.aggregator.returncode}, {codes}; see {self.folder / 'logs'}"
            )

    # ---- after the run

    def replay(self) -> Path:
        """Replay the run's journal in one process."""
        whose = [word for m in range(MEMBERS) for word in ("--observe" if m == OBSERVER else "--data", self.data(m))]
        out = self.folder / "replay"
        self.fedloom("run", self.experiment, "--replay", self.run, *whose, "--out", out, "--no-report")
        return out


def tail(path: Path, size: int = 1 << 16) -> list[dict[str, Any]]:
    """Return the last complete lines of a file of JSON lines."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        lines = file.read().rpartition(b"\n")[0].splitlines()
    whole = [line for line in lines if line.startswith(b"{")]
    return [json.loads(line) for line in whole[-5:]]


def upto(lines: Sequence[dict[str, Any]], round: int) -> list[dict[str, Any]]:
    """Return the attempts of a journal up to a round."""
    return [line for line in lines if line["round"] <= round and line["outcome"] != "evaluated"]


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_bytes(content)
    beside.replace(path)


def final(run: Path) -> bytes:
    """Return the last checkpoint's content."""
    return sorted((run / "checkpoints").glob("round-*.safetensors"))[-1].read_bytes()


def same(run: Path, replay: Path) -> dict[str, bool]:
    """Return which parts of a run and its replay are equal bit for bit."""
    mine, other = (list(RunFolder(folder).objects("metrics.jsonl")) for folder in (run, replay))
    keys = ("round", "seen", "unseen", "global", "validation_pooled")
    return {
        "checkpoint": final(run) == final(replay),
        "metrics": [[a.get(k) for k in keys] for a in mine] == [[a.get(k) for k in keys] for a in other],
    }


def lost_rows(lines: Sequence[dict[str, Any]]) -> int:
    """Return the number of cohort rows that were lost."""
    return sum(len(conversation["lost"]) for line in lines for conversation in line["conversations"])


def judged(shown: Demonstration, replay: Path) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Return the results by row of the table, and the properties that did not hold."""
    found, lines = shown.found, shown.lines()
    cohorts = [(line["round"], c["clients"]) for line in lines for c in line["conversations"]]
    done = [line["round"] for line in lines if line["outcome"] == "done"]
    joined, left = (sum(len(line.get(what, ())) for line in lines) for what in ("joined", "left"))
    kills, (revoked,) = found.of("kill"), found.of("revoke")
    lost = sum(upto(lines, durable) != before for durable, before in found.durable)
    gone = shown.of(revoked["member"])
    later = sum(gone in clients and round > revoked["at"] + 1 for round, clients in cohorts)
    equal = same(shown.run, replay)
    failures = [
        what
        for what, holds in {
            "durable rounds were lost": not lost,
            "rounds are missing": done == list(range(1, shown.rounds + 1)),
            "the revoked member did not end with exit code 4": revoked["exit_code"] == 4 and gone in revoked["told"],
            "the revoked member was asked again": not later,
            **{f"{what}: not equal to the replay": is_equal for what, is_equal in equal.items()},
        }.items()
        if not holds
    ]
    seconds, again = [kill["seconds"] for kill in kills], [kill["again"] for kill in kills]
    seen = json.loads((shown.run / "summary.json").read_text(encoding="utf-8"))["seen"]
    rotations = {
        name: {"count": 1, "members": one["members"], "seconds": one["seconds"], "lost": one["rows_lost"]}
        for name, one in zip(("certificates", "authority"), found.of("rotate"), strict=True)
    }
    return {
        "rounds": {
            "count": len(done),
            "failed": sum(line["outcome"] not in ("done", "evaluated") for line in lines),
            "rows": sum(len(clients) for _, clients in cohorts),
            "lost": lost_rows(lines),
        },
        "killed": {
            "count": len(kills),
            "seconds": statistics.median(seconds),
            "seconds_most": max(seconds),
            "again": sum(again),
            "again_most": max(again),
            "lost": lost,
        },
        "leave": {"count": len(found.of("leave"))},
        "crash": {"count": len(found.of("crash"))},
        "come": {"count": len(found.of("come")), "joined": joined, "gone": left},
        **rotations,
        "revoked": {"count": 1, "seconds": revoked["seconds"], "exit_code": revoked["exit_code"], "later": later},
        "replay": {"count": 1, **equal},
        "end": {
            "count": seen["clients"],
            "mean": 100 * seen["accuracy_mean"],
            "worst": 100 * seen["accuracy_worst"],
        },
    }, failures


def main() -> None:
    """Run the demonstration."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=sorted(FEDERATIONS))
    parser.add_argument("--out", type=Path, default=Path("runs/open-federation"), help="new folder for everything")
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    folder = options.out.absolute() / options.name
    if folder.exists():
        shutil.rmtree(folder)
    started = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))  # also ends the processes
    with ExitStack() as held:
        shown = Demonstration(options.name, folder, options.rounds, held)
        shown.prepare()
        began = time.monotonic()
        shown.carry_out(script(options.seed, options.rounds, options.kills))
        took = time.monotonic() - began
        found, failures = judged(shown, shown.replay())
    found["rounds"]["seconds"] = took
    (folder / FOUND).write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(f"\n{options.rounds} rounds in {took:.0f} s, {time.monotonic() - started:.0f} s with packing and replay\n")
    print(of_one(found))
    if failures:
        raise SystemExit("\n".join(("DID NOT HOLD:", *failures)))


if __name__ == "__main__":
    main()
