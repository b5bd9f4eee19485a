"""``fedloom status`` and ``fedloom federation``: show and control federations."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fedloom.cli.characters import shown_as
from fedloom.cli.completion import complete_runs
from fedloom.cli.options import ClientAccess, Json, refuse_options, with_options
from fedloom.cli.results import CommandResult, print_json
from fedloom.core.words import duration, pluralize, printable, rounded_up

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from fedloom.errors import AbandonedError
    from fedloom.federation.activity import Activity, Awaited, ConnectedWorker, RosterClient
    from fedloom.transport.control import ControlClient

EVERY_S = 1.0
"""Seconds between requests with ``--follow``."""

STORE_EVERY_S = 10.0
"""Seconds between requests to a store, which may charge for them and is updated less often."""

LINES_EVERY_S = 10.0
"""Minimum interval between updates if standard output is not a terminal, in seconds."""

LOST_S = 60.0
"""Seconds to keep asking an aggregator that has stopped answering; it may be restarting."""

NAME_WIDTH = 12
"""Width of the names of facts, in characters."""

ENDED = ("finished", "interrupted", "published")

Where = Annotated[
    str | None,
    typer.Argument(
        help="An aggregator's HOST:PORT, a run's folder, or its URL; by default the newest run in runs.",
        metavar="[ADDRESS|RUN]",
        autocompletion=complete_runs,
        show_default=False,
    ),
]


@dataclass(frozen=True)
class _Source:
    """Source of a federation's status: its activity, the clients of its roster, and the polling interval in seconds."""

    activity: Callable[[], Activity]
    clients: Callable[[], Sequence[RosterClient]]
    every_s: float = EVERY_S


@with_options()
def status_command(
    access: ClientAccess,
    where: Where = None,
    as_json: Json = False,
    clients: Annotated[bool, typer.Option("--clients", help="List the clients of the roster instead.")] = False,
    follow: Annotated[
        bool | None,
        typer.Option(
            "--follow/--once", help="Keep showing until the run is over, or show once; by default follow on a terminal."
        ),
    ] = None,
) -> CommandResult | None:
    """Show the status of a federation. Asks its aggregator, or reads a run's files, even if no process runs."""
    if clients:
        refuse_options({"--follow": follow}, "cannot be combined with --clients.")
        return _roster(where, access)
    follow = sys.stdout.isatty() and not as_json if follow is None else follow
    with _open_source(where, access) as source:
        now = source.activity()
        if not follow:
            return CommandResult(now, lambda: _show(now))
        if sys.stdout.isatty() and not as_json:
            _follow_live(source, now)
        else:
            _follow_lines(source, now, as_json=as_json)
    return None


def _roster(where: str | None, access: ClientAccess) -> CommandResult:
    from fedloom.cli.tables import print_table

    with _open_source(where, access) as source:
        found = source.clients()
    if not found:
        return CommandResult(found, "no clients in the roster")
    headings, rows, texts = client_table(found)
    return CommandResult(found, lambda: print_table(pluralize(len(rows), "client"), headings, rows, texts=texts))


@with_options()
def federation_command(
    action: Annotated[
        Literal["pause", "resume", "stop"],
        typer.Argument(
            help="pause after the current round, also across a restart; resume a paused federation; stop after the "
            "current round: restart the aggregator with --resume to continue later."
        ),
    ],
    address: Annotated[str, typer.Argument(help="The aggregator's HOST:PORT.", metavar="ADDRESS")],
    access: ClientAccess,
    now: Annotated[
        bool, typer.Option("--now", help="With stop: do not wait for the current round; it runs again on --resume.")
    ] = False,
) -> CommandResult:
    """Control a running federation; needs the role admin."""
    if action != "stop":
        refuse_options({"--now": now}, "is for stop.")
    with _dialled(address, access) as client:
        if action == "stop":
            status = client.stop(now=now)
            when = "now" if now or status.doing is None else f"after round {status.doing}"
            text = f"{status.run} stops {when}; continue by restarting its aggregator with --resume"
            return CommandResult(status, printable(text))
        changed, status = client.pause() if action == "pause" else client.resume()
    if action == "resume":
        text = f"{status.run} continues after round {status.round}" if changed else f"{status.run} was not paused"
    else:
        what = "pauses" if changed else "had already been asked to pause:"
        text = f"{status.run} {what} after round {status.doing if status.doing is not None else status.round}"
    return CommandResult(status, printable(text))


# ---- sources


@contextmanager
def _dialled(address: str, access: ClientAccess) -> Iterator[ControlClient]:
    from fedloom.security.options import Credentials
    from fedloom.transport.control import dialled

    with dialled(address, Credentials(access.options())) as client:
        yield client


@contextmanager
def _open_source(where: str | None, access: ClientAccess) -> Iterator[_Source]:
    """Yield the source that an argument names: a store by its URL, an aggregator as ``HOST:PORT``, or a folder."""
    from fedloom.core.urls import is_url

    if where is not None and is_url(where):
        from fedloom.reporting.status import RunStatus
        from fedloom.runs.folder import RunFolder
        from fedloom.storage import open_store

        open_store(where).check(writing=False)
        run = RunStatus(RunFolder.open(where, checkpoints=False))
        yield _Source(run.activity, run.clients, STORE_EVERY_S)
    elif where is not None and ":" in where and "/" not in where and not Path(where).exists():
        with _dialled(where, access) as asked:
            yield _Source(asked.status, lambda: list(asked.clients()))
    else:
        from fedloom.reporting.status import RunStatus
        from fedloom.runs.folder import RunFolder
        from fedloom.runs.listing import newest_run

        run = RunStatus(RunFolder.open(newest_run(Path("runs")) if where is None else where))
        yield _Source(run.activity, run.clients)


# ---- output


def _show(now: Activity) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    for line in status_lines(now, console):
        if console.is_terminal or "COLUMNS" in os.environ:
            console.print(line, overflow="fold")
        else:  # a file has no width limit
            typer.echo(line.plain)


def _states(
    source: _Source, now: Activity, lost: Callable[[float, AbandonedError], None] = lambda silent_s, error: None
) -> Iterator[Activity]:
    """Yield a federation's states, from ``now`` on, until it is over or its aggregator has exited after stopping.

    Parameters
    ----------
    lost
        Called while there is no answer, with its duration in seconds and the error.

    Raises
    ------
    AbandonedError
        If there is no answer for ``LOST_S`` seconds.
    """
    from fedloom.errors import AbandonedError

    yield now
    lost_at: float | None = None
    while not _is_over(now):
        time.sleep(source.every_s)
        try:
            now, lost_at = source.activity(), None
        except AbandonedError as error:
            if now.phase == "stopping":
                return
            lost_at = lost_at or time.monotonic()
            silent_s = time.monotonic() - lost_at
            if silent_s >= LOST_S:
                raise
            lost(silent_s, error)
        else:
            yield now


def _follow_lines(source: _Source, first: Activity, *, as_json: bool) -> None:
    """Show the status when it has changed: as one JSON object per line, or in full at ``LINES_EVERY_S`` intervals."""
    shown: Activity | None = None
    shown_at = -LINES_EVERY_S
    for now in _states(source, first):
        due = as_json or _is_over(now) or time.monotonic() - shown_at >= LINES_EVERY_S
        if due and (shown is None or _differs(now, shown)):
            if as_json:
                print_json(now, indent=None)
            else:
                if shown is not None:
                    typer.echo("")
                _show(now)
            sys.stdout.flush()
            shown, shown_at = now, time.monotonic()


def _follow_live(source: _Source, latest: Activity) -> None:
    """Show the status on a terminal and update it; the last line says so if lines are left out for lack of space."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)

    def shown(note: str = "") -> Group:
        lines = [*status_lines(latest, console), *([Text(note, "bold")] if note else [])]
        return Group(*_fitting(lines, console))

    try:
        with Live(shown(), console=console, auto_refresh=False, transient=True) as live:

            def lost(silent_s: float, error: AbandonedError) -> None:
                live.update(shown(f"no answer for {duration(silent_s)}: {error.message}"), refresh=True)

            for now in _states(source, latest, lost):
                latest = now
                live.update(shown(), refresh=True)
    finally:
        _show(latest)  # leave the last status in full, also after Ctrl-C


def _fitting(lines: list[Text], console: Console) -> list[Text]:
    """Return the lines that fit on the terminal; if some do not, the last line says how to see all of them."""
    from rich.text import Text

    def wrapped(line: Text) -> list[Text]:
        return list(line.wrap(console, console.width, overflow="fold"))

    found = [part for line in lines for part in wrapped(line)]
    room = max(2, console.height - 1)
    if len(found) <= room:
        return found
    note = wrapped(Text("... more lines: see all with --once", "bold"))
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


# ---- text


def status_lines(now: Activity, console: Console) -> list[Text]:
    """Return a heading, and a line for each known fact."""
    from rich.text import Text

    of = "" if now.rounds is None else f" of {now.rounds}"
    doing = f"round {now.doing}{of}, attempt {now.attempt}" if now.doing is not None else f"after round {now.round}{of}"
    since = duration(now.time - now.since)
    heading = f"{now.run} · {now.method} · {now.phase}, {doing}, "
    heading += f"{since} ago" if now.phase in ENDED else f"for {since}"
    lines = [(heading, "bold"), *((f"{name:<{NAME_WIDTH}}{words}", "") for name, words in _facts(now))]
    return [Text(shown_as(console.encoding, printable(line)), style) for line, style in lines]


def client_table(clients: Sequence[RosterClient]) -> tuple[list[str], list[list[str]], list[int]]:
    """Return the headings, rows and text columns of a table of clients, without columns that would be empty."""
    now = time.time()
    columns: tuple[tuple[str, Callable[[RosterClient], str]], ...] = (
        ("client", lambda c: c.id),
        ("role", lambda c: "observes" if c.observes else "trains"),
        ("state", lambda c: {True: "connected", False: "absent", None: ""}[c.connected]),
        ("worker", lambda c: printable(c.worker or "")),
        ("identity", lambda c: printable(c.identity or "")),
        ("examples", lambda c: "" if c.examples is None else f"{c.examples:,}"),
        ("last round", lambda c: "" if c.last_round is None else str(c.last_round)),
        ("awaited for", lambda c: "" if c.awaited_since is None else duration(now - c.awaited_since)),
    )
    shown = [(i, heading, [cell(client) for client in clients]) for i, (heading, cell) in enumerate(columns)]
    kept = [(i, heading, cells) for i, heading, cells in shown if i < 2 or any(cells)]
    rows = [list(row) for row in zip(*(cells for _, _, cells in kept), strict=True)]
    return [heading for _, heading, _ in kept], rows, [n for n, (i, _, _) in enumerate(kept) if i < 5]


def _facts(now: Activity) -> Iterator[tuple[str, str]]:
    """Yield the known facts about a federation as (name, text)."""
    from fedloom.federation.standing import Standing

    if now.message:
        yield "", now.message
    if now.paused_by is not None and now.phase != "paused":
        yield "pause", f"requested by {now.paused_by}"
    if now.durable_age_s is not None:
        yield "durable", f"round {now.durable_round}, {duration(now.durable_age_s)} ago"
    yield "clients", _clients(now)
    if now.awaited:
        yield "awaited", f"{Standing.from_activity(now).waits(now.time)}, {now.late:,} late"
    yield from (("late", _late(each, now.time)) for each in now.awaiting if each.late)
    if now.rounds_per_s is not None:
        steps = _number(now.client_steps_per_s or 0.0)
        yield "speed", f"{_number(now.rounds_per_s)} rounds/s, {steps} client steps/s"
    if now.train_loss is not None:
        yield "loss", f"{now.train_loss:.4f} in training"
    yield from _measured(now)
    yield from _privacy(now)
    yield from _totals(now)
    yield from (("worker", _worker(worker, now.time)) for worker in now.workers)
    yield from (("declined", f"{name}: {reason}") for name, reason in sorted(now.declined.items()))
    yield from (("too new", f"{name}: {reason}") for name, reason in sorted(now.too_new.items()))


def _clients(now: Activity) -> str:
    c = now.clients
    parts = [f"{c.roster:,} in the roster"]
    if c.connected is not None:
        parts += [f"{c.connected:,} connected", f"{c.absent:,} absent"]
    if c.observing:
        parts.append(f"{c.observing:,} observing")
    if c.cohort:
        parts.append(f"{c.answered:,} of {c.cohort:,} answered in round {now.round}")
    return ", ".join(parts)


def _late(each: Awaited, now: float) -> str:
    whom = "no worker serves it" if each.worker is None else f"worker {each.worker}"
    until = "" if each.deadline is None else f", lost in {duration(each.deadline - now)}"
    return f"{each.client}: {whom}, awaited for {duration(now - each.since)}{until}"


def _totals(now: Activity) -> Iterator[tuple[str, str]]:
    from rich.filesize import decimal

    t = now.totals
    if t.bytes_up is not None and t.bytes_down is not None:
        yield "bytes", f"{decimal(t.bytes_down)} to workers, {decimal(t.bytes_up)} from them"
    if t.exchanges:
        spent = f"{duration(t.seconds)}: {_shares(t.exchanges)}"
        yield "rounds", f"{t.rounds:,}, {t.failed_attempts:,} failed attempts, {spent}"
    if t.phases:
        yield "time", f"{duration(sum(t.phases.values()))}: {_shares(t.phases)}"
    if t.refusals:
        yield "refused", ", ".join(f"{reason}: {count:,}" for reason, count in sorted(t.refusals.items()))


def _measured(now: Activity) -> Iterator[tuple[str, str]]:
    if (measured := now.measured) is None:
        return
    for name in ("seen", "unseen", "global"):
        if (group := measured.groups.get(name)) is None:
            continue
        shown, worst = measured.headline, group.worst_decile
        what = "" if group.mean is None else f"{shown.title} {shown.exact(group.mean)}"
        what += "" if worst is None else f", worst decile {shown.exact(worst)}"
        yield name, f"{what} (mean of {group.clients:,} after round {measured.round})"


def _privacy(now: Activity) -> Iterator[tuple[str, str]]:
    if (spent := now.privacy) is None:
        return
    epsilon = "no guarantee" if spent.epsilon is None else f"ε = {rounded_up(spent.epsilon)} at δ = {spent.delta:g}"
    budget = "" if spent.budget is None else f", budget {spent.budget:g}"
    others = "; ".join(
        f"{'no guarantee' if found is None else rounded_up(found)} toward {whom}"
        for found, whom in ((spent.epsilon_members, "members"), (spent.epsilon_aggregator, "the aggregator"))
    )
    sums = pluralize(spent.sums, "noisy sum")
    yield "privacy", f"{epsilon} toward readers of the models; {others}; after {sums}{budget}"


def _worker(worker: ConnectedWorker, now: float) -> str:
    whose = "" if worker.identity is None else f" of {worker.identity}"
    silent = "" if now - worker.sign < 30 else f", silent for {duration(now - worker.sign)}"
    version = "" if worker.protocol is None else f"fedloom {worker.package} (protocol {worker.protocol}), "
    withheld = f"; {worker.withheld}" if worker.withheld else ""
    return (
        f"{worker.name}{whose}: {pluralize(worker.clients, 'client')}, {worker.device}, {version}"
        f"connected for {duration(now - worker.since)}{silent}{withheld}"
    )


def _shares(seconds: dict[str, float]) -> str:
    """Return each part's share of the total time, largest first."""
    total = sum(seconds.values()) or 1.0
    by_size = sorted(seconds.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {part / total:.0%}" for name, part in by_size)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
