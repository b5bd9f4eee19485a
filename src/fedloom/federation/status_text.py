"""Text about federations, for the command line and for pages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from fedloom.core.words import duration, pluralize, printable, rounded_up
from fedloom.federation.activity import Activity, Awaited, ConnectedWorker, RosterClient
from fedloom.federation.standing import Standing

ENDED = ("finished", "interrupted", "published")
"""Phases of runs, for which the time since they ended is shown."""


def federation_heading(now: Activity) -> str:
    """Return a line with the run, its method, and what it does."""
    of = "" if now.rounds is None else f" of {now.rounds}"
    doing = f"round {now.doing}{of}, attempt {now.attempt}" if now.doing is not None else f"after round {now.round}{of}"
    since = duration(now.time - now.since)
    heading = f"{now.run} · {now.method} · {now.phase}, {doing}, "
    return heading + (f"{since} ago" if now.phase in ENDED else f"for {since}")


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


def federation_facts(now: Activity) -> Iterator[tuple[str, str]]:
    """Yield the known facts about a federation as (name, text)."""
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
