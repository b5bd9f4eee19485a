"""PFNM, called BNFed in papers/003: neurons of the clients' networks are matched before averaging.

M. Yurochkin, M. Agarwal, S. Ghosh, K. Greenewald, T. N. Hoang, Y. Khazaeni, Bayesian nonparametric federated learning
of neural networks, ICML 2019, arXiv 1905.12022, §3 and §4 (several rounds). Clients train networks with one hidden
layer of the model's width. The server matches their neurons (``neuron_matching``). The global network has one
neuron per atom, so its width changes, and a client continues from its own atoms. The authors classify; here a client's
weight for an output is the number of its examples that have the class or label, or of all its examples in regression.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms import base
from fedloom.algorithms.base import Cohort, Conversation, Round, Setup, conversation
from fedloom.algorithms.client import train
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.fedavg import FineTuningClient, PersonalizeRequest, Update
from fedloom.algorithms.local_sgd import LocalSGD
from fedloom.core.settings import Settings
from fedloom.errors import ExperimentError
from fedloom.messages import Message, Quantity, Replies, rows
from fedloom.models.flat import FlatModel
from fedloom.models.networks import MLP


class PFNMServer(base.ServerAlgorithm):
    """Server that keeps each client's last network, the atoms of its neurons, and its number of examples per output."""

    def __init__(self, settings: PFNMSettings, setup: Setup, generator: torch.Generator) -> None:
        super().__init__(settings, setup)
        try:
            from scipy.optimize import linear_sum_assignment
        except ImportError as error:
            raise ExperimentError(
                "pfnm needs the package scipy, which is not installed", hint="pip install 'fedloom[pfnm]'"
            ) from error
        self._assign = lambda gain: torch.from_numpy(linear_sum_assignment(gain.numpy(), maximize=True)[1])
        self.sizes |= {"s": setup.model.layout.size, "C": setup.outputs}
        start, n = setup.model.init(generator, setup.dtype), len(setup.roster)
        self.state = {
            "start": start,
            "models": torch.zeros(n, len(start), dtype=setup.dtype),
            "atoms": torch.full((n, width(setup)), -1),  # -1 for a client that no round has counted
            "classes": torch.zeros(n, setup.outputs, dtype=torch.float64),
        }

    def update_bounds(self, examples: int) -> Mapping[str, float]:
        """Return the bounds of local training and of the example counts."""
        local: LocalSGD = self.settings.local
        return local.update_bounds(examples) | {"classes": examples}

    def train_round(self, round: Round) -> base.Statistics:
        """Train clients from their atoms, or from a network of their own, and rematch all known networks."""
        cohort = round.sample()
        rows = [self.setup.rows[client] for client in cohort.clients]
        global_network, known_rows = self._merged(), self.state["atoms"][:, 0] >= 0
        starts = []
        for i, client in zip(rows, cohort.clients, strict=True):
            if global_network is not None and known_rows[i]:  # line 3
                starts.append(network(global_network[0][self.state["atoms"][i]], global_network[1], self.setup))
            else:
                starts.append(self.setup.model.init(round.generator(f"start/{client}"), self.setup.dtype))
        theta = torch.stack(starts)
        updates = cohort.send(Subnetwork(theta), CountedUpdate)  # line 4
        present_rows = torch.tensor(rows)[updates.present]
        models, atoms, classes = (self.state[name].clone() for name in ("models", "atoms", "classes"))
        models[present_rows] = (theta + updates.delta_theta)[updates.present]
        classes[present_rows] = updates.classes[updates.present]
        known_rows[present_rows] = True
        if not models.isfinite().all():
            raise FloatingPointError("a client's network is not finite and cannot be matched")
        s = self.settings
        atoms[known_rows] = match(  # line 5
            neurons(self.setup, models[known_rows])[0], self._precisions(classes[known_rows]), atoms[known_rows],
            self._assign, prior=s.sigma0**-2, gamma=s.gamma, cap=s.cap, sweeps=s.sweeps,
            generator=round.generator("sweeps"), centre=self._centre(),
        )  # fmt: skip
        self.state |= {"models": models, "atoms": atoms, "classes": classes}
        return base.statistics_of(updates) | {"width": float(atoms.max() + 1)}

    def personalize(self, cohort: Cohort) -> Replies[Any]:
        """Send the global network, or an untrained one of the clients' width before the first round."""
        global_network = self._merged()
        return cohort.send(
            PersonalizeRequest(self.state["start"] if global_network is None else network(*global_network, self.setup))
        )

    def _centre(self) -> Tensor:
        """Return μ0 of a neuron's numbers ``[K]``: 0 except for its bias."""
        incoming = self.setup.model.layout.entries[0][1][1]
        centre = torch.zeros(incoming + 1 + self.setup.outputs, dtype=torch.float64)
        centre[incoming] = self.settings.bias_mean
        return centre

    def _precisions(self, classes: Tensor) -> Tensor:
        """Return the precisions of a neuron's numbers by network ``[J, K]``, from example counts ``[J, C]``."""
        incoming = self.setup.model.layout.entries[0][1][1] + 1
        shares = torch.ones_like(classes)
        if self.settings.output == "classes":
            shares = classes / classes.sum(0).clamp(min=1)
        sigma: float = self.settings.sigma
        return torch.cat([torch.ones(len(classes), incoming, dtype=torch.float64), shares], 1) / sigma**2

    def _merged(self) -> tuple[Tensor, Tensor] | None:
        """Return neurons ``[I, K]`` and output biases ``[C]`` of the global network (line 6); None before any count."""
        is_matched, prior = self.state["atoms"][:, 0] >= 0, self.settings.sigma0**-2
        if not is_matched.any():
            return None
        (v, out), p = (
            neurons(self.setup, self.state["models"][is_matched]),
            self._precisions(self.state["classes"][is_matched]),
        )
        total, precision, _ = pool(v, p, self.state["atoms"][is_matched], prior, self._centre())
        p_out, mean = p[:, -out.shape[1] :], self.settings.bias_mean
        return total / precision, (prior * mean + (p_out * out).sum(0)) / (prior + p_out.sum(0))


class PFNMClient(FineTuningClient):
    """Client that trains its own network and predicts with the global one."""

    @conversation
    def train(self, clients: ClientGroup, opening: Subnetwork) -> Conversation:
        """Perform line 4."""
        trained = train(self.setup.model, clients, opening.theta, self.settings.local)
        labels = [client.train.y for client in clients.clients]
        task, outputs = self.setup.model.task, self.setup.outputs
        counts = [task.examples_per_output(y, outputs) for y in labels if y is not None]
        yield CountedUpdate(trained.theta - opening.theta, trained.steps, trained.loss, torch.stack(counts))
        return None

    def model_of(self, theta: Tensor) -> FlatModel:
        """Return the model of the global network's width."""
        return wide(self.setup, theta)


def width(setup: Setup) -> int:
    """Return L, the number of hidden units of a client's network."""
    return setup.model.layout.entries[0][1][0]


def neurons(setup: Setup, models: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights in, bias and weights out of each hidden unit, and biases: ``[n, L, K], [n, outputs]``."""
    first, bias, last, out = torch.split(models, setup.model.layout.sizes, dim=1)
    n, units = len(models), width(setup)
    parts = [first.view(n, units, -1), bias.view(n, units, 1), last.view(n, -1, units).transpose(1, 2)]
    return torch.cat(parts, dim=2).double(), out.double()


def network(units: Tensor, out: Tensor, setup: Setup) -> Tensor:
    """Return θ of one network of any width, the inverse of :func:`neurons`."""
    outputs = len(out)
    parts = units[:, : -outputs - 1], units[:, -outputs - 1], units[:, -outputs:].T, out
    return torch.cat([part.reshape(-1) for part in parts]).to(setup.dtype)


def wide(setup: Setup, theta: Tensor) -> FlatModel:
    """Return the model with the number of hidden units of θ ``[..., d]``."""
    (inputs, outputs), model = (setup.model.layout.entries[0][1][1], setup.outputs), setup.model
    units = (theta.shape[-1] - outputs) // (inputs + 1 + outputs)
    assert isinstance(model, MLP)
    module = type(model)(setup.input_shape, [units], outputs)
    module.task = model.task
    return module


class PFNMSettings(Settings):
    """Keys of ``algorithm`` for PFNM."""

    sigma: float = Field(default=1.0, ge=1e-6, le=1e6, description="σ, deviation of a client's neuron from its atom")
    sigma0: float = Field(default=1.0, ge=1e-6, le=1e6, description="σ0, deviation of atoms from 0")
    bias_mean: float = Field(
        default=0.0, ge=-1e6, le=1e6, description="μ0 of biases, hidden and output; the authors' code has 0.1"
    )
    gamma: float = Field(default=1.0, ge=1e-6, le=1e6, description="γ; larger values give more atoms")
    sweeps: int = Field(default=5, ge=1, description="passes over the clients in a matching")
    cap: int = Field(default=700, ge=1, description="maximum width of the global network")
    output: Literal["classes", "uniform"] = Field(
        default="classes",
        description="precision of outgoing weights: 1/σ² times the client's share of an output's examples (those of a "
        "class), or 1/σ²",
    )
    local: LocalSGD = Field(default=LocalSGD(epochs=1, lr=0.5, momentum=0.0), description="local training in a round")
    personalize_steps: int = Field(default=0, ge=0, description="local SGD steps from the global network to personal")


class Subnetwork(Message):
    """Opening of training: the client's own network, made of its atoms."""

    theta: Tensor = rows(Quantity.MODEL)  # [c, d]


class CountedUpdate(Update):
    """Result of local training, and the client's number of examples per output."""

    classes: Tensor = rows(Quantity.COUNT, "C")  # [c, C] float64


class ProbabilisticMatching(base.Algorithm):
    """Averaging of networks whose neurons are matched."""

    name = "pfnm"
    no_sums = "matches each client's own neurons at the server"
    settings = PFNMSettings
    example = {"sweeps": 2}
    server = PFNMServer
    client = PFNMClient
    messages = (Subnetwork, CountedUpdate, PersonalizeRequest)
    tasks = ("classification", "multilabel", "regression")
    restriction = "It matches the neurons of perceptrons, whose outputs have no pixels or positions."
    predictors = {"personal": "PFNM + fine-tuning", "global": "PFNM"}
    roster_data = "a network of each client"
    no_example_privacy = "Clients send their numbers of examples of each class, which have no noise."

    def check_model(self, settings: Any, model: FlatModel) -> None:
        """Reject models other than a perceptron with one hidden layer, or wider than the global network may become."""
        super().check_model(settings, model)
        if not isinstance(model, MLP) or len(model.layout.entries) != 4:
            raise ExperimentError(
                "model.name: pfnm matches the neurons of one hidden layer; use mlp with one number in hidden",
                key="model.name",
            )
        if settings.cap < (units := model.layout.entries[0][1][0]):
            raise ExperimentError(
                f"algorithm.cap: the model has {units} hidden units, and the cap is {settings.cap}; raise it",
                key="algorithm.cap",
                found=settings.cap,
            )


PFNM = ProbabilisticMatching()


Assign = Callable[[Tensor], Tensor]
"""Assignment ``[L, I] -> [L]`` of rows to distinct columns with the largest sum."""


def pool(
    neurons: Tensor, precisions: Tensor, assignment: Tensor, prior: float, centre: Tensor | float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return μ0/σ0² + Σ p v, 1/σ0² + Σ p, and the number of neurons of each atom: ``[I, K], [I, K], [I]``.

    Parameters
    ----------
    neurons
        ``[J, L, K]`` float64.
    precisions
        ``[J, K]``.
    assignment
        ``[J, L]`` atoms 0 ... I - 1, each assigned at least once.
    prior
        1/σ0².
    centre
        μ0, the mean of an atom: one number, or ``[K]``.
    """
    width = int(assignment.max()) + 1 if assignment.numel() else 0
    total = neurons.new_zeros(width, neurons.shape[2]) + prior * centre
    precision, count = torch.full_like(total, prior), neurons.new_zeros(width)
    for v, p, atoms in zip(neurons, precisions, assignment, strict=True):
        total[atoms] += p * v
        precision[atoms] += p
        count[atoms] += 1
    return total, precision, count


def gains(
    v: Tensor, p: Tensor, total: Tensor, precision: Tensor, count: Tensor, networks: int, prior: float, gamma: float,
    new: int, centre: Tensor | float = 0.0,
) -> Tensor:  # fmt: skip
    """Return each neuron's gain in twice the log posterior, by atom: ``[L, I + new]`` (eq. 9 and 10).

    Parameters
    ----------
    v, p
        Neurons ``[L, K]`` of the network and their precisions ``[K]``.
    total, precision, count
        Values of :func:`pool` for the atoms of the other networks.
    networks
        J, including this one.
    new
        Number of columns for atoms that are not yet assigned.
    centre
        As for :func:`pool`.
    """
    a, q = p * v, precision + p
    old = (total.square() / q - total.square() / precision).sum(1) + 2 * (count / (networks - count)).log()
    old = old + 2 * a @ (total / q).T + a.square() @ (1 / q).T
    empty = torch.zeros_like(p) + prior * centre
    fresh = ((empty + a).square() / (prior + p) - empty.square() / prior).sum(1, keepdim=True)
    fresh = fresh + 2 * math.log(gamma / networks)
    return torch.cat([old, fresh - 2 * torch.arange(1, new + 1, dtype=v.dtype).log()], dim=1)


def match(
    neurons: Tensor,
    precisions: Tensor,
    assignment: Tensor,
    assign: Assign,
    *,
    prior: float,
    gamma: float,
    cap: int,
    sweeps: int,
    generator: torch.Generator,
    centre: Tensor | float = 0.0,
) -> Tensor:
    """Match the neurons of J networks, each in turn given the others, in ``sweeps`` passes in random order.

    Parameters
    ----------
    neurons, precisions, prior, centre
        As for :func:`pool`.
    assignment
        Initial assignment, ``[J, L]``; -1 in the row of a network without one.
    cap
        Maximum number of atoms, at least L.

    Returns
    -------
    Tensor
        ``[J, L]``, atoms 0 ... I - 1.
    """
    assignment, length = assignment.clone(), assignment.shape[1]
    for _ in range(sweeps):
        for j in torch.randperm(len(neurons), generator=generator).tolist():
            others = assignment[:, 0] >= 0
            others[j] = False
            assignment[others] = without_gaps(assignment[others])
            total, precision, count = pool(neurons[others], precisions[others], assignment[others], prior, centre)
            new = min(length, cap - len(count))
            args = total, precision, count, len(neurons), prior, gamma, new, centre
            assignment[j] = assign(gains(neurons[j], precisions[j], *args))
    return without_gaps(assignment)


def without_gaps(assignment: Tensor) -> Tensor:
    """Return the assignment with its atoms renumbered 0 ... I - 1 in the same order."""
    is_used = torch.bincount(assignment.flatten()) > 0
    return (is_used.cumsum(0) - 1)[assignment]
