"""Base class of all settings: the keys that an experiment file may set for one part."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Frozen settings that reject unknown keys, values of the wrong type, and numbers that are not finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
