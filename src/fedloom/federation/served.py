"""Serving of models: a durable round of a run, and the server side of personalization conversations.

The clients that ask here are unknown to the run: the opening of their conversations is the same for all, and is
computed once per round. Their answers arrive at any time. Those that have arrived are processed together, up to 64 of
them: server networks run on tiles of a fixed row count, so that a client's model does not depend on which other clients
ask.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from fedloom.algorithms.base import Algorithm, ServerAlgorithm
from fedloom.errors import DataError, ExperimentError
from fedloom.federation.validation import non_finite, out_of_range
from fedloom.messages import Message, Metrics, Replies, Shapes, answer_shapes, stack
from fedloom.runs.checkpoint import Checkpoint, check_fits

TOGETHER = 64
"""Maximum number of answers processed together: a hypernetwork's weights are read once for all of their tiles."""


class NobodyLeft(Exception):
    """All clients of a tile have disconnected."""


@dataclass(frozen=True)
class About:
    """Information about a run that a client needs to request its model.

    The client must have this version of the algorithm. ``experiment`` is the shared part of the experiment, in JSON,
    and ``problem`` has the keys dataset, kind, input_shape, class_names, normalization and clients.
    """

    run: str
    algorithm: str
    version: int
    experiment: str
    problem: str


@dataclass(frozen=True, eq=False)
class ServedRound:
    """Durable round, ready to serve; immutable."""

    about: About
    round: int
    digest: str
    """SHA-256 of the round's checkpoint."""
    server: ServerAlgorithm
    """Server algorithm at this round, which is never trained."""
    shapes: Shapes
    """Allowed answers of a client."""
    dtype: torch.dtype
    opening: Message
    """First message of every conversation, with one row."""
    answer: type[Message]
    """Class of the answer to the opening; ``Metrics`` if the opening is the whole conversation."""


def useless_values(message: Message) -> str | None:
    """Return one line on why the values of an answer, or of several in rows, are unusable; None if they are usable."""
    return non_finite(message) or out_of_range(message, {})


def served_round(
    description: About, algorithm: Algorithm, fresh: ServerAlgorithm, checkpoint: Checkpoint
) -> ServedRound:
    """Make a checkpoint ready to serve.

    ``fresh`` is a server algorithm of the run, with any state; it is not changed.

    Raises
    ------
    DataError
        If the checkpoint belongs to another method or model.
    ExperimentError
        If the method has no model for an unknown client.
    Exception
        A bug in its server algorithm.
    """
    check_fits(checkpoint, fresh.state, algorithm.name, algorithm.version)
    server = copy.copy(fresh)
    server.load(checkpoint.state)
    try:
        server.personalize(_Opening())
    except _Opened as unwound:
        opening, answer = unwound.message.select([0]), unwound.answer
    except DataError as error:
        raise ExperimentError(f"{algorithm.name} has no model for unknown clients: {error}") from error
    else:
        raise ExperimentError(f"{algorithm.name} has no model for unknown clients: it sends them nothing")
    shapes = answer_shapes(algorithm.messages, server.sizes)
    return ServedRound(
        description, checkpoint.round, checkpoint.digest, server, shapes, server.setup.dtype, opening, answer
    )


class _Opened(Exception):
    """First message of a server algorithm."""

    def __init__(self, message: Message, answer: type[Message]) -> None:
        self.message = message
        self.answer = answer


class _Opening:
    """Cohort of one client unknown to the run, used to obtain the first message."""

    clients = ("",)

    def send(
        self, message: Message, answer: type[Message] = Metrics, meanwhile: Callable[[], None] | None = None
    ) -> NoReturn:
        raise _Opened(message, answer)

    def record(self, name: str, values: Tensor) -> None:
        """Do nothing, since no client is measured."""


class Tile:
    """Clients that have answered the opening, as the server algorithm's cohort (``algorithms.base.Cohort``).

    ``answers`` are those to the opening, one row each. ``write`` sends each client its row of a message, given the
    class of the awaited answer (None after the last message). ``read`` waits for the answers to it; None for a client
    that has disconnected.
    """

    def __init__(
        self,
        clients: Sequence[str],
        answers: Sequence[Message | None],
        write: Callable[[Message, type[Message] | None], None],
        receive: Callable[[], Sequence[Message | None]],
    ) -> None:
        self.clients = tuple(clients)
        self._answers: Sequence[Message | None] = answers
        self._write, self._read = write, receive
        self._opened = False

    def send(
        self, message: Message, answer: type[Message] = Metrics, meanwhile: Callable[[], None] | None = None
    ) -> Replies[Any]:
        """Deliver a message; the last one, which gives each client its model, has no answer.

        Raise NobodyLeft if no client is left.
        """
        if meanwhile is not None:
            meanwhile()
        if self._opened:
            self._write(message, None if answer is Metrics else answer)
            if answer is Metrics:
                return Replies(None, self._present(), torch.ones(len(self.clients)))
            self._answers = self._read()
        self._opened = True
        replies = stack(answer, self._answers)
        if replies is None:
            raise NobodyLeft
        return Replies(replies, self._present(), torch.ones(len(self.clients)))

    def record(self, name: str, values: Tensor) -> None:
        """Do nothing, since no client is measured."""

    def _present(self) -> Tensor:
        return torch.tensor([answer is not None for answer in self._answers])
