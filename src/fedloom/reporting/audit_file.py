"""Schema of ``audit.json`` for reports."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0, le=1)]
Epsilon = Annotated[float, Field(ge=0, lt=1e15)]
Positive = Annotated[int, Field(ge=1, lt=2**63)]
Whole = Annotated[int, Field(ge=0, lt=2**63)]
Decibel = Annotated[float, Field(gt=-1e6, lt=1e6)]
Level = Annotated[int, Field(ge=0, le=255)]
Picture = Annotated[list[list[Level | list[Level]]], Field(min_length=1)]


class _Checked(BaseModel):
    """Object in the file; additional keys are allowed."""

    model_config = ConfigDict(strict=True)


class _Exposed(_Checked):
    mean: Fraction
    highest: Fraction
    client: str


class _Attack(_Checked):
    clients: Positive
    members: Positive
    others: Positive
    auc: Fraction
    auc_clients: _Exposed
    tpr_at_low_fpr: Fraction
    epsilon: Epsilon | None
    curve: Annotated[list[Annotated[list[Fraction], Field(min_length=2, max_length=2)]], Field(min_length=2)]


class _Attacks(_Checked):
    seen: _Attack | None
    unseen: _Attack | None


class _Membership(_Checked):
    round: Whole
    delta: Fraction
    confidence: Fraction
    predictors: dict[str, _Attacks]


class _Canaries(_Checked):
    of: Literal["clients", "examples"]
    canaries: Positive
    epsilon: Epsilon | None
    guesses_in: Whole
    guesses_out: Whole
    right: Whole
    largest_bound: Epsilon | None
    delta: Fraction
    confidence: Fraction


class _Case(_Checked):
    update: str
    clients: Positive
    examples: Positive
    attack: str
    psnr_best: Decibel
    psnr_mean: Decibel
    psnr_of_mean_input: Decibel
    original: Picture | None = None
    reconstruction: Picture | None = None


class _Inversion(_Checked):
    client: str
    secure_aggregation: bool
    noisy_steps: bool = False
    cases: Annotated[list[_Case], Field(min_length=1)]


class _Claim(_Checked):
    of: Literal["clients", "examples"]
    epsilon: Epsilon
    delta: Fraction


class AuditFile(_Checked):
    """The file: each attack that was made, and the run's claim."""

    claim: _Claim | None
    membership: _Membership | None = None
    canaries: _Canaries | None = None
    inversion: _Inversion | None = None
