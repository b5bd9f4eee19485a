"""Personalized models as torch modules, safetensors files, exported programs and ONNX models."""

from __future__ import annotations

import io
import json
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from fedloom.core.words import printable
from fedloom.data.manifest import Kind, Normalization
from fedloom.data.problem import Problem
from fedloom.errors import DataError, ExperimentError
from fedloom.models.predictors import Predictor
from fedloom.storage.folder import write_atomically

FORMATS = (".safetensors", ".pt2", ".onnx")
"""Suffixes of the supported file formats."""

ONNX = "fedloom[onnx]"


@dataclass(frozen=True)
class PrivacyGuarantee:
    """(ε, δ)-differential privacy of one answer, towards anyone who reads it.

    Attributes
    ----------
    epsilon, delta
        Privacy parameters of this answer; each further answer costs as much again.
    mechanism
        Gaussian noise on a mean over all of the client's training examples.
    neighbours
        Neighbouring data sets: of equal size, differing in one example.
    clip, noise_multiplier, examples
        C, z and n: the noise of each coordinate has deviation z·2C/n.
    requests, total_epsilon, total_delta
        Number of requests in the client's ledger, including this one; their total ε; and the ledger's δ, at which that
        total holds. None without a ledger.
    """

    epsilon: float
    delta: float
    clip: float
    noise_multiplier: float
    examples: int
    mechanism: str = "gaussian"
    neighbours: str = "replace one"
    requests: int | None = None
    total_epsilon: float | None = None
    total_delta: float | None = None


@dataclass(frozen=True)
class ModelCard:
    """Description of a personalized model.

    Attributes
    ----------
    run, round, digest
        Run, its durable round, and sha256 of that round's checkpoint.
    algorithm, predictor
        Method, and which of its predictors this is.
    model
        Name of the network.
    client
        Id of the client.
    kind, input_shape, classes, normalization
        Inputs (pixels from 0 to 255, or unchanged features or tokens) and outputs, in the order of ``classes``.
    precision
        Precision of the transfer: float32, or bfloat16, which rounds.
    privacy
        Privacy guarantee of the client's answer; None: no guarantee.
    """

    run: str
    round: int
    digest: str
    algorithm: str
    predictor: str
    model: str
    client: str
    kind: Kind
    input_shape: tuple[int, ...]
    classes: tuple[str, ...]
    normalization: Normalization
    precision: str = "float32"
    privacy: PrivacyGuarantee | None = None


class PersonalModel(nn.Module):
    """Personalized model that maps raw inputs ``[b, *input_shape]``, a tensor or an array, to probabilities ``[b, C]``.

    Its ``state_dict`` uses the network's names. Parameters have ``requires_grad=False``; call ``requires_grad_()`` to
    train them.

    Attributes
    ----------
    card
        Description of the model.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, predictor: Predictor, card: ModelCard) -> None:
        super().__init__()
        self.card = card
        self._predict = predictor.predict
        for name, tensor in predictor.named().items():
            _put(self, name.split("."), tensor)
        axes = (1, -1, *[1] * (len(card.input_shape) - 1))
        for key in ("mean", "std"):
            numbers = torch.tensor(getattr(card.normalization, key), dtype=torch.float32)
            self.register_buffer(key, numbers.reshape(axes) if len(numbers) else numbers, persistent=False)
        self.eval()

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names, in the order of the output's columns."""
        return self.card.classes

    def forward(self, x: Any) -> Tensor:
        """Return class probabilities, ``[b, *input_shape] -> [b, C]``, of a tensor, an array or a list.

        Raises
        ------
        DataError
            If pixels are not integers: floats from a transform such as ``ToTensor`` would be divided by 255 again.
        """
        if not isinstance(x, Tensor):
            x = torch.as_tensor(x, device=self.mean.device)
        if self.card.kind == "pixels":
            if x.dtype.is_floating_point or x.dtype.is_complex or x.dtype == torch.bool:
                raise DataError(
                    f"x: pixels are of type {x.dtype}; give whole numbers from 0 to 255, such as torch.uint8"
                )
            x = (x.float() / 255 - self.mean) / self.std
        elif self.card.kind == "features":
            x = (x.float() - self.mean) / self.std
        named = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        return self._predict(named, x).exp()

    @property
    def example(self) -> Tensor:
        """Batch of two zero inputs of the right shape and type."""
        dtype = torch.float32 if self.card.kind == "features" else torch.uint8
        return torch.zeros(2, *self.card.input_shape, dtype=dtype)

    def save(self, path: str | Path) -> list[Path]:
        """Save the model and return the files written.

        Parameters
        ----------
        path
            ``NAME.safetensors``: the weights by name, with instructions for their use in ``NAME.md``. ``NAME.pt2``: a
            ``torch.export`` program, for any batch size. ``NAME.onnx``: for other runtimes. None of them needs FedLoom.

        Raises
        ------
        ExperimentError
            If the suffix is not one of these, or the model cannot be exported.
        StorageError
            If the file cannot be written.
        """
        path = Path(path)
        check_format(path)
        if path.suffix == ".safetensors":
            write_atomically(path, self.weights())
            write_atomically(path.with_suffix(".md"), self._readme(path.name).encode())
            return [path, path.with_suffix(".md")]
        write_atomically(path, self.exported() if path.suffix == ".pt2" else self.onnx())
        return [path]

    def weights(self) -> bytes:
        """Return the weights as a safetensors file with the :class:`ModelCard` in its metadata."""
        tensors = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        about = json.dumps({"version": 1, **asdict(self.card)}, sort_keys=True)
        return safetensors.torch.save(tensors, metadata={"fedloom": about})

    def exported(self) -> bytes:
        """Return the model as a program of ``torch.export``."""
        content = io.BytesIO()
        try:
            with warnings.catch_warnings():  # it errors channels-last kernels for views
                warnings.simplefilter("ignore")
                torch.export.save(self._program(), content)
        except Exception as error:
            raise _unexportable("torch.export", error, FORMATS[0]) from error
        return content.getvalue()

    def onnx(self) -> bytes:
        """Return the model in the ONNX format."""
        try:
            import onnx  # noqa: F401
            import onnxscript  # noqa: F401
        except ImportError as error:
            raise ExperimentError(
                f"ONNX needs {error.name}, which is not installed.",
                hint=f"install {ONNX}, or save as .safetensors or .pt2",
            ) from error
        try:
            program = torch.onnx.export(self._program(), verbose=False)
            assert program is not None
            content: bytes = program.model_proto.SerializeToString()
        except Exception as error:
            raise _unexportable("ONNX", error, ", ".join(FORMATS[:2])) from error
        return content

    def _program(self) -> Any:
        with torch.no_grad():
            self(self.example)  # a module copies its constants at its first call, which must not be traced
        return torch.export.export(self, (self.example,), dynamic_shapes=({0: torch.export.Dim("b", min=1)},))

    def _readme(self, name: str) -> str:
        """Return a short text on how to use the weights."""
        c = self.card
        goes_in = {
            "pixels": "pixels 0 ... 255: x = (pixels / 255 - mean) / std, of each channel",
            "features": "features: x = (features - mean) / std",
            "tokens": "tokens, unchanged",
        }[c.kind]
        return "\n".join(
            (
                f"Weights of a `{c.model}` for client {c.client}: run {c.run}, round {c.round} ({c.digest[:12]}), "
                f"{c.algorithm}, {c.precision}.",
                f'Read them: `weights = safetensors.torch.load_file("{name}")`, a `state_dict` of '
                f"{len(self.state_dict())} tensors, such as `{next(iter(self.state_dict()))}`.",
                f"Input: [b, {', '.join(map(str, c.input_shape))}] of {goes_in}; mean {list(c.normalization.mean)}, "
                "std "
                f"{list(c.normalization.std)}.",
                f"Output: logits; their softmax gives the probabilities of {', '.join(c.classes)}, in this order."
                if c.classes
                else "Output: the network's raw output; the data have no classes.",
                "The file's metadata has all this as JSON, under `fedloom`. Saved as .pt2 or .onnx, a model includes "
                "its network.",
                "",
            )
        )


def check_format(path: Path) -> None:
    """Raise if the suffix is not a supported format.

    Raises
    ------
    ExperimentError
        If the suffix is none of :data:`FORMATS`.
    """
    if path.suffix not in FORMATS:
        raise ExperimentError(
            f"The model's file must end in {', '.join(FORMATS)} (got {path}).", key="out", found=path, allowed=FORMATS
        )


def _put(module: nn.Module, path: list[str], tensor: Tensor) -> None:
    *parents, name = path
    for parent in parents:
        if not hasattr(module, parent):
            module.add_module(parent, nn.Module())
        module = getattr(module, parent)
    if tensor.is_floating_point():
        module.register_parameter(name, nn.Parameter(tensor.detach(), requires_grad=False))
    else:
        module.register_buffer(name, tensor)


def _unexportable(what: str, error: Exception, others: str) -> ExperimentError:
    said = printable((str(error).splitlines() or [""])[0], 200)
    return ExperimentError(
        f"This model cannot be exported by {what} ({type(error).__name__}: {said}); save it as {others}."
    )


def card_of(problem: Problem, **others: Any) -> ModelCard:
    """Return the card of a model, with the input and output description from the run's problem."""
    return ModelCard(
        kind=problem.kind,
        input_shape=problem.input_shape,
        classes=problem.class_names,
        normalization=problem.normalization,
        **others,
    )
