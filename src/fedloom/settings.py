"""The base of all settings: what an experiment file may say about one part."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Frozen; an unknown key, or a value that is of the wrong type or not finite, is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
