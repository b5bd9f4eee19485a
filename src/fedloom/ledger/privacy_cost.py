"""Privacy cost of a training that has not run: ε by rounds, the noise that an ε needs, and its size beside updates."""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedloom.algorithms.base import Setup, find_algorithm
from fedloom.algorithms.sums import UNIFORM, learned_fields
from fedloom.core.words import pluralize, rounded_up
from fedloom.data.federated import FederatedDataset
from fedloom.data.manifest import Manifest
from fedloom.data.partition import made_partition
from fedloom.engine.options import PrivacyQuestion
from fedloom.engine.training_privacy import Planned, Population
from fedloom.errors import ExperimentError, argument
from fedloom.experiment.sections import Experiment, OwnData
from fedloom.federation.randomness import generator
from fedloom.ledger.ledger import PrivacyAccountant
from fedloom.messages import answer_shapes
from fedloom.models.fitting import fitted
from fedloom.privacy.accounting import MOST_ROUNDS, rounds_within
from fedloom.privacy.claim import readings_of
from fedloom.privacy.settings import TrainingPrivacy
from fedloom.privacy.spent import Total, TrainingCost
from fedloom.privacy.tally import Cohorts
from fedloom.tasks.registry import agreed_task

HOPELESS = {"clients": 1.0, "examples": 10.0}
SEVERE = {"clients": 0.3, "examples": 3.0}
"""Ratios of the noise's norm to the clipping norm, on the mean of a round or step, above which a sentence warns.

Examples have higher limits, because noise averages out over many steps (Abadi et al. 2016, arXiv 1607.00133: ratio 2).
"""


@dataclass(frozen=True)
class EpsilonAt:
    """ε after some rounds, toward readers of the models, a member, and the aggregator; None: no guarantee.

    The member is a client that took part in ``cohorts`` of the rounds, the expected number; 0 if it does not know the
    cohorts.
    """

    rounds: int
    to_readers: float
    to_members: float | None
    to_aggregator: float | None
    cohorts: int


@dataclass(frozen=True)
class PrivacyCost:
    """Cost of a training's privacy.

    Attributes
    ----------
    unit
        ``clients`` or ``examples``.
    clip, noise_multiplier, delta
        C, z and δ.
    asked_epsilon
        ε for which the noise multiplier or the rounds were found; None if both were given.
    sampling, clients, cohort
        Draw of cohorts, number of training clients, and expected number of them in a round.
    visits, examples, batch
        For privacy of examples: rounds that a client takes part in (few exceed it), its training examples, and expected
        size of a mini-batch; None otherwise.
    rounds
        Number of rounds; None: more than ten million fit.
    by_rounds
        ε after one round, a quarter, half and all of them.
    noise
        ``central`` or ``distributed``.
    parameters
        Number d of coordinates that get noise.
    noise_to_clip
        z √d / m: norm of the noise on the mean of a round (m clients) or a step (m examples), relative to the
        clipping norm.
    with_ledger
        Total (ε, δ) of the ledger with this training, for replacing one training example; None without a ledger.
    statement
        The same in sentences.
    """

    unit: str
    clip: float
    noise_multiplier: float
    delta: float
    asked_epsilon: float | None
    sampling: str
    clients: int
    cohort: int
    visits: int | None
    examples: int | None
    batch: int | None
    rounds: int | None
    by_rounds: tuple[EpsilonAt, ...]
    noise: str
    parameters: int
    noise_to_clip: float
    with_ledger: Total | None = None
    statement: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the sentences."""
        return "\n".join(self.statement)

    def as_json(self) -> dict[str, Any]:
        """Return the cost as a JSON object."""
        return asdict(self) | {
            "by_rounds": [asdict(cost) for cost in self.by_rounds],
            "statement": list(self.statement),
        }


def cost_of(experiment: Experiment, question: PrivacyQuestion) -> PrivacyCost:
    """Return the privacy cost of an experiment's training; nothing is trained, and no data are needed.

    Raise ExperimentError if the experiment has no ``federation.privacy``, a value is out of range, or a number of
    clients or examples is neither known nor given.
    """
    for name in ("clients", "examples", "epsilon", "noise_multiplier"):
        value = getattr(question, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ExperimentError(f"{argument(name)} must be positive (got {value:g}).", key=name, found=value)
    privacy = experiment.federation.privacy
    if privacy is None:
        raise ExperimentError(
            "federation.privacy is not set, so training has no ε.",
            key="federation.privacy",
            hint=f"add it, or {argument('set')}federation.privacy='{{clip: 1.0, epsilon: 8, delta: 1e-5}}'",
        )
    plan = Planned(experiment, _population(experiment, question))
    z, rounds, requested = _solved(plan, question)
    size = update_size(experiment, plan.population.clients)
    examples = None if plan.population.examples is None else plan.population.examples[0]
    of_examples = privacy.of == "examples"
    batch = min(_batch(plan, examples), examples) if of_examples and examples is not None else None
    ratio = z * math.sqrt(size) / (batch or plan.cohort)
    cost = PrivacyCost(
        unit=privacy.of,
        clip=privacy.clip,
        noise_multiplier=z,
        delta=privacy.delta,
        asked_epsilon=requested,
        sampling=plan.release(z).sampling,
        clients=plan.population.clients,
        cohort=plan.cohort,
        visits=plan.visits(rounds) if of_examples and rounds is not None else None,
        examples=examples if of_examples else None,
        batch=batch,
        rounds=rounds,
        by_rounds=tuple(_at(plan, privacy, n, z) for n in _shown_rounds(rounds)),
        noise=privacy.noise,
        parameters=size,
        noise_to_clip=ratio,
    )
    sentences = _sentences(cost)
    if question.ledger is not None:
        total, sentence = _with_ledger(plan, rounds, z, question.ledger)
        cost = dataclasses.replace(cost, with_ledger=total)
        sentences.append(sentence)
    return dataclasses.replace(cost, statement=tuple(sentences))


def update_size(experiment: Experiment, clients: int) -> int:
    """Return the number of coordinates that a client sends in a round, without statistics."""
    algorithm, settings = find_algorithm(experiment.algorithm.name), experiment.algorithm.settings
    setup = _setup(experiment, clients)
    sizes = algorithm.server(settings, setup, generator(experiment.seed, "init")).sizes
    shapes = answer_shapes(algorithm.messages, sizes)
    answers = algorithm.sums(settings) or {cls: dict.fromkeys(names, UNIFORM) for cls, names in shapes.items()}
    return sum(math.prod(shapes[cls][name]) for cls, fields in answers.items() for name in learned_fields(cls, fields))


def _setup(e: Experiment, clients: int) -> Setup:
    """Return the setup that the experiment's manifest would give, without data."""
    if isinstance(e.data, OwnData):
        spec, source = e.data.own.spec, "data.own"
    else:
        spec, source = e.data.partition.drawn_spec(e.data.opened().spec), e.data.dataset
    task = agreed_task(e.task, spec.task, spec.outputs, source)
    fitted_model = fitted(e.model, spec.inputs, spec.outputs, task, () if spec.targets is None else spec.targets.shape)
    return Setup(
        model=fitted_model.model,
        classes=spec.classes,
        input_shape=spec.input_shape,
        clients=clients,
        kind="features" if fitted_model.standardizes and spec.kind == "integers" else spec.kind,
        roster=tuple(str(i) for i in range(clients)),
        targets=spec.targets,
        seed=e.seed,
    )


def _population(e: Experiment, question: PrivacyQuestion) -> Population:
    """Return the training clients: as asked, or from the partition if it is on this machine, or from the settings."""
    population = Population.from_experiment(
        e, _partition(e) if question.clients is None or question.examples is None else None
    )
    clients = question.clients or (None if population is None else population.clients)
    is_open = isinstance(e.data, OwnData) and e.federation.min_clients == 1  # the default: any number may join
    if clients is None or (is_open and question.clients is None):
        raise ExperimentError(
            f"The number of clients is not known before the run; give it with {argument('clients')}.", key="clients"
        )
    examples = None if population is None else population.examples
    if question.examples is not None:
        examples = (question.examples, question.examples)
    privacy = e.federation.privacy
    if examples is None and privacy is not None and privacy.of == "examples":
        raise ExperimentError(
            "The ε of examples depends on the clients' numbers of examples, and the partition is not on this machine; "
            f"give the smallest number with {argument('examples')}.",
            key="examples",
            hint="or make the partition: fedloom partition EXPERIMENT",
        )
    return Population(clients, examples)


def _partition(e: Experiment) -> Manifest | None:
    """Return the manifest of the experiment's partition if it is on this machine."""
    if isinstance(e.data, OwnData):
        return None
    data = e.data
    folder = made_partition(data.opened(), data.partition_settings(e.seed), data.root)
    return None if folder is None else FederatedDataset.open(folder).manifest


def _solved(plan: Planned, question: PrivacyQuestion) -> tuple[float, int | None, float | None]:
    """Return noise multiplier, rounds, and the ε from which one of them was found (None: from neither)."""
    privacy, e = plan.privacy, plan.experiment
    epsilon, z = question.epsilon, question.noise_multiplier
    if epsilon is not None and z is not None:
        return z, _rounds(plan, epsilon, z), epsilon
    rounds = e.federation.rounds
    if not rounds:
        raise ExperimentError(
            f"The experiment has no number of rounds; set federation.rounds, or give {argument('epsilon')} with "
            f"{argument('noise_multiplier')}.",
            key="federation.rounds",
        )
    if z is None and epsilon is None:
        z, epsilon = privacy.noise_multiplier, privacy.epsilon
    if z is not None:
        return z, rounds, None
    assert epsilon is not None  # the settings have one of them
    return plan.noise_multiplier(epsilon, rounds), rounds, epsilon


def _rounds(plan: Planned, epsilon: float, z: float) -> int | None:
    """Return the number of rounds that cost at most ε; None for more than ten million."""
    if plan.privacy.of == "clients":
        return rounds_within(epsilon, plan.privacy.delta, plan.release(z))
    high = 1
    while plan.epsilon(high, z) <= epsilon:
        if high > MOST_ROUNDS:
            return None
        high *= 2
    low = high // 2
    return low + bisect(range(low + 1, high), epsilon, key=lambda rounds: plan.epsilon(rounds, z))


def _shown_rounds(rounds: int | None) -> list[int]:
    if rounds is None:
        return [1]
    return sorted({n for n in (1, rounds // 4, rounds // 2, rounds) if n})


def _at(plan: Planned, privacy: TrainingPrivacy, rounds: int, z: float) -> EpsilonAt:
    to_readers = plan.epsilon(rounds, z)
    if privacy.of == "examples":
        return EpsilonAt(rounds, to_readers, to_readers, to_readers, 0)
    release, secure = plan.release(z), plan.experiment.federation.secure_aggregation is not None
    member = Counter({release: math.ceil(rounds * release.rate)})
    cohorts = Cohorts({"": member}, plan.cohort)
    readings = readings_of(privacy, {release: rounds}, cohorts, secure=secure)
    return EpsilonAt(rounds, to_readers, readings.members.epsilon, readings.aggregator.epsilon, readings.member_cohorts)


def _with_ledger(plan: Planned, rounds: int | None, z: float, ledger: Path) -> tuple[Total, str]:
    """Return the total of a ledger after this training, and a sentence that states it."""
    if rounds is None:
        raise ExperimentError(f"{argument('ledger')} needs a number of rounds.", key="ledger")
    record = PrivacyAccountant(ledger).content()
    delta = plan.privacy.delta if record.delta is None else record.delta
    costs = [TrainingCost.planned(plan.privacy, counts) for counts in plan.counts(rounds, z).values()]
    each = [dataclasses.replace(record.spent, trainings=(*record.spent.trainings, cost)).total(delta) for cost in costs]
    total = max(each, key=lambda total_after: total_after.epsilon)
    return total, (
        f"For a client whose ledger {ledger} has {record} (ε = {rounded_up(record.total.epsilon)}), the total becomes "
        f"ε = {rounded_up(total.epsilon)} at δ = {rounded_up(total.delta)}, for replacing one training example."
    )


def _batch(plan: Planned, examples: int) -> int:
    """Return the largest mini-batch of a client's visit."""
    steps = plan.algorithm.noisy_steps(plan.experiment.algorithm.settings, examples)
    return max((each.batch_size for each in steps), default=examples)


def _sentences(cost: PrivacyCost) -> list[str]:
    sentences = [_draw(cost), _noise(cost)]
    last = cost.by_rounds[-1]
    if cost.unit == "clients" and last.cohorts:
        own = " and its own share of the noise" if cost.noise == "distributed" else ""
        sentences.append(
            f"A member of secure sums knows who else takes part{own}: its ε is that of a client that takes part in "
            f"{last.cohorts:,} of {pluralize(last.rounds, 'round')}, as expected; one that takes part in more learns "
            "more."
        )
    if cost.unit == "clients" and cost.noise == "central":
        sentences.append("The aggregator adds the noise, so it is trusted: there is no ε toward it.")
    elif cost.unit == "clients":
        sentences.append(
            "Each client adds a share of the noise. The aggregator knows who takes part, so sampling gives no privacy "
            "toward it."
        )
    else:
        sentences.append("Clients add the noise themselves: ε holds toward members and the aggregator, too.")
    if cost.unit == "clients" and cost.delta >= 1 / cost.clients:
        sentences.append(
            f"δ = {cost.delta:g} is not below 1/n = {1 / cost.clients:.2g}: even publishing the data of one client "
            "would satisfy it."
        )
    return sentences


def _draw(cost: PrivacyCost) -> str:
    if cost.unit == "examples":
        return (
            f"A client takes part in at most about {cost.visits} of {cost.rounds} rounds; one with {cost.examples} "
            f"training examples draws mini-batches of {cost.batch}. ε holds for such a client."
        )
    if cost.sampling == "all":
        return f"All of {pluralize(cost.clients, 'client')} take part in every round, so sampling adds no privacy."
    draw = "independently" if cost.sampling == "poisson" else "without replacement"
    relation = "" if cost.sampling == "poisson" else " ε is then for replacing a client, not for adding one."
    return f"In each round {cost.cohort:,} of {cost.clients:,} clients take part, drawn {draw}.{relation}"


def _noise(cost: PrivacyCost) -> str:
    period = "step" if cost.unit == "examples" else "round"
    ratio = cost.noise_to_clip
    sentence = (
        f"The noise on the mean of a {period} has {ratio:.2g} times the norm of the largest clipped "
        f"{'gradient' if cost.unit == 'examples' else 'update'} (z √d / m with d = {cost.parameters:,})"
    )
    least = math.ceil(cost.noise_multiplier * math.sqrt(cost.parameters) / SEVERE[cost.unit])
    units = "examples per mini-batch" if cost.unit == "examples" else "clients per round"
    fix = f"To reduce it, use about {least:,} {units}, fewer parameters (a head, adapters), or a larger ε."
    if ratio > HOPELESS[cost.unit]:
        # Over rounds, updates that agree grow linearly, and noise with the square root.
        rounds = cost.rounds or MOST_ROUNDS
        over_all = ratio / math.sqrt(rounds * (cost.cohort if cost.unit == "examples" else 1))
        outlook = "training cannot be expected to work" if over_all > 1 else "only what many rounds agree on remains"
        total_text = (
            f"Over all {pluralize(rounds, 'round')} it has {over_all:.2g} times the norm of what the updates share"
        )
        return f"{sentence}. {total_text}. It swamps the signal, and {outlook}. {fix}"
    if ratio > SEVERE[cost.unit]:
        return f"{sentence}. It slows training considerably, and averages out only over many rounds. {fix}"
    return f"{sentence}: training can be expected to work."
