"""Full disks, file size limits, and damaged files."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from faults.kills import PROMISE, TRAINED, Kept
from faults.place import METHODS, Broken, Place, durable
from faults.table import Fault, Tried
from fedloom.errors import DataError, ExitCode
from fedloom.federation.states import States
from fedloom.runs.checkpoint import Checkpoints
from fedloom.runs.folder import RunFolder
from fedloom.runs.journal import Journal
from fedloom.storage import open_store

STATEFUL = ("fedrep", "pfedbayes")
FLIPS = 100


def may_not_grow(place: Place, random: Random) -> Tried:
    """Limit the size of files, which fails a write like a full disk; the run continues once the limit is raised."""
    experiment, out = place.experiment(random.choice(METHODS)), place.new()
    largest = max(path.stat().st_size for path in place.truth(experiment).rglob("*") if path.is_file())
    order = ("run", experiment, "--partition", place.partition, "--resume", "--out", out)
    kept, failed = Kept(place, out, None), 0
    for _ in range(3):
        with place.start(*order, FAULTS_FILE_BYTES=str(random.randrange(200, largest))) as run:
            failed += run.wait(0, ExitCode.STORAGE) != 0
        kept.look()
    with place.start(*order) as run:
        run.wait(0)
    kept.look()
    place.check(out, experiment)
    return Tried(failed)


@contextmanager
def small_disk(where: Path, kilobytes: int) -> Iterator[bool]:
    """Mount a disk of so many kB; return False if that is impossible."""
    where.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(where)]
    there = shutil.which("mount") is not None and subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield there
    finally:
        if there:
            subprocess.run(["umount", "-l", str(where)], check=True)


def full(place: Place, random: Random) -> Tried:
    """Let the disk fill up at some time; with more room the run continues."""
    experiment, disk = place.experiment(random.choice(METHODS)), place.new()
    taken = sum(path.stat().st_size for path in place.truth(experiment).rglob("*") if path.is_file()) // 1024
    with small_disk(disk, random.randrange(8, max(16, taken))) as there:
        if not there:
            return Tried(0)
        out = disk / "run"
        order = ("run", experiment, "--partition", place.partition, "--resume", "--out", out)
        with place.start(*order) as run:
            failed = run.wait(0, ExitCode.STORAGE) != 0
        kept = Kept(place, out, None)
        kept.look()
        subprocess.run(["mount", "-o", f"remount,size={4 * taken + 4096}k", str(disk)], check=True)
        with place.start(*order) as run:
            run.wait(0)
        kept.look()
        place.check(out, experiment)
    return Tried(int(failed))


def damage(content: bytes, random: Random) -> bytes:
    """Flip one bit of a file, or cut off its end."""
    if random.random() < 0.1:
        return content[: random.randrange(len(content))]
    changed = bytearray(content)
    changed[random.randrange(len(content))] ^= 1 << random.randrange(8)
    return bytes(changed)


def checkpoints_and_states(place: Place, random: Random) -> Tried:
    """Flip bits in checkpoints and clients' states: every reader detects the damage."""
    run = place.truth(place.experiment(random.choice(STATEFUL)))
    copy = place.new()
    shutil.copytree(run, copy)
    newest, journal = durable(copy), Journal.read(RunFolder(copy))
    checkpoint = next((copy / "checkpoints").glob(f"round-*{newest}.safetensors"))
    states = States(open_store(copy / "states"))
    for number in range(FLIPS):
        client = random.choice(place.clients[:6])
        version = journal.version(client, newest)
        of_state = number % 2 == 1 and version is not None
        path = copy / "states" / client / f"{version}.safetensors" if of_state else checkpoint
        whole = path.read_bytes()
        path.write_bytes(damage(whole, random))
        try:
            if of_state and version is not None:
                states.load(client, version)
            else:
                Checkpoints(copy / "checkpoints").load("last")
        except DataError:
            path.write_bytes(whole)
        else:
            raise Broken(f"{path.name} was damaged, and read all the same")
    return Tried(FLIPS)


def files_of_a_run(place: Place, random: Random) -> Tried:
    """Damage any file of a killed run: resuming is rejected with an exit code, or completes."""
    experiment, out = place.experiment(random.choice(TRAINED)), place.new()
    order = ("run", experiment, "--partition", place.partition, "--resume", "--out", out)
    operations = place.operations(experiment)
    given = {"FAULTS_UNDER": str(out), "FAULTS_DIE_AT": str(random.randint(operations // 3, operations))}
    with place.start(*order, **given) as run:
        run.wait(0, -signal.SIGKILL)
    found = [path for path in sorted(out.rglob("*")) if path.is_file() and path.stat().st_size]
    path = random.choice(found)
    whole = path.read_bytes()
    path.write_bytes(damage(whole, random))
    with place.start(*order) as run:
        code = run.wait(0, ExitCode.EXPERIMENT, ExitCode.DATA, ExitCode.QUORUM)
    newest = max(found, key=lambda path: path.name if path.match("checkpoints/round-*.safetensors") else "")
    if path == newest and path.parent.name == "checkpoints" and code == 0:
        raise Broken(f"the run went on from {path.name}, which is damaged")
    if code:
        path.write_bytes(whole)
        with place.start(*order) as run:
            run.wait(0)
        place.check(out, experiment)
    return Tried()


FAULTS = (
    Fault("file-size", "disks", "a file cannot grow", f"ends with 6; {PROMISE}", may_not_grow, goal=10, short=1),
    Fault("full-disk", "disks", "the disk is full", f"ends with 6; {PROMISE}", full, goal=10, short=1),
    Fault(
        "damaged-tensors", "disks", "a bit of a checkpoint or of a client's state is flipped, or its end is cut off",
        "refused whenever it is read", checkpoints_and_states, goal=20, short=1,
    ),
    Fault(
        "damaged-run", "disks", "a bit of any file of a run is flipped",
        "a resume continues, or exits with a code for the damage, without a traceback or a hang",
        files_of_a_run, goal=15,
    ),
)  # fmt: skip
