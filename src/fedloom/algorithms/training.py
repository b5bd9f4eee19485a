"""Local training and fixed predictors: what the client halves of most methods share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor
from torch.func import grad, vmap

from fedloom.algorithms.base import Group, Predictor
from fedloom.data.federated import ClientData, Split
from fedloom.errors import DataError
from fedloom.models.flat import FlatModel
from fedloom.settings import Settings


class LocalSGD(Settings):
    """Mini-batch SGD on a client; exactly one of ``steps`` and ``epochs``."""

    steps: int | None = Field(default=None, ge=1, description="local SGD steps k (exactly one of steps and epochs)")
    epochs: int | None = Field(default=None, ge=1, description="passes over the train split, short batches dropped")
    batch_size: int = Field(default=32, ge=1, description="batch size b; a client with fewer examples uses them all")
    lr: float = Field(default=0.01, gt=0, description="learning rate")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="momentum, fresh at every visit")
    lambda_theta: float = Field(default=0.0, ge=0, description="λ_θ of the term λ_θ‖θ‖² (papers/001, eq. 1)")
    clip: float | None = Field(default=None, gt=0, description="largest gradient norm; null does not clip")
    mask_absent: bool = Field(
        default=False, description="set the logits of labels absent from the client's train split to -inf"
    )

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"exactly one of steps and epochs: found steps={self.steps}, epochs={self.epochs}")
        return self

    def count(self, examples: int) -> int:
        """Steps that a client with so many train examples makes in one visit."""
        if examples == 0:
            return 0
        per_epoch = examples // min(self.batch_size, examples)
        return self.steps if self.steps is not None else (self.epochs or 0) * per_epoch


def batches(n: int, size: int, steps: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield index batches of ``min(size, n)``: fresh permutations per epoch, a shorter remainder dropped."""
    size = min(size, n)
    made = 0
    while made < steps:
        order = torch.randperm(n, generator=generator)
        for batch in torch.split(order[: n - n % size], size):
            yield batch
            made += 1
            if made == steps:
                return


def examples(client: ClientData) -> Split:
    """A client's train split, which has examples.

    Raises
    ------
    DataError
        If it is empty.
    """
    if len(client.train) == 0:
        raise DataError(f"client {client.id}: its train split is empty, at least one example is needed")
    return client.train


def labelled(client: ClientData) -> tuple[Tensor, Tensor]:
    """Inputs and labels of a client's train split.

    Raises
    ------
    DataError
        If it is empty or has no labels.
    """
    train = examples(client)
    if train.y is None:
        raise DataError(f"client {client.id}: its train split has no labels, which local training needs")
    return train.x, train.y


def local_sgd(
    model: FlatModel, theta: Tensor, clients: Group, settings: LocalSGD, purpose: str = "train"
) -> tuple[Tensor, Tensor, Tensor]:
    """Train one model per client on f_i = L(θ; S_i) + λ_θ‖θ‖² (papers/001, eq. 1).

    Parameters
    ----------
    theta
        ``[g, d]``, where each client starts.
    purpose
        Of the generator that draws the batches.

    Returns
    -------
    theta
        ``[g, d]`` after training.
    steps
        ``[g, 1]`` float64, SGD steps made.
    loss
        ``[g, 1]`` float64, mean training loss over the steps, before each step's update.
    """
    if len(clients) == 1:
        trained, steps, loss = _train_one(model, theta[0], clients, settings, purpose)
        trained = trained[None]
    else:
        trained, steps, loss = _train_group(model, theta, clients, settings, purpose)
    # Counts and losses go through float64 lists, never through the model's precision.
    return trained, torch.tensor(steps, dtype=torch.float64)[:, None], torch.tensor(loss, dtype=torch.float64)[:, None]


def _train_one(
    model: FlatModel, theta: Tensor, clients: Group, s: LocalSGD, purpose: str
) -> tuple[Tensor, list[int], list[float]]:
    """The driver for CPUs: ``autograd.grad`` on one split of θ."""
    client = clients.clients[0]
    x, y = labelled(client)
    absent = ~client.present.to(x.device) if s.mask_absent else None
    parameters = model.layout.leaves(theta, requires_grad=True)
    leaves = list(parameters.values())
    momentum = [torch.zeros_like(leaf) for leaf in leaves]
    steps = s.count(len(client.train))
    losses = torch.zeros((), dtype=torch.float64, device=x.device)
    for index in batches(len(x), s.batch_size, steps, clients.generator(0, purpose)):
        logits = model.forward(parameters, x[index])
        if absent is not None:
            logits = logits.masked_fill(absent, -torch.inf)
        loss = F.cross_entropy(logits, y[index])
        gradients = torch.autograd.grad(loss, leaves)
        with torch.no_grad():
            losses += loss
            if s.lambda_theta:
                gradients = torch._foreach_add(gradients, leaves, alpha=2 * s.lambda_theta)
            if s.clip is not None:
                norm = torch.stack(torch._foreach_norm(gradients)).norm()
                if norm > s.clip:
                    torch._foreach_mul_(gradients, s.clip / (norm + 1e-6))
            torch._foreach_mul_(momentum, s.momentum)
            torch._foreach_add_(momentum, gradients)
            torch._foreach_add_(leaves, momentum, alpha=-s.lr)
    return model.layout.join(parameters).detach(), [steps], [losses.item() / steps]


def _train_group(
    model: FlatModel, theta: Tensor, clients: Group, s: LocalSGD, purpose: str
) -> tuple[Tensor, list[int], list[float]]:
    """The driver for GPUs: ``vmap(grad)`` over the group, batches padded with weight 0 to one size."""
    device = theta.device
    data = [labelled(client) for client in clients.clients]
    counts = [s.count(len(x)) for x, _ in data]
    indices = [
        list(batches(len(x), s.batch_size, steps, clients.generator(i, purpose)))
        for i, ((x, _), steps) in enumerate(zip(data, counts, strict=True))
    ]
    width = max(len(index[0]) for index in indices)
    absent = torch.stack([~client.present for client in clients.clients]).to(device)  # [g, C]

    def objective(theta: Tensor, x: Tensor, y: Tensor, weight: Tensor, absent: Tensor) -> tuple[Tensor, Tensor]:
        logits = model.logits(theta, x)
        if s.mask_absent:
            logits = logits.masked_fill(absent, -torch.inf)
        loss = (F.cross_entropy(logits, y, reduction="none") * weight).sum()
        return loss + s.lambda_theta * theta.square().sum(), loss

    gradient = vmap(grad(objective, has_aux=True))
    theta, momentum = theta.clone(), torch.zeros_like(theta)
    losses = torch.zeros(len(clients), dtype=torch.float64, device=device)
    for t in range(max(counts)):
        xs, ys, weights = [], [], []
        for (x, y), index in zip(data, indices, strict=True):
            # A client that is done repeats its last batch; its update is discarded below.
            picked = index[min(t, len(index) - 1)]
            padded = F.pad(picked, (0, width - len(picked))).to(device)
            xs.append(x[padded])
            ys.append(y[padded])
            weights.append((torch.arange(width, device=device) < len(picked)).to(theta.dtype) / len(picked))
        gradients, loss = gradient(theta, torch.stack(xs), torch.stack(ys), torch.stack(weights), absent)
        if s.clip is not None:
            norm = gradients.norm(dim=1, keepdim=True)
            gradients = torch.where(norm > s.clip, gradients * (s.clip / (norm + 1e-6)), gradients)
        active = torch.tensor([t < count for count in counts], device=device)
        losses += torch.where(active, loss.double(), 0)
        momentum = s.momentum * momentum + gradients
        theta = torch.where(active[:, None], theta - s.lr * momentum, theta)
    return theta, counts, [total / count for total, count in zip(losses.tolist(), counts, strict=True)]


def gradient(model: FlatModel, theta: Tensor, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gradient of the model's mean loss over some examples, whatever that loss is.

    Parameters
    ----------
    theta
        ``[d]``.
    x, y
        ``[b, *input_shape]``, ``[b]`` or None for a model that needs no labels.

    Returns
    -------
    gradient
        ``[d]``.
    loss
        A scalar.
    """
    parameters = model.layout.leaves(theta, requires_grad=True)
    loss = model.loss(parameters, x, y).mean()
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    return model.layout.join(dict(zip(parameters, gradients, strict=True))), loss.detach()


class ModelPredictor:
    """A fixed θ as a predictor."""

    def __init__(self, model: FlatModel, theta: Tensor) -> None:
        self.model = model
        self.theta = theta
        self.parameters = model.layout.leaves(theta)

    @torch.no_grad()
    def log_probabilities(self, x: Tensor) -> Tensor:
        """``[b, ...] -> [b, C]``."""
        return F.log_softmax(self.model.forward(self.parameters, x), dim=1)

    def probabilities(self, x: Tensor) -> Tensor:
        """``[b, ...] -> [b, C]``; rows sum to one."""
        return self.log_probabilities(x).exp()

    @torch.no_grad()
    def losses(self, x: Tensor, y: Tensor | None) -> Tensor:
        """The model's own loss of each example, ``[b, ...], [b] -> [b]``: what is measured without classes."""
        return self.model.loss(self.parameters, x, y)

    def tensors(self) -> dict[str, Tensor]:
        """θ ``[d]``."""
        return {"theta": self.theta}


def predictors_of(model: FlatModel, **thetas: Tensor) -> list[dict[str, Predictor]]:
    """Name one fixed model per client: ``personal=theta [g, d]`` to a dict of predictors per client."""
    g = next(iter(thetas.values())).shape[0]
    return [{name: ModelPredictor(model, theta[i]) for name, theta in thetas.items()} for i in range(g)]


def first_batch(split: Split, size: int, generator: torch.Generator) -> Tensor:
    """Indices of one random batch of ``min(size, n)`` examples."""
    return next(batches(len(split), size, 1, generator))


def as_mapping(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The part of a state under ``prefix.``, without the prefix."""
    return {key.removeprefix(f"{prefix}."): value for key, value in state.items() if key.startswith(f"{prefix}.")}
