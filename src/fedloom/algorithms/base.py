"""Building blocks of an algorithm: server algorithm, client algorithm, settings, and the registry of algorithms.

The two sides communicate by messages (``fedloom.messages``). The server algorithm is sequential code over a
:class:`Cohort`; the client algorithm consists of coroutines over a :class:`ClientGroup`. Neither depends on the
transport.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor

from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.local_sgd import adaptation_of
from fedloom.algorithms.requirements import Need, check_batches, check_masks, check_needs, check_task
from fedloom.algorithms.sums import SummedFields
from fedloom.core.plugins import entries, load_plugin
from fedloom.data.spec import Kind, Targets
from fedloom.errors import ExperimentError
from fedloom.messages import Message, Metrics, Replies
from fedloom.models.flat import FlatModel
from fedloom.models.predictors import Predictors
from fedloom.privacy.examples import NoisySteps, Privacy
from fedloom.tasks.names import TaskName

Statistics: TypeAlias = dict[str, float]
"""Statistics of a round: ``client_steps`` (local SGD steps of all clients), and ``loss`` and others if known."""


@dataclass(frozen=True)
class Setup:
    """Facts about the problem that both sides have; the aggregator takes them from the manifest, never from data."""

    model: FlatModel  # of the clients, as a function of a flat θ
    classes: int  # C; 0 for tasks without classes
    input_shape: tuple[int, ...]  # of one input: (channels, height, width), (features,) or (tokens,)
    clients: int  # seen and unseen (the papers' n); 0 in an open federation
    dtype: torch.dtype = torch.float32
    kind: Kind = "pixels"  # of the inputs
    roster: tuple[str, ...] = ()  # ids of the seen clients, in manifest order; () in an open federation
    same_clients: bool = True  # False for another partition, whose clients reuse ids of the roster
    targets: Targets | None = None  # of tasks other than classification
    protects_examples: bool = False  # by noisy steps (``federation.privacy.of: examples``)
    seed: int = 0  # of the experiment, for numbers that every process draws itself instead of receiving them

    @cached_property
    def rows(self) -> dict[str, int]:
        """Position in the roster by client id."""
        return {client: i for i, client in enumerate(self.roster)}

    def known_row(self, client: str) -> int | None:
        """Return the position of a client in the roster; None for one that training has not seen."""
        return self.rows.get(client) if self.same_clients else None

    @property
    def outputs(self) -> int:
        """Number K of outputs: classes, labels, numbers, classes of a pixel, or tokens of the vocabulary."""
        return self.classes if self.targets is None else self.targets.outputs


class Cohort(Protocol):
    """Clients of one conversation, in manifest order (rows are by position; an id may repeat)."""

    @property
    def clients(self) -> tuple[str, ...]:
        """Client ids by row."""

    def send(
        self, message: Message, answer: type[Message] = Metrics, meanwhile: Callable[[], None] | None = None
    ) -> Replies[Any]:
        """Deliver a message to every client still in the conversation and return their replies.

        Raise TooFewReplies if fewer than ``federation.min_replies`` clients answered, which ends the attempt.

        Parameters
        ----------
        answer
            Required class of the replies; a client that sends another class is lost. By default the clients return
            their predictors, and the replies are their metrics.
        meanwhile
            Server work that needs no reply. It runs once, while the clients work, and ends before this returns.
        """

    def record(self, name: str, values: Tensor) -> None:
        """Keep one row per client for the evaluation: ``[c, ...]`` (PeFLL: descriptors)."""


class Round(Protocol):
    """Training round or evaluation."""

    @property
    def number(self) -> int:
        """Round number t = 1 ... T."""

    def sample(
        self,
        size: int | None = None,
        purpose: str = "cohort",
        weights: Tensor | None = None,
        replace: bool = False,
        always: Sequence[str] = (),
    ) -> Cohort:
        """Draw a cohort from the roster, of ``federation.clients_per_round`` by default.

        The clients named in ``always`` are part of every draw.
        """

    def everyone(self) -> Cohort:
        """Return the whole roster as one cohort."""

    def generator(self, purpose: str) -> torch.Generator:
        """Return the server's random generator for this round and purpose."""


def statistics_of(updates: Replies[Any]) -> Statistics:
    """Return the total of the ``steps`` of updates, and the mean of their ``loss``."""
    return {"client_steps": updates.total(updates.steps), "loss": float(updates.mean(updates.loss))}


class ServerAlgorithm(ABC):
    """Server side of a method.

    ``state`` holds everything that lasts between rounds; anything else is lost on resume. The loop restores the state
    if a round fails, or if a tensor that the round replaced is not finite. A method that changes tensors in place for
    speed must check its update first.
    """

    def __init__(self, settings: Any, setup: Setup) -> None:
        self.settings = settings
        self.setup = setup
        self.state: dict[str, Tensor] = {}  # CPU tensors by name
        self.sizes = {"d": setup.model.layout.size}  # values of the names in message shapes

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load the state from a checkpoint, whose entries may be in another order."""
        self.state = {name: state[name] for name in self.state}

    def settle(self) -> None:  # noqa: B027 - most methods defer nothing
        """Finish deferred work; called before the state is read from outside."""

    def update_bounds(self, examples: int) -> Mapping[str, float]:
        """Return bounds on the training answer of an honest client with this many train examples, by field name.

        For a count, the bound is the maximum value; for any other field, the maximum ℓ2 norm of a row. A client that
        exceeds a bound is lost for the round. By default the bounds are those of the settings ``local``, if there are
        any; otherwise only the limits of the quantities apply.
        """
        local = getattr(self.settings, "local", None)
        return {} if local is None else local.update_bounds(examples)

    def answer_bounds(self, examples: int) -> Mapping[str, float]:
        """Return :meth:`update_bounds`, without those of changes of θ if θ has buffers, whose moves nothing bounds."""
        bounds = self.update_bounds(examples)
        if not self.setup.model.layout.buffers:
            return bounds
        return {name: bound for name, bound in bounds.items() if not name.startswith("delta_")}

    def disclosed(self, statistics: Statistics) -> Statistics:
        """Return the statistics of a round, without the loss if clients withhold it to protect their examples."""
        if not self.setup.protects_examples:
            return statistics
        return {name: value for name, value in statistics.items() if name != "loss"}

    @abstractmethod
    def train_round(self, round: Round) -> Statistics:
        """Perform one training round of the method."""

    @abstractmethod
    def personalize(self, cohort: Cohort) -> Replies[Any]:
        """Run the conversation in which each client gets its predictors, without changing the state.

        Returns the replies to the last message, at which the client algorithm returns its predictors. The caller
        computes the replies from them: metrics, for an evaluation.

        Raise DataError if the method has no predictors for these clients.
        """


Conversation: TypeAlias = Generator[Message, Any, Predictors | None]
"""Client side of a conversation: a generator that yields answers, is sent messages, and may return predictors."""

F = TypeVar("F", bound=Callable[..., Conversation | Predictors])


class ClientAlgorithm:
    """Client side of a method: conversations, chosen by the type of their opening message (:func:`conversation`).

    Each is a coroutine, or a plain function if the opening message suffices to make the predictors.
    """

    predictors: tuple[str, ...] = ("personal",)
    """Names of the predictors that ``personalize`` returns, in reporting order."""

    stateful: bool = False
    """True if clients keep a state between rounds (:meth:`ClientGroup.save_state`)."""

    personalizing: tuple[str, ...] = ("personalize",)
    """Names of the conversations that take place outside training rounds; all others train."""

    def __init__(self, settings: Any, setup: Setup) -> None:
        self.settings = settings
        self.setup = setup

    @classmethod
    @cache
    def _openings(cls) -> dict[type[Message], str]:
        """Return message class -> name of the method that it opens, by the annotation of the parameter ``opening``."""
        names = [name for name in dir(cls) if hasattr(getattr(cls, name), "is_conversation")]
        return {get_type_hints(getattr(cls, name))["opening"]: name for name in names}

    def trains(self, opening: type[Message]) -> bool:
        """Return whether this class of message opens a training round; noise, clipping and states follow from it."""
        return self._openings().get(opening) not in self.personalizing

    def personalization_steps(self, predictor: str, examples: int) -> int:
        """Return the SGD steps that a client with this many train examples makes for a predictor.

        By default they are :func:`personalization_steps` for ``personal``, and 0 for others.
        """
        return personalization_steps(self.settings, examples) if predictor == "personal" else 0

    def open(self, clients: ClientGroup, opening: Message) -> Conversation:
        """Start the conversation that this message opens; raise TypeError if it opens none."""
        openings = self._openings()
        name = openings.get(type(opening))
        if name is None:
            names = ", ".join(sorted(t.__name__ for t in openings))
            raise TypeError(f"{type(opening).__name__} opens no conversation; expected {names}")
        started: Conversation | Predictors = getattr(self, name)(clients, opening)
        return started if isinstance(started, Generator) else _finished(started)


def personalization_steps(settings: Any, examples: int) -> int:
    """Return the steps from a received model to ``personal`` (:func:`adaptation_of`); 0 for settings without any."""
    if hasattr(settings, "adaptation") or hasattr(settings, "personalize_epochs"):
        return adaptation_of(settings).count(examples)
    return int(getattr(settings, "personalize_steps", 0))


def _finished(predictors: Predictors) -> Conversation:
    return predictors
    yield


def conversation(method: F) -> F:
    """Mark a method of a client algorithm as a conversation, opened by the message type that annotates ``opening``."""
    method.is_conversation = True  # type: ignore[attr-defined]
    return method


class Algorithm(ABC):
    """Method, registered under the entry point ``fedloom.algorithms`` by an instance.

    A subclass sets the attributes and overrides the methods in which it differs.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    """Version of what the method computes and sends; name and version of aggregator and worker must match."""
    settings: ClassVar[Any]
    """Subclass of ``Settings``: the keys under ``algorithm`` in an experiment file, without ``name``."""
    example: ClassVar[Mapping[str, Any]] = {}
    """Further settings of a training on a few examples, which complete :meth:`example_settings`."""
    trains: ClassVar[bool] = True
    """False for a method without rounds, which requires ``federation.rounds: 0``."""
    needs: ClassVar[tuple[Need, ...]] = ()
    """Requirements on the clients' model."""
    augments: ClassVar[bool] = True
    """False if clients do not train on mini-batches of their examples, which ``data.augment`` changes."""
    keeps_buffers: ClassVar[bool] = False
    """True if clients can keep their own values of buffers that move in training (``model.buffers: local``)."""
    tasks: ClassVar[tuple[TaskName, ...]] = get_args(TaskName)
    """Tasks that the method supports."""
    restriction: ClassVar[str] = ""
    """Reason in one sentence why it supports no other task."""
    no_sums: ClassVar[str] = "needs each client's own update at the server"
    """Reason why its server needs more than sums over a cohort (:meth:`sums`), if it does: the end of a sentence."""
    needs_one_input: ClassVar[bool] = False
    """True if an example must be one tensor; else its inputs may have names."""
    predictors: ClassVar[Mapping[str, str]] = {}
    """Predictor -> name in tables, in reporting order."""
    roster_data: ClassVar[str] = ""
    """Data that the server keeps about a fixed set of clients, such as "a model of each client"; empty for none."""
    no_example_privacy: ClassVar[str | None] = (
        "Its clients also send values that do not follow from gradients of local steps."
    )
    """Reason in one sentence why training cannot protect examples (:meth:`example_privacy`); None if it can."""
    noisy_training: ClassVar[tuple[str, ...]] = ()
    """Keys of settings of local training whose steps are noisy if examples are protected (:meth:`noisy_steps`)."""
    at_home: ClassVar[tuple[str, ...]] = ()
    """Keys of settings of local training whose results stay with the clients, and need no noise for examples."""
    answers_privately: ClassVar[bool] = False
    """True if a new client can add noise to everything that it discloses (:meth:`private`)."""

    @property
    @abstractmethod
    def messages(self) -> tuple[type[Message], ...]:
        """Message classes of all conversations, both directions; a class attribute will do."""

    @abstractmethod
    def server(self, settings: Any, setup: Setup, generator: torch.Generator) -> ServerAlgorithm:
        """Return the server algorithm; the generator initializes its state."""

    @abstractmethod
    def client(self, settings: Any, setup: Setup) -> ClientAlgorithm:
        """Return the client algorithm."""

    def example_settings(self) -> dict[str, Any]:
        """Return settings of a training on a few examples, by which tests and the conformance kit run every method."""
        local = {"epochs": 1, "batch_size": 4, "lr": 0.05}
        common = {"local": local, "personalize_steps": 2, "personalize_epochs": 1}
        return {**{k: v for k, v in common.items() if k in self.settings.model_fields}, **self.example}

    def titles(self, settings: Any) -> Mapping[str, str]:
        """Return the name in tables of each predictor: by default ``predictors``."""
        return self.predictors

    def labelled(self, settings: Any) -> bool:
        """Return True if a client needs labels to personalize; without labels there is no label mask."""
        return True

    def trains_unlabelled(self, settings: Any) -> bool:
        """Return True if clients without labels can take part in training although the model's loss needs labels."""
        return False

    def needs_each_update(self, settings: Any) -> bool:
        """Return True if these settings make a server that uses sums need each client's own update after all."""
        return False

    def sums(self, settings: Any) -> SummedFields:
        """Return the answers in training that the server uses only as sums over the cohort; none by default.

        Other answers in training reach the server one by one: they must not disclose an update (``sums_suffice``).
        """
        return {}

    def sums_suffice(self, settings: Any) -> str | None:
        """Return why sums over the cohort do not suffice for the server, as the end of a sentence; None if they do."""
        if not self.sums(settings):
            return self.no_sums
        if self.needs_each_update(settings):
            return "bounds or trims each client's own update at the server; set max_norm to null and trim to 0"
        return None

    def example_privacy(self, settings: Any) -> str | None:
        """Return in a sentence why training cannot protect examples (``federation.privacy.of: examples``).

        None if all that clients send in training, and all of their state that affects it, depends on their examples
        only through gradients of :class:`~fedloom.algorithms.client.LocalTrainer` on batches that it draws, and through
        numbers of examples. A method must state this itself, here or by ``no_example_privacy``.
        """
        return self.no_example_privacy

    def noisy_steps(self, settings: Any, examples: int, *, personalizing: bool = False) -> tuple[NoisySteps, ...]:
        """Return the noisy steps of a training visit of a client with this many train examples.

        ``personalizing`` asks for those of a personalization whose results the client sends, which only clients that do
        not train may make. By default they are those of ``noisy_training``, and personalization sends no results.
        """
        return () if personalizing else tuple(getattr(settings, key).noisy(examples) for key in self.noisy_training)

    def noisy_sums_suffice(self, settings: Any) -> str | None:
        """Return why noise on the sums does not make training private, as the end of a sentence; None if it does.

        It does if the server learns only from fields of the sums: updates, and statistics declared as ``learned``.
        """
        return None

    def needs_fine_sums(self, settings: Any) -> str | None:
        """Return why secure sums of 32-bit integers are too coarse, as the end of a sentence; None if not."""
        return None

    def differentiates_twice(self, settings: Any) -> bool:
        """Return True if training differentiates gradients of the model's loss."""
        return False

    def check_model(self, settings: Any, model: FlatModel) -> None:
        """Check that the method supports the task of the clients' model, and can use the model.

        Raise ExperimentError if it cannot; the message begins with the key to change.
        """
        check_task(self.name, self.tasks, self.restriction, model)
        check_needs(self.name, self.needs, model)
        check_batches(settings.model_dump(), model)
        check_masks(settings, model)
        if model.layout.local_buffers and model.layout.buffers and not self.keeps_buffers:
            raise ExperimentError(
                f"model.buffers: clients of {self.name} cannot keep buffers of their own (got local); use shared, or a "
                "method with a shared model, such as fedavg or fedbn",
                key="model.buffers",
                found="local",
                allowed=["shared"],
            )

    def check_inputs(self, kind: Kind) -> None:
        """Check that the method can use inputs of a kind.

        Raise ExperimentError if it needs one tensor for each example, and the inputs are named tensors.
        """
        if self.needs_one_input and kind == "named":
            raise ExperimentError(
                f"algorithm.name: {self.name} needs one input tensor for each example, but the data have named inputs; "
                "join them into one, or choose another method",
                key="algorithm.name",
                found=self.name,
            )

    def check_client(self, settings: Any, examples: int, classes: int) -> str | None:
        """Return why a client with these train examples, of this many classes, cannot train; None if it can."""
        return None

    def starts_alike(self, settings: Any) -> bool:
        """Return True if clients start from the model's own initialization, which is not sent."""
        return False

    def requires_fixed_population(self, settings: Any) -> tuple[str, str] | None:
        """Return the key to change and a sentence if the method requires a fixed set of clients; None if not."""
        if not self.roster_data:
            return None
        return "name", f"the server of {self.name} keeps {self.roster_data}, so that none can join later; use fedavg"

    def privacy(self, settings: Any) -> Privacy | None:
        """Return the differential privacy guarantee; None if there is none."""
        return None

    def private(self, settings: Any, clip: float | None, noise_multiplier: float, delta: float) -> Any:
        """Return settings under which a new client discloses nothing beyond the private message.

        The norm ``clip`` is that of the settings if it is None. A method that sets ``answers_privately`` overrides
        this; otherwise NotImplementedError is raised.
        """
        raise NotImplementedError(f"{self.name} adds no noise to what a new client discloses")

    @property
    def has_steps(self) -> bool:
        """True if the method supports :meth:`after_steps`."""
        return "personalize_steps" in self.settings.model_fields

    def after_steps(self, settings: Any, steps: int) -> Any:
        """Return settings under which a new client makes this many local steps on the model that it receives.

        Raise ExperimentError if clients of this method make no such steps.
        """
        if not self.has_steps:
            able = [name for name in available() if find_algorithm(name).has_steps]
            raise ExperimentError(
                f"evaluation.own_steps: new clients of {self.name} make no steps that can be counted; set it to null, "
                f"or use one of {', '.join(able)}",
                key="evaluation.own_steps",
                allowed=able,
            )
        return settings.model_copy(update={"personalize_steps": steps})


def available() -> tuple[str, ...]:
    """Return the names of the registered algorithms."""
    return tuple(point.name for point in entries("fedloom.algorithms"))


def find_algorithm(name: str) -> Algorithm:
    """Return the algorithm of this name.

    Raise ExperimentError if no such algorithm is registered, or the registered object cannot be loaded or is of another
    class.
    """
    for point in entries("fedloom.algorithms"):
        if point.name == name:
            return load_plugin(point, Algorithm)  # type: ignore[type-abstract]
    names = available()
    raise ExperimentError(
        f"algorithm.name: there is no method {name!r}; choose one of {', '.join(names)}",
        key="algorithm.name",
        found=name,
        allowed=names,
    )
