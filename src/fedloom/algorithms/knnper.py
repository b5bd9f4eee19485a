"""kNN-Per: FedAvg, and on each client a vote of the training examples nearest in the model's feature space.

O. Marfoq, G. Neglia, L. Kameni, R. Vidal, Personalized federated learning through local memorization, ICML 2022,
arXiv 2111.09360, §3. Training is FedAvg's. A client's predictor is λ kNN(x) + (1 - λ) softmax(logits). The datastore of
the k-nearest-neighbour estimate has the features and labels of its training examples; each neighbour has weight
exp(-distance²/(D s)), D being the number of features. k and λ are chosen by leave-one-out on the datastore. The authors
classify; in regression the estimate is the weighted mean of the neighbours' numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedloom.algorithms.batches import PIECE, train_examples
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.fedavg import Averaging, FedAvg
from fedloom.algorithms.local_sgd import LocalSGD
from fedloom.data.inputs import single
from fedloom.models.flat import FlatModel
from fedloom.models.predictors import ModelPredictor, Predictors


class Neighbours(ModelPredictor):
    """Mixture of the shared model θ with a datastore: ``features`` [n, D] and ``labels`` [n] of the train split."""

    def __init__(self, model: FlatModel, theta: Tensor, x: Tensor, y: Tensor, scale: float) -> None:
        super().__init__(model, theta)
        self.features, self.labels, self.scale = self._features(x), y, scale
        self.k, self.mixing = 1, 0.0
        self.classifies = model.task.kind.is_class

    def choose(self, x: Tensor, ks: list[int], mixings: list[float]) -> None:
        """Choose the k and λ that predict the most examples of the datastore correctly, each left out of its own vote.

        Ties go to the higher likelihood of the labels, then to the smaller k, then to the smaller λ. In regression, the
        lowest loss decides. With one example nothing remains to vote, and λ is 0.
        """
        if len(x) == 1:
            return
        own, best = super().log_probabilities(x), (-1, -math.inf)
        distances, nearest = nearest_of(self.features, self.features, max(ks), left_out=True)
        for k in sorted(ks):
            vote = self._vote(distances[:, :k], nearest[:, :k], own)
            for mixing in sorted(mixings):
                score = self._score(self._mixed(vote, own, mixing))
                if score > best:
                    best, self.k, self.mixing = score, k, mixing

    def _score(self, predictions: Tensor) -> tuple[int, float]:
        """Return the number of right predictions of the datastore, and their likelihood; 0 and -loss in regression."""
        if not self.classifies:
            return 0, -float(self.model.task.loss(predictions, self.labels).double().sum())
        right = int((predictions.argmax(1) == self.labels).sum())
        return right, float(predictions.gather(1, self.labels[:, None]).double().sum())

    @torch.no_grad()
    def log_probabilities(self, x: Tensor) -> Tensor:
        """Return log-probabilities, ``[b, ...] -> [b, C]``, or numbers ``[b, k]``."""
        own = super().log_probabilities(x)
        return self._mixed(self._vote(*nearest_of(self._features(x), self.features, self.k), own), own, self.mixing)

    def tensors(self) -> dict[str, Tensor]:
        """Return θ, the datastore, and the chosen k, λ and scale."""
        values = {"k": self.k, "mixing": self.mixing, "scale": self.scale}
        numbers = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
        return {"theta": self.theta, "features": self.features, "labels": self.labels, **numbers}

    def named(self) -> dict[str, Tensor]:
        """Return the shared model's entries and the datastore."""
        return {**self.parameters, "datastore.features": self.features, "datastore.labels": self.labels}

    def predict(self, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return log-probabilities, ``[b, ...] -> [b, C]``, or numbers ``[b, k]``."""
        own = super().predict(tensors, x)
        datastore = tensors["datastore.features"], tensors["datastore.labels"]
        vote = self._vote(*nearest_of(self.model.features(tensors, x), datastore[0], self.k), own, datastore[1])
        return self._mixed(vote, own, self.mixing)

    @torch.no_grad()
    def _features(self, x: Tensor) -> Tensor:
        return torch.cat([self.model.features(self.parameters, piece) for piece in torch.split(x, PIECE)])

    def _vote(self, squared: Tensor, nearest: Tensor, like: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return log-probabilities or numbers of the estimate, of the shape of ``like``; softmax normalizes weights."""
        labels = self.labels if labels is None else labels
        weights = F.softmax(-squared / (self.features.shape[1] * self.scale), dim=1).to(like)
        if not self.classifies:
            numbers = labels.reshape(len(labels), -1).to(like)
            return (weights[:, :, None] * numbers[nearest]).sum(1).reshape(like.shape)
        return torch.zeros_like(like).scatter_add_(1, labels[nearest], weights).log()

    def _mixed(self, vote: Tensor, own: Tensor, mixing: float) -> Tensor:
        return mixed(vote, own, mixing) if self.classifies else mixing * vote + (1 - mixing) * own


def nearest_of(queries: Tensor, features: Tensor, k: int, *, left_out: bool = False) -> tuple[Tensor, Tensor]:
    """Return squared distances and positions ``[b, k]`` of at most k nearest; ``left_out`` excludes the query."""
    # Matrix products would round, but the distance of an example from itself must be 0 in any batch of queries.
    squared = torch.cdist(queries, features, compute_mode="donot_use_mm_for_euclid_dist").square()
    if left_out:
        squared.fill_diagonal_(math.inf)
    distances, nearest = squared.sort(dim=1, stable=True)
    k = min(k, squared.shape[1] - left_out)
    return distances[:, :k], nearest[:, :k]


def mixed(vote: Tensor, own: Tensor, mixing: float) -> Tensor:
    """Return log(λ vote + (1 - λ) own) of log-probabilities ``[b, C]``; at λ = 0 bitwise ``own``."""
    first, second = (math.log(share) if share > 0 else -math.inf for share in (mixing, 1 - mixing))
    return torch.logaddexp(vote + first, own + second)


class KNNPerSettings(Averaging):
    """Keys of ``algorithm`` for kNN-Per."""

    local: LocalSGD = Field(default=LocalSGD(steps=50), description="local training in a round")
    neighbours: list[Annotated[int, Field(ge=1)]] = Field(
        default=[5, 10],
        min_length=1,
        description="values of k to choose from; a client needs at least as many examples as the smallest",
    )
    mixing: list[Annotated[float, Field(ge=0, le=1)]] = Field(
        default=[i / 10 for i in range(11)],
        min_length=1,
        description="values of λ to choose from, the share of the neighbours",
    )
    scale: float = Field(default=100.0, ge=1e-6, description="s of a neighbour's weight exp(-distance²/(D s))")


class KNNPer(FedAvg):
    """FedAvg, and a vote of the nearest training examples on each client."""

    name = "knn-per"
    settings = KNNPerSettings
    example = {"neighbours": [1, 3], "mixing": [0.0, 0.3, 1.0], "scale": 1.0}
    tasks = ("classification", "regression")
    restriction = "Neighbours vote for one class, or average their numbers."
    needs = ("labels", "features")
    needs_one_input = True
    predictors = {"personal": "kNN-Per", "global": "kNN-Per, shared model"}

    def personalize(self, model: FlatModel, group: ClientGroup, theta: Tensor, s: KNNPerSettings) -> Predictors:
        """Return ``personal``, the mixture, and ``global``, the shared model, without training, for all clients."""
        predictors: Predictors = []
        for client, row in zip(group.clients, theta, strict=True):
            split = train_examples(client, labelled=True)
            assert split.y is not None
            personal = Neighbours(model, row, single(split.x), split.y, s.scale)
            personal.choose(single(split.x), s.neighbours, s.mixing)
            predictors.append({"personal": personal, "global": ModelPredictor(model, row)})
        return predictors

    def check_client(self, settings: Any, examples: int, classes: int) -> str | None:
        """Reject a client with fewer examples than the smallest k."""
        least = min(settings.neighbours)
        if examples >= least:
            return None
        return f"it has {examples} train examples, but needs {least}, the smallest k of algorithm.neighbours"


KNNPER = KNNPer()
