"""What an algorithm is made of: a server half, a client half, settings, and the registry that finds them.

The two halves talk by messages (``fedloom.messages``). The server half is plain sequential code over a
:class:`Cohort`; the client half answers with coroutines over a :class:`Group`. Nothing here knows how a message
travels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import shake_256
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar, get_type_hints

import numpy as np
import torch
from torch import Tensor

from fedloom.data.federated import ClientData
from fedloom.data.manifest import Kind
from fedloom.errors import DataError, ExperimentError
from fedloom.messages import Message, Metrics, Replies
from fedloom.models.flat import FlatModel
from fedloom.models.predictors import Predictors
from fedloom.plugins import entries, load
from fedloom.settings import Settings

Statistics: TypeAlias = dict[str, float]
"""What a round reports: ``client_steps`` (local SGD steps of all clients) always, ``loss`` and others where known."""


@dataclass(frozen=True)
class Task:
    """What both halves know of the problem; the aggregator learns it from the manifest, never from data."""

    model: FlatModel  # of the clients, as functions of a flat θ
    classes: int  # C
    input_shape: tuple[int, ...]  # of one input: (channels, height, width), (features,) or (tokens,)
    clients: int  # seen and unseen (the papers' n); 0 where they come and go
    dtype: torch.dtype = torch.float32
    kind: Kind = "pixels"  # what an input is
    roster: tuple[str, ...] = ()  # ids of the seen clients, in manifest order; () where they come and go
    same_clients: bool = True  # False with another partition: there an id of the roster is another client's


class Cohort(Protocol):
    """The clients one conversation is held with, in manifest order (rows are by position; an id may repeat)."""

    @property
    def clients(self) -> tuple[str, ...]:
        """Ids by row."""

    def send(
        self, message: Message, answer: type[Message] = Metrics, meanwhile: Callable[[], None] | None = None
    ) -> Replies[Any]:
        """Deliver a message to every client still in the conversation and return their replies.

        ``answer`` is the class that they consist of; a client that says something else is lost. By default the clients
        return their predictors, and what they measured comes back. ``meanwhile`` is work of the server that needs no
        reply: it runs while the clients work, once, and before this returns.

        Raises
        ------
        TooFewReplies
            If fewer than ``federation.min_replies`` clients answered: the attempt is over.
        """

    def record(self, name: str, values: Tensor) -> None:
        """Keep one row per client for the evaluation: ``[c, ...]`` (PeFLL: descriptors)."""


class Round(Protocol):
    """One training round, or one evaluation."""

    @property
    def number(self) -> int:
        """t = 1 ... T."""

    def sample(
        self,
        size: int | None = None,
        purpose: str = "cohort",
        weights: Tensor | None = None,
        replace: bool = False,
        always: Sequence[str] = (),
    ) -> Cohort:
        """Draw a cohort from the roster (``federation.clients_per_round`` by default); ``always`` names clients that
        are in it whatever is drawn."""

    def everyone(self) -> Cohort:
        """The whole roster as one cohort."""

    def generator(self, purpose: str) -> torch.Generator:
        """The server's random numbers for this round and purpose."""


class ServerHalf(ABC):
    """The server half.

    ``state`` is all that lasts from round to round; what is not in it is gone on resume. A round that fails, or after
    which a tensor of the state that it replaced is not finite, leaves the state as it was: the loop sees to that. A
    method that changes tensors in place, for speed, checks its update before.
    """

    def __init__(self, settings: Any, task: Task) -> None:
        self.settings = settings
        self.task = task
        self.state: dict[str, Tensor] = {}  # CPU tensors by name
        self.sizes = {"d": task.model.layout.size}  # the numbers behind names in the shapes of messages

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over a state of these names, from a checkpoint, which may have them in another order."""
        self.state = {name: state[name] for name in self.state}

    def settle(self) -> None:  # noqa: B027 - most have nothing to do
        """Finish what was put off; called before the state is read from outside."""

    def limits(self, examples: int) -> Mapping[str, float]:
        """Bounds of what an honest client with so many train examples answers in training, by the field's name.

        Of a count the largest, of anything else the largest ℓ2 norm of a row. Who is beyond is lost for the round; by
        default what quantities allow is all that is asked for.
        """
        del examples
        return {}

    @abstractmethod
    def train_round(self, round: Round) -> Statistics:
        """One training step of the method."""

    @abstractmethod
    def personalize(self, cohort: Cohort) -> Replies[Any]:
        """Hold the conversation in which each client gets its predictors; changes no state.

        Returns the replies to the last message: the client half returns its predictors there, and what the
        caller wanted of them (metrics, for an evaluation) is the reply.

        Raises
        ------
        DataError
            If the method has no predictors for these clients.
        """


Conversation: TypeAlias = Generator[Message, Any, Predictors | None]
"""A client's side of a conversation: yields answers, is sent messages, may return predictors."""

F = TypeVar("F", bound=Callable[..., Conversation | Predictors])


class Group:
    """The clients that one coroutine serves: exactly one on CPU, up to ``runtime.clients_at_once`` on a GPU.

    Parameters
    ----------
    clients
        Their data, already on ``device``.
    generator
        ``(client id, purpose) -> torch.Generator``, keyed with seed, purpose, client and round; always on the CPU.
    states
        What each client kept in the last round that counted it; None for a client that no round has counted.
    may_keep
        False in conversations that change no state.
    secret
        32 random bytes that the aggregator does not know: the key of noise that has to hide something from it. None in
        a simulation, where that noise, too, comes from ``generator``.
    """

    def __init__(
        self,
        clients: Sequence[ClientData],
        generator: Callable[[str, str], torch.Generator],
        states: Sequence[dict[str, Tensor] | None] | None = None,
        *,
        may_keep: bool = True,
        secret: bytes | None = None,
    ) -> None:
        self.clients = tuple(clients)
        self._generator = generator
        self._states = tuple(states) if states is not None else (None,) * len(self.clients)
        self._may_keep = may_keep
        self._secret = secret
        self.kept: dict[int, dict[str, Tensor]] = {}  # by position, what it keeps of this conversation
        self.lost: dict[int, str] = {}  # by position, why it is lost

    def __len__(self) -> int:
        """g, the number of clients."""
        return len(self.clients)

    def generator(self, i: int, purpose: str) -> torch.Generator:
        """Random numbers of the i-th client for a purpose."""
        return self._generator(self.clients[i].id, purpose)

    def noise(self, i: int, purpose: str, about: bytes, size: int) -> Tensor:
        """Standard normal numbers ``[size]``, float64, that hide something of the i-th client from the server.

        With a secret they are a pseudorandom function (SHAKE-256) of it, the client, the purpose, and ``about``: all
        that decides what they are added to. Asked the same again, a client so answers the same, which tells nothing
        more; asked anything else, its noise is independent.
        """
        if self._secret is None:
            return torch.randn(size, dtype=torch.float64, generator=self.generator(i, purpose))
        parts = (self._secret, self.clients[i].id.encode(), purpose.encode(), about)
        key = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        words = np.frombuffer(shake_256(key).digest(8 * size), dtype="<u8")
        uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53  # in (0, 1), both ends excluded
        numbers: Tensor = torch.special.ndtri(torch.from_numpy(uniform))
        return numbers

    @property
    def new(self) -> list[int]:
        """Positions of the clients that have kept nothing yet."""
        return [i for i, state in enumerate(self._states) if state is None]

    def recall(self, name: str, default: Tensor) -> Tensor:
        """What each client kept under a name in the last round that counted it, ``[g, ...]``.

        A client that is new, or kept nothing of that name then (under other settings, which an open federation may
        change), has its default.

        Raises
        ------
        DataError
            If what a client kept has not the shape of its default.
        """
        old = []
        for client, state, row in zip(self.clients, self._states, default, strict=True):
            kept = row if state is None or name not in state else state[name].to(row)
            if kept.shape != row.shape:
                raise DataError(
                    f"client {client.id}: its state has {name} of shape {tuple(kept.shape)}; allowed: "
                    f"{tuple(row.shape)}, that of this run's model"
                )
            old.append(kept)
        return torch.stack(old)

    def keep(self, **named: Tensor) -> None:
        """Keep rows ``[g, ...]``, one for each client, for later rounds.

        To be called before the answer that they belong to is yielded, so that a round that counts the client has its
        state. A method that keeps any is ``stateful`` and keeps some in every training conversation.

        Raises
        ------
        RuntimeError
            In a conversation that changes no state.
        """
        if not self._may_keep:
            raise RuntimeError("personalizing changes no state: nothing can be kept in it")
        for i in range(len(self)):
            self.kept[i] = {name: rows[i].detach().clone() for name, rows in named.items()}

    def lose(self, i: int, reason: str) -> None:
        """Lose the i-th client: its answer is this reason. The others of the group go on."""
        self.lost.setdefault(i, reason)


class ClientHalf:
    """The client half: conversations, picked by the type of the message that opens them (:func:`conversation`).

    Each is a coroutine, or a plain function where the opening is all that is needed to have the predictors.
    """

    predictors: ClassVar[tuple[str, ...]] = ("personal",)
    """Names of the predictors that ``personalize`` returns, in the order metrics are reported."""

    stateful: ClassVar[bool] = False
    """Whether clients keep a state from round to round (:meth:`Group.keep`)."""

    def __init__(self, settings: Any, task: Task) -> None:
        self.settings = settings
        self.task = task

    @classmethod
    @cache
    def _openings(cls) -> dict[type[Message], str]:
        """Message class -> name of the method that it opens, by the annotation of the parameter ``opening``."""
        marked = [name for name in dir(cls) if hasattr(getattr(cls, name), "is_conversation")]
        return {get_type_hints(getattr(cls, name))["opening"]: name for name in marked}

    def personalization_steps(self, predictor: str, examples: int) -> int:
        """SGD steps that a client with so many train examples makes to get a predictor; 0 unless a method says more."""
        del predictor, examples
        return 0

    def open(self, clients: Group, opening: Message) -> Conversation:
        """Start the conversation that this message opens.

        Raises
        ------
        TypeError
            If no coroutine is opened by this type of message.
        """
        openings = self._openings()
        name = openings.get(type(opening))
        if name is None:
            known = ", ".join(sorted(t.__name__ for t in openings))
            raise TypeError(f"no conversation is opened by {type(opening).__name__} (those that are: {known})")
        opened: Conversation | Predictors = getattr(self, name)(clients, opening)
        return opened if isinstance(opened, Generator) else _finished(opened)


def _finished(predictors: Predictors) -> Conversation:
    return predictors
    yield


def conversation(method: F) -> F:
    """Mark a method of a client half as one that a message opens: the annotation of ``opening`` says which."""
    method.is_conversation = True  # type: ignore[attr-defined]
    return method


@dataclass(frozen=True)
class Privacy:
    """What the Gaussian mechanism promises of one message of a client (``fedloom.theory.privacy``).

    Attributes
    ----------
    covers
        The messages, by class; whatever else a client says is not covered.
    clip
        C: the largest ℓ2 norm of what one example adds to a sum over n examples, of which the mean is sent.
    noise_multiplier
        z: noise of deviation z·2C/n on each coordinate, 2C/n being what replacing one example can change.
    delta
        δ of the (ε, δ) that is told.
    """

    covers: tuple[str, ...]
    clip: float
    noise_multiplier: float
    delta: float


@dataclass(frozen=True)
class Algorithm:
    """A method: what the registry (entry point ``fedloom.algorithms``) finds."""

    name: str
    version: int  # it and the name must match between aggregator and worker
    settings: type[Settings]  # the keys under ``algorithm`` in an experiment file, without ``name``
    server: Callable[[Any, Task, torch.Generator], ServerHalf]  # of settings; the generator initializes the state
    client: Callable[[Any, Task], ClientHalf]
    messages: tuple[type[Message], ...]  # of all conversations, both directions
    trains: bool = True  # False for a method without rounds (``federation.rounds`` must then be 0)
    labelled: Callable[[Any], bool] = lambda settings: True  # are labels used to personalize? Else no label mask
    needs_classes: bool = True  # False if it needs nothing but the model's own loss, so that data may have no classes
    # Does the server need each client's own update, so that sums over clients will not do? A loss is no update.
    needs_each_update: Callable[[Any], bool] = lambda settings: False
    titles: Callable[[Any], Mapping[str, str]] = lambda settings: {}  # how tables call its predictors
    # (settings, model): raises ExperimentError, which starts with the key to change, where it cannot work with a model.
    check_model: Callable[[Any, FlatModel], None] = lambda settings, model: None
    # (settings, train examples, classes among them): what is wrong with a client that is to train; None: nothing.
    unfit: Callable[[Any, int, int], str | None] = lambda settings, examples, classes: None
    # (key, found, allowed): what to change where it must know all clients beforehand, so that they cannot come and go.
    closed: Callable[[Any], tuple[str, str, str] | None] = lambda settings: None
    # What of a client's messages is differentially private, as it is set; None: nothing.
    privacy: Callable[[Any], Privacy | None] = lambda settings: None
    # (settings, C or None for theirs, noise multiplier, δ): the settings by which a client that has just come tells
    # nothing more than that. None: a method that has no such answer.
    private: Callable[[Any, float | None, float, float], Any] | None = None
    # (settings, k): the settings by which a new client makes k steps of its own. None: ``personalize_steps`` says it.
    stepping: Callable[[Any, int], Any] | None = None

    def after_steps(self, settings: Any, steps: int) -> Any:
        """The settings by which a client that has just come makes so many steps on what it is handed.

        Raises
        ------
        ExperimentError
            If a client of this method has no such steps.
        """
        if self.stepping is not None:
            return self.stepping(settings, steps)
        if "personalize_steps" not in self.settings.model_fields:
            able = [name for name in available() if find(name).has_steps]
            raise ExperimentError(
                f"evaluation.own_steps: found with {self.name}, by which a new client makes no steps of its own that "
                f"can be counted; allowed: null, or with {', '.join(able)}"
            )
        return settings.model_copy(update={"personalize_steps": steps})

    @property
    def has_steps(self) -> bool:
        """Whether :meth:`after_steps` has an answer."""
        return self.stepping is not None or "personalize_steps" in self.settings.model_fields


def no_batch_norm(name: str) -> Callable[[Any, FlatModel], None]:
    """A ``check_model`` for a method whose local steps are its own and measure no statistics of batches."""

    def check_model(settings: Any, model: FlatModel) -> None:
        if model.needs_whole_batches:
            raise ExperimentError(
                f"model.norm: found batch, with {name}, whose local steps keep no statistics of batches; allowed: none"
            )

    return check_model


def available() -> tuple[str, ...]:
    """Names of the registered algorithms."""
    return tuple(point.name for point in entries("fedloom.algorithms"))


def find(name: str) -> Algorithm:
    """Look an algorithm up by name.

    Raises
    ------
    ExperimentError
        If no such algorithm is registered, or what is registered cannot be loaded or is something else.
    """
    for point in entries("fedloom.algorithms"):
        if point.name == name:
            return load(point, Algorithm)
    raise ExperimentError(f"algorithm.name: found {name!r}, allowed: {', '.join(available())}")
