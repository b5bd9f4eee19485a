"""Requirements of methods on the clients' model and its task, and of privacy of examples on methods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from fedloom.core.settings import Settings
from fedloom.errors import ExperimentError
from fedloom.models.flat import FlatModel
from fedloom.tasks.names import TaskName

Need: TypeAlias = Literal[
    "labels", "head", "linear head", "features", "default loss", "no buffers", "any vector", "normalization"
]
"""Requirement of a method on the clients' model.

``labels``: its loss uses labels. ``head``: layers besides the last linear one. ``linear head``: that layer is not
parametrized (no weight normalization), and its outputs are the logits. ``features``: it ends in a linear layer on
features. ``default loss``: its loss is that of a built-in task. ``no buffers``: it has no buffers
that move in training, because the method has no training calls that move them. ``any vector``: every θ is a model,
because the method generates or draws θ. ``normalization``: it has normalization layers.
"""


PRIVACY_KEY = "federation.privacy.of"


def check_needs(name: str, needs: Sequence[Need], model: FlatModel) -> None:
    """Raise ExperimentError unless a model meets the requirements of the method with this name."""
    for need in needs:
        if (problem := _problem(need, model)) is not None:
            key = "algorithm.name" if need == "labels" else "model.name"
            if need == "no buffers" and not model.constrained:
                key = "model.norm"
            raise ExperimentError(f"{key}: {name} {problem}", key=key)


def check_batches(settings: Mapping[str, Any], model: FlatModel, section: str = "algorithm") -> None:
    """Raise ExperimentError if a ``batch_size`` in a method's settings is smaller than the model can train on."""
    for name, value in settings.items():
        key = f"{section}.{name}"
        if isinstance(value, Mapping):
            check_batches(value, model, key)
        elif name.endswith("batch_size") and isinstance(value, int) and value < model.least_batch:
            raise ExperimentError(
                f"{key}: a layer of the model normalizes by the batch and needs {model.least_batch} examples or more "
                f"(got {value})",
                key=key,
                found=value,
            )


def check_task(name: str, tasks: Sequence[TaskName], restriction: str, model: FlatModel) -> None:
    """Raise ExperimentError if a method does not support the task of a model that uses labels."""
    if not model.needs_labels or model.task.target_kind in tasks:
        return
    supported = ", ".join(tasks[:-1]) + (" and " if tasks[:-1] else "") + tasks[-1]
    raise ExperimentError(
        f"algorithm.name: {name} supports only {supported}, but the task is {model.task.name}. {restriction}",
        hint="docs/algorithms/README.md lists the tasks of each method; fedavg supports all of them",
        key="algorithm.name",
        found=name,
    )


def check_masks(settings: Any, model: FlatModel) -> None:
    """Raise ExperimentError if settings mask absent labels, but the model does not classify."""
    if model.task.kind.is_class and model.needs_labels:
        return
    for key in _masks(settings, "algorithm."):
        task = model.task.name if model.needs_labels else "data without labels"
        raise ExperimentError(
            f"{key}: only in classification can labels be absent, but the model is for {task}; set it to false",
            key=key,
            found=True,
        )


def _masks(settings: Any, prefix: str) -> Iterator[str]:
    """Yield the keys ``mask_absent`` that are set, at any depth."""
    if isinstance(settings, Settings):
        for name, value in settings:
            if name == "mask_absent" and value:
                yield prefix + name
            yield from _masks(value, f"{prefix}{name}.")


def _problem(need: Need, model: FlatModel) -> str | None:
    """Return why a model does not meet a requirement, as the end of a sentence; None if it does."""
    if need == "labels" and not model.needs_labels:
        return "needs labels, which the loss of this model does not use; use fedavg"
    if need == "head" and not model.layout.head:
        if model.layout.headless:
            return "needs a last linear layer, but the outputs of this model do not come from such a layer"
        return "needs layers before the last one, but this model has one layer"
    if need == "linear head" and model.layout.logits_apart:
        return (
            f"computes logits by the head alone, but the outputs of {model.layout.last!r} in this model are not "
            "the logits, which are computed from them. Make the module return the outputs of the layer"
        )
    if need == "linear head" and not model.layout.head_is_linear:
        head = f"{model.layout.last!r} of this model is parametrized ({', '.join(model.layout.head)})"
        return f"computes logits by the head alone, but {head}. Make it a plain linear layer"
    if need == "features" and not model.has_features:
        return "uses the input of the last linear layer, but the outputs of this model do not come from such a layer"
    if need == "default loss" and model.own_loss:
        return "trains with its own loss, but this model defines another; use a model without a loss"
    if need == "default loss" and model.task.name != model.task.target_kind:
        return f"trains with its own loss, but the task {model.task.name} defines another; leave `task` out"
    return _problem_of_buffers(need, model)


def _problem_of_buffers(need: Need, model: FlatModel) -> str | None:
    buffers = model.layout.buffers
    if need == "no buffers" and buffers:
        instead = "use GroupNorm or LayerNorm" if model.constrained else "use norm: none"
        return f"cannot train running statistics, and this model has some ({buffers[0]}); {instead}"
    if need == "any vector" and model.constrained:
        return (
            f"generates all of θ, and running statistics are not free parameters: a variance ({buffers[-1]}) is not "
            "negative. Use GroupNorm or LayerNorm"
        )
    if need == "normalization" and not model.layout.normalization:
        return "keeps normalization layers with the clients, and this model has none"
    return None


def check_example_privacy(method: Any, settings: Any) -> None:
    """Check that a method with these settings protects examples; :meth:`FlatModel.check_steps` checks the model.

    Raise ExperimentError if it cannot; the message begins with the key to change.
    """
    reason = method.example_privacy(settings) if _is_stated(method) else "The method does not state that it can."
    if reason is not None:
        raise ExperimentError(
            f"algorithm.name: {method.name} cannot protect single examples ({PRIVACY_KEY}: examples). {reason}",
            hint="docs/algorithms/README.md lists the methods that can; with `of: clients`, others can",
            key="algorithm.name",
            found=method.name,
        )
    for key, value, text in _refused(method, settings):
        raise ExperimentError(f"{key}: {text} ({PRIVACY_KEY}: examples)", key=key, found=value)


def _is_stated(method: Any) -> bool:
    """Return True if the class that states what clients disclose also defines, or inherits, all that they do."""
    classes = type(method).__mro__

    def first_with(*names: str) -> int:
        return next((i for i, cls in enumerate(classes) if not vars(cls).keys().isdisjoint(names)), len(classes))

    return first_with("example_privacy", "no_example_privacy") <= first_with("train", "client")


def _refused(method: Any, settings: Any) -> Iterator[tuple[str, object, str]]:
    """Yield settings that noisy steps do not permit, as key, value and advice."""
    for name, local in settings:
        if name in method.at_home or not hasattr(local, "mask_absent"):
            continue
        if local.mask_absent:
            yield (
                f"algorithm.{name}.mask_absent",
                True,
                "the labels that a client lacks follow from its examples, without noise; set it to false",
            )
        for clip in ("clip", "clip_value"):
            if (value := getattr(local, clip, None)) is not None:
                yield (
                    f"algorithm.{name}.{clip}",
                    value,
                    f"gradients of examples are clipped by federation.privacy.clip, and clipping their noisy sum again "
                    f"would bias it; set it to null (got {value:g})",
                )
