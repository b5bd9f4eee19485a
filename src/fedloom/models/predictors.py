"""Predictors of clients, which predict and can be saved."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from fedloom.errors import DataError
from fedloom.models.flat import FlatModel


class Predictor(ABC):
    """Predictor of a client, a function of named tensors."""

    model: FlatModel

    @abstractmethod
    def named(self) -> dict[str, Tensor]:
        """Return all tensors used for prediction, by the model's own names."""

    @abstractmethod
    def predict(self, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return predictions, ``[b, *output_shape]``, as a function of :meth:`named`."""

    @torch.no_grad()
    def log_probabilities(self, x: Tensor) -> Tensor:
        """Return the predictions of a classifier: log-probabilities of the classes, ``[b, ...] -> [b, C]``."""
        return self.predict(self.named(), x)

    def predictions(self, x: Tensor) -> Tensor:
        """Return predictions in the form of the task (``PredictionTask.predictions``), ``[b, *output_shape]``."""
        return self.log_probabilities(x)

    def probabilities(self, x: Tensor) -> Tensor:
        """Return probabilities, or the numbers of a regression, ``[b, *output_shape]``."""
        return self.model.task.probabilities(self.predictions(x))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to save, from which the predictor can be restored."""
        return self.named()


Predictors: TypeAlias = list[dict[str, Predictor]]
"""Predictors ``personal`` and, if it exists, ``global``, in a dict per client of the group."""


def predictor_of(client: str, predictors: Mapping[str, Predictor], name: str) -> Predictor:
    """Return one of a client's predictors.

    Raise DataError if the client has none of that name, because it has no examples to train on.
    """
    if name not in predictors:
        raise DataError(
            f"client {client} has no {name} model, which needs labelled training examples. Pack some, or request the "
            f"{' or the '.join(predictors)} model."
        )
    return predictors[name]


class ModelPredictor(Predictor):
    """Predictor with a fixed θ."""

    def __init__(self, model: FlatModel, theta: Tensor) -> None:
        self.model = model
        self.theta = theta
        self.parameters = model.layout.leaves(theta)

    @torch.no_grad()
    def log_probabilities(self, x: Tensor) -> Tensor:
        """Return log-probabilities of the classes, ``[b, ...] -> [b, C]``."""
        return ModelPredictor.predict(self, self.parameters, x)

    @torch.no_grad()
    def losses(self, x: Tensor, y: Tensor | None) -> Tensor:
        """Return the model's loss of each example, ``[b, ...], [b] -> [b]``, which evaluates data without targets."""
        return self.model.loss(self.parameters, x, y)

    def tensors(self) -> dict[str, Tensor]:
        """Return θ ``[d]``."""
        return {"theta": self.theta}

    def named(self) -> dict[str, Tensor]:
        """Return the entries of the layout, and the model's constants that its own ``state_dict`` has."""
        constants = {name: t for name, t in self.model.constants.items() if name not in self.model.unsaved}
        return {**self.parameters, **{name: t.to(self.theta.device) for name, t in constants.items()}}

    def predict(self, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return predictions, ``[b, *output_shape]``."""
        return self.model.task.predictions(self.model.forward(tensors, x))


def predictors_of(model: FlatModel, **thetas: Tensor) -> list[dict[str, Predictor]]:
    """Return a dict of predictors per client, given one fixed model per client and name (``personal=theta [g, d]``).

    Two names of the same tensor share one predictor, which is then evaluated once.
    """
    g = next(iter(thetas.values())).shape[0]
    different = {id(theta): theta for theta in thetas.values()}
    predictors = [{key: ModelPredictor(model, theta[i]) for key, theta in different.items()} for i in range(g)]
    return [{name: each[id(theta)] for name, theta in thetas.items()} for each in predictors]


class Ensemble(Predictor):
    """Mean of the predictions of S networks (Bayesian model averaging if they are draws).

    Classes, labels, pixels and tokens have the mean of the networks' probabilities; numbers their mean.

    Parameters
    ----------
    thetas
        ``[S, d]``.
    tensors
        Tensors to save, from which the ensemble can be restored.
    """

    def __init__(self, model: FlatModel, thetas: Tensor, **tensors: Tensor) -> None:
        self.networks = [model.layout.leaves(theta) for theta in thetas]
        self.model = model
        self._tensors = tensors

    @torch.no_grad()
    def draws_log_probabilities(self, x: Tensor) -> Tensor:
        """Return each network's predictions, ``[S, b, *output_shape]``; log-probabilities of classes."""
        return self._draws(self.networks, x)

    def log_probabilities(self, x: Tensor) -> Tensor:
        """Return the log of the mean probabilities of the classes, ``[b, ...] -> [b, C]``."""
        return self.model.task.combine(self.draws_log_probabilities(x))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that the ensemble was made from."""
        return self._tensors

    def named(self) -> dict[str, Tensor]:
        """Return the networks' entries, as ``networks.0.fc1.weight``."""
        return {f"networks.{i}.{name}": t for i, leaves in enumerate(self.networks) for name, t in leaves.items()}

    def predict(self, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return predictions, ``[b, *output_shape]``."""
        names = self.model.layout.entries
        networks = [{name: tensors[f"networks.{i}.{name}"] for name, _ in names} for i in range(len(self.networks))]
        return self.model.task.combine(self._draws(networks, x))

    def _draws(self, networks: Sequence[Mapping[str, Tensor]], x: Tensor) -> Tensor:
        task = self.model.task
        return torch.stack([task.predictions(self.model.forward(network, x)) for network in networks])
