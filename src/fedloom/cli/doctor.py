"""``fedloom doctor``: checks of this machine, and of what a federation needs around it."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import fedloom
from fedloom.cli.options import ClientAccess, with_options
from fedloom.cli.results import CommandResult
from fedloom.core.address import split_address
from fedloom.core.checks import CheckResult, checked
from fedloom.core.plugins import capability, entries
from fedloom.core.processes import usable_cores
from fedloom.core.words import pluralize
from fedloom.errors import ExitCode

if TYPE_CHECKING:
    from fedloom.security.options import Credentials

SMALLEST_DISK = 2 * 10**9
"""Bytes free on a disk below which a run may fail."""

SHORTEST_VALIDITY_D = 14
"""Days for which a certificate should still be valid."""

LARGEST_SKEW_S = 30.0
"""Difference of two clocks that makes certificates and deadlines unreliable, in seconds."""


@with_options()
def doctor_command(
    access: ClientAccess,
    aggregator: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Check this aggregator, with the credentials.")
    ] = None,
    store: Annotated[str | None, typer.Option(metavar="URL", help="Check that this store can be written to.")] = None,
    cluster: Annotated[bool, typer.Option("--cluster", help="Check the current Kubernetes cluster.")] = False,
    kubeflow: Annotated[
        str | None,
        typer.Option(
            metavar="URL|FILE|in-cluster", help="Check this installation of Kubeflow, as for `fedloom pipeline`."
        ),
    ] = None,
) -> CommandResult:
    """Check this machine, and an aggregator, a store, a cluster or Kubeflow; each problem comes with its remedy."""
    findings = [*_machine()]
    if access.credentials is not None or aggregator is not None:
        findings += _aggregator(access, aggregator)
    if store is not None:
        findings.append(checked("store", lambda: _store(store)))
    if cluster:
        findings += capability("doctor-cluster", "--cluster")()
    if kubeflow is not None:
        findings += capability("doctor-kubeflow", "--kubeflow")(kubeflow)
    lines = []
    for finding in findings:
        lines.append(f"{finding.state:<9}{finding.subject}: {finding.detail}")
        lines += [f"{'':9}{finding.remedy}"] if finding.remedy else []
    code = next((finding.code for finding in findings if finding.state == "error"), 0)
    return CommandResult(findings, "\n".join(lines), exit_code=code)


# --- this machine -----------------------------------------------------------------------------------------------------


def _machine() -> Iterator[CheckResult]:
    from fedloom.data.folders import data_root

    yield checked("fedloom", _version)
    yield checked("torch", _torch)
    yield checked("memory", _memory)
    for subject, path in (("disk, data sets", data_root()), ("disk, this folder", Path.cwd())):
        yield checked(subject, lambda path=path: _disk(path))  # type: ignore[misc]
    for group in ("algorithms", "models", "tasks", "datasets", "commands"):
        yield from _broken_plugins(group)


def _broken_plugins(group: str) -> Iterator[CheckResult]:
    """Yield the plugins of other packages that cannot be loaded."""
    for point in entries(f"fedloom.{group}"):
        package = "fedloom" if point.dist is None else point.dist.name
        if package == "fedloom":
            continue
        try:
            point.load()
        except Exception as error:
            remedy = f"install {package} again, or uninstall it"
            code = int(ExitCode.EXPERIMENT)
            yield CheckResult(f"plugin {point.name}", "error", f"{type(error).__name__}: {error}", remedy, code)


def _version() -> str:
    from fedloom.transport.versions import OLDEST, PROTOCOL

    python = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    return f"{fedloom.__version__}, protocol {PROTOCOL} (and {OLDEST}), {python}"


def _torch() -> CheckResult | str:
    import torch

    cores, threads = usable_cores(), torch.get_num_threads()
    words = f"{torch.__version__}, {pluralize(threads, 'thread')} on {pluralize(cores, 'core')}"
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        return f"{words}, GPU: {names} (`fedloom device` checks that it computes what a CPU computes)"
    if torch.version.cuda is not None:
        remedy = "the CPU build of torch is gigabytes smaller (docs/install.md)"
        return CheckResult(
            "torch", "warning", f"{words}, built for CUDA {torch.version.cuda}, and there is no GPU", remedy
        )
    if threads > cores:
        return CheckResult(
            "torch", "warning", words, f"set OMP_NUM_THREADS={cores}: more threads than cores are slower"
        )
    return f"{words}, no GPU"


def _memory() -> str:
    page = os.sysconf("SC_PAGE_SIZE")
    words = f"{page * os.sysconf('SC_PHYS_PAGES') / 1e9:.1f} GB"
    if "SC_AVPHYS_PAGES" not in os.sysconf_names:  # macOS
        return words
    return f"{words}, of which {page * os.sysconf('SC_AVPHYS_PAGES') / 1e9:.1f} GB are unused"


def _disk(path: Path) -> CheckResult | str:
    there = next(each for each in (path, *path.parents) if each.exists())
    free, words = shutil.disk_usage(there).free, str(path)
    if not os.access(there, os.W_OK):
        return CheckResult(
            "disk",
            "error",
            f"{there} cannot be written to",
            "set FEDLOOM_DATA, or change its owner",
            int(ExitCode.STORAGE),
        )
    words += f", {free / 1e9:.1f} GB free"
    return words if free >= SMALLEST_DISK else CheckResult("disk", "warning", words, "free some space before a run")


# --- what a federation needs around it --------------------------------------------------------------------------------


def _aggregator(access: ClientAccess, address: str | None) -> Iterator[CheckResult]:
    from fedloom.security.options import Credentials

    credentials: list[Credentials] = []

    def opened() -> str:
        credentials.append(Credentials(access.options()))
        current = credentials[0].current
        kinds = {"authorities": current.ca, "a certificate": current.pair, "a token": current.token}
        return ", ".join(kind for kind, content in kinds.items() if content is not None) or "none: plaintext"

    yield checked("credentials", opened)
    if not credentials:
        return
    if credentials[0].current.pair is not None:
        yield checked("certificate", lambda: _certificate(credentials[0]))
    if address is not None:
        yield checked("aggregator", lambda: _status(address, credentials[0]))


def _certificate(credentials: Credentials) -> CheckResult | str:
    pair = credentials.show("localhost").pair
    assert pair is not None
    days = (pair.certificate.ends - datetime.now(UTC)).days
    words = f"{pair.certificate}, valid for {pluralize(days, 'day')}"
    return words if days >= SHORTEST_VALIDITY_D else CheckResult("certificate", "warning", words, "renew it soon")


def _status(address: str, credentials: Credentials) -> CheckResult | str:
    from fedloom.transport.control import dialled

    host, _ = split_address(address, what="--aggregator", lowest=1)
    credentials.show(host)
    with dialled(address, credentials) as client:
        now = client.status()
    words = f"{now.run} at {address} is {now.phase}, round {now.round}, {pluralize(len(now.workers), 'worker')}"
    skew = now.time - time.time()
    if abs(skew) > LARGEST_SKEW_S:
        direction = "ahead of" if skew > 0 else "behind"
        remedy = "synchronize both clocks (NTP): certificates and deadlines depend on them"
        return CheckResult(
            "aggregator", "warning", f"{words}; its clock is {abs(skew):.0f} s {direction} this one", remedy
        )
    return words


def _store(url: str) -> str:
    from fedloom.storage import open_store

    store = open_store(url)
    store.check()
    return f"{store.url} can be read and written to"
