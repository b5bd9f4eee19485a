"""``fedloom status``, ``fedloom clients`` and ``fedloom federation``: show and control federations."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedloom.cli import trusted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from fedloom.federation.activity import Activity, ConnectedWorker, RosterClient
    from fedloom.transport.control import ControlClient

EVERY_S = 1.0
"""Seconds between requests with ``--follow``."""

STORE_EVERY_S = 10.0
"""The same for a store, which may charge for requests and is updated less often, in seconds."""

LINES_EVERY_S = 10.0
"""Minimum interval between updates if standard output is not a terminal, in seconds."""

LOST_S = 60.0
"""Seconds to keep asking an aggregator that has stopped answering; it may be restarting."""

Where = Annotated[
    str | None,
    typer.Argument(
        help="An aggregator's HOST:PORT, a run's folder, or its URL; by default the newest run in runs.",
        metavar="[ADDRESS|RUN]",
        show_default=False,
    ),
]
Address = Annotated[str, typer.Argument(help="The aggregator's HOST:PORT.", metavar="ADDRESS")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(frozen=True)
class Source:
    """Source of a federation's status: its activity, the clients of its roster, and the polling interval in seconds."""

    activity: Callable[[], Activity]
    clients: Callable[[], Sequence[RosterClient]]
    every_s: float = EVERY_S


def status(
    where: Where = None,
    as_json: Json = False,
    follow: Annotated[
        bool | None,
        typer.Option(
            "--follow/--once", help="Keep showing until the run is over, or show once; by default follow on a terminal."
        ),
    ] = None,
    tls_ca: trusted.CaOfAggregator = None,
    tls_certificate: trusted.Certificate = None,
    tls_key: trusted.Key = None,
    token_file: trusted.TokenFile = None,
    insecure: trusted.InsecureClient = False,
) -> None:
    """Show the status of a federation. Asks its aggregator, or reads a run's files, even if no process runs."""
    follow = sys.stdout.isatty() and not as_json if follow is None else follow
    with _source(where, tls_ca, tls_certificate, tls_key, token_file, insecure) as source:
        now = source.activity()
        if not follow:
            _show(now, as_json=as_json)
        elif sys.stdout.isatty() and not as_json:
            _follow_live(source, now)
        else:
            _follow_lines(source, now, as_json=as_json)


def clients(
    where: Where = None,
    as_json: Json = False,
    tls_ca: trusted.CaOfAggregator = None,
    tls_certificate: trusted.Certificate = None,
    tls_key: trusted.Key = None,
    token_file: trusted.TokenFile = None,
    insecure: trusted.InsecureClient = False,
) -> None:
    """List the clients of a federation's roster."""
    import json
    from dataclasses import asdict

    from fedloom.cli.tables import print_table
    from fedloom.words import pluralize, printable

    with _source(where, tls_ca, tls_certificate, tls_key, token_file, insecure) as source:
        found = source.clients()
    if as_json:
        typer.echo(json.dumps([asdict(client) for client in found], indent=2))
        return
    if not found:
        typer.echo("no clients in the roster")
        return
    now = time.time()
    rows = [
        (
            client.id,
            "observes" if client.observes else "trains",
            {True: "connected", False: "absent", None: ""}[client.connected],
            printable(client.worker or ""),
            printable(client.identity or ""),
            "" if client.examples is None else f"{client.examples:,}",
            "" if client.last_round is None else str(client.last_round),
            "" if client.awaited_since is None else _duration(now - client.awaited_since),
        )
        for client in found
    ]
    headings = ("client", "role", "state", "worker", "identity", "examples", "last round", "awaited for")
    kept = [i for i in range(len(headings)) if i < 2 or any(row[i] for row in rows)]
    print_table(
        pluralize(len(rows), "client"),
        [headings[i] for i in kept],
        [[row[i] for i in kept] for row in rows],
        texts=[n for n, i in enumerate(kept) if i < 5],
    )


federation = typer.Typer(
    help="Control a running federation; needs the role admin.", no_args_is_help=True, rich_markup_mode=None
)


@federation.command("pause")
def pause(
    address: Address,
    tls_ca: trusted.CaOfAggregator = None,
    tls_certificate: trusted.Certificate = None,
    tls_key: trusted.Key = None,
    token_file: trusted.TokenFile = None,
    insecure: trusted.InsecureClient = False,
) -> None:
    """Pause after the current round, until `resume`. A restarted aggregator stays paused."""
    with _dialled(address, tls_ca, tls_certificate, tls_key, token_file, insecure) as asked:
        changed, now = asked.pause()
    what = "pauses" if changed else "was to pause before:"
    _say(f"{now.run} {what} after round {now.doing if now.doing is not None else now.round}")


@federation.command("resume")
def resume(
    address: Address,
    tls_ca: trusted.CaOfAggregator = None,
    tls_certificate: trusted.Certificate = None,
    tls_key: trusted.Key = None,
    token_file: trusted.TokenFile = None,
    insecure: trusted.InsecureClient = False,
) -> None:
    """Continue a paused federation."""
    with _dialled(address, tls_ca, tls_certificate, tls_key, token_file, insecure) as asked:
        changed, now = asked.resume()
    _say(f"{now.run} goes on after round {now.round}" if changed else f"{now.run} was not paused")


@federation.command("stop")
def stop(
    address: Address,
    now: Annotated[
        bool, typer.Option("--now", help="Do not wait for the current round; it runs again on --resume.")
    ] = False,
    tls_ca: trusted.CaOfAggregator = None,
    tls_certificate: trusted.Certificate = None,
    tls_key: trusted.Key = None,
    token_file: trusted.TokenFile = None,
    insecure: trusted.InsecureClient = False,
) -> None:
    """Stop after the current round. To continue later, start the aggregator with `--resume`."""
    with _dialled(address, tls_ca, tls_certificate, tls_key, token_file, insecure) as asked:
        told = asked.stop(now=now)
    when = "now" if now or told.doing is None else f"after round {told.doing}"
    _say(f"{told.run} stops {when}; its aggregator goes on with --resume")


# ---- sources


@contextmanager
def _dialled(
    address: str, ca: Path | None, certificate: Path | None, key: Path | None, token_file: Path | None, insecure: bool
) -> Iterator[ControlClient]:
    from fedloom.transport.control import dialled
    from fedloom.trust.options import ClientOptions, Credentials, token_of

    options = ClientOptions(ca, certificate, key, token_file, token_of(), insecure)
    with dialled(address, Credentials(options)) as asked:
        yield asked


@contextmanager
def _source(
    where: str | None,
    ca: Path | None,
    certificate: Path | None,
    key: Path | None,
    token_file: Path | None,
    insecure: bool,
) -> Iterator[Source]:
    """Yield the source for an argument: a store if it is a URL, an aggregator if ``HOST:PORT``, otherwise a folder."""
    from fedloom.storage import is_url

    if where is not None and is_url(where):
        from fedloom.reporting.status import RunStatus
        from fedloom.runs.folder import RunFolder
        from fedloom.storage import open_store

        open_store(where).check(writing=False)
        run = RunStatus(RunFolder.open(where, checkpoints=False))
        yield Source(run.activity, run.clients, STORE_EVERY_S)
    elif where is not None and ":" in where and "/" not in where and not Path(where).exists():
        with _dialled(where, ca, certificate, key, token_file, insecure) as asked:
            yield Source(asked.status, lambda: list(asked.clients()))
    else:
        from fedloom.reporting.status import RunStatus
        from fedloom.runs.folder import RunFolder
        from fedloom.runs.listing import newest_run

        run = RunStatus(RunFolder.open(newest_run(Path("runs")) if where is None else where))
        yield Source(run.activity, run.clients)


# ---- output


def _say(text: str) -> None:
    from fedloom.words import printable

    typer.echo(printable(text))


def _show(now: Activity, *, as_json: bool) -> None:
    import json
    from dataclasses import asdict

    from rich.console import Console

    if as_json:
        typer.echo(json.dumps(asdict(now), indent=2))
        return
    console = Console(highlight=False)
    for line in _lines(now, console):
        if console.is_terminal or "COLUMNS" in os.environ:
            console.print(line, overflow="fold")
        else:  # a file has no width limit
            typer.echo(line.plain)


def _follow_lines(source: Source, now: Activity, *, as_json: bool) -> None:
    """Show the status when it has changed: as one JSON object per line, or in full at ``LINES_EVERY_S`` intervals."""
    import json
    from dataclasses import asdict

    shown: Activity | None = None
    shown_at = -LINES_EVERY_S
    while True:
        over = _is_over(now)
        due = as_json or over or time.monotonic() - shown_at >= LINES_EVERY_S
        if due and (shown is None or _differs(now, shown)):
            if as_json:
                typer.echo(json.dumps(asdict(now)))
            else:
                if shown is not None:
                    typer.echo("")
                _show(now, as_json=False)
            sys.stdout.flush()
            shown, shown_at = now, time.monotonic()
        if over:
            return
        time.sleep(source.every_s)
        if (next_one := _asked_again(source, now)) is None:
            return
        now = next_one


def _asked_again(source: Source, last: Activity) -> Activity | None:
    """Ask again, retrying for a while; return None if the aggregator is gone after it was stopping.

    Raises
    ------
    AbandonedError
        If there is no answer for ``LOST_S`` seconds.
    """
    from fedloom.errors import AbandonedError

    until = time.monotonic() + LOST_S
    while True:
        try:
            return source.activity()
        except AbandonedError:
            if last.phase == "stopping":
                return None
            if time.monotonic() >= until:
                raise
            time.sleep(source.every_s)


def _follow_live(source: Source, now: Activity) -> None:
    """Show the status on a terminal and update it; note if lines are left out for lack of room."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    from fedloom.errors import AbandonedError

    console = Console(highlight=False)
    lost_at: float | None = None

    def shown(note: str = "") -> Group:
        lines = [*_lines(now, console), *([Text(note, "bold")] if note else [])]
        return Group(*_fitting(lines, console))

    try:
        with Live(shown(), console=console, auto_refresh=False, transient=True) as live:
            while not _is_over(now):
                time.sleep(source.every_s)
                try:
                    now, lost_at = source.activity(), None
                    live.update(shown(), refresh=True)
                except AbandonedError as error:
                    if now.phase == "stopping":
                        return
                    lost_at = lost_at or time.monotonic()
                    if time.monotonic() - lost_at >= LOST_S:
                        raise
                    gone = _duration(time.monotonic() - lost_at)
                    live.update(shown(f"no answer for {gone}: {error.message}"), refresh=True)
    finally:
        _show(now, as_json=False)  # leave the last status in full, also after Ctrl-C


def _fitting(lines: list[Text], console: Console) -> list[Text]:
    """Return the lines that fit on the terminal; if some do not, a last one says how to see them all."""
    from rich.text import Text

    def wrapped(line: Text) -> list[Text]:
        return list(line.wrap(console, console.width, overflow="fold"))

    found = [part for line in lines for part in wrapped(line)]
    room = max(2, console.height - 1)
    if len(found) <= room:
        return found
    note = wrapped(Text("... and more lines: --once shows all", "bold"))
    return [*found[: max(1, room - len(note))], *note]


def _is_over(now: Activity) -> bool:
    from fedloom.federation.activity import OVER

    return now.phase in OVER


def _differs(now: Activity, before: Activity) -> bool:
    """Return whether anything but times has changed."""
    from dataclasses import replace

    def still(seen: Activity) -> Activity:
        workers = tuple(replace(worker, since=0, sign=0) for worker in seen.workers)
        awaiting = tuple(replace(each, since=0, deadline=None) for each in seen.awaiting)
        totals = replace(seen.totals, phases={})
        return replace(seen, time=0, since=0, durable_at=0, awaiting=awaiting, workers=workers, totals=totals)

    return still(now) != still(before)


def _lines(now: Activity, console: Console) -> list[Text]:
    """Return the status as text: a heading, and a line for each known fact."""
    from rich.text import Text

    from fedloom.cli.characters import shown_as
    from fedloom.words import printable

    def text(line: str, style: str = "") -> Text:
        return Text(shown_as(console.encoding, printable(line)), style)

    of = "" if now.rounds is None else f" of {now.rounds}"
    doing = f"round {now.doing}{of}, attempt {now.attempt}" if now.doing is not None else f"after round {now.round}{of}"
    heading = f"{now.run} · {now.method} · {now.phase}, {doing}, for {_duration(now.time - now.since)}"
    if now.phase in ("finished", "interrupted", "published"):
        heading = f"{now.run} · {now.method} · {now.phase}, {doing}, {_duration(now.time - now.since)} ago"
    found = [text(heading, "bold")]
    found += [text(f"{name:<{_NAMES}}{words}") for name, words in _facts(now)]
    return found


_NAMES = 12


def _facts(now: Activity) -> Iterator[tuple[str, str]]:
    """Yield the known facts about a federation as (name, text)."""
    from fedloom.words import pluralize

    if now.message:
        yield "", now.message
    if now.paused_by is not None and now.phase != "paused":
        yield "pause", f"asked for by {now.paused_by}"
    if now.durable_age_s is not None:
        yield "durable", f"round {now.durable_round}, {_duration(now.durable_age_s)} ago"
    c = now.clients
    parts = [f"{c.roster:,} in the roster"]
    if c.connected is not None:
        parts += [f"{c.connected:,} connected", f"{c.absent:,} absent"]
    parts += [f"{c.observing:,} observing"] if c.observing else []
    parts += [f"{c.answered:,} of {c.cohort:,} answered in round {now.round}"] if c.cohort else []
    yield "clients", ", ".join(parts)
    if now.awaited:
        yield "awaited", f"{pluralize(now.awaited, 'client')}, {now.late:,} late"
    for each in [each for each in now.awaiting if each.late]:
        whom = "nobody serves it" if each.worker is None else f"worker {each.worker}"
        until = "" if each.deadline is None else f", lost in {_duration(each.deadline - now.time)}"
        yield "late", f"{each.client}: {whom}, awaited for {_duration(now.time - each.since)}{until}"
    if now.rounds_per_s is not None:
        steps = f", {_number(now.client_steps_per_s or 0.0)} client steps/s"
        yield "speed", f"{_number(now.rounds_per_s)} rounds/s{steps}"
    if now.train_loss is not None:
        yield "loss", f"{now.train_loss:.4f} in training"
    yield from _measured(now)
    t = now.totals
    if t.bytes_up is not None and t.bytes_down is not None:
        yield "bytes", f"{_bytes(t.bytes_down)} to workers, {_bytes(t.bytes_up)} from them"
    if t.exchanges:
        yield (
            "rounds",
            f"{t.rounds:,}, {t.failed_attempts:,} failed attempts, {_duration(t.seconds)}: {_shares(t.exchanges)}",
        )
    if t.phases:
        yield "time", f"{_duration(sum(t.phases.values()))}: {_shares(t.phases)}"
    if t.refusals:
        yield "refused", ", ".join(f"{reason}: {count:,}" for reason, count in sorted(t.refusals.items()))
    for worker in now.workers:
        yield "worker", _worker(worker, now.time)


def _measured(now: Activity) -> Iterator[tuple[str, str]]:
    if (measured := now.measured) is None:
        return
    for name in ("seen", "unseen", "global"):
        if (group := measured.groups.get(name)) is None:
            continue
        if group.accuracy_mean is None:
            what = "" if group.loss_mean is None else f"loss {group.loss_mean:.4f}"
        else:
            worst = group.accuracy_worst_decile
            what = f"accuracy {group.accuracy_mean:.4f}" + ("" if worst is None else f", worst decile {worst:.4f}")
        yield name, f"{what} (mean of {group.clients:,} after round {measured.round})"


def _worker(worker: ConnectedWorker, now: float) -> str:
    from fedloom.words import pluralize

    whose = "" if worker.identity is None else f" of {worker.identity}"
    silent = "" if now - worker.sign < 30 else f", silent for {_duration(now - worker.sign)}"
    return (
        f"{worker.name}{whose}: {pluralize(worker.clients, 'client')}, {worker.device}, "
        f"connected for {_duration(now - worker.since)}{silent}"
    )


def _shares(seconds: dict[str, float]) -> str:
    """Return each part's share of the total time, largest first."""
    total = sum(seconds.values()) or 1.0
    by_size = sorted(seconds.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {part / total:.0%}" for name, part in by_size)


def _duration(seconds: float) -> str:
    """Return a readable duration: ``0.4 s``, ``12 s``, ``3 min 5 s``, ``2 h 10 min``, ``5 d 3 h``."""
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f} s"
    whole = round(seconds)
    for unit, size, smaller, part in (("d", 86_400, "h", 3_600), ("h", 3_600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _bytes(count: int) -> str:
    size, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
