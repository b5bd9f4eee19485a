"""Parts of pages that reports do not have: what has left clients, a client's rounds and results, and logs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path

from fedloom.core.files import open_file
from fedloom.core.words import pluralize, printable
from fedloom.errors import DataError, ExperimentError
from fedloom.reporting.page import DASH, Part, one_block, table_row
from fedloom.reporting.report_results import last_line, main_reading
from fedloom.reporting.words import client_column, human_bytes
from fedloom.runs.files import JOURNAL, as_object
from fedloom.runs.folder import RunFolder
from fedloom.runs.journal import DONE, Attempt, attempt_of
from fedloom.tasks.names import headline_of
from fedloom.ui.watch import WatchedRun

MOST_ROUNDS, MOST_CLIENTS = 200, 2000
"""Maximum numbers of rows of a client's rounds, of which the newest are shown, and of a run's clients."""

LOG_BYTES, LOG_LINES = 1 << 16, 100
"""Maximum size of the end of a log that is shown, and number of its lines."""


def disclosed(run: RunFolder) -> tuple[Part, ...]:
    """Return what has left the clients of a run: numbers of answers and bytes, and the tensors of an answer.

    Raise DataError if a file is damaged, or the method is not installed.
    """
    from fedloom.algorithms.base import find_algorithm
    from fedloom.engine.assemble import evaluation_plan
    from fedloom.engine.disclosure import answers, measures

    answered, clients, up = Counter[str](), set[str](), 0
    for attempt in _attempts(run):
        up += attempt.payload_up
        clients |= attempt.answered
        answered[attempt.outcome] += sum(len(each.clients) - len(each.lost) for each in attempt.conversations)
    pairs = (
        ("answers in training", f"{answered[DONE]:,}, of {len(clients):,} clients"),
        ("other answers", f"{answered.total() - answered[DONE]:,}, in failed attempts and incomplete evaluations"),
        ("size of the answers in training", human_bytes(up)),
    )
    try:
        experiment = run.experiment()
        algorithm = find_algorithm(experiment.algorithm.name)
        secure = experiment.federation.secure_aggregation is not None
        sums = algorithm.sums(experiment.algorithm.settings) if secure else None
        plan = evaluation_plan(experiment, run.manifest())
    except ExperimentError as error:
        raise DataError(str(error)) from error
    tables = [
        one_block(
            ("tensor", "quantity", "shape", "the aggregator learns"),
            [
                table_row(
                    f"{one.message}.{one.field}",
                    one.quantity,
                    f"[{', '.join(map(str, one.shape))}]",
                    "only the sum" if one.only_summed else "each answer",
                )
                for one in tensors
            ],
            title,
            text_columns=4,
        )
        for title, tensors in (
            ("An answer in training", answers(algorithm, None, sums)),
            ("An answer in an evaluation", measures(len(algorithm.predictors), plan, only_summed=secure)),
        )
    ]
    text = (
        "A row is a tensor in an answer of one client. In shapes, s is the size of the shared part of the model, d "
        "that of the model, and C the number of classes. Examples never leave a client."
    )
    return Part(pairs=pairs), Part(tables=tuple(tables), text=text)


def client_index(run: RunFolder, href: Callable[[str], str]) -> Part:
    """Return a table of a run's clients, each with the link to its page."""
    clients = run.manifest().clients
    rows = [
        table_row(
            one.id,
            "seen" if one.seen else "unseen",
            *(f"{size:,}" for size in (one.train, one.validation, one.test)),
            href=href(one.id),
        )
        for one in clients[:MOST_CLIENTS]
    ]
    more = f"The first {MOST_CLIENTS:,} of {len(clients):,} clients." if len(clients) > MOST_CLIENTS else ""
    return Part(tables=(one_block(("client", "", "training", "validation", "test"), rows, text_columns=2),), text=more)


def client_rounds(run: RunFolder, client: str) -> Part:
    """Return the attempts at rounds in which a client was asked, newest first."""
    rows, counts = [], Counter[str]()
    for attempt in _attempts(run):
        if any(client in each.clients for each in attempt.conversations):
            reason = attempt.losses.get(client)
            counts["answered" if reason is None else "lost"] += 1
            cells = (str(attempt.round), "answered" if reason is None else f"lost: {reason}", attempt.outcome)
            rows.append(table_row(*map(printable, cells)))
    pairs = (
        ("asked", pluralize(len(rows), "time")),
        *((name, pluralize(count, "time")) for name, count in counts.items()),
    )
    newest = f" The newest {MOST_ROUNDS} are shown." if len(rows) > MOST_ROUNDS else ""
    table = one_block(("round", "client", "attempt"), rows[::-1][:MOST_ROUNDS], text_columns=3)
    return Part(tables=(table,), text=f"Attempts at rounds that asked this client.{newest}", pairs=pairs)


def client_methods(client: str, runs: Sequence[tuple[WatchedRun, str]]) -> Part:
    """Return a client's test results in the last evaluation of each of some runs, which come with links."""
    rows, headings = [], set[str]()
    for watched, href in runs:
        run = watched.folder
        try:
            row = next(row for row in run.clients() if row["id"] == client)
            headline, reading = headline_of(last_line(run)), main_reading(run)
        except (DataError, KeyError, StopIteration):
            continue  # not measured yet, or damaged, as the run's own page says
        headings.add(headline.heading)
        values = (row.get(client_column(name, headline.name, reading)) for name in ("personal", "global"))
        shown = (headline.shown(float(value)) if value else DASH for value in values)
        rows.append(table_row(watched.name, watched.entry.method or "", *shown, href=href))
    metric = headings.pop() if len(headings) == 1 else "result"
    table = one_block(("run", "method", f"own model, test {metric}", "global model"), rows, text_columns=2)
    text = "Results of this client in the last evaluation of each run with the same partition, newest first."
    return Part(tables=(table,) if rows else (), text=text if rows else "No run has measured this client yet.")


def log_tail(run: RunFolder) -> tuple[Part, ...]:
    """Return the ends of a run's logs; links among them are left out, as they may lead out of the folder."""
    logs = [path for path in sorted(run.logs.glob("*.jsonl")) if path.is_file() and not path.is_symlink()]
    return tuple(Part(path.name, pre="\n".join(_last_lines(path)) or "empty") for path in logs)


def _last_lines(path: Path) -> Iterable[str]:
    try:
        with open_file(path) as file:
            start = max(0, file.seek(0, 2) - LOG_BYTES)
            file.seek(start)
            lines = file.read(LOG_BYTES).decode(errors="replace").splitlines()[start > 0 :]
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error})") from error
    for line in lines[-LOG_LINES:]:
        record = as_object(line) or {}
        match record:
            case {"time": int() | float() as at, "level": level, "message": message}:
                yield printable(f"{datetime.fromtimestamp(at):%m-%d %H:%M:%S} {level} {message}")
            case _:
                yield printable(line)


def _attempts(run: RunFolder) -> Iterable[Attempt]:
    return (attempt_of(line, run) for line in run.objects(JOURNAL))
