"""What a run shows while it goes: a bar with ETA and phases on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fedloom.federation.journal import Attempt

if TYPE_CHECKING:
    from fedloom.federation.loop import Observer

LINE_EVERY_S = 10.0


class Watch:
    """Tells a person how the run goes (``federation.loop.Observer``); everything goes to standard error.

    Parameters
    ----------
    rounds, done
        In all, and before this start.
    choosing
        Whether settings are being chosen: then evaluations show validation accuracy, and none on test data.
    """

    def __init__(self, rounds: int, done: int = 0, *, choosing: bool = False) -> None:
        self._choosing = choosing
        self._console = Console(stderr=True, highlight=False)
        self._rounds = rounds
        self._seconds: list[float] = []
        self._phases: dict[str, float] = {}
        self._bar: Progress | None = None
        self._said = time.monotonic()
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.fields[what]}", markup=False),
                BarColumn(bar_width=30),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}", markup=False),
                TimeElapsedColumn(),
                console=self._console,
            )
            self._train = self._bar.add_task("", total=rounds, completed=done, what="rounds", note="")
            self._measure = self._bar.add_task("", total=1, what="clients measured", note="", visible=False)

    def __enter__(self) -> Self:
        """Start showing."""
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop showing."""
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Show a line."""
        self._console.print(text, markup=False, soft_wrap=True)

    def round_done(self, attempt: Attempt, rounds: int) -> None:
        """Show the round, the time to go, and where the time went."""
        self._seconds = [*self._seconds[-19:], attempt.seconds]
        for name, seconds in attempt.phases.items():
            self._phases[name] = self._phases.get(name, 0.0) + seconds
        per_round = sum(self._seconds) / len(self._seconds)
        left = clock(per_round * (rounds - attempt.round))
        loss = f"loss {attempt.statistics['loss']:.3f}, " if "loss" in attempt.statistics else ""
        lost = sum(len(conversation.lost) for conversation in attempt.conversations)
        note = f"{loss}{per_round:.2f} s/round, ETA {left}" + (f", {lost} lost" if lost else "")
        if self._bar is not None:
            self._bar.update(self._train, completed=attempt.round, note=note)
        elif time.monotonic() - self._said >= LINE_EVERY_S or attempt.round == rounds:
            self._said = time.monotonic()
            self.say(f"round {attempt.round}/{rounds}: {note} ({self.phases()})")

    def attempt_failed(self, attempt: Attempt, attempts: int) -> None:
        """Say why an attempt came to nothing."""
        self.say(f"round {attempt.round}: attempt {attempt.attempt} of {attempts} failed: {attempt.outcome}")

    def evaluating(self, round: int, done: int, clients: int) -> None:
        """Show how far an evaluation is."""
        if self._bar is not None:
            self._bar.update(
                self._measure, completed=done, total=clients, visible=done < clients, note=f"after round {round}"
            )

    def evaluated(self, line: dict[str, Any]) -> None:
        """Show the accuracies of an evaluation, or the losses of data without classes."""
        parts, what = [], "pooled test accuracy"
        for group in ("seen", "unseen", "global"):
            if line[group] is not None:
                accuracy = line[group]["accuracy_pooled"]
                what = "mean test loss" if accuracy is None else what
                parts.append(f"{group} {line[group]['loss_mean'] if accuracy is None else accuracy:.4f}")
        if self._choosing:
            accuracy, loss = line["validation_pooled"], line["validation_loss"]
            what = "mean validation loss" if accuracy is None else "pooled validation accuracy"
            found = loss if accuracy is None else accuracy
            parts = ["none: no validation examples" if found is None else f"seen {found:.4f}"]
        where = f" (time: {self.phases()})" if self._phases else ""
        self.say(f"after round {line['round']}: {what} {', '.join(parts)}{where}")

    def phases(self) -> str:
        """Share of each phase so far."""
        total = sum(self._phases.values()) or 1.0
        return ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in self._phases.items())


class Observers:
    """Several who are told how the run goes."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def round_done(self, attempt: Attempt, rounds: int) -> None:
        """A round has ended."""
        for observer in self._observers:
            observer.round_done(attempt, rounds)

    def attempt_failed(self, attempt: Attempt, attempts: int) -> None:
        """An attempt came to nothing."""
        for observer in self._observers:
            observer.attempt_failed(attempt, attempts)

    def evaluating(self, round: int, done: int, clients: int) -> None:
        """An evaluation has measured so many clients."""
        for observer in self._observers:
            observer.evaluating(round, done, clients)

    def evaluated(self, line: dict[str, Any]) -> None:
        """A line of metrics.jsonl has been written."""
        for observer in self._observers:
            observer.evaluated(line)


def results(summary: dict[str, Any]) -> Table:
    """The table that a run ends with."""
    headings = ("", "clients", "mean ± std", "worst decile", "worst", "pooled", "loss")
    table = narrow(f"{summary['name']} · {summary['algorithm']} · seed {summary['seed']}", headings)
    for label, group in (("seen", "seen"), ("unseen", "unseen"), ("global model", "global")):
        row = summary[group]
        if row is not None:
            table.add_row(
                label,
                str(row["clients"]),
                *_accuracies(row),
                f"{row['loss_mean']:.4f}",
            )
    return table


def _accuracies(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Four cells of :func:`results`; dashes for data without classes."""
    if row["accuracy_mean"] is None:
        return ("–",) * 4
    mean = f"{row['accuracy_mean']:.4f} ± {row['accuracy_std']:.4f}"
    return (mean, *(f"{row[f'accuracy_{key}']:.4f}" for key in ("worst_decile", "worst", "pooled")))


def narrow(title: str, headings: Sequence[str]) -> Table:
    """A table whose first column is text and whose headings, not cells, wrap: it fits eighty columns."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for i, heading in enumerate(headings):
        heading = heading.replace(" ", "\n") if i and "±" not in heading else heading
        table.add_column(heading, justify="right" if i else "left", no_wrap=True, vertical="bottom")
    return table


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss or m:ss."""
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


class JsonLines(logging.Formatter):
    """A log record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """``time``, ``level``, ``logger``, ``message``, and ``trace`` where there is one."""
        line = {
            "time": round(record.created, 3),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


@contextmanager
def logged_to(path: Path, *, alone: bool = False) -> Iterator[None]:
    """Write FedLoom's log to a file of JSON lines too, or to it alone."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(JsonLines())
    logger = logging.getLogger("fedloom")
    propagated = logger.propagate
    logger.addHandler(handler)
    logger.propagate = propagated and not alone
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagated
        handler.close()
