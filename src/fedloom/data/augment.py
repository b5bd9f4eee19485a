"""Random changes of training images, by transforms of ``torchvision.transforms.v2``.

A transform is described by its name, or by its name and arguments, as in an experiment file:
``{"RandomCrop": {"size": 32, "padding": 4}}``. An argument that is a list of transforms is described in the same way.
"""

from __future__ import annotations

import difflib
import enum
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import torch
from pydantic import AfterValidator, Field, JsonValue
from torch import Tensor

from fedloom.core.draws import drawing_from
from fedloom.data.federated import standardize
from fedloom.data.own import AsTuple
from fedloom.data.spec import DataSpec, InputSpec, Normalization
from fedloom.errors import ExperimentError

KEY = "data.augment"
STANDARDIZED = "ToDtype", "ConvertImageDtype", "ToTensor", "Normalize"
"""Transforms that users often append to others, but that FedLoom applies itself."""
MIXING = "CutMix", "MixUp"
OLDER = "torchvision.transforms.transforms", "torchvision.transforms.autoaugment"
"""Modules whose classes have namesakes in v2."""
TRIALS = 20
"""Number of random images that a check applies the transforms to."""

Transform: TypeAlias = Callable[[Tensor], Tensor]
"""Function of one image, ``[channels, height, width]`` uint8."""


def _one_name(value: str | Mapping[str, Any]) -> str | Mapping[str, Any]:
    if isinstance(value, Mapping) and len(value) != 1:
        raise ValueError(f"must be a name, or one name with its arguments: {{NAME: {{...}}}} (got {len(value)} names)")
    return value


Described: TypeAlias = Annotated[str | dict[str, dict[str, JsonValue]], AfterValidator(_one_name)]
"""Transform as an experiment file describes it."""

Augment: TypeAlias = Annotated[
    tuple[Described, ...],
    AsTuple,
    Field(
        description="Random changes of training images, in order: names of torchvision.transforms.v2, or names with "
        "arguments, such as [{RandomCrop: {size: 32, padding: 4}}, RandomHorizontalFlip] (docs/local-training.md)."
    ),
]
"""Field type of ``data.augment``."""


@dataclass(frozen=True, eq=False)
class Augmentation:
    """Transforms of standardized images, in order.

    Each image is converted back to uint8 pixels, changed, and standardized again.
    """

    transforms: Sequence[Transform]
    normalization: Normalization

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Change a batch ``[b, channels, height, width]``, each image by its own draws, on the CPU.

        Raise ExperimentError if an image changes its shape, or is no longer uint8.
        """
        with drawing_from(generator):
            images = torch.stack([apply_transforms(self.transforms, image) for image in self.pixels(x)])
        return standardize(images, InputSpec("pixels", tuple(images.shape[1:]), self.normalization)).to(x)

    def pixels(self, x: Tensor) -> Tensor:
        """Return the pixels that standardize to x, exactly: uint8 on the CPU."""
        per_channel = (1, -1, *[1] * (x.dim() - 2))
        mean, std = (
            torch.tensor(values).reshape(per_channel) for values in (self.normalization.mean, self.normalization.std)
        )
        return ((x.cpu() * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)


def apply_transforms(transforms: Sequence[Transform], image: Tensor) -> Tensor:
    """Return an image after transforms; raise ExperimentError if one changes its shape or type."""
    result = image
    for transform in transforms:
        result = transform(result)
        if result.dtype != torch.uint8:
            raise ExperimentError(
                f"{KEY}: {type(transform).__name__} makes pixels of {result.dtype}; they must stay uint8, and are "
                "standardized afterwards",
                key=KEY,
            )
    if result.shape != image.shape:
        raise ExperimentError(
            f"{KEY}: the transforms make images of shape {list(result.shape)}; they must keep {list(image.shape)}",
            key=KEY,
        )
    return result.as_subclass(Tensor)


def augmentation(descriptions: Sequence[Any], normalization: Normalization) -> Augmentation | None:
    """Return the augmentation of a run; None without transforms; raise like :func:`made`."""
    return Augmentation(build_transforms(descriptions), normalization) if descriptions else None


def check_augment(descriptions: Sequence[Any], spec: DataSpec) -> None:
    """Check transforms by making them and applying them to random images of the data's shape.

    Raise ExperimentError if a transform does not exist or fails, the images change shape, the inputs are not images, or
    torchvision is missing.
    """
    if not descriptions:
        return
    kind, shape = spec.kind, spec.input_shape
    if spec.targets is not None and spec.targets.kind.like == "plane":
        raise ExperimentError(f"{KEY}: transforms would change images, but not their masks; leave it out", key=KEY)
    if kind != "pixels":
        raise ExperimentError(f"{KEY}: transforms change images, and the inputs are {kind}; leave it out", key=KEY)
    transforms, random = build_transforms(descriptions), torch.Generator().manual_seed(0)
    for _ in range(TRIALS):
        image = torch.randint(256, shape, generator=random, dtype=torch.uint8)
        try:
            with drawing_from(random):
                apply_transforms(transforms, image)
        except ExperimentError:
            raise
        except Exception as error:  # raised by torchvision for an image that it cannot change
            names = ", ".join(_name(one) for one in descriptions)
            raise ExperimentError(
                f"{KEY}: {names} cannot change images of shape {list(shape)}: {_line(error)}", key=KEY
            ) from error


def build_transforms(described: Sequence[Any]) -> list[Transform]:
    """Make transforms from their descriptions.

    Raise ExperimentError if torchvision is missing, has no such transform, or rejects an argument, or if a transform
    does what FedLoom does itself.
    """
    return [_build_transform(one) for one in described]


def _build_transform(one: Any) -> Transform:
    v2, name = _v2(), _name(one)
    arguments = {} if isinstance(one, str) else one[name]
    if name in STANDARDIZED:
        raise ExperimentError(
            f"{KEY}: leave out {name}: the transforms change uint8 pixels, which are standardized afterwards",
            key=KEY,
            found=name,
        )
    if name in MIXING:
        raise ExperimentError(f"{KEY}: leave out {name}: a transform must change a single image", key=KEY, found=name)
    kind = getattr(v2, name, None)
    if not isinstance(kind, type) or not issubclass(kind, v2.Transform):
        transforms = [each for each in dir(v2) if isinstance(getattr(v2, each), type)]
        meant = "".join(f"; did you mean {each}?" for each in difflib.get_close_matches(name, transforms, n=1))
        raise ExperimentError(f"{KEY}: torchvision.transforms.v2 has no transform {name!r}{meant}", key=KEY, found=name)
    try:
        transform: Transform = kind(**{key: _argument(key, value) for key, value in arguments.items()})
    except (TypeError, ValueError) as error:
        raise ExperimentError(f"{KEY}: {name}: {_line(error)}", key=KEY, found=name) from error
    return transform


def _argument(key: str, value: Any) -> Any:
    v2 = _v2()
    if key == "transforms":
        return build_transforms(value)
    kinds: Mapping[str, Any] = {"interpolation": v2.InterpolationMode, "policy": v2.AutoAugmentPolicy}
    if key not in kinds or not isinstance(value, str):
        return value
    allowed = [one.value for one in kinds[key]]
    if value not in allowed:
        raise ValueError(f"{key} must be one of {', '.join(allowed)} (got {value!r})")
    return kinds[key](value)


def _name(one: Any) -> str:
    return one if isinstance(one, str) else str(next(iter(one)))


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _v2() -> Any:
    try:
        from torchvision.transforms import v2
    except ImportError as error:
        raise ExperimentError(
            f"{KEY}: torchvision is not installed in this environment.",
            hint="pip install 'fedloom[vision]' on all machines where clients train",
            key=KEY,
        ) from error
    return v2


# --- transforms given as objects --------------------------------------------------------------------------------------


def describe_transforms(transforms: Any) -> list[Any]:
    """Return the description of transforms given in Python: an object of torchvision.transforms.v2, or several.

    An object of torchvision.transforms is described as its namesake in v2. Descriptions, also those among objects,
    are returned unchanged.

    Raise ExperimentError if an object is of another class, or its arguments cannot be written to an experiment file.
    """
    several = transforms if isinstance(transforms, Sequence) and not isinstance(transforms, str) else [transforms]
    return [one for each in several for one in _describe_transform(each)]


def _describe_transform(one: Any) -> Iterator[Any]:
    if isinstance(one, str | Mapping):
        yield one
        return
    name = type(one).__name__
    if name == "Compose" or isinstance(one, torch.nn.Sequential):
        for inner in getattr(one, "transforms", one):
            yield from _describe_transform(inner)
        return
    is_v2 = _is_v2(one, name)
    if name in STANDARDIZED:
        yield name  # rejected later, as in an experiment file
        return
    parameters = inspect.signature(type(one)).parameters.values()
    values = {p.name: (getattr(one, p.name, p.default), p.default) for p in parameters}
    arguments = {key: _plain(value, name) for key, (value, default) in values.items() if value is not default}
    description = {name: arguments} if arguments else name
    if is_v2 and _shown(_build_transform(description)) != _shown(one):
        raise ExperimentError(
            f"augment: {name} cannot be described by its arguments; give it as {{{name!r}: {{...}}}}", key=KEY
        )
    yield description


def _is_v2(one: Any, name: str) -> bool:
    """Return False for an object of the older module with a namesake in v2; raise if it is of neither."""
    v2, module = _v2(), type(one).__module__
    if type(one) is getattr(v2, name, None) and isinstance(one, v2.Transform):
        return True
    if module not in OLDER or not hasattr(v2, name):
        raise ExperimentError(
            f"augment must be made of transforms of torchvision.transforms.v2 (got {module}.{type(one).__qualname__}).",
            hint="from torchvision.transforms import v2",
            key=KEY,
        )
    return False


def _shown(transform: Any) -> str:
    return repr(transform).translate(str.maketrans("()", "[]"))  # a file holds lists in place of tuples


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, list | tuple):
        if any(map(callable, value)):
            return describe_transforms(list(value))
        return [_plain(inner, name) for inner in value]
    if isinstance(value, str | int | float | bool | None):
        return value
    raise ExperimentError(
        f"augment: {name} has an argument of type {type(value).__name__}, which an experiment file cannot hold; use "
        "numbers, texts and lists",
        key=KEY,
    )
