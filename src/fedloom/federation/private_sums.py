"""Aggregator's part of differential privacy of clients: the draw of cohorts, noise, and the clipping norm.

Noise and draws come from the operating system's generator, except in a simulation, where the seed determines them:
its results repeat, and its noise protects nobody.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.algorithms.sums import Summed, learned_fields
from fedloom.errors import ExperimentError
from fedloom.federation.randomness import generator
from fedloom.federation.transport import ConversationKey
from fedloom.messages import Message
from fedloom.privacy.accounting import Release, Sampling, sampled
from fedloom.privacy.adaptive_clip import default_count_noise, next_clip
from fedloom.privacy.clipped_sum import SLACK, ClippedSum, check_cohorts, clip_factor
from fedloom.privacy.gaussian_mechanism import on_grid
from fedloom.privacy.noise import NoiseSource
from fedloom.privacy.settings import TrainingPrivacy

Values: TypeAlias = Mapping[str, NDArray[np.float64]]
"""Values of summed fields by name, in the shapes of one row."""

BIT = "unclipped"
"""Name of the coordinate that adaptive clipping adds to an update."""


@dataclass(frozen=True)
class Draw:
    """Random choice of a cohort."""

    population: int
    """Number of clients to draw from."""
    expected: int
    """Expected size of the cohort."""
    sampling: Sampling


def everyone(population: int) -> Draw:
    """Return the draw that takes all clients."""
    return Draw(population, population, "all")


def noise_source(seed: int | bytes | None, *context: object) -> NoiseSource:
    """Return the source of noise for one purpose: of the system, of a secret, or of the seed of a simulation."""
    if seed is None:
        return NoiseSource.secret()
    parts = [str(part) for part in (seed.hex() if isinstance(seed, bytes) else seed, *context)]
    return NoiseSource.seeded("".join(f"{len(part)}:{part}" for part in parts).encode())


def clipping_rule(settings: TrainingPrivacy, clients_per_round: int, clip: float) -> ClippedSum:
    """Return the clipping and the noise of the sums of a run, at a clipping norm.

    Raise ValueError if the noise multiplier is not known yet.
    """
    if settings.noise_multiplier is None:
        raise ValueError("federation.privacy.noise_multiplier is found from epsilon before a run begins")
    count_noise = None
    if (adaptive := settings.adaptive_clip) is not None:
        noise = adaptive.count_noise
        count_noise = default_count_noise(clients_per_round) if noise is None else noise
    return ClippedSum(clip, settings.noise_multiplier, count_noise)


class PrivateSums:
    """Draws, noise and clipping norm of one run.

    Parameters
    ----------
    seed
        Seed of a simulation; None uses the operating system's generator.
    is_secure
        True under secure aggregation, which cannot sum very small cohorts.
    """

    def __init__(
        self, settings: TrainingPrivacy, clients_per_round: int, seed: int | None, *, is_secure: bool = False
    ) -> None:
        self.settings = settings
        self.seed = seed
        self._clients_per_round, self._is_secure = clients_per_round, is_secure
        self._clip = settings.clip

    @property
    def rule(self) -> ClippedSum:
        """Clipping and noise of the next sum."""
        return clipping_rule(self.settings, self._clients_per_round, self._clip)

    @property
    def is_poisson(self) -> bool:
        """True if clients are drawn independently, so that cohorts may be small, or empty."""
        return self.settings.sampling == "poisson"

    @property
    def state(self) -> dict[str, Tensor]:
        """Tensors that last between rounds: the clipping norm, if it adapts."""
        if self.settings.adaptive_clip is None:
            return {}
        return {"clip": torch.tensor([self._clip], dtype=torch.float64)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state; without one, from the start."""
        self._clip = float(state["clip"]) if "clip" in state else self.settings.clip

    def choice(self, population: int, expected: int, *, is_uniform: bool = True) -> Draw:
        """Return the draw of a cohort of this expected size.

        Raise ExperimentError if a method asks for a draw that is not uniform, or cohorts would often be too small for a
        secure sum.
        """
        if not is_uniform:
            raise ExperimentError(
                "the method draws some clients more often than others, which federation.privacy does not account for; "
                "leave it out, or choose another method",
                key="federation.privacy",
            )
        if expected >= population:
            return everyone(population)
        if self._is_secure and self.is_poisson:
            check_cohorts(population, expected, self.settings.delta)
        return Draw(population, expected, self.settings.sampling)

    def drawn(self, roster: Sequence[str], draw: Draw, purpose: str, round: int, attempt: int) -> set[str]:
        """Return the clients of a cohort; a fixed number of them is drawn in a simulation as without privacy."""
        if draw.sampling == "all":
            return set(roster)
        if draw.sampling == "fixed" and self.seed is not None:
            order = torch.randperm(len(roster), generator=generator(self.seed, purpose, round=round, attempt=attempt))
            return {roster[i] for i in order[: draw.expected].tolist()}
        uniform = noise_source(self.seed, "cohort", purpose, round, attempt).uniform(len(roster))
        if draw.sampling == "poisson":
            rows = np.flatnonzero(uniform <= draw.expected / draw.population)
        else:
            rows = np.argsort(uniform, kind="stable")[: draw.expected]
        return {roster[i] for i in rows.tolist()}

    def release(self, draw: Draw) -> Release:
        """Return the release of a sum over a cohort, for the accountant."""
        z = self.rule.noise_multiplier
        if draw.sampling == "all":
            return Release(1.0, z, draw.population, draw.population, "all")
        return sampled(draw.sampling, draw.population, draw.expected, z)

    def noisy(self, values: Values, deviation: float, key: ConversationKey, exchange: int) -> Values:
        """Return the sums of the learned fields with noise of this standard deviation on each coordinate."""
        source = noise_source(self.seed, "sum", key.round, key.attempt, key.conversation, exchange)
        noisy = {}
        for name, value in values.items():
            noise = source.gaussian(value.size, deviation).reshape(value.shape)
            noisy[name] = on_grid(torch.from_numpy(value + noise), deviation).numpy()
        return noisy

    def adapt(self, values: Values, expected: int) -> None:
        """Move the clipping norm by the noisy sum of the bits, if it adapts."""
        if (adaptive := self.settings.adaptive_clip) is not None:
            bits = float(values[BIT][0]) / self.rule.bit_weight
            self._clip = next_clip(self._clip, bits, expected, adaptive.quantile, adaptive.lr)


def changes_of(answer: Message, request: Message, fields: Mapping[str, Summed], *, exact: bool = True) -> Values:
    """Return the values to sum of a one-row answer: fields (if ``exact`` in float64), or changes from the request."""
    answer_tensors, request_tensors = answer.tensors(), request.tensors()
    values = {}
    for name, field in fields.items():
        value = answer_tensors[name][0]
        value = value.double() if exact or field.since is not None else value
        values[name] = (value if field.since is None else value - request_tensors[field.since].double()).numpy()
    return values


def noisy_names(answer: type[Message], fields: Mapping[str, Summed], rule: ClippedSum) -> tuple[str, ...]:
    """Return the names with noise in a sum, in order: the learned fields, and the bit of adaptive clipping."""
    return (*learned_fields(answer, fields), *(() if rule.count_noise is None else (BIT,)))


def norm_of(values: Values, names: tuple[str, ...]) -> float:
    """Return the ℓ2 norm of these fields together."""
    return math.hypot(*(float(np.linalg.norm(values[name].reshape(-1))) for name in names))


def clipped_values(values: Values, names: tuple[str, ...], rule: ClippedSum) -> Values:
    """Return the values with these fields clipped jointly; with adaptive clipping also the coordinate of the bit."""
    norm = norm_of(values, names)
    factor = clip_factor(norm, rule.clip)
    clipped = {name: value * factor if name in names else value for name, value in values.items()}
    return {**clipped, **bit_of(norm <= rule.clip, rule)}


def bit_of(is_below: bool, rule: ClippedSum) -> Values:
    """Return the coordinate that indicates whether an update was clipped, ``[1]``; empty with constant clipping."""
    return {} if rule.count_noise is None else {BIT: np.array([rule.bit_weight * (is_below - 0.5)])}


def clipped_answer(answer: Message, request: Message, fields: Mapping[str, Summed], rule: ClippedSum) -> Message:
    """Return a one-row answer with its learned fields clipped jointly; unchanged if their norm is at most C."""
    names = learned_fields(type(answer), fields)
    norm = norm_of(changes_of(answer, request, fields), names)
    if norm <= rule.clip:
        return answer
    factor, tensors = clip_factor(norm, rule.clip), answer.tensors()
    for name in names:
        since, value = fields[name].since, tensors[name]
        if since is None:
            tensors[name] = value * factor
        else:
            start = request.tensors()[since].double()
            tensors[name] = (start + (value.double() - start) * factor).to(value.dtype)
    return type(answer)(**tensors)


def slack_of(answer: Message, request: Message, fields: Mapping[str, Summed], rule: ClippedSum) -> float:
    """Return the error of a clipped answer's norm that rounding to the answer's floating-point type explains."""
    slack = SLACK * rule.clip
    for name in learned_fields(type(answer), fields):
        since = fields[name].since
        if since is not None:
            tensor = answer.tensors()[name]
            norm = torch.linalg.vector_norm(request.tensors()[since], dtype=torch.float64)
            slack += torch.finfo(tensor.dtype).eps * float(norm)
    return slack
