"""Privacy of training before a run: what its rounds will release, and the noise that an ε needs."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fedloom.algorithms.base import Algorithm, find_algorithm
from fedloom.core.words import rounded_up
from fedloom.data.manifest import Manifest
from fedloom.errors import ExperimentError
from fedloom.experiment.sections import Data, Experiment, OwnData
from fedloom.federation.client_side import InProcess
from fedloom.federation.private_sums import PrivateSums
from fedloom.federation.transport import TRAIN, Transport
from fedloom.models.flat import FlatModel
from fedloom.privacy.accounting import (
    EVERYONE,
    PRECISION,
    Release,
    check_accountant,
    epsilon_of,
    least_multiplier,
    sampled,
)
from fedloom.privacy.clipped_sum import check_cohorts
from fedloom.privacy.settings import TrainingPrivacy
from fedloom.privacy.tally import Counts, Tally, largest
from fedloom.runs.folder import RunFolder

_log = logging.getLogger(__name__)

DEVIATIONS = 4
"""Standard deviations above the mean at which a client's number of visits is planned, where cohorts are drawn."""


@dataclass(frozen=True)
class Population:
    """Clients that train, as far as they are known before a run.

    Attributes
    ----------
    clients
        Number of clients; in an open federation, the least number.
    examples
        Smallest and largest numbers of training examples of a client; None if they are not known.
    """

    clients: int
    examples: tuple[int, int] | None = None

    @classmethod
    def from_experiment(cls, experiment: Experiment, manifest: Manifest | None) -> Population | None:
        """Return the population of a manifest, or else of the experiment; None if only data determine it."""
        if manifest is not None and manifest.roster:
            sizes = [entry.train for entry in manifest.clients if entry.seen]
            return cls(len(sizes), (min(sizes), max(sizes)))
        data = experiment.data
        clients = data.seen if isinstance(data, Data) else experiment.federation.min_clients
        return None if clients is None else cls(clients)


@dataclass(frozen=True)
class Planned:
    """Releases of a planned training.

    Attributes
    ----------
    experiment
        Experiment with ``federation.privacy``.
    population
        Its training clients.
    """

    experiment: Experiment
    population: Population

    @property
    def privacy(self) -> TrainingPrivacy:
        """Settings of ``federation.privacy``."""
        assert self.experiment.federation.privacy is not None
        return self.experiment.federation.privacy

    @property
    def rounds(self) -> int:
        """Number of rounds of the experiment, which must have one."""
        assert self.experiment.federation.rounds is not None
        return self.experiment.federation.rounds

    @property
    def multiplier(self) -> float:
        """Noise multiplier of the experiment, which must have one."""
        assert self.privacy.noise_multiplier is not None
        return self.privacy.noise_multiplier

    @property
    def algorithm(self) -> Algorithm:
        """The method."""
        return find_algorithm(self.experiment.algorithm.name)

    @property
    def cohort(self) -> int:
        """Expected number of clients of a cohort."""
        return min(self.experiment.federation.clients_per_round, self.population.clients)

    def counts(self, rounds: int, noise_multiplier: float) -> Counts:
        """Return the releases of this many rounds; for examples, of the smallest and of the largest client."""
        if self.privacy.of == "clients":
            return {EVERYONE: {self.release(noise_multiplier): rounds}}
        visits = self.visits(rounds)
        return {str(n): self.steps(n, visits, noise_multiplier) for n in dict.fromkeys(self._sizes())}

    def epsilon(self, rounds: int, noise_multiplier: float) -> float:
        """Return the ε of this many rounds toward readers of the models."""
        delta = self.privacy.delta
        return epsilon_of(largest(self.counts(rounds, noise_multiplier), delta), delta)

    def release(self, noise_multiplier: float) -> Release:
        """Return the release of a noisy sum over a cohort."""
        return sampled(self.privacy.sampling, self.population.clients, self.cohort, noise_multiplier)

    def visits(self, rounds: int) -> int:
        """Return the number of rounds that a client takes part in, which few clients exceed."""
        rate = self.cohort / self.population.clients
        likely = rounds * rate + DEVIATIONS * math.sqrt(rounds * rate * (1 - rate))
        return min(rounds, math.ceil(likely))

    def steps(self, examples: int, visits: int, noise_multiplier: float) -> Counter[Release]:
        """Return the releases of a client with this many training examples over some visits."""
        settings = self.experiment.algorithm.settings
        visit = steps_of(self.algorithm, settings, self.privacy, examples, noise_multiplier)
        return Counter({release: count * visits for release, count in visit.items()})

    def noise_multiplier(self, epsilon: float, rounds: int) -> float:
        """Return the least noise multiplier with which this many rounds cost at most ε."""
        return least_multiplier(epsilon, lambda z: self.epsilon(rounds, z))

    def _sizes(self) -> Sequence[int]:
        if self.population.examples is None:
            raise ExperimentError(
                "The ε of examples depends on the clients' numbers of examples, which only the data determine.",
                key="examples",
            )
        return self.population.examples


def with_noise(experiment: Experiment, manifest: Manifest | None, stored: Experiment | None = None) -> Experiment:
    """Return the experiment with the noise multiplier that its ``federation.privacy.epsilon`` needs.

    ``manifest`` has the clients of the run; None: as the experiment says. A resumed run keeps the noise of the
    experiment that is ``stored`` in its folder.

    Raise ExperimentError if the accountant is not installed, cohorts are too small for secure sums, a given noise
    multiplier does not suffice for ε, the number of rounds is not limited, or clients' numbers of examples are not
    known.
    """
    privacy, rounds = experiment.federation.privacy, experiment.federation.rounds
    if privacy is None or rounds == 0:
        return experiment
    check_accountant()
    population = Population.from_experiment(experiment, manifest)
    if (
        population is not None
        and experiment.federation.secure_aggregation is not None
        and (privacy.of, privacy.sampling) == ("clients", "poisson")
    ):
        check_cohorts(population.clients, experiment.federation.clients_per_round, privacy.delta)
    if (epsilon := privacy.epsilon) is None:
        return experiment
    if rounds is None:
        raise ExperimentError(
            "federation.privacy.epsilon needs a number of federation.rounds; set that, or noise_multiplier with a "
            "budget, which ends training.",
            key="federation.privacy.epsilon",
            found=privacy.epsilon,
        )
    stored_privacy = None if stored is None else stored.federation.privacy
    if stored_privacy is not None and stored_privacy.epsilon == privacy.epsilon and stored_privacy.noise_multiplier:
        experiment = with_multiplier(experiment, stored_privacy.noise_multiplier)
        privacy = stored_privacy
    assert population is not None  # if the experiment does not state the clients, there is a manifest
    if privacy.of == "examples" and population.examples is None:
        raise ExperimentError(
            "federation.privacy.epsilon with of: examples needs the clients' numbers of examples before the run, and "
            "here clients join later; set noise_multiplier with a budget.",
            hint=f"fedloom privacy EXPERIMENT --examples N --epsilon {epsilon:g} prints the noise multiplier to copy, "
            "where N is the smallest number of training examples of a client",
            key="federation.privacy.epsilon",
            found=privacy.epsilon,
        )
    plan = Planned(experiment, population)
    if (z := privacy.noise_multiplier) is None:
        return with_multiplier(experiment, plan.noise_multiplier(epsilon, rounds))
    if (cost := plan.epsilon(rounds, z)) > epsilon * (1 + PRECISION):
        raise ExperimentError(
            f"federation.privacy.noise_multiplier is {z:.4g}, with which {rounds} rounds cost ε = {rounded_up(cost)}, "
            f"more than federation.privacy.epsilon, {epsilon:g}.",
            key="federation.privacy.noise_multiplier",
            found=z,
            hint="set only one of the two, or fewer federation.rounds",
        )
    return experiment


def tally_of(experiment: Experiment) -> Tally | None:
    """Return a new tally of the releases of training; None if it is not private."""
    privacy = experiment.federation.privacy
    return None if privacy is None else Tally(privacy.delta, privacy.budget, privacy.of)


def noisy_steps_of(experiment: Experiment) -> Callable[[int, str], Mapping[Release, int]] | None:
    """Return a function of a client's number of training examples and a conversation's purpose.

    It returns the releases of the noisy steps. None without privacy of examples.
    """
    privacy = experiment.federation.privacy
    if privacy is None or privacy.of != "examples" or (z := privacy.noise_multiplier) is None:
        return None
    method, settings = find_algorithm(experiment.algorithm.name), experiment.algorithm.settings

    def releases(examples: int, purpose: str) -> Mapping[Release, int]:
        return steps_of(method, settings, privacy, examples, z, personalizing=purpose != TRAIN)

    return cache(releases)


def steps_of(
    method: Algorithm,
    settings: Any,
    privacy: TrainingPrivacy,
    examples: int,
    noise_multiplier: float,
    *,
    personalizing: bool = False,
) -> Counter[Release]:
    """Return the releases of a client's noisy steps in one conversation.

    Several sums over the same mini-batch reveal as much as one with noise that is smaller by the root of their number.
    """
    releases: Counter[Release] = Counter()
    for steps in method.noisy_steps(settings, examples, personalizing=personalizing) if examples else ():
        z = noise_multiplier / math.sqrt(steps.uses)
        releases[sampled(privacy.sampling, examples, steps.batch_size, z)] += steps.count
    return releases


def is_simulation(experiment: Experiment, transport: Transport) -> bool:
    """Return whether noise comes from the experiment's seed: clients share a data set, or all are in this process."""
    return not isinstance(experiment.data, OwnData) or isinstance(transport, InProcess)


def private_sums_of(experiment: Experiment, *, simulated: bool) -> PrivateSums | None:
    """Return the draws and noise of private sums over clients, from the seed in a simulation; None without privacy."""
    federation, privacy = experiment.federation, experiment.federation.privacy
    if privacy is None or privacy.of != "clients" or federation.rounds == 0:
        return None
    _log.info(
        "noise on sums over clients, and the draw of cohorts, come from %s",
        "the experiment's seed, because this is a simulation, and protect nobody"
        if simulated
        else "the operating system, and cannot be repeated",
    )
    seed = experiment.seed if simulated else None
    return PrivateSums(privacy, federation.clients_per_round, seed, is_secure=federation.secure_aggregation is not None)


def check_private_buffers(experiment: Experiment, model: FlatModel) -> None:
    """Raise ExperimentError if a buffer that moves is part of a noisy sum: noise can make a variance negative."""
    privacy = experiment.federation.privacy
    if privacy is None or privacy.of != "clients" or model.layout.local_buffers or not model.layout.buffers:
        return
    raise ExperimentError(
        f"federation.privacy adds noise to what clients share, and the model shares {model.layout.buffers[0]}, a "
        "running statistic that noise can make negative.",
        key="model.buffers",
        found="shared",
        allowed=["local"],
        hint="set model.buffers to local, or normalize without running statistics (GroupNorm, LayerNorm)",
    )


def has_secret_noise(experiment: Experiment, run: Path) -> bool:
    """Return whether the noise of a run that is to be replayed was secret, or may have been."""
    if experiment.federation.privacy is None or not isinstance(experiment.data, OwnData):
        return False
    claim = (RunFolder(run).json_or_none("summary.json") or {}).get("training_privacy") or {}
    return bool(claim.get("noise", "secret") == "secret")


def with_multiplier(experiment: Experiment, noise_multiplier: float) -> Experiment:
    """Return a copy of an experiment with another noise multiplier."""
    federation = experiment.federation
    assert federation.privacy is not None
    privacy = federation.privacy.model_copy(update={"noise_multiplier": noise_multiplier})
    return experiment.model_copy(update={"federation": federation.model_copy(update={"privacy": privacy})})
