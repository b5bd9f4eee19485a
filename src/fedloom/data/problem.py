"""Problem of a run: the data description that a client needs before it requests a model.

It comes from a server and is untrusted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from fedloom.data.manifest import Kind, Normalization
from fedloom.errors import DataError

LONGEST = 16 * 2**20
"""Maximum characters of a problem."""


@dataclass(frozen=True)
class Problem:
    """Data and clients of a run.

    Attributes
    ----------
    dataset, kind, input_shape, class_names, normalization
        As in :class:`~fedloom.data.manifest.Manifest`.
    clients
        Number of the run's own clients.
    """

    dataset: str
    kind: Kind
    input_shape: tuple[int, ...]
    class_names: tuple[str, ...]
    normalization: Normalization
    clients: int

    @classmethod
    def from_json(cls, text: str) -> Problem:
        """Parse a problem.

        Raises
        ------
        DataError
            If the text is too long, not JSON, nested too deeply, or inconsistent.
        """
        if len(text) > LONGEST:
            raise DataError(
                f"the problem that the server tells has {len(text):,} characters; at most {LONGEST:,} are read"
            )
        try:
            problem = _PROBLEM.validate_json(text)  # rejects deep nesting itself
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"]) or "the whole text"
            raise DataError(f"the problem that the server tells is damaged: {key}: {first['msg']:.200}") from None
        fault = problem._contradiction()
        if fault is not None:
            raise DataError(f"the problem that the server tells is damaged: {fault}")
        return problem

    def _contradiction(self) -> str | None:
        if not self.input_shape or min(self.input_shape) < 1:
            return f"input_shape is {list(self.input_shape)}; each size must be at least 1"
        if self.clients < 0:
            return f"clients is {self.clients}; it must be 0 or more"
        numbers = 0 if self.kind == "tokens" else self.input_shape[0]
        mean, std = self.normalization.mean, self.normalization.std
        if not len(mean) == len(std) == numbers:
            return f"normalization has {len(mean)} means and {len(std)} deviations; the inputs need {numbers}"
        if not all(math.isfinite(value) for value in (*mean, *std)) or min(std, default=1.0) <= 0:
            return "normalization must have finite means and deviations above 0"
        return None


_PROBLEM = TypeAdapter(Problem)
