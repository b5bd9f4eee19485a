"""Progress of a run: a bar with ETA and phases on a terminal or in a notebook, else lines; or JSON lines of the log."""

from __future__ import annotations

import io
import logging
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fedloom.core.words import pluralize, printable
from fedloom.engine.jobs import Job, JobObserver
from fedloom.engine.observer import RunObserver
from fedloom.tasks.names import GROUPS, headline_of, in_words, validation_value, values_of

if TYPE_CHECKING:
    from fedloom.errors import FedloomError
    from fedloom.experiment import Experiment
    from fedloom.runs.journal import Attempt

log = logging.getLogger("fedloom.run")

LINE_EVERY_S = 10.0
"""Seconds between lines about rounds if there is no bar."""

PAGE_EVERY_S = 0.25
"""Minimum interval between updates of a notebook's output, each a message to the browser, in seconds."""

STYLE = "line-height:normal;font-family:Menlo,'DejaVu Sans Mono',consolas,'Courier New',monospace"


class Page:
    """Output of a notebook cell that is updated in place; the notebook keeps its last state.

    Attributes
    ----------
    heading, found
        Lines above and below the bars: the run, and its last evaluation.
    """

    def __init__(self) -> None:
        self.heading: list[str] = []
        self.found = ""
        self._handle: Any = None
        self._shown = -PAGE_EVERY_S

    def show(self, bars: Progress | None = None, *, now: bool = False) -> None:
        """Update the output, unless it was updated just before; ``now`` updates it in any case."""
        if not now and time.monotonic() - self._shown < PAGE_EVERY_S:
            return
        from IPython.display import display

        console = Console(record=True, file=io.StringIO(), force_jupyter=False, width=100, highlight=False)
        parts: list[str | Progress | None] = [*self.heading, bars, self.found]
        for part in parts:
            if isinstance(part, Progress):
                console.print(part.get_renderable())
            elif part:
                console.print(printable(part, keep="\n"), markup=False, soft_wrap=True)
        data = {
            "text/plain": console.export_text(clear=False),
            "text/html": console.export_html(inline_styles=True, code_format=f'<pre style="{STYLE}">{{code}}</pre>'),
        }
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)
        self._shown = time.monotonic()


class Watch(RunObserver):
    """Observer that shows a run's progress on standard error or in a notebook.

    Parameters
    ----------
    choosing
        True while settings are being chosen: only results on validation data are then shown.
    page
        Output to use in a notebook; None: a new one.
    """

    def __init__(self, *, choosing: bool = False, page: Page | None = None) -> None:
        self._choosing = choosing
        self._console = Console(stderr=True, highlight=False)
        self._page = Page() if page is None and self._console.is_jupyter else page
        self._seconds: list[float] = []
        self._phases: dict[str, float] = {}
        self._bar: Progress | None = None
        self._line_at = time.monotonic()
        if self._console.is_terminal or self._page is not None:
            self._bar = Progress(
                TextColumn("{task.fields[what]}", markup=False),
                BarColumn(bar_width=30),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}", markup=False),
                TimeElapsedColumn(),
                console=self._console,
            )
            self._train = self._bar.add_task("", total=None, what="rounds", note="")
            self._measure = self._bar.add_task("", total=1, what="clients measured", note="", visible=False)

    def started(self, experiment: Experiment, clients: int, location: str) -> None:
        """Show the bar and a description of the run."""
        e, count = experiment, pluralize(clients, "client")
        title = f"{e.name}: {e.algorithm.name} on {e.data.dataset}, {count}, {location}"
        if self._bar is not None:
            self._bar.update(self._train, total=e.federation.rounds)
        if self._page is not None:
            self._page.heading.append(title)
            self._page.show(self._bar, now=True)
            return
        if self._bar is not None:
            self._bar.start()
        self.say(title)

    def waiting_for_workers(self, address: str, partition: str, states: str | None) -> None:
        """Show the command that starts a worker."""
        option = "" if states is None else f" --states {states}"
        self.say(f"waiting for: fedloom worker --aggregator {address} --partition {partition}{option}")

    def resumed(self, round: int) -> None:
        """Show the round after which training continues."""
        self.say(f"resuming after round {round}")

    def stopping(self, *, after_round: bool) -> None:
        """Show that the run will stop."""
        self.say("stopping after this round (again to stop at once)" if after_round else "stopping")

    def notice(self, text: str) -> None:
        """Show the message."""
        self.say(text)

    def ended(self) -> None:
        """Remove the bar; a notebook keeps it."""
        if self._page is not None:
            self._page.show(self._bar, now=True)
        elif self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(printable(text, keep="\n"), markup=False, soft_wrap=True)

    def round_done(self, attempt: Attempt, rounds: int | None) -> None:
        """Show the round, the time remaining, and the time by phase."""
        self._seconds = [*self._seconds[-19:], attempt.seconds]
        for name, seconds in attempt.phases.items():
            self._phases[name] = self._phases.get(name, 0.0) + seconds
        per_round = sum(self._seconds) / len(self._seconds)
        loss = f"loss {attempt.statistics['loss']:.3f}, " if "loss" in attempt.statistics else ""
        lost_count = sum(len(conversation.lost) for conversation in attempt.conversations)
        eta = "" if rounds is None else f", ETA {clock(per_round * (rounds - attempt.round))}"
        note = f"{loss}{per_round:.2f} s/round{eta}" + (f", {lost_count} lost" if lost_count else "")
        if self._bar is not None:
            self._bar.update(self._train, completed=attempt.round, note=note)
            if self._page is not None:
                self._page.show(self._bar)
        elif time.monotonic() - self._line_at >= LINE_EVERY_S or attempt.round == rounds:
            self._line_at = time.monotonic()
            total = "" if rounds is None else f"/{rounds}"
            self.say(f"round {attempt.round}{total}: {note} ({self.phases()})")

    def attempt_failed(self, attempt: Attempt, attempts: int) -> None:
        """Show why an attempt failed."""
        self.say(f"round {attempt.round}: attempt {attempt.attempt} of {attempts} failed: {attempt.outcome}")

    def evaluating(self, round: int, count: int, clients: int) -> None:
        """Show the progress of an evaluation."""
        if self._bar is not None:
            self._bar.update(
                self._measure, completed=count, total=clients, visible=count < clients, note=f"after round {round}"
            )
            if self._page is not None:
                self._page.show(self._bar)

    def evaluated(self, line: dict[str, Any]) -> None:
        """Show the headline metric of an evaluation."""
        label, parts = _validation(line) if self._choosing else _test(line)
        if absent := line["left_out"]["absent"]:
            parts.append(f"{pluralize(absent, 'client')} without an answer (reasons: journal.jsonl)")
        timing = f" (time: {self.phases()})" if self._phases else ""
        text = f"after round {line['round']}: {label} {', '.join(parts)}{timing}"
        if self._page is None:
            self.say(text)
        else:
            self._page.found = text
            self._page.show(self._bar)

    def phases(self) -> str:
        """Return each phase's share of the time so far."""
        total = sum(self._phases.values()) or 1.0
        return ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in self._phases.items())


def _test(line: dict[str, Any]) -> tuple[str, list[str]]:
    """Return the measure of an evaluation on test data, and its value for each group."""
    headline = headline_of(line)
    return in_words(headline, {name: values_of(line[name], headline) for name in GROUPS if line[name] is not None})


def _validation(line: dict[str, Any]) -> tuple[str, list[str]]:
    """Return the measure of an evaluation on validation data, and its value."""
    headline, value = headline_of(line), validation_value(line)
    if value is not None:
        kind = "mean" if line["validation_pooled"] is None else "pooled"
        return f"{kind} validation {headline.title}", [f"seen {headline.exact(value)}"]
    nobody = line["left_out"]["absent"] and line["seen"] is None
    return "validation", ["none: no client answered" if nobody else "none: no validation examples"]


class LoggedRun(RunObserver):
    """Observer that logs rounds and evaluations as lines, with their numbers under ``data``."""

    def started(self, experiment: Experiment, clients: int, location: str) -> None:
        """Log the start of the run."""
        log.info("started", extra={"run": experiment.name, "data": {"clients": clients, "folder": location}})

    def waiting_for_workers(self, address: str, partition: str, states: str | None) -> None:
        """Log the address that workers connect to."""
        log.info("waiting for workers at %s", address)

    def resumed(self, round: int) -> None:
        """Log the round after which training resumes."""
        log.info("resuming", extra={"round": round})

    def stopping(self, *, after_round: bool) -> None:
        """Log when the run will stop."""
        log.info("stopping after this round" if after_round else "stopping")

    def notice(self, text: str) -> None:
        """Log the message."""
        log.info("%s", text)

    def round_done(self, attempt: Attempt, rounds: int | None) -> None:
        """Log a round: its seconds, in total and by phase, bytes, clients, and the method's statistics."""
        log.info("round done", extra={"round": attempt.round, "attempt": attempt.attempt, "data": _numbers(attempt)})

    def attempt_failed(self, attempt: Attempt, attempts: int) -> None:
        """Log a failed attempt and the reason."""
        details = {"round": attempt.round, "attempt": attempt.attempt, "data": _numbers(attempt)}
        log.warning("attempt failed: %s", attempt.outcome, extra=details)

    def evaluated(self, line: dict[str, Any]) -> None:
        """Log an evaluation as in ``metrics.jsonl``."""
        log.info("evaluated", extra={"round": line["round"], "data": line})


def _numbers(attempt: Attempt) -> dict[str, Any]:
    return {
        "seconds": attempt.seconds,
        "phases": attempt.phases,
        "clients": sum(len(record.clients) for record in attempt.conversations),
        "lost": [
            {"client": loss.client, "exchange": loss.exchange, "reason": loss.reason}
            for record in attempt.conversations
            for loss in record.lost
        ],
        "payload_up": attempt.payload_up,
        "payload_down": attempt.payload_down,
        "wire_up": attempt.wire_up,
        "wire_down": attempt.wire_down,
        "statistics": attempt.statistics,
    }


class SweepWatch(JobObserver):
    """Observer that shows the progress of a sweep or search.

    Parameters
    ----------
    choosing
        True while settings are being chosen: only results on validation data are then shown.
    """

    def __init__(self, *, choosing: bool) -> None:
        self._choosing = choosing
        self._console = Console(stderr=True, highlight=False)
        self._page = Page() if self._console.is_jupyter else None

    def begins(self, job: Job, *, beside: bool) -> RunObserver:
        """Show which run begins; return an observer that shows the progress of one in this process."""
        self._say(job, "")
        return RunObserver() if beside else Watch(choosing=self._choosing, page=self._page)

    def ended(self, job: Job, outcome: str, error: FedloomError | None = None) -> None:
        """Show how a run ended; a failure permanently."""
        self._say(job, f": {outcome}", keep=error is not None)

    def notice(self, job: Job, text: str) -> None:
        """Show the message permanently."""
        self._say(job, f": {text}", keep=True)

    def _say(self, job: Job, text: str, *, keep: bool = False) -> None:
        line = f"run {job.number} of {job.count}, {job.label}{text}"
        if self._page is None or keep:
            self._console.print(printable(line, keep="\n"), markup=False, soft_wrap=True)
        else:
            self._page.heading, self._page.found = [line], ""
            self._page.show(now=True)


def clock(seconds: float) -> str:
    """Return seconds formatted as h:mm:ss or m:ss."""
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"
