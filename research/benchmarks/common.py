"""Common parts of the benchmarks: the machine, processes and their memory, tables, and the file of figures."""

from __future__ import annotations

import json
import os
import platform
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedloom.data.manifest import Manifest

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


def machine() -> dict[str, Any]:
    """Return what figures depend on: processor, cores, initial load, versions, commit."""
    import torch

    def git(*command: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *command], capture_output=True, text=True).stdout.strip()

    names = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": git("rev-parse", "--short", "HEAD")
        + ("+" if git("status", "--porcelain", "src", "research") else ""),
    }


def describe(about: dict[str, Any]) -> str:
    """Return the machine in one line; a + after the commit marks a modified tree."""
    return (
        f"{about['processor']}, {about['cores']} cores, load {about['load']:.1f} at the start, "
        f"Python {about['python']}, torch {about['torch']}, commit {about['commit']}"
    )


def made_up_manifest(dataset: str, clients: Iterable[str], classes: int, per_class: int) -> Manifest:
    """Return a manifest of seen clients without data, with ``per_class`` images of each class in each split."""
    from fedloom.data.manifest import VERSION, ClientEntry, Manifest
    from fedloom.data.spec import DataSpec, Normalization

    n, spec = classes * per_class, DataSpec.single("pixels", (1, 28, 28), tuple(f"class {c}" for c in range(classes)))
    counts = dict.fromkeys(("train", "validation", "test"), (per_class,) * classes)
    return Manifest(
        version=VERSION,
        dataset=dataset,
        spec=spec.with_normalization(Normalization((0.5,), (0.5,))),
        scheme={"scheme": "none"},
        seed=1,
        held_out_fraction=0.0,
        validation_fraction=0.0,
        source_sha256={},
        clients=tuple(ClientEntry(name, True, n, n, n, counts, "0" * 64) for name in clients),
    )


def import_torch_s() -> float:
    """Return the seconds that a process takes to import torch."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - started


def resident_bytes(process: int, kind: str = "VmRSS") -> int:
    """Return the resident memory of a process: now, at its peak (VmHWM), or anonymous (RssAnon); 0 if it has ended."""
    found = [line for line in _lines(f"/proc/{process}/status") if line.startswith(f"{kind}:")]
    return int(found[0].split()[1]) * 1024 if found else 0


def socket_bytes() -> int:
    """Return the bytes that this process's TCP connections have carried in both directions, without TCP headers."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                if connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6):
                    about = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += sum(struct.unpack_from("=QQ", about, 120))  # tcpi_bytes_acked, tcpi_bytes_received
        except OSError:  # just closed
            continue
    return total


def cpu_s(processes: Iterable[int]) -> float:
    """Return the CPU seconds that processes have used; 0 for one that has ended."""
    total = 0.0
    for process in processes:
        with suppress(OSError):
            total += time.clock_gettime(~process << 3 | 2)  # CPUCLOCK_SCHED of Linux: in ns, where /proc has ticks
    return total


def descendants(process: int) -> list[int]:
    """Return a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            stat = "".join(_lines(str(entry / "stat")))
            if stat:
                parent = int(stat.rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found, left = [], [process]
    while left:
        found.append(left.pop())
        left += children.get(found[-1], [])
    return found


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(errors="replace").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return []


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that this share of the values does not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def spread(values: Sequence[float], form: str = "{:.2f}") -> str:
    """Return median, lowest and highest: ``1.31 (1.25-1.40)``."""
    low, middle, high = (form.format(v) for v in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low}-{high})"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table with aligned columns, readable on a terminal too."""
    lines = [list(head), *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    text.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(text)


def write_json(path: Path | None, about: dict[str, Any], figures: Any) -> None:
    """Write the figures and the machine to a file, if one is given."""
    if path is not None:
        path.write_text(json.dumps({"machine": about, "figures": figures}, indent=2) + "\n")
