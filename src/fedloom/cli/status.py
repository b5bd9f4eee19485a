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
from fedloom.core.words import duration, pluralize, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from fedloom.errors import AbandonedError
    from fedloom.federation.activity import Activity, RosterClient
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
    from fedloom.federation.status_text import client_table

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

    from fedloom.federation.status_text import federation_facts, federation_heading

    facts = ((f"{name:<{NAME_WIDTH}}{words}", "") for name, words in federation_facts(now))
    lines = [(federation_heading(now), "bold"), *facts]
    return [Text(shown_as(console.encoding, printable(line)), style) for line, style in lines]
