"""Problem of a run: the data description that a client needs before it requests a model.

It comes from a server and is untrusted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import TypeAdapter, ValidationError

from fedloom.data.input_spec import ChannelAxis, InputSpec, Kind, Normalization, inputs_fault
from fedloom.data.manifest import targets_fault, text_fault
from fedloom.data.targets import Targets
from fedloom.errors import DataError

LONGEST = 16 * 2**20
"""Maximum characters of a problem."""


@dataclass(frozen=True)
class Problem:
    """Data and clients of a run.

    Attributes
    ----------
    dataset, kind, input_shape, class_names, normalization, channel_axis, high, tokenizer, inputs, targets
        As in :class:`~fedloom.data.manifest.Manifest`.
    clients
        Number of the run's own clients.
    constants
        Digests of the tensors of the model that are not sent, by name.
    """

    dataset: str
    kind: Kind
    input_shape: tuple[int, ...]
    class_names: tuple[str, ...]
    normalization: Normalization
    clients: int
    constants: dict[str, str] = field(default_factory=dict)
    channel_axis: ChannelAxis = "first"
    high: int | None = None
    tokenizer: str | None = None
    inputs: Mapping[str, InputSpec] | None = None
    targets: Targets | None = None

    @classmethod
    def from_json(cls, text: str) -> Problem:
        """Parse a problem; raise DataError if the text is too long, not JSON, nested too deeply, or inconsistent."""
        if len(text) > LONGEST:
            raise DataError(f"the server's problem description has {len(text):,} characters; the limit is {LONGEST:,}")
        try:
            problem = _PROBLEM.validate_json(text)  # rejects deep nesting itself
        except ValidationError as error:
            raise DataError(f"the server's problem description is damaged: {text_fault(error)}") from None
        fault = inputs_fault(problem) or targets_fault(problem.targets, 0, problem.class_names)
        if problem.clients < 0:
            fault = f"clients is {problem.clients}; it must be 0 or more"
        if fault is not None:
            raise DataError(f"the server's problem description is damaged: {fault}")
        return problem


_PROBLEM = TypeAdapter(Problem)
