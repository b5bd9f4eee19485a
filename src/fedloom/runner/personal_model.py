"""A client's model as what people use: a module of torch, a file of weights, an exported program, ONNX."""

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

from fedloom.data.manifest import Kind, Normalization
from fedloom.data.problem import Problem
from fedloom.errors import DataError, ExperimentError
from fedloom.models.predictors import Predictor
from fedloom.storage.folder import write_atomically
from fedloom.words import printable

FORMATS = (".safetensors", ".pt2", ".onnx")
"""What a model can be saved as, by the end of the file's name."""

ONNX = "fedloom[onnx]"


@dataclass(frozen=True)
class Promise:
    """(ε, δ)-differential privacy of one answer, towards whoever reads it.

    Attributes
    ----------
    epsilon, delta
        How much. Each answer more costs as much again.
    mechanism
        By what: Gaussian noise on a mean over all of the client's training examples.
    neighbours
        Data between which nobody can tell: as many examples, one of them another.
    clip, noise_multiplier, examples
        C, z and n: the noise of each coordinate has deviation z·2C/n.
    requests, total_epsilon, total_delta
        How many requests the client's ledger counts, this one among them, their ε together, and the ledger's δ, at
        which that is; None without a ledger.
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
class Card:
    """What a model is, and of what.

    Attributes
    ----------
    run, round, digest
        The run, the durable round of it, and sha256 of that round's checkpoint.
    algorithm, predictor
        The method, and which of the predictors that it gives a client.
    model
        The network's name.
    client
        Whose it is.
    kind, input_shape, classes, normalization
        What goes in: pixels from 0 to 255, features or tokens as they are; and what comes out, in this order.
    precision
        How its numbers travelled: float32, or bfloat16, which rounds them.
    privacy
        What is promised of what the client said to get it; None: nothing.
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
    privacy: Promise | None = None


class PersonalModel(nn.Module):
    """A client's own model: raw inputs ``[b, *input_shape]``, a tensor or an array, in, probabilities ``[b, C]`` out.

    Its ``state_dict`` has the names of the network. Parameters have no gradient; ``requires_grad_()`` gives them one.

    Attributes
    ----------
    card
        What it is, and of what.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, predictor: Predictor, card: Card) -> None:
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
        """What the columns of the output are called."""
        return self.card.classes

    def forward(self, x: Any) -> Tensor:
        """Return probabilities of the classes, ``[b, *input_shape] -> [b, C]``; of a tensor, an array or a list.

        Raises
        ------
        DataError
            If pixels are no integers: floats of a transform such as ``ToTensor`` would be divided by 255 again.
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
        """Two inputs of the right shape and type, of zeros."""
        dtype = torch.float32 if self.card.kind == "features" else torch.uint8
        return torch.zeros(2, *self.card.input_shape, dtype=dtype)

    def save(self, path: str | Path) -> list[Path]:
        """Save it, and return the files written.

        Parameters
        ----------
        path
            ``NAME.safetensors``: the weights by name, and beside them ``NAME.md``, which says how they are used.
            ``NAME.pt2``: a program of ``torch.export``, for any number of inputs. ``NAME.onnx``: for other runtimes.
            None of them needs FedLoom.

        Raises
        ------
        ExperimentError
            If the name ends otherwise, or the model cannot be exported.
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
        """The weights as a safetensors file, whose metadata says what :class:`Card` does."""
        tensors = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        about = json.dumps({"version": 1, **asdict(self.card)}, sort_keys=True)
        return safetensors.torch.save(tensors, metadata={"fedloom": about})

    def exported(self) -> bytes:
        """The model as a program of ``torch.export``."""
        content = io.BytesIO()
        try:
            with warnings.catch_warnings():  # of kernels that are channels-last, which it takes for parts of others
                warnings.simplefilter("ignore")
                torch.export.save(self._program(), content)
        except Exception as error:
            raise _unexportable("torch.export", error, FORMATS[0]) from error
        return content.getvalue()

    def onnx(self) -> bytes:
        """The model for ONNX."""
        try:
            import onnx  # noqa: F401
            import onnxscript  # noqa: F401
        except ImportError as error:
            raise ExperimentError(
                f"ONNX: {error.name} is not installed; allowed: {', '.join(FORMATS[:2])}", hint=f"install {ONNX}"
            ) from error
        try:
            program = torch.onnx.export(self._program(), verbose=False)
            assert program is not None
            content: bytes = program.model_proto.SerializeToString()
        except Exception as error:
            raise _unexportable("ONNX", error, ", ".join(FORMATS[:2])) from error
        return content

    def _program(self) -> Any:
        return torch.export.export(self, (self.example,), dynamic_shapes=({0: torch.export.Dim("b", min=1)},))

    def _readme(self, name: str) -> str:
        """Five lines on how the weights are used."""
        c = self.card
        goes_in = {
            "pixels": "pixels 0 ... 255: x = (pixels / 255 - mean) / std, of each channel",
            "features": "features: x = (features - mean) / std",
            "tokens": "tokens, as they are",
        }[c.kind]
        return "\n".join(
            (
                f"Weights of a `{c.model}` for client {c.client}: run {c.run}, round {c.round} ({c.digest[:12]}), "
                f"{c.algorithm}, {c.precision}.",
                f'Read them: `weights = safetensors.torch.load_file("{name}")`, a `state_dict` of '
                f"{len(self.state_dict())} tensors, such as `{next(iter(self.state_dict()))}`.",
                f"In: [b, {', '.join(map(str, c.input_shape))}] of {goes_in}; mean {list(c.normalization.mean)}, std "
                f"{list(c.normalization.std)}.",
                f"Out: logits; their softmax are the probabilities of {', '.join(c.classes)}, in this order."
                if c.classes
                else "Out: what the network gives; the data have no classes.",
                "The file's metadata has all this as JSON, under `fedloom`. Saved as .pt2 or .onnx, a model brings its "
                "network along.",
                "",
            )
        )


def check_format(path: Path) -> None:
    """Refuse a name by whose end it is not known what to save.

    Raises
    ------
    ExperimentError
        If it has none of :data:`FORMATS`.
    """
    if path.suffix not in FORMATS:
        raise ExperimentError(f"the model's file: found {path}; allowed: a file that ends in {', '.join(FORMATS)}")


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
    return ExperimentError(f"{what}: this model cannot be exported ({type(error).__name__}: {said}); allowed: {others}")


def card_of(problem: Problem, **others: Any) -> Card:
    """Make a card of a run's problem, and the rest."""
    return Card(
        kind=problem.kind,
        input_shape=problem.input_shape,
        classes=problem.class_names,
        normalization=problem.normalization,
        **others,
    )
