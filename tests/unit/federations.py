"""Small federations in this process, made of the real parts, in float64, shared by the tests of the methods."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Normal

from fedloom.algorithms.base import Algorithm, ClientAlgorithm, Setup
from fedloom.algorithms.batches import batches
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.local_sgd import LocalSGD
from fedloom.core.settings import Settings
from fedloom.data.federated import ClientData, ClientEntry, Manifest, Normalization, Split
from fedloom.data.manifest import VERSION
from fedloom.data.spec import DataSpec, Targets, TensorKind
from fedloom.evaluation.group_statistics import summed_metrics
from fedloom.evaluation.measure import metrics
from fedloom.evaluation.plan import EvaluationPlan, EvaluationResult
from fedloom.federation.client_side import ClientConfig, ClientSide, InProcess
from fedloom.federation.evaluator import AlgorithmPair, LoopConfig, LoopHooks
from fedloom.federation.loop import Loop, vocabulary
from fedloom.federation.monitor import Control, Monitor
from fedloom.federation.private_sums import PrivateSums
from fedloom.federation.progress import Saves
from fedloom.federation.randomness import generator
from fedloom.federation.releases import Releases
from fedloom.federation.roster import Roster
from fedloom.federation.states import States
from fedloom.messages import Message, SummedMetrics
from fedloom.models.flat import FlatModel
from fedloom.models.networks import MLP
from fedloom.models.predictors import Predictors
from fedloom.privacy.examples import ExamplePrivacy
from fedloom.privacy.tally import Tally
from fedloom.runs.folder import RunFolder
from fedloom.runs.journal import Attempt, ConversationRecord, Loss, Replay
from fedloom.storage import Store, open_store
from fedloom.sums.held_answers import HeldAnswers
from fedloom.sums.summation import Summation

CLASSES = 3
IMAGE = (1, 16, 16)  # the smallest size that a LeNet accepts


def close(found: Tensor, expected: Tensor, atol: float = 1e-12) -> None:
    """Check that tensors are equal up to rounding in float64."""
    torch.testing.assert_close(found, expected.detach(), rtol=0, atol=atol)


def split(n: int, random: torch.Generator, shape: tuple[int, ...] = IMAGE, classes: int = CLASSES) -> Split:
    """Return random examples; each class occurs while there are enough. Other tasks have as many outputs."""
    x = torch.randn(n, *shape, generator=random, dtype=torch.float64)
    if FlatModel.task.name == "multilabel":
        return Split(x, torch.randint(2, (n, classes), generator=random).float())
    if FlatModel.task.name == "regression":
        return Split(x / 8, torch.randn(n, classes, generator=random))  # small, so that steps do not diverge
    y = torch.randint(classes, (n,), generator=random)
    y[: min(n, classes)] = torch.arange(classes)[:n]
    return Split(x, y)


def mean_loss(outputs: Tensor, y: Tensor) -> Tensor:
    """Return PyTorch's own loss for the task of the tests, over all examples and outputs."""
    if FlatModel.task.name == "multilabel":
        return F.binary_cross_entropy_with_logits(outputs, y.to(outputs))
    return F.mse_loss(outputs, y.to(outputs)) if FlatModel.task.name == "regression" else F.cross_entropy(outputs, y)


def surprise(outputs: Tensor, y: Tensor) -> Tensor:
    """Return -log p(y | x) of all examples by torch.distributions, up to a constant."""
    if FlatModel.task.name == "multilabel":
        return -Bernoulli(logits=outputs).log_prob(y.to(outputs)).sum()
    if FlatModel.task.name == "regression":
        return -Normal(outputs, 1.0).log_prob(y.to(outputs)).sum() - outputs.numel() * math.log(2 * math.pi) / 2
    return -Categorical(logits=outputs).log_prob(y).sum()


def client(id: str, train: int, seed: int = 0, shape: tuple[int, ...] = IMAGE, classes: int = CLASSES) -> ClientData:
    """Return one client with so many train examples, and a few to evaluate."""
    random = torch.Generator().manual_seed(seed)
    of_classes = FlatModel.task.name == "classification"
    splits = [split(n, random, shape, classes) for n in (train, 2, 2)]
    return ClientData(id, *splits, classes if of_classes else 0)


def clients(sizes: Sequence[int], **kwargs: Any) -> list[ClientData]:
    """Return clients ``c0, c1, ...`` of these sizes."""
    return [client(f"c{i}", n, seed=i, **kwargs) for i, n in enumerate(sizes)]


def held_out_elsewhere(data: Sequence[ClientData]) -> list[ClientData]:
    """Return the clients with validation and test examples swapped, which must not change any model."""
    return [replace(c, validation=other.test, test=other.validation) for c, other in zip(data, data[::-1], strict=True)]


def made_by(federation: Federation) -> dict[str, Tensor]:
    """Return everything a run produced: the server's state and the tensors of the clients' predictors."""
    found = federation.state
    for (_, name), named in federation.predictors.items():
        for which, predictor in named.items():
            found |= {f"{name}.{which}.{key}": tensor for key, tensor in predictor.tensors().items()}
    return found


def sgd(
    model: FlatModel,
    theta: Tensor,
    c: ClientData,
    s: LocalSGD,
    moved: slice,
    random: torch.Generator,
    *,
    term: Callable[[Tensor], Tensor | float] = lambda p: 0.0,
    steps: int | None = None,
) -> Tensor:
    """Train a part p of θ by torch.optim.SGD on the mean loss and a term of p, independent of the tested code."""
    p, where = theta[moved].clone().requires_grad_(), torch.arange(len(theta))[moved]
    optimizer = torch.optim.SGD([p], lr=s.lr, momentum=s.momentum)
    steps = s.count(len(c.train)) if steps is None else steps
    for index in batches(len(c.train), s.batch_size, steps, random):
        optimizer.zero_grad()
        logits = model.logits(theta.index_put((where,), p), c.train.x[index])
        (mean_loss(logits, c.train.y[index]) + term(p)).backward()
        optimizer.step()
    return theta.index_put((where,), p.detach())


def group(members: Sequence[ClientData], seed: int = 0, round: int = 1) -> ClientGroup:
    """Return a batch of clients whose generators are keyed as in a run."""
    return ClientGroup(members, lambda client, purpose: generator(seed, purpose, client, round))


def answers_as_alone(
    half: ClientAlgorithm,
    data: Sequence[ClientData],
    opening: Message,
    ask: Message | None = None,
    states: Sequence[dict[str, Tensor] | None] | None = None,
    atol: float = 1e-12,
) -> list[dict[str, Tensor]]:
    """Check that a batch replies to an opening, keeps states, and is personalized as its clients are one at a time.

    Parameters
    ----------
    ask
        Opens personalization; None: personalization is not checked.
    states
        States that each client kept before.

    Returns
    -------
    list
        Results of the batch for each client: fields of the answer, ``kept.NAME``, ``PREDICTOR.TENSOR``.
    """
    before = [None] * len(data) if states is None else states

    def members(rows: slice, may_keep: bool) -> ClientGroup:
        return ClientGroup(data[rows], group(data)._generator, before[rows], may_keep=may_keep)

    def given(rows: slice) -> list[dict[str, Tensor]]:
        trained = members(rows, True)
        answer = next(half.open(trained, opening)).tensors()
        found = [{name: values[i] for name, values in answer.items()} for i in range(len(trained))]
        for i, kept in trained.kept.items():
            found[i] |= {f"kept.{name}": value for name, value in kept.items()}
        if ask is not None:
            with pytest.raises(StopIteration) as end:
                next(half.open(members(rows, False), ask))
            for one, named in zip(found, end.value.value, strict=True):
                for which, predictor in named.items():
                    one |= {f"{which}.{key}": value for key, value in predictor.tensors().items()}
        return found

    together = given(slice(0, len(data)))
    for i, one in enumerate(together):
        (alone,) = given(slice(i, i + 1))
        assert one.keys() == alone.keys()
        for name, value in one.items():
            torch.testing.assert_close(value, alone[name], rtol=0, atol=atol)
    return together


def setup(model: FlatModel | None = None, n: int = 3) -> Setup:
    """Return a float64 problem, by default with a small MLP on 1x16x16 images."""
    model = MLP(IMAGE, [5], CLASSES) if model is None else model
    return problem_of(model, clients([1] * n))


def problem_of(model: FlatModel, data: Sequence[ClientData], **keys: Any) -> Setup:
    """Return the float64 problem of a model, its task, and clients whose targets have a number of outputs per class."""
    x, y = data[0].train.x, data[0].train.y
    targets = None
    if model.task.name != "classification":
        targets = Targets(model.task.name, () if y is None else tuple(y.shape[1:]), CLASSES)  # type: ignore[arg-type]
    classes = CLASSES if targets is None else 0
    shape, kind = tuple(x.shape[1:]), "pixels" if x.is_floating_point() else "tokens"
    return Setup(model, classes, shape, len(data), torch.float64, kind=kind, targets=targets, **keys)  # type: ignore[arg-type]


class Silent:
    """Observer that does nothing."""

    def round_done(self, attempt: Attempt, rounds: int) -> None: ...

    def attempt_failed(self, attempt: Attempt, attempts: int) -> None: ...

    def evaluating(self, round: int, done: int, clients: int) -> None: ...

    def evaluated(self, line: dict[str, Any]) -> None: ...


@dataclass
class Federation:
    """A loop, and objects that tests inspect beside it."""

    loop: Loop
    predictors: dict[tuple[int, str], dict[str, Any]]

    @property
    def state(self) -> dict[str, Tensor]:
        """Return a copy of the server's state."""
        self.loop.server.settle()
        return {name: tensor.clone() for name, tensor in self.loop.server.state.items()}

    def run(self) -> EvaluationResult:
        """Run all rounds."""
        return self.loop.run()


def manifest(data: Sequence[ClientData], unseen: Sequence[str] = ()) -> Manifest:
    """Return the manifest of these clients."""

    classes = data[0].classes and CLASSES
    shape = tuple(data[0].train.x.shape[1:])
    kind: TensorKind = "pixels" if len(shape) == 3 else "features"
    spec = DataSpec.single(kind, shape, tuple("abc") if classes else ())

    def counts(part: Split) -> tuple[int, ...]:
        if part.y is None or not classes or part.y.dim() > 1 or part.y.is_floating_point():
            return (0,) * classes
        return tuple(torch.bincount(part.y, minlength=CLASSES).tolist())

    return Manifest(
        version=VERSION,
        dataset="random",
        spec=spec.with_normalization(Normalization.identity(spec.numbers)),
        scheme={},
        seed=0,
        held_out_fraction=0.0,
        validation_fraction=0.1,
        source_sha256={},
        clients=tuple(
            ClientEntry(
                c.id,
                c.id not in unseen,
                len(c.train),
                len(c.validation),
                len(c.test),
                {"train": counts(c.train), "validation": counts(c.validation), "test": counts(c.test)},
                "0" * 64,
            )
            for c in data
        ),
    )


def variant(algorithm: Algorithm, **changes: Any) -> Algorithm:
    """Return a method with other attributes, such as ``client``."""
    changed = copy.copy(algorithm)
    vars(changed).update(changes)
    return changed


def federation(
    folder: Path,
    algorithm: Algorithm,
    settings: Settings,
    problem: Setup,
    data: Sequence[ClientData],
    *,
    rounds: int = 1,
    cohort: int | None = None,
    lost: Mapping[int, int] | None = None,
    unseen: Sequence[str] = (),
    load: Callable[[str], ClientData] | None = None,
    seed: int = 7,
    evaluation_cohort: int = 2,
    start_afresh: bool = False,
    checkpoint_every_s: float = 1e9,
    states: Store | None = None,
    after: Callable[[int], None] | None = None,
    control: Control | None = None,
    repeated: RunFolder | None = None,
    private: bool = False,
    plan: EvaluationPlan | None = None,
    at_once: int = 1,
    summation: Summation | None = None,
    held: HeldAnswers | None = None,
    examples: ExamplePrivacy | None = None,
    private_sums: PrivateSums | None = None,
    saves: Saves | None = None,
) -> Federation:
    """The real loop over the in-process transport, all or a ``cohort`` sampled; ``lost``: exchange -> row, each round.

    ``repeated``: a run whose journal is replayed. ``private``: what the method promises is counted.
    """
    made = RunFolder(folder)
    made.make()
    known = manifest(data, unseen)
    if plan is None and problem.targets is not None:
        plan = EvaluationPlan.of(problem.targets, problem.model.task)
    plan = plan or EvaluationPlan.of_classes(data[0].classes and CLASSES)
    problem = replace(problem, protects_examples=examples is not None)
    half = algorithm.client(settings, problem)
    by_id = {c.id: c for c in data}
    predictors: dict[tuple[int, str], dict[str, Any]] = {}

    def conclude(found: Predictors, clients: ClientGroup) -> Message:
        for named, member in zip(found, clients.clients, strict=True):
            predictors[loop.round, member.id] = dict(named)
        measured = metrics(found, clients.clients, half.predictors, batch_size=16, plan=plan)
        in_sums = summation is not None and SummedMetrics in summation.fields
        return summed_metrics(measured, plan) if in_sums else measured

    transport = InProcess(
        ClientSide(
            half,
            vocabulary(algorithm),
            load or by_id.__getitem__,
            conclude,
            ClientConfig(
                seed, clients_at_once=at_once, start_afresh=start_afresh, held=held, examples=examples, saves=saves
            ),
            states=States(states or open_store(made.states)) if half.stateful else None,
        ),
        problem.dtype,
    )
    replay = None if repeated is None else Replay(repeated)
    tally = None if private_sums is None else Tally(private_sums.settings.delta, private_sums.settings.budget)
    if lost is not None:
        losses = [Loss(row, known.roster[row], exchange, "planned") for exchange, row in lost.items()]
        record = ConversationRecord(list(known.roster), losses)
        planned = RunFolder(folder / "planned")
        planned.make()
        attempts = [
            Attempt(t, 1, conversations=[record], statistics={"client_steps": 0.0}) for t in range(1, rounds + 1)
        ]
        planned.rewrite("journal.jsonl", map(asdict, attempts))
        replay = Replay(planned)
    loop = Loop(
        LoopConfig(
            rounds=rounds,
            clients_per_round=len(known.roster) if cohort is None else cohort,
            deadline_s=60.0,
            min_replies=1,
            attempts=1,
            checkpoint_every_s=checkpoint_every_s,
            evaluate_every=rounds or 1,
            evaluation_cohort=evaluation_cohort,
            label_mask=False,
            seed=seed,
        ),
        AlgorithmPair(
            algorithm,
            algorithm.server(settings, problem, generator(seed, "init")),
            half,
            plan,
            summation,
            private=private_sums,
        ),
        Roster(known),
        transport,
        made,
        LoopHooks(Silent(), after=after, monitor=Monitor() if control is None else control.monitor, control=control),
        lambda evaluation: {},
        replay=replay,
        releases=None
        if not private and private_sums is None
        else Releases(made, algorithm.privacy(settings), None, tally),
    )
    return Federation(loop, predictors)


def rostered(folder: Path, method: Algorithm, s: Settings, data: Sequence[ClientData], **keys: Any) -> Federation:
    """Run a federation whose server knows the ids of the seen clients."""
    roster = tuple(c.id for c in data if c.id not in keys.get("unseen", ()))
    f = federation(folder, method, s, replace(keys.pop("problem", setup()), roster=roster), data, **keys)
    f.run()
    return f


def kept(folder: Path, client: str, name: str) -> Tensor:
    """Return the state that a client kept under a name in its last visit."""
    paths = sorted((folder / "states" / client).glob("*.safetensors"), key=lambda path: int(path.name.split("-")[0]))
    return load_file(paths[-1])[name]
