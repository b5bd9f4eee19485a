"""Personalized models as torch modules, safetensors files, exported programs and ONNX models."""

from __future__ import annotations

import copy
import io
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from fedloom.core.files import storing, write_atomically
from fedloom.core.home import expanded
from fedloom.core.words import printable
from fedloom.data.problem import Problem, TrainedPrivately
from fedloom.data.spec import DTYPES, DataSpec, InputSpec
from fedloom.errors import DataError, ExperimentError
from fedloom.models.adapters import BESIDE, adapter_files
from fedloom.models.predictors import ModelPredictor, Predictor
from fedloom.privacy.spent import PrivacyGuarantee

FORMATS = (".safetensors", ".pt2", ".onnx", ".peft")
"""Suffixes of the supported formats: files, and the folder of an adapter."""

CARD = "fedloom.json"
"""File of the model's card in the folder of an adapter, and inside a program of ``torch.export``."""

ONNX = "fedloom[onnx]"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class ModelCard:
    """Description of a personalized model.

    Attributes
    ----------
    run, round, digest
        Run, its round, and sha256 of that round's checkpoint; empty if it is not known, as in a worker.
    algorithm, predictor
        Method, and which of its predictors this is.
    model
        Name of the network.
    client
        Id of the client.
    spec
        Inputs (pixels from 0 to 255, or unchanged features, tokens or integers) and outputs, in the order of
        ``class_names``.
    privacy
        Privacy guarantee of the client's answer; None: no guarantee.
    training_privacy
        Privacy guarantee of the run's training, for its own clients; None: none, or not known yet.
    standardizes
        True if the model standardizes integers like features.
    """

    run: str
    round: int
    digest: str
    algorithm: str
    predictor: str
    model: str
    client: str
    spec: DataSpec
    privacy: PrivacyGuarantee | None = None
    standardizes: bool = False
    training_privacy: TrainedPrivately | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self)


class PersonalModel(nn.Module):
    """Personalized model that maps raw inputs to probabilities, or to numbers in the units of the targets.

    Inputs are a tensor or an array ``[b, *input_shape]``, or a dict of them by name. The outputs are probabilities
    ``[b, C]`` of classes, ``[b, K]`` of labels, ``[b, C, height, width]`` of a pixel's classes or ``[b, length, K]`` of
    next tokens; or numbers ``[b, K]``.

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
        self._renamed: dict[str, str] = {}
        self._network = predictor.model if type(predictor) is ModelPredictor else None
        for name, tensor in predictor.named().items():
            _put(self, name.split("."), tensor)
        for name, spec in card.spec.inputs.items():
            for key in ("mean", "std"):
                numbers = torch.tensor(getattr(spec.normalization, key), dtype=torch.float32)
                shaped = numbers.reshape(spec.broadcast) if len(numbers) else numbers
                self.register_buffer(f"{key}_{name}" if name else key, shaped, persistent=False)
        if card.spec.targets is not None and card.spec.targets.numbers:
            for key in ("mean", "std"):
                numbers = torch.tensor(getattr(card.spec.targets, key), dtype=torch.float32)
                self.register_buffer(f"target_{key}", numbers, persistent=False)
        self.eval()

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names, in the order of the output's columns."""
        return self.card.spec.class_names

    def forward(self, x: Any) -> Tensor:
        """Return probabilities, or numbers, for a tensor, array or list of inputs, or for a dict of named ones.

        Raises
        ------
        DataError
            If pixels are not integers: floats from a transform such as ``ToTensor`` would be divided by 255 again; or
            if the inputs have other names.
        """
        specs = self.card.spec.inputs
        if "" in specs:
            inputs: Any = self._normalized(x, "", specs[""])
        else:
            if not isinstance(x, Mapping) or set(x) != set(specs):
                found = ", ".join(map(str, x)) if isinstance(x, Mapping) else type(x).__name__
                raise DataError(f"x must be a dict of {', '.join(specs)} (got {found})", key="x")
            inputs = {name: self._normalized(x[name], name, spec) for name, spec in specs.items()}
        tensors = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        if self._renamed:
            tensors = {self._name(name): tensor for name, tensor in tensors.items()}
        return self._finished(self._predict(tensors, inputs))

    def _name(self, exported: str) -> str:
        first, *rest = exported.split(".")
        return ".".join((self._renamed.get(first, first), *rest))

    def _normalized(self, x: Any, name: str, spec: InputSpec) -> Tensor:
        """Return an input tensor as the network takes it."""
        mean, std = (getattr(self, f"{key}_{name}" if name else key) for key in ("mean", "std"))
        tensor = x if isinstance(x, Tensor) else torch.as_tensor(x, device=mean.device)
        if spec.kind == "pixels":
            if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
                raise DataError(
                    f"{name or 'x'}: pixels are of type {tensor.dtype}; give whole numbers from 0 to 255, such as "
                    "torch.uint8"
                )
            tensor = tensor.float() / 255
        elif spec.kind == "tokens" or (spec.kind == "integers" and not self.card.standardizes):
            return tensor
        standardized: Tensor = (tensor.float() - mean) / std
        return standardized

    def _finished(self, predictions: Tensor) -> Tensor:
        """Return probabilities, or numbers in their own units, given predictions in the form of the task."""
        targets = self.card.spec.targets
        if targets is None or targets.kind.like is not None:
            return predictions.exp()
        if targets.kind.is_binary:
            return predictions.sigmoid()
        mean, std = self.get_buffer("target_mean"), self.get_buffer("target_std")
        return predictions * std + mean

    @property
    def example(self) -> Any:
        """Batch of two examples of zeros, with the shapes and types of the inputs."""
        zeros = {
            name: torch.from_numpy(np.zeros((2, *spec.shape), dtype=DTYPES[spec.kind]))
            for name, spec in self.card.spec.inputs.items()
        }
        return zeros.get("", zeros)

    def save(self, path: str | Path) -> list[Path]:
        """Save the model and return the files written.

        Parameters
        ----------
        path
            ``NAME.safetensors``: the weights by name, with instructions for their use in ``NAME.md``. ``NAME.pt2``: a
            ``torch.export`` program, for any batch size. ``NAME.onnx``: for other runtimes. ``NAME.peft``: a folder
            that ``PeftModel.from_pretrained`` opens, of a model with adapters. None of them needs FedLoom.

        Raises
        ------
        ExperimentError
            If the suffix is not one of these, or the model cannot be exported, or has no adapters of ``peft``.
        StorageError
            If the file cannot be written.
        """
        path = expanded(path)
        check_format(path)
        if path.suffix == ".peft":
            files = self.peft_files()
            with storing(path):
                path.mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                write_atomically(path / name, content)
            if BESIDE not in files:
                (path / BESIDE).unlink(missing_ok=True)  # left by an earlier model
            return [path / name for name in files]
        if path.suffix == ".safetensors":
            write_atomically(path, self.weights())
            write_atomically(path.with_suffix(".md"), self._readme(path.name).encode())
            return [path, path.with_suffix(".md")]
        write_atomically(path, self.exported() if path.suffix == ".pt2" else self.onnx())
        return [path]

    def weights(self) -> bytes:
        """Return the weights as a safetensors file with the :class:`ModelCard` in its metadata."""
        tensors = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        metadata = json.dumps({"version": 1, **self.card.as_json()}, sort_keys=True)
        return safetensors.torch.save(tensors, metadata={"fedloom": metadata})

    def peft_files(self) -> dict[str, bytes]:
        """Return the files of a folder that ``PeftModel.from_pretrained(base, folder)`` opens, by name.

        Raises
        ------
        ExperimentError
            If the model has no adapters of ``peft``.
        """
        files = adapter_files(self._network, self.state_dict(keep_vars=True))
        card = json.dumps({"version": 1, **self.card.as_json()}, sort_keys=True, indent=1)
        return {**files, CARD: f"{card}\n".encode(), "README.md": self._adapter_readme(BESIDE in files).encode()}

    def exported(self) -> bytes:
        """Return the model as a program of ``torch.export``, with the :class:`ModelCard` as an extra file."""
        content = io.BytesIO()
        card = json.dumps({"version": 1, **self.card.as_json()}, sort_keys=True)
        try:
            with warnings.catch_warnings():  # it takes channels-last kernels for views, and warns
                warnings.simplefilter("ignore")
                torch.export.save(self._program(), content, extra_files={CARD: card})
                content.seek(0)
                torch.export.load(content).module()(self.example)  # a program may be saved that cannot be loaded
        except Exception as error:
            raise _unexportable("torch.export", error, FORMATS[0]) from error
        return content.getvalue()

    def onnx(self) -> bytes:
        """Return the model in the ONNX format; inputs are named as in the data, or ``x``, and the output ``output``."""
        try:
            import onnx  # noqa: F401
            import onnxscript  # noqa: F401
        except ImportError as error:
            raise ExperimentError(
                f"ONNX needs {error.name}, which is not installed.",
                hint=f"install {ONNX}, or save as .safetensors or .pt2",
            ) from error
        try:
            names = [name or "x" for name in self.card.spec.inputs]
            program = torch.onnx.export(self._program(), input_names=names, output_names=["output"], verbose=False)
            assert program is not None
            content: bytes = program.model_proto.SerializeToString()
        except Exception as error:
            raise _unexportable("ONNX", error, ", ".join(FORMATS[:2])) from error
        return content

    def _program(self) -> Any:
        """Return the exported program; layers named like attributes of its class, such as ``code``, get a ``_``."""
        view, program = copy.copy(self), torch.fx.GraphModule(nn.Module(), torch.fx.Graph())
        for kind in ("_modules", "_parameters", "_buffers"):
            renames = {name: f"{name}_" for name in vars(self)[kind] if hasattr(program, name)}
            vars(view)[kind] = {renames.get(name, name): value for name, value in vars(self)[kind].items()}
            view._renamed = view._renamed | {new: name for name, new in renames.items()}
        with torch.no_grad():
            view(self.example)  # a module copies its constants at its first call, which must not be traced
        batch = {0: torch.export.Dim("b", min=1)}
        shapes = dict.fromkeys(self.card.spec.inputs, batch)
        return torch.export.export(view, (self.example,), dynamic_shapes=(shapes.get("", shapes),))

    def _readme(self, name: str) -> str:
        """Return a short text on how to use the weights."""
        c = self.card
        return "\n".join(
            (
                f"Weights of a `{c.model}` for client {c.client}: {self._origin()}.",
                f'Load them with `weights = safetensors.torch.load_file("{name}")`: a `state_dict` of '
                f"{len(self.state_dict())} tensors, such as `{next(iter(self.state_dict()))}`.",
                *self._tied(),
                *self._usage(),
                "The key `fedloom` of the file's metadata has the same information as JSON. The formats .pt2 and .onnx "
                "include the network.",
                "",
            )
        )

    def _tied(self) -> list[str]:
        """Return a sentence on tensors that are saved once and have several names in the network."""
        tied = {} if self._network is None else self._network.tied
        if not tied:
            return []
        lines = "; ".join(f'`weights["{name}"] = weights["{first}"]`' for name, first in tied.items())
        return [f"Tensors with several names are in the file once. Before `load_state_dict`, set {lines}."]

    def _adapter_readme(self, beside: bool) -> str:
        """Return a short text on how to use the adapter."""
        other = (
            f"`{BESIDE}` has the other trained tensors, by their names in the whole module. Load them with "
            f'`module.load_state_dict(safetensors.torch.load_file("FOLDER/{BESIDE}"), strict=False)`.'
        )
        return "\n".join(
            (
                f"Adapter for client {self.card.client}: {self._origin()}.",
                "Load it with `PeftModel.from_pretrained(base, FOLDER).eval()`; `base` comes from the run's factory.",
                *([other] if beside else []),
                *self._usage(),
                f"`{CARD}` has the same information as JSON.",
                "",
            )
        )

    def _origin(self) -> str:
        c = self.card
        checkpoint = f" ({c.digest[:12]})" if c.digest else ""
        return f"run {c.run}, round {c.round}{checkpoint}, {c.algorithm}"

    def _usage(self) -> list[str]:
        """Return sentences on inputs, outputs and the privacy of training."""
        c = self.card
        goes_in = {
            "pixels": "pixels 0 ... 255: x = (pixels / 255 - mean) / std, of each channel",
            "features": "features: x = (features - mean) / std",
            "tokens": "tokens, unchanged",
            "integers": "integers: x = (integers - mean) / std" if c.standardizes else "integers, unchanged",
        }
        inputs = [
            f"Input{f' `{name}`' if name else ''}: [b, {', '.join(map(str, spec.shape))}] of {goes_in[spec.kind]}; "
            f"mean {list(spec.normalization.mean)}, std {list(spec.normalization.std)}."
            for name, spec in c.spec.inputs.items()
        ]
        private = [] if c.training_privacy is None else [f"Trained {c.training_privacy}."]
        return [*inputs, _output(c), *private]


def _output(card: ModelCard) -> str:
    """Return a sentence on the outputs of a network."""
    targets, classes = card.spec.targets, ", ".join(card.spec.class_names)
    if classes:
        return f"Output: logits; their softmax gives the probabilities of {classes}, in this order."
    if targets is None:
        return "Output: the network's raw output; the data have no classes."
    names = f" ({', '.join(targets.names)}, in this order)" if targets.names else ""
    if targets.kind.is_number:
        units = f"output * std + mean, mean {list(targets.mean)}, std {list(targets.std)}"
        return f"Output: standardized numbers{names}; in the targets' own units: {units}."
    subject, function = targets.kind.outputs, "sigmoid" if targets.kind.is_binary else "softmax"
    return f"Output: logits of {targets.outputs} {subject}{names}; their {function} gives the probabilities."


def check_format(path: Path) -> None:
    """Raise ExperimentError unless the suffix is one of :data:`FORMATS`."""
    if path.suffix not in FORMATS:
        raise ExperimentError(
            f"The model's file must end in {', '.join(FORMATS)} (got {path}).", key="out", found=path, allowed=FORMATS
        )


def _put(module: nn.Module, path: list[str], tensor: Tensor) -> None:
    """Set a tensor of a module by its path, whose parts may be names of methods, such as ``adapter`` or ``save``."""
    *parents, name = path
    for parent in parents:
        child = module._modules.get(parent)
        if child is None:
            child = module._modules[parent] = nn.Module()
        module = child
    if tensor.is_floating_point():
        module._parameters[name] = nn.Parameter(tensor.detach(), requires_grad=False)
    else:
        module._buffers[name] = tensor


def _unexportable(what: str, error: Exception, others: str) -> ExperimentError:
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    text = _COLOURS.sub("", str(cause)).strip()
    reason = printable(text.splitlines()[0] if text else "", 200)
    return ExperimentError(
        f"This model cannot be exported by {what} ({type(cause).__name__}: {reason}); save it as {others}."
    )


def card_of(problem: Problem, **others: Any) -> ModelCard:
    """Return the card of a model, with the input and output description from the run's problem."""
    return ModelCard(
        spec=problem.spec,
        training_privacy=problem.training_privacy,
        **others,
    )
