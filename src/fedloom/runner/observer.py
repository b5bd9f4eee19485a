"""Who is told how a run goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedloom.experiment import Experiment
    from fedloom.federation.journal import Attempt
    from fedloom.federation.loop import Observer


class RunObserver:
    """Is told how a run goes; override what you want to know. Calls come from the thread that runs the rounds.

    A run that fails raises its error and calls nothing more than :meth:`ended`.
    """

    def started(self, experiment: Experiment, clients: int, where: str) -> None:
        """Everything fits: data, model, method and folder; the run begins, with so many clients, in a folder or URL."""

    def waiting_for_workers(self, address: str, partition: str, states: str | None) -> None:
        """The aggregator listens at an address, ``host:port``.

        Parameters
        ----------
        address
            Where workers connect.
        partition
            Folder or URL of the partition that they serve.
        states
            Folder or URL of the clients' states; None where workers need not be told.
        """

    def resumed(self, round: int) -> None:
        """Training goes on after this round."""

    def stopping(self, *, after_round: bool) -> None:
        """The run was asked to stop, and does so after the round at hand, or at once."""

    def round_done(self, attempt: Attempt, rounds: int | None) -> None:
        """A round has ended; there are to be so many, None: no end."""

    def attempt_failed(self, attempt: Attempt, attempts: int) -> None:
        """An attempt came to nothing."""

    def evaluating(self, round: int, done: int, clients: int) -> None:
        """An evaluation has measured so many clients."""

    def evaluated(self, line: dict[str, Any]) -> None:
        """A line of metrics.jsonl has been written."""

    def notice(self, text: str) -> None:
        """Something that a person should know, in one line, such as that there is no report and why."""

    def ended(self) -> None:
        """The run has ended, well or not, after :meth:`started`."""


class Observers:
    """Several who are told how the rounds go."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def round_done(self, attempt: Attempt, rounds: int | None) -> None:
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
