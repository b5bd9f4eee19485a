"""Settings that protect clients in training: secure aggregation and differential privacy."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from fedloom.core.settings import Settings
from fedloom.privacy.gaussian_mechanism import MAX_DELTA

SMALLEST_SUM = 3
"""Smallest number of clients whose sum is revealed: from a sum of two, each learns the other's value."""


def least_survivors(members: int) -> int:
    """Return the smallest number of survivors of a sum: two thirds of the members, rounded up, and at least 3."""
    return max(SMALLEST_SUM, -(-2 * members // 3))


class SecureAggregation(Settings):
    """Keys of ``federation.secure_aggregation``: the aggregator learns sums over a cohort, and no client's own answer.

    K. Bonawitz et al., Practical secure aggregation for privacy-preserving machine learning, CCS 2017; J. H. Bell et
    al., Secure single-server aggregation with (poly)logarithmic overhead, CCS 2020.
    """

    range: float = Field(
        default=16.0,
        gt=0,
        description="Largest magnitude of a coordinate of an update; a client with a larger one is lost for the "
        "round. Coordinates are rounded to multiples of a step that grows with it.",
    )
    bits: Literal[32, 64] = Field(
        default=32,
        description="Bits of a coordinate of an update on the wire: 32 adds few bytes to float32, 64 rounds less.",
    )
    neighbours: int | None = Field(
        default=None,
        ge=2,
        multiple_of=2,
        description="Number of other clients with which each client shares masks; null: by the size of the cohort.",
    )
    threshold: int | None = Field(
        default=None,
        ge=2,
        description="Neighbours of a client that must answer until the end: more than half; null: two thirds.",
    )
    examples: int | None = Field(
        default=None,
        ge=1,
        description="Bound on the training examples of a client, where answers are weighted by them: a client with "
        "more is lost. Steps of the sum grow with it. Null: the largest client of the cohort in a partition, whose "
        "sizes all sides know; with data.own, an error unless weights are uniform.",
    )
    signatures: Literal["none", "keys", "certificates"] | None = Field(
        default=None,
        description="Signatures with which clients verify each other's keys: with keys from a register, "
        "or with their certificates (docs/security.md); none: they trust the aggregator. Null: none; with data.own, an "
        "error.",
    )

    @property
    def signature_bytes(self) -> int:
        """Length of a signature."""
        return {"keys": 64, "certificates": 2048}.get(self.signatures or "none", 1)

    @model_validator(mode="after")
    def _more_than_half(self) -> Self:
        if self.threshold is None:
            return self
        if self.neighbours is None:
            raise ValueError(f"threshold: set neighbours, too (got {self.threshold}, with neighbours null)")
        if not self.neighbours / 2 < self.threshold <= self.neighbours:
            raise ValueError(
                f"threshold: must be more than half of the neighbours, {self.neighbours}, and at most all (got "
                f"{self.threshold})"
            )
        return self


class AdaptiveClip(Settings):
    """Keys of ``federation.privacy.adaptive_clip``: the clipping norm follows a quantile of the updates' norms.

    G. Andrew, O. Thakkar, H. B. McMahan, S. Ramaswamy, Differentially private learning with adaptive clipping, NeurIPS
    2021, arXiv 1905.03871.
    """

    quantile: float = Field(default=0.5, gt=0, lt=1, description="Fraction γ of the updates that is not clipped.")
    lr: float = Field(default=0.2, gt=0, description="Learning rate η_C of the logarithm of the clipping norm.")
    count_noise: float | None = Field(
        default=None,
        gt=0,
        description="Standard deviation σ_b of the noise on the number of updates that are not clipped; null: a "
        "twentieth of clients_per_round.",
    )


class TrainingPrivacy(Settings):
    """Keys of ``federation.privacy``: differential privacy of training, of clients or of their examples."""

    of: Literal["clients", "examples"] = Field(
        default="clients",
        description="Protected unit: a client with all its data, or one training example of a client.",
    )
    clip: float = Field(gt=0, description="Clipping norm C: of a client's update, or of the gradient of an example.")
    noise_multiplier: float | None = Field(
        default=None,
        gt=0,
        description="Noise multiplier z: standard deviation z · C on each coordinate of a sum of clipped terms "
        "(at least one of noise_multiplier and epsilon).",
    )
    epsilon: float | None = Field(
        default=None,
        gt=0,
        description="ε of all rounds together toward readers of the models, from which the noise multiplier is found "
        "before the run. If noise_multiplier is set, too, as in a run's folder, the run is refused if its rounds cost "
        "more.",
    )
    delta: float = Field(gt=0, le=MAX_DELTA, description="δ of the (ε, δ) that is reported; below 1/n.")
    sampling: Literal["poisson", "fixed"] = Field(
        default="poisson",
        description="Sampling of a cohort, or of the examples of a mini-batch: poisson draws "
        "each independently, so that sizes vary; fixed draws a fixed number without replacement.",
    )
    noise: Literal["central", "distributed"] = Field(
        default="central",
        description="Place where noise is added to sums over clients: at the aggregator, which is then trusted, or in "
        "shares at the clients, under secure aggregation.",
    )
    adaptive_clip: AdaptiveClip | None = Field(
        default=None, description="Adapts the clipping norm of clients, which starts at clip; null: constant."
    )
    budget: float | None = Field(
        default=None, gt=0, description="Largest ε: training ends before the round that would exceed it; null: none."
    )

    @model_validator(mode="after")
    def _noise_or_epsilon(self) -> Self:
        if self.noise_multiplier is None and self.epsilon is None:
            raise ValueError("set noise_multiplier or epsilon")
        return self

    @model_validator(mode="after")
    def _examples_have_neither_shares_nor_quantiles(self) -> Self:
        if self.of == "examples" and self.noise == "distributed":
            raise ValueError("noise: distributed is for of: clients; clients add noise for their examples themselves")
        if self.of == "examples" and self.adaptive_clip is not None:
            raise ValueError("adaptive_clip: is for of: clients; set it to null")
        return self
