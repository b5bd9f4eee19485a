"""Schemas of ``audit.json``, and of the privacy of training in ``summary.json``, for reports."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[float, Field(gt=-1e15, lt=1e15)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Epsilon = Annotated[float, Field(ge=0, lt=1e15)]
Positive = Annotated[int, Field(ge=1, lt=2**63)]
Decibel = Annotated[float, Field(gt=-1e6, lt=1e6)]
Level = Annotated[int, Field(ge=0, le=255)]
Picture = Annotated[list[list[Level | list[Level]]], Field(min_length=1)]


class FileObject(BaseModel):
    """Object in a file of a run; additional keys are allowed."""

    model_config = ConfigDict(strict=True)


class _Exposed(FileObject):
    mean: Fraction
    highest: Fraction
    client: str


class _Attack(FileObject):
    clients: Positive
    members: Positive
    others: Positive
    auc: Fraction
    auc_clients: _Exposed
    tpr_at_low_fpr: Fraction
    epsilon: Epsilon | None
    curve: Annotated[list[Annotated[list[Fraction], Field(min_length=2, max_length=2)]], Field(min_length=2)]


class _Attacks(FileObject):
    seen: _Attack | None
    unseen: _Attack | None


class _Membership(FileObject):
    round: Count
    delta: Fraction
    confidence: Fraction
    predictors: dict[str, _Attacks]


class _Estimate(FileObject):
    epsilon: Epsilon | None
    interval: Annotated[list[Epsilon | None], Field(min_length=2, max_length=2)] | None = None
    noise: Number | None = None
    noise_interval: Annotated[list[Number | None], Field(min_length=2, max_length=2)] | None = None


class _Sampling(FileObject):
    p_value: Fraction
    draws: Count
    drawn: Count
    drawn_expected: Number
    repeats: Count
    repeats_expected: Number


class _Way(FileObject):
    canaries: Positive
    delta: Fraction


class _Power(FileObject):
    probability: Fraction
    noise: Number | None
    canaries: Positive | None
    refutable: Epsilon | None
    to_refute: list[_Way]


class _Canaries(FileObject):
    of: Literal["clients", "examples"]
    canaries: Positive
    epsilon: Epsilon | None
    guesses_in: Count
    guesses_out: Count
    right: Count
    largest_bound: Epsilon | None
    delta: Fraction
    confidence: Fraction
    score: Literal["direction", "gradient", "loss"]
    normal_estimate: _Estimate | None = None
    sampling: _Sampling | None = None
    power: _Power | None = None
    verdict: Literal["passed", "failed", "no power"] | None = None
    failed_by: list[Literal["guesses", "noise", "sampling"]] = []


class _Case(FileObject):
    update: str
    clients: Positive
    examples: Positive
    attack: str
    psnr_best: Decibel
    psnr_mean: Decibel
    psnr_of_mean_input: Decibel
    original: Picture | None = None
    reconstruction: Picture | None = None


class _Inversion(FileObject):
    client: str
    secure_aggregation: bool
    noisy_steps: bool = False
    cases: Annotated[list[_Case], Field(min_length=1)]


class _Claim(FileObject):
    of: Literal["clients", "examples"]
    epsilon: Epsilon
    delta: Fraction


class AuditFile(FileObject):
    """Content of ``audit.json``: each attack that was made, and the run's claim."""

    claim: _Claim | None
    membership: _Membership | None = None
    canaries: _Canaries | None = None
    inversion: _Inversion | None = None


class _Guarantee(FileObject):
    """Guarantee toward one kind of observer."""

    epsilon: Number | None
    because: str | None = None


class ClaimFile(FileObject):
    """Claim of the privacy of training in ``summary.json``."""

    unit: str
    neighbouring: str
    mechanism: str
    clip: Number
    noise_multiplier: Number
    sampling: list[str]
    sums: Count
    delta: Number
    epsilon: Number | None
    to_readers: _Guarantee
    to_members: _Guarantee | None = None  # of runs of this version or later
    to_aggregator: _Guarantee
    covers: list[str]
    noise: str
    statement: list[str]
