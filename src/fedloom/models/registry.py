"""Models that an experiment file can name."""

from __future__ import annotations

import functools
import operator
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple, TypeAlias

from pydantic import Field
from torch import nn

from fedloom.core.plugins import plugins
from fedloom.core.settings import Settings
from fedloom.errors import ExperimentError
from fedloom.models.adapters import LoRA, adapted
from fedloom.models.flat import FlatModel, bfloat16
from fedloom.models.library import TokenTransformer, resnet18, unet, vit
from fedloom.models.module import ModuleModel, factory_of
from fedloom.models.module_call import InputShape, shape_of
from fedloom.models.module_facts import check_codes
from fedloom.models.networks import LSTM, MLP, BatchNormConvNet, ConvNet, LeNet, Quadratic, ResNet20
from fedloom.tasks.base import PredictionTask
from fedloom.tasks.classification import CLASSIFICATION
from fedloom.tasks.names import TaskName

Kind: TypeAlias = Literal["pixels", "features", "tokens", "integers", "named"]
"""Kind of an input, as in ``fedloom.data.spec.Kind``; models do not import the data package."""

Width: TypeAlias = Annotated[int, Field(ge=1)]
Curvature: TypeAlias = Annotated[float, Field(gt=0)]


class ModelProblem(NamedTuple):
    """Inputs and outputs for which a model is made.

    Attributes
    ----------
    input_shape
        Shape of the input, ``[channels, height, width]``, ``[features]`` or ``[tokens]``; or the descriptions of named
        inputs, a single one under the empty name.
    outputs
        K: number of classes, or of the outputs of another task; 0 for data without classes.
    kind
        Kind of a single input; ``named`` if there are several.
    task, target_shape
        Task of the model, and the shape of one target.
    """

    input_shape: InputShape
    outputs: int
    kind: Kind = "pixels"
    task: PredictionTask = CLASSIFICATION
    target_shape: tuple[int, ...] = ()


class ModelChoice(Settings):
    """Keys of ``model`` for one network."""

    name: str
    precision: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description=(
            "bfloat16: convolutions and matrix products in bfloat16; parameters, losses, updates and messages stay "
            "float32. Faster on GPUs and on CPUs with AMX, slower on most other CPUs"
        ),
    )
    takes: ClassVar[tuple[Kind, ...]]
    """Kinds of input that the network accepts."""
    classifies: ClassVar[bool] = True
    """True if the network is for data with classes, False if for data without."""

    def build(
        self,
        input_shape: InputShape,
        outputs: int,
        kind: Kind = "pixels",
        task: PredictionTask = CLASSIFICATION,
        target_shape: tuple[int, ...] = (),
    ) -> FlatModel:
        """Make the model for a problem (:class:`ModelProblem`).

        Raise ExperimentError if this network does not accept such inputs, or has no outputs of the task's shape.
        """
        model = self.model_for(ModelProblem(input_shape, outputs, kind, task, target_shape))
        if self.precision == "float32":
            return model
        if not self.classifies or getattr(model, "steps", False):
            reason = "the module's training_step runs in float32" if self.classifies else f"{self.name} has no products"
            raise ExperimentError(
                f"model.precision: {reason}; set float32 (got bfloat16)", key="model.precision", found=self.precision
            )
        model = bfloat16(model)
        model.check_steps()
        return model

    def model_for(self, problem: ModelProblem) -> FlatModel:
        """Return the model in float32 for a problem that this network fits; see :meth:`build`."""
        shape, classes, kind, task, target_shape = problem
        if classes and task.output_shape(classes, target_shape) != (classes,):
            expected = list(task.output_shape(classes, target_shape))
            raise self.refused(
                f"{self.name} has one row of outputs, but {task.name} needs outputs {expected}; use module"
            )
        if isinstance(shape, Mapping):
            inputs = ", ".join(f"{name} ({spec.kind})".strip() for name, spec in shape.items())
            raise self.refused(
                f"{self.name} accepts one input of {' or '.join(self.takes)}, but the inputs are {inputs}; use module"
            )
        problems = []
        if kind not in self.takes:
            problems.append(f"{self.name} accepts {' and '.join(self.takes)}, but the inputs are {kind}")
        elif self.classifies != (classes > 0):
            problems.append(f"{self.name} does not fit data with {classes or 'no'} classes")
        else:
            try:
                model = self.make(shape, classes)
            except ValueError as error:
                problems.append(f"{self.name}: {error}")
        if problems:
            raise self.refused(f"{problems[0]}; choose from {_allowed(shape, classes, kind)}")
        model.task = task
        return model

    def make(self, input_shape: tuple[int, ...], classes: int) -> FlatModel:
        """Make the model for inputs of an accepted kind.

        Raise ValueError if an input is too small.
        """
        raise NotImplementedError

    def refused(self, reason: str) -> ExperimentError:
        """Return the error for data that this network does not fit."""
        return ExperimentError(f"model.name: {reason}", key="model.name", found=self.name)


def _allowed(input_shape: tuple[int, ...], classes: int, kind: Kind) -> str:
    """Return the names of the models that accept such inputs with default settings."""
    names = []
    for choice in MODELS:
        if kind in choice.takes and choice.classifies == (classes > 0):
            with suppress(ValueError, ExperimentError):
                choice.make(input_shape, classes)
                names.append(choice.name)
    return ", ".join(names)


class LeNetSettings(ModelChoice):
    """LeNet of papers/001, Table 3."""

    name: Literal["lenet"] = Field(
        default="lenet", description="LeNet of papers/001, Table 3, for images of at least 16x16"
    )
    takes = ("pixels",)

    def make(self, input_shape: tuple[int, ...], classes: int) -> FlatModel:
        """Make the model for images of at least 16x16."""
        return LeNet(input_shape, classes)


class ResNet20Settings(ModelChoice):
    """ResNet20 without batch normalization."""

    name: Literal["resnet20"] = Field(
        default="resnet20",
        description="ResNet20 without batch normalization (papers/001, A.3), for images of at least 4x4",
    )
    takes = ("pixels",)

    def make(self, input_shape: tuple[int, ...], classes: int) -> FlatModel:
        """Make the model for images of at least 4x4."""
        return ResNet20(input_shape, classes)


class CNNSettings(ModelChoice):
    """Four-layer CNN of papers/002."""

    name: Literal["cnn"] = Field(
        default="cnn", description="four 3x3 convolutions (papers/002, §5.2), for images of at least 16x16"
    )
    filters: int = Field(default=32, ge=1, description="channels of each convolution")
    takes = ("pixels",)

    def make(self, input_shape: tuple[int, ...], classes: int) -> FlatModel:
        """Make the model for images of at least 16x16."""
        return ConvNet(input_shape, [self.filters] * 4, [], classes)


class VGGSettings(ModelChoice):
    """VGG of papers/003."""

    name: Literal["vgg"] = Field(default="vgg", description="VGG of papers/003, §5, for images of at least 32x32")
    channels: list[Width] = Field(
        default=[16, 32, 64, 128, 128],
        min_length=1,
        description="channels of the 3x3 convolutions, each followed by 2x2 max pooling",
    )
    classifier: list[Width] = Field(
        default=[], description="widths of the linear layers between the convolutions and the last layer"
    )
    norm: Literal["none", "batch"] = Field(
        default="none",
        description="batch: batch normalization after each convolution, whose statistics are part of θ, and are sent "
        "with it; clients then train one at a time (runtime.clients_at_once: 1)",
    )
    takes = ("pixels",)

    def make(self, input_shape: tuple[int, ...], classes: int) -> FlatModel:
        """Make the model, with n convolutions, for images of at least 2^n x 2^n."""
        network = BatchNormConvNet if self.norm == "batch" else ConvNet
        return network(input_shape, self.channels, self.classifier, classes)


class LogisticSettings(ModelChoice):
    """Multinomial logistic regression."""

    name: Literal["logistic"] = Field(default="logistic", description="multinomial logistic regression")
    takes = ("pixels", "features")

    def make(self, input_shape: tuple[int, ...], classes: int) -> FlatModel:
        """Make the model for inputs of any shape."""
        return MLP(input_shape, [], classes)


class MLPSettings(ModelChoice):
    """Multilayer perceptron with configurable widths."""

    name: Literal["mlp"] = Field(default="mlp", description="multilayer perceptron, ReLU between layers")
    hidden: list[Width] = Field(default=[100], min_length=1, description="widths of the hidden layers")
    takes = ("pixels", "features")

    def make(self, input_shape: tuple[int, ...], classes: int) -> FlatModel:
        """Make the model for inputs of any shape."""
        return MLP(input_shape, self.hidden, classes)


class LSTMSettings(ModelChoice):
    """Character model of LEAF."""

    name: Literal["lstm"] = Field(
        default="lstm", description="stacked LSTMs that predict the next token (LEAF; papers/001, A.3)"
    )
    embedding: int = Field(default=8, ge=1, description="length of a token's vector")
    hidden: int = Field(default=256, ge=1, description="width of each LSTM layer")
    layers: int = Field(default=2, ge=1, description="number of LSTM layers")
    takes = ("tokens",)

    def make(self, input_shape: tuple[int, ...], classes: int) -> FlatModel:
        """Make the model for any number of tokens; the classes are the vocabulary."""
        return LSTM(classes, self.embedding, self.hidden, self.layers)


class QuadraticSettings(ModelChoice):
    """Noisy quadratic model of papers/004."""

    name: Literal["quadratic"] = Field(
        default="quadratic", description="the noisy quadratic model (papers/004, §6), for data without classes"
    )
    curvature: Curvature | tuple[Curvature, ...] = Field(
        default=1.0, description="diagonal of H: one number for all coordinates, or one for each; 1 estimates a mean"
    )
    takes = ("features",)
    classifies = False

    def make(self, input_shape: tuple[int, ...], classes: int) -> FlatModel:
        """Make the model for inputs of any length."""
        return Quadratic(input_shape[0], self.curvature)


class ModuleSettings(ModelChoice):
    """Any ``nn.Module``."""

    name: Literal["module"] = Field(default="module", description="your own PyTorch module (docs/models.md)")
    factory: str = Field(
        pattern=r"^[A-Za-z_][\w.]*:[\w.-]+$",
        description="`package.module:function` that creates it; called with `input_shape` and `classes` if it has "
        "such parameters",
    )
    head: str | None = Field(
        default=None,
        min_length=1,
        description="name of the linear layer whose outputs determine the logits; null: the last linear layer if its "
        "outputs are the logits, else the model has no head",
    )
    output: str | int | None = Field(
        default=None,
        description="field, key or position of the logits in the module's result, if that is not a tensor; null: "
        "`logits`",
    )
    buffers: Literal["shared", "local"] = Field(
        default="shared",
        description="buffers that move in training, such as BatchNorm's running statistics. shared: averaged like "
        "parameters, and sent; local: each client keeps its own, which are never sent",
    )
    lora: LoRA | None = Field(
        default=None,
        description="adapters by `peft` on the module, whose own parameters are then frozen (docs/models.md)",
    )
    takes = ("pixels", "features", "tokens", "integers", "named")

    def model_for(self, problem: ModelProblem) -> FlatModel:
        """Make the module, and try it on inputs.

        Raise ExperimentError if it cannot be made or flattened; the message names the layer.
        """
        shape, classes, kind, task, target_shape = problem
        if not classes:
            raise self.refused(f"{self.name} needs classes, but the data have none; use quadratic")
        make = factory_of(self.factory, shape_of(shape), classes)
        make = make if self.lora is None else adapted(make, self.lora)
        check_codes(make, shape, kind)
        return ModuleModel(make, shape, classes, kind, self.head, self.buffers, self.output, task, target_shape)


class LibraryChoice(ModelChoice):
    """Keys of a network of another library, which runs as a module."""

    tasks: ClassVar[tuple[TaskName, ...]] = ("classification", "multilabel", "regression")
    """Tasks whose outputs it has."""

    @abstractmethod
    def module(self, input_shape: tuple[int, ...], outputs: int, task: PredictionTask) -> nn.Module:
        """Make the module.

        Raise ValueError if it does not accept such inputs.
        """

    def model_for(self, problem: ModelProblem) -> FlatModel:
        """Make the module, and try it on inputs; see :meth:`ModelChoice.build`."""
        shape, outputs, kind, task, target_shape = shape_of(problem.input_shape), *problem[1:]
        fits = kind in self.takes and task.target_kind in self.tasks and outputs > 0
        if not fits or isinstance(shape, dict):
            takes = f"{' or '.join(self.takes)} in {', '.join(self.tasks)}"
            raise self.refused(
                f"{self.name} is for {takes}, but the data are {kind} with {outputs} outputs in {task.name}; use "
                "another model, or module"
            )
        make = functools.partial(self.module, shape, outputs, task)
        try:
            make()
        except ValueError as error:
            raise self.refused(f"{self.name}: {error}") from error
        buffers: Literal["shared", "local"] = getattr(self, "buffers", "shared")
        return ModuleModel(
            make, problem.input_shape, outputs, kind, buffers=buffers, task=task, target_shape=target_shape
        )


class ResNet18Settings(LibraryChoice):
    """ResNet18 of torchvision."""

    name: Literal["resnet18"] = Field(
        default="resnet18",
        description="torchvision's ResNet18; on images smaller than 64 pixels, it starts with a 3x3 convolution "
        "without pooling",
    )
    norm: Literal["batch", "group"] = Field(
        default="batch", description="batch normalization, or group normalization with 32 groups, which has no buffers"
    )
    buffers: Literal["shared", "local"] = Field(
        default="shared", description="running statistics: averaged like parameters, and sent; or kept by each client"
    )
    takes = ("pixels",)

    def module(self, input_shape: tuple[int, ...], outputs: int, task: PredictionTask) -> nn.Module:
        """Make the module."""
        return resnet18(input_shape, outputs, self.norm)


class ViTSettings(LibraryChoice):
    """Vision transformer of torchvision."""

    name: Literal["vit"] = Field(default="vit", description="torchvision's vision transformer, for square images")
    patch: int = Field(default=4, ge=1, description="side of a patch in pixels; must divide the side of the images")
    width: int = Field(default=64, ge=1, description="length of a patch's vector")
    layers: int = Field(default=4, ge=1, description="number of layers")
    heads: int = Field(default=4, ge=1, description="attention heads; must divide the width")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="dropout in training")
    takes = ("pixels",)

    def module(self, input_shape: tuple[int, ...], outputs: int, task: PredictionTask) -> nn.Module:
        """Make the module."""
        return vit(input_shape, outputs, **self.model_dump(include={"patch", "width", "layers", "heads", "dropout"}))


class TransformerSettings(LibraryChoice):
    """Transformer encoder of PyTorch."""

    name: Literal["transformer"] = Field(
        default="transformer",
        description="PyTorch's transformer encoder on tokens: causal for next tokens, else the mean over positions",
    )
    vocabulary: int | None = Field(
        default=None, ge=2, description="number of tokens; null: the number of outputs, as for next tokens"
    )
    width: int = Field(default=64, ge=1, description="length of a token's vector")
    layers: int = Field(default=2, ge=1, description="number of layers")
    heads: int = Field(default=4, ge=1, description="attention heads; must divide the width")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="dropout in training")
    takes = ("tokens", "integers")
    tasks = ("classification", "multilabel", "regression", "next_token")

    def module(self, input_shape: tuple[int, ...], outputs: int, task: PredictionTask) -> nn.Module:
        """Make the module."""
        if len(input_shape) != 1:
            raise ValueError(f"inputs must be sequences of tokens, [tokens] (got {list(input_shape)})")
        keys = self.model_dump(include={"width", "layers", "heads", "dropout"})
        vocabulary = outputs if self.vocabulary is None else self.vocabulary
        of_places = task.kind.like == "sequence"
        return TokenTransformer(vocabulary, input_shape[0], outputs, next_token=of_places, **keys)


class UNetSettings(LibraryChoice):
    """U-Net of MONAI."""

    name: Literal["unet"] = Field(
        default="unet", description="MONAI's U-Net for segmentation (`pip install 'fedloom[unet]'`)"
    )
    channels: list[Width] = Field(
        default=[16, 32, 64], min_length=2, description="channels of each level; each but the first halves the image"
    )
    takes = ("pixels",)
    tasks = ("segmentation",)

    def module(self, input_shape: tuple[int, ...], outputs: int, task: PredictionTask) -> nn.Module:
        """Make the module."""
        return unet(input_shape, outputs, self.channels)


LIBRARY = (ResNet18Settings, ViTSettings, TransformerSettings, UNetSettings)
"""Networks of other libraries."""

MODELS: tuple[ModelChoice, ...] = (
    LeNetSettings(),
    ResNet20Settings(),
    CNNSettings(),
    VGGSettings(),
    LogisticSettings(),
    MLPSettings(),
    LSTMSettings(),
    QuadraticSettings(),
    *plugins("fedloom.models", ModelChoice),
)
"""All models with default settings; other packages register theirs under the entry point ``fedloom.models``."""

if TYPE_CHECKING:
    ModelSettings: TypeAlias = ModelChoice
else:
    ModelSettings = functools.reduce(operator.or_, [*(type(choice) for choice in MODELS), *LIBRARY, ModuleSettings])
    """Settings of any model, distinguished by ``name``."""
