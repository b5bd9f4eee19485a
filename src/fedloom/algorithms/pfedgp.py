"""pFedGP: a shared body, and a tree of Gaussian processes on its features for each client.

I. Achituve, A. Shamsian, A. Navon, G. Chechik, E. Fetaya, Personalized federated learning with Gaussian processes,
NeurIPS 2021, arXiv 2106.15482, Algorithm 1 with the predictive objective. A client's classes are split in two
recursively; at each split a Gaussian process on the normalized features decides between the sides. Pólya-gamma
variables ω make its posterior Gaussian, and Gibbs sampling draws them. Only the body is trained and sent: the kernel
has fixed parameters, and the processes are rebuilt at each visit. Line numbers refer to docs/algorithms/pfedgp.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from polyagamma import random_polyagamma
from pydantic import Field, model_validator
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedloom.algorithms.batches import PIECE, train_examples
from fedloom.algorithms.client import LocalTrainer, Trained
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.fedavg import Averaging, FedAvg
from fedloom.algorithms.local_sgd import LocalSGD, check_overshoot
from fedloom.data.federated import ClientData
from fedloom.data.inputs import single
from fedloom.errors import DataError
from fedloom.models.flat import FlatModel
from fedloom.models.predictors import Predictor, Predictors

NODES, WEIGHTS = map(torch.from_numpy, np.polynomial.hermite.hermgauss(20))
"""Nodes and weights of Gauss-Hermite quadrature, which averages the logistic function over a Gaussian."""

CACHED = 2**18
"""Number of float64 values, 2 MiB, that stay in a processor's cache."""


# --- the tree ---------------------------------------------------------------------------------------------------------


def tree(z: Tensor, y: Tensor, classes: int) -> Tensor:
    """Return the splits of the classes that occur, ``[c - 1, C]`` int64: 1 or -1 for a class's side, 0 for neither.

    Each part of two or more classes is split by 2-means on the class means of ``z`` ``[n, f]``.
    """
    present = torch.bincount(y, minlength=classes).nonzero()[:, 0]
    means = {int(c): z[y == c].nan_to_num().double().mean(0) for c in present}
    splits, parts = torch.zeros(0, classes, dtype=torch.int64), [sorted(means)]
    while parts:
        part = parts.pop()
        if len(part) < 2:
            continue
        second = two_means(torch.stack([means[c] for c in part])).tolist()
        sides = [[c for c, other in zip(part, second, strict=True) if other == side] for side in (False, True)]
        split = torch.zeros(1, classes, dtype=torch.int64)
        split[0, sides[0]], split[0, sides[1]] = 1, -1
        splits = torch.cat([splits, split])
        parts += sides[::-1]
    return splits


def two_means(points: Tensor) -> Tensor:
    """Return the members of the second of two clusters, ``[m, f] -> [m]`` bool, by Lloyd's algorithm.

    It starts from the two farthest points and keeps them apart, so no cluster is empty. It uses no randomness.
    """
    i, j = torch.triu_indices(len(points), len(points), 1)
    farthest = int((points[i] - points[j]).square().sum(1).argmax())
    one, other = int(i[farthest]), int(j[farthest])
    second = torch.arange(len(points)) == other
    centres = points[[one, other]]
    for _ in range(100):
        near, far = ((points - centre).square().sum(1) for centre in centres)
        is_far = far < near
        is_far[one], is_far[other] = False, True
        if torch.equal(is_far, second):
            break
        second, centres = is_far, torch.stack([points[~is_far].mean(0), points[is_far].mean(0)])
    return second


# --- one Gaussian process ---------------------------------------------------------------------------------------------


def unit(z: Tensor) -> Tensor:
    """Scale features ``[n, f]`` to norm 1, in float64; overflowed values are clamped to the largest number."""
    return F.normalize(z.nan_to_num().double(), dim=1)


def kernel(a: Tensor, b: Tensor, s: PFedGPSettings) -> Tensor:
    """Return ``outputscale`` · exp(-‖a_i - b_j‖² / (2 ``lengthscale``²)), ``[n, f], [m, f] -> [n, m]``."""
    squared = a.square().sum(1)[:, None] + b.square().sum(1) - 2 * a @ b.T
    return s.outputscale * (-0.5 / s.lengthscale**2 * squared.clamp(min=0)).exp()


def prior(a: Tensor, s: PFedGPSettings) -> Tensor:
    """Return the covariance of the process at its training examples, ``[n, f] -> [n, n]``."""
    return kernel(a, a, s) + s.jitter * torch.eye(len(a), dtype=a.dtype, device=a.device)


def posterior(k: Tensor, cross: Tensor, own: float, kappa: Tensor, omega: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and variance ``[S, b]`` of the process at b points, given ω.

    With Ω = diag(ω): mean = cross (K + Ω⁻¹)⁻¹ κ/ω and variance = own - diag(cross (K + Ω⁻¹)⁻¹ crossᵀ), from the
    Cholesky factor of I + Ω^½ K Ω^½, which is well conditioned for any K and ω.

    Parameters
    ----------
    k, cross, own
        Covariance at n examples ``[n, n]``, between points and examples ``[b, n]``, and variance at a point.
    kappa, omega
        ±1/2 for the sides of the examples, ``[n]``; ω of S chains, ``[S, n]``.
    """
    mean, variance = Posterior.apply(k, cross, own, kappa, omega)
    return mean, variance.clamp(min=1e-12)


class Posterior(torch.autograd.Function):
    """Autograd function of ``posterior`` with a closed-form gradient, at a third of the cost through Cholesky.

    With A = K + Ω⁻¹, α = A⁻¹ κ/ω and w_i = A⁻¹ cross_iᵀ for point i, the gradients of mean_i are α in cross_i and -w_i
    αᵀ in K, and those of variance_i are -2 w_i and w_i w_iᵀ. κ and ω are constants. It cannot be differentiated twice.
    """

    @staticmethod
    def forward(ctx: Any, k: Tensor, cross: Tensor, own: float, kappa: Tensor, omega: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance, unclamped."""
        saved: list[tuple[Tensor, ...]] = []
        means, variances = [], []
        for root in in_pieces(omega.sqrt(), len(k)):
            factor = cholesky_of(k, root)
            half = torch.linalg.solve_triangular(factor, root[:, :, None] * cross.T, upper=False)
            solved = torch.linalg.solve_triangular(factor, (kappa / root)[:, :, None], upper=False)
            means.append((half * solved).sum(1))
            variances.append(own - half.square().sum(1))
            if any(ctx.needs_input_grad):
                saved.append((root, factor, half, solved))
        ctx.kept = saved
        return torch.cat(means), torch.cat(variances)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of K and cross from those of mean and variance, summed over the chains."""
        of_k = of_cross = torch.zeros((), dtype=slopes[0].dtype, device=slopes[0].device)
        first = 0
        for root, factor, half, solved in ctx.kept:
            mean, variance = (slope[first : first + len(root), :, None] for slope in slopes)
            first += len(root)
            up = factor.mT
            w = root[:, :, None] * torch.linalg.solve_triangular(up, half, upper=True)
            alpha = root[:, :, None] * torch.linalg.solve_triangular(up, solved, upper=True)
            weighted, along = variance * w.mT, mean * alpha.mT
            of_k = of_k + (w @ (weighted - along)).sum(0)
            of_cross = of_cross + (along - 2 * weighted).sum(0)
        return of_k, of_cross, None, None, None


def in_pieces(chains: Tensor, n: int) -> tuple[Tensor, ...]:
    """Split chains ``[S, n]`` so that the ``[n, n]`` matrices of a piece fit together in a processor's cache."""
    return torch.split(chains, max(1, CACHED // n**2)) if chains.device.type == "cpu" else (chains,)


def cholesky_of(k: Tensor, root: Tensor) -> Tensor:
    """Return the Cholesky factors ``[S, n, n]`` of I + Ω^½ K Ω^½."""
    scaled = (root[:, :, None] * k).mul_(root[:, None, :])
    scaled.diagonal(dim1=1, dim2=2).add_(1)
    factor: Tensor = torch.linalg.cholesky(scaled)
    return factor


def log_sides(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probabilities ``[b]`` of the sides 1 and -1: E σ(±f), f ~ N(mean, variance), averaged over chains."""
    nodes, weights = NODES.to(mean.device), WEIGHTS.to(mean.device)
    f = mean[..., None] + (2 * variance)[..., None].sqrt() * nodes
    log_weights = (weights / weights.sum()).log() - np.log(len(mean))
    first, second = ((F.logsigmoid(v) + log_weights).logsumexp((0, 2)) for v in (f, -f))
    return first, second


@torch.no_grad()
def gibbs(k: Tensor, kappa: Tensor, chains: int, steps: int, random: np.random.Generator) -> Tensor:
    """Return ω ``[S, n]`` of S chains after some steps: f | ω, then ω | f ~ PG(1, f); the first f is from the prior.

    f | ω is drawn from the prior and corrected by its residual: f₀ + K (K + Ω⁻¹)⁻¹ (κ/ω - f₀ - e) with
    e ~ N(0, Ω⁻¹). This needs one Cholesky factor instead of two.
    """
    n, factor = len(k), torch.linalg.cholesky(k)

    def normal() -> Tensor:
        return torch.from_numpy(random.standard_normal((chains, n)))

    f = normal() @ factor.T
    for _ in range(steps):
        omega = polya_gamma(f, random)
        f, noise = normal() @ factor.T, normal() / omega.sqrt()
        f = f + conditional_change(k, kappa / omega - f - noise, omega)
    return polya_gamma(f, random)


def conditional_change(k: Tensor, residual: Tensor, omega: Tensor) -> Tensor:
    """Return K (K + Ω⁻¹)⁻¹ residual, ``[S, n]``."""
    solved = [
        root * torch.cholesky_solve((root * piece)[:, :, None], cholesky_of(k, root))[:, :, 0]
        for root, piece in zip(in_pieces(omega.sqrt(), len(k)), in_pieces(residual, len(k)), strict=True)
    ]
    return torch.cat(solved) @ k


def polya_gamma(f: Tensor, random: np.random.Generator) -> Tensor:
    """Draw ω ~ PG(1, f) elementwise."""
    return torch.from_numpy(random_polyagamma(1.0, f.numpy(), random_state=random))


def numpy_generator(generator: torch.Generator) -> np.random.Generator:
    """Return a NumPy generator seeded from a client's generator."""
    return np.random.default_rng(int(torch.randint(2**62, (1,), generator=generator)))


# --- training ---------------------------------------------------------------------------------------------------------


def predictive_loss(z: Tensor, y: Tensor, splits: Tensor, s: PFedGPSettings, random: np.random.Generator) -> Tensor:
    """Return Σ over the splits of the mean of -log p(side) of held-out examples; ω is constant in the gradient."""
    u, y, loss = unit(z.cpu()), y.cpu(), z.sum().cpu().double() * 0  # 0, also without held-out examples
    for split in splits:
        side = split[y]
        train_parts, test_parts = [], []
        for sign in (1, -1):  # line 6
            members = torch.from_numpy(random.permutation((side == sign).nonzero()[:, 0].numpy()))
            held_count = int(s.held_out * len(members))
            test_parts.append(members[:held_count])
            train_parts.append(members[held_count:])
        rows, queries = torch.cat(train_parts), torch.cat(test_parts)
        if len(queries):
            k, kappa = prior(u[rows], s), side[rows].double() / 2
            omega = gibbs(k.detach(), kappa, s.chains, s.gibbs_steps, random)  # line 7
            sides = log_sides(*posterior(k, kernel(u[queries], u[rows], s), s.outputscale, kappa, omega))  # line 8
            loss = loss - torch.where(side[queries] > 0, *sides).mean()
    return loss


def visit(model: FlatModel, group: ClientGroup, i: int, body: Tensor, s: PFedGPSettings) -> Trained:
    """Perform lines 3-10: SGD steps on the body of one client, each on all of its examples."""
    client, sgd = group.clients[i], s.sgd
    local, x, y = LocalTrainer(model, group, members=[i]), *labelled(client)
    if (wrong := unusable(s, len(x), int(client.present.sum()))) is not None:
        raise DataError(f"client {client.id}: {wrong}")
    w, random = (
        local.parameters(F.pad(body, (0, model.layout.size - body.shape[1]))),
        numpy_generator(group.generator(i, "gp")),
    )
    leaves, losses, splits = [w[name] for name in model.layout.body], [], None
    step = local.sgd(leaves, sgd)
    for _ in range(s.steps):
        with torch.enable_grad(), local.drawing(local.seed()):
            z = model.in_training().features(w, x)
            if splits is None:
                splits = tree(z.detach().cpu(), y.cpu(), client.classes)  # line 4
            loss = predictive_loss(z, y, splits, s, random)
            gradients = list(torch.autograd.grad(loss, leaves, materialize_grads=True))
        losses.append(torch.where(z.isfinite().all().cpu(), loss.detach(), torch.nan)[None])
        step(list(torch._foreach_add(gradients, [p.detach() for p in leaves], alpha=s.weight_decay)), None)  # line 9
    return local.trained(local.join(w)[:, : body.shape[1]], losses, [s.steps], "lr", s.lr)


def labelled(client: ClientData) -> tuple[Tensor, Tensor]:
    """Return a client's train examples and labels."""
    split = train_examples(client, labelled=True)
    assert split.y is not None
    return single(split.x), split.y


def unusable(s: PFedGPSettings, examples: int, classes: int) -> str | None:
    """Return why a client cannot train; None if it can."""
    if classes == 1:
        return "its train examples are of one class, but a Gaussian process decides between two or more"
    if examples > s.max_examples:
        return f"it has {examples} train examples, more than algorithm.max_examples ({s.max_examples}) permits"
    return None


# --- the predictor of a client ----------------------------------------------------------------------------------------


class GPTree(Predictor):
    """Predictor of a client: the shared body, and the Gaussian processes of its tree, fitted to its train split.

    Parameters
    ----------
    body
        ``[s]``.
    random
        Generator that draws ω.
    """

    def __init__(
        self, model: FlatModel, body: Tensor, client: ClientData, s: PFedGPSettings, random: np.random.Generator
    ) -> None:
        self.model, self.settings = model, s
        x, y = labelled(client)
        leaves = model.layout.leaves(F.pad(body, (0, model.layout.size - len(body))))
        self.parameters = {name: leaves[name] for name in (*model.layout.body, *model.layout.buffers)}
        with torch.no_grad():
            z = torch.cat([model.features(self.parameters, piece) for piece in torch.split(x, PIECE)]).cpu()
        y, u, splits = y.cpu(), unit(z), tree(z, y.cpu(), client.classes)  # lines 11-12
        self.parameters |= {"gp.splits": splits.to(x.device), "gp.present": client.present.to(x.device).long()}
        for i, split in enumerate(splits):
            rows = split[y].nonzero()[:, 0]
            kappa = split[y[rows]].double() / 2
            omega = gibbs(prior(u[rows], s), kappa, s.chains_predict, s.gibbs_steps, random)  # line 13
            for name, tensor in (("features", u[rows]), ("kappa", kappa), ("omega", omega)):
                self.parameters[f"gp.{i}.{name}"] = tensor.to(x.device)

    def named(self) -> dict[str, Tensor]:
        """Return the body's entries, and features, sides and ω of each Gaussian process, as ``gp.0.omega``."""
        return self.parameters

    def predict(self, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return log-probabilities ``[b, ...] -> [b, C]``, a class's being the sum over its path (line 14)."""
        s, z = self.settings, self.model.features(tensors, x)
        u = unit(z)
        log_p = torch.where(tensors["gp.present"] > 0, 0.0, -torch.inf).to(u).expand(len(u), -1)
        for i, split in enumerate(tensors["gp.splits"]):
            features, kappa, omega = (tensors[f"gp.{i}.{name}"] for name in ("features", "kappa", "omega"))
            both = log_sides(*posterior(prior(features, s), kernel(u, features, s), s.outputscale, kappa, omega))
            for side, log_side in zip((1, -1), both, strict=True):
                log_p = log_p + torch.where(split == side, log_side[:, None], 0.0)
        return log_p.to(z.dtype)


class PFedGPSettings(Averaging):
    """Keys of ``algorithm`` for pFedGP; ``weighting`` defaults to the paper's, uniform."""

    weighting: Literal["examples", "uniform"] = Field(default="uniform", description="average by n_i or uniformly")
    steps: int = Field(default=1, ge=1, description="SGD steps in a round, each on all of the train split")
    lr: float = Field(default=0.05, gt=0, description="learning rate")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="momentum, fresh at every visit")
    weight_decay: float = Field(
        default=1e-3, ge=0, description="weight decay: this times the body is added to the gradient"
    )
    clip: float | None = Field(default=50.0, gt=0, description="largest gradient norm; null does not clip")
    held_out: float = Field(
        default=0.5, gt=0, lt=1, description="fraction of each side that a step predicts from the rest"
    )
    gibbs_steps: int = Field(default=5, ge=1, description="Gibbs steps of each chain")
    chains: int = Field(default=20, ge=1, description="Gibbs chains in training")
    chains_predict: int = Field(default=30, ge=1, description="Gibbs chains of a client's predictor")
    outputscale: float = Field(default=8.0, ge=1e-6, le=1e6, description="variance of the Gaussian processes")
    lengthscale: float = Field(
        default=1.0, ge=1e-6, le=1e6, description="length scale of the kernel, for features of norm 1"
    )
    jitter: float = Field(default=1e-3, ge=1e-6, description="number added to the diagonal of the kernel matrix")
    max_examples: int = Field(
        default=1000, ge=2, description="maximum number of a client's train examples; a step costs its cube"
    )

    @model_validator(mode="after")
    def _shrinking(self) -> Self:
        check_overshoot("weight_decay", self.weight_decay, "lr", self.lr)
        return self

    @property
    def sgd(self) -> LocalSGD:
        """SGD settings of the body."""
        return LocalSGD(steps=self.steps, lr=self.lr, momentum=self.momentum, clip=self.clip)


class PFedGP(FedAvg):
    """Shared body, and a tree of Gaussian processes on each client."""

    name = "pfedgp"
    settings = PFedGPSettings
    example = {"steps": 2, "gibbs_steps": 2, "chains": 3, "chains_predict": 4, "clip": None}
    tasks = ("classification",)
    restriction = "Its Gaussian processes decide between the two sides of splits of the classes."
    needs = ("labels", "default loss")
    augments = False
    needs_one_input = True
    predictors = {"personal": "pFedGP"}
    shared = "body"
    no_example_privacy = (
        "Each step is over all examples together, by Gaussian processes, so that no example's part of it can be "
        "clipped."
    )

    def train(self, model: FlatModel, group: ClientGroup, body: Tensor, s: PFedGPSettings) -> Trained:
        """Visit the clients of a group one by one: each has a tree and matrices of its own size."""
        return Trained.joined([visit(model, group, i, body[i : i + 1], s) for i in range(len(group))])

    def personalize(self, model: FlatModel, group: ClientGroup, body: Tensor, s: PFedGPSettings) -> Predictors:
        """Return ``personal`` for seen and unseen clients alike, without training."""
        predictors: Predictors = []
        for i, client in enumerate(group.clients):
            if (wrong := unusable(s, len(client.train), 2)) is not None:
                raise DataError(f"client {client.id}: {wrong}")
            predictors.append(
                {"personal": GPTree(model, body[i], client, s, numpy_generator(group.generator(i, "gp")))}
            )
        return predictors

    def update_bounds(self, s: Any, examples: int) -> Mapping[str, float]:
        """Return the bounds of the body's training."""
        bounds: Mapping[str, float] = s.sgd.update_bounds(examples)
        return bounds

    def check_client(self, settings: Any, examples: int, classes: int) -> str | None:
        """Reject a client with one class, or with more examples than a step can process."""
        return unusable(settings, examples, classes)


PFEDGP = PFedGP()
