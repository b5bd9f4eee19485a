"""Schema of the privacy of training in a run's summary, for reports."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[float, Field(gt=-1e15, lt=1e15)]


class Guarantee(BaseModel):
    """Guarantee toward one kind of observer."""

    model_config = ConfigDict(strict=True)

    epsilon: Number | None
    because: str | None = None


class ClaimFile(BaseModel):
    """Claim of the privacy of training in ``summary.json``; additional keys are allowed."""

    model_config = ConfigDict(strict=True)

    unit: str
    neighbouring: str
    mechanism: str
    clip: Number
    noise_multiplier: Number
    sampling: list[str]
    sums: Count
    delta: Number
    epsilon: Number | None
    to_readers: Guarantee
    to_aggregator: Guarantee
    covers: list[str]
    noise: str
    statement: list[str]
