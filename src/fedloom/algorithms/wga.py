"""Weighted gradient averaging and Bias Correction.

E. M. Chayti, S. P. Karimireddy, S. U. Stich, N. Flammarion, M. Jaggi, Linear speedup in personalized collaborative
learning, arXiv 2111.05968 (papers/004). User 0 minimizes its own objective f_0 with stochastic gradients of N helpers
at its own state θ (Algorithm 1). The aggregation on user 0 is one of four rules: Alone, WGA (Algorithm 2), Bias
Correction (Algorithm 3), and Bias Correction with an oracle (§5.1). Our copy of the paper lacks its formulas;
docs/algorithms/wga.md gives our reading. Beyond the paper (§7), every client can be user 0 at once, a round can have
several exchanges, and the corrected gradient can pass through momentum or Adam.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.algorithms import base, collaboration
from fedloom.algorithms.base import Cohort, Conversation, Round, Setup, conversation
from fedloom.algorithms.client import LocalTrainer, adapt
from fedloom.algorithms.client_group import Batch, ClientGroup
from fedloom.algorithms.collaboration import CollaborationConstants, next_bias, weighted_gradient
from fedloom.algorithms.fedavg import or_shared_alone
from fedloom.algorithms.local_sgd import LocalSGD
from fedloom.algorithms.optimizers import adam_direction
from fedloom.core.settings import Settings
from fedloom.errors import ExperimentError
from fedloom.messages import Message, Quantity, Replies, broadcast, rows
from fedloom.models.predictors import Predictors

# --- the server -------------------------------------------------------------------------------------------------------


class WGAServer(base.ServerAlgorithm):
    """Server that keeps, for each user, its state θ, its bias estimate c, and its optimizer's moments."""

    settings: WGASettings

    def __init__(self, settings: WGASettings, setup: Setup, generator: torch.Generator) -> None:
        super().__init__(settings, setup)
        one = (settings.user,) if settings.user is not None else setup.roster[:1]
        self.always, users = (one, one) if settings.users == "one" else ((), setup.roster)
        self.row = {client: i for i, client in enumerate(users)}
        theta, counts = setup.model.init(generator, setup.dtype).repeat(len(users), 1), torch.zeros(len(users)).long()
        self.state = {"theta": theta}
        if settings.rule == "bc":
            self.state["bias"] = torch.zeros_like(theta)
        if settings.rule == "bc" and settings.beta == "harmonic":
            self.state["observed"] = counts
        if settings.optimizer != "sgd":
            self.state["first"] = torch.zeros_like(theta)
        if settings.optimizer == "adam":
            self.state |= {"second": torch.zeros_like(theta), "steps": counts.clone()}
        if settings.weights == "inverse_variance":
            # For each client of the roster: the sum of the estimates, and their number.
            self.state["variances"] = torch.zeros(len(setup.roster), 2, dtype=torch.float64)
        self.sizes["block"] = settings.block_of(setup.roster)

    def train_round(self, round: Round) -> base.Statistics:
        """Perform ``steps_per_round`` iterations of Algorithm 1 for every user in the cohort."""
        s, size, cohort = self.settings, self.sizes["block"], round.sample(always=self.always)
        users = [client for client in cohort.clients if client in self.row]
        blocks = [users[i : i + size] for i in range(0, len(users), size)]
        new = {name: tensor.clone() for name, tensor in self.state.items()}
        steps, losses = 0.0, []
        for step in range(s.steps_per_round):
            t = (round.number - 1) * s.steps_per_round + step
            responses: list[tuple[int, Replies[Gradients]]] = []
            for block in blocks:
                replies, truth = self._exchange(cohort, block, step, new["theta"])
                steps += replies.total(replies.steps) + (truth.total(truth.steps) if truth is not replies else 0.0)
                responses.append((len(block), replies))
                for j, user in enumerate(block):
                    position = cohort.clients.index(user)
                    if truth.present[position]:  # without its own gradient it makes no step
                        noise = round.generator(f"oracle/{step}/{user}")
                        self._move_user(new, cohort.clients, replies, truth, j, position, t, noise)
                        losses.append(float(replies.loss[position]))
            self._note_variances(new, cohort, responses)
        self.state = new
        statistics = {"client_steps": steps, "users": float(len(losses)) / s.steps_per_round}
        return statistics | ({"loss": sum(losses) / len(losses)} if losses else {})

    def _exchange(
        self, cohort: Cohort, block: Sequence[str], step: int, states: Tensor
    ) -> tuple[Replies[Gradients], Replies[Gradients]]:
        """Ask the cohort for gradients at the states of some users, and for the true ones if the rule has an oracle."""
        theta = states[[self.row[user] for user in block]]
        owners, number = torch.tensor([self.setup.rows[user] for user in block]).double(), torch.tensor([step]).double()
        replies = cohort.send(SharedStates(theta, owners, number), Gradients)
        return replies, cohort.send(TrueGradients(theta), Gradients) if self.settings.rule == "oracle" else replies

    def _move_user(
        self, new: dict[str, Tensor], clients: Sequence[str], replies: Replies[Gradients], truth: Replies[Gradients],
        j: int, position: int, t: int, noise: torch.Generator,
    ) -> None:  # fmt: skip
        """Make the step of the j-th user of a block, the client in row ``position``, along its aggregated gradient.

        That is g_t (papers/004): of its own gradient, and the weighted mean of those of N helpers, all ``[d]``.
        """
        s, row = self.settings, self.row[clients[position]]
        mine = {name: tensor[row] for name, tensor in new.items() if name != "variances"}
        gradients = replies.gradient[:, j]
        g, weights = gradients[position], self._weights(clients, gradients, truth.present, new, position)
        if s.rule != "alone" and weights.any():
            n = 1 / float(weights.square().sum())  # N, if the weights are equal
            helpers, beta = replies.mean(gradients, weights), 0.0
            bias: Tensor | float = 0.0
            if s.rule == "bc":
                beta = s.beta_at(int(mine.get("observed", t)), n)
                if "observed" in mine:  # for a harmonic β: the updates of this user's own c, including this one
                    mine["observed"] += 1
                bias = mine["bias"].clone()  # before this exchange: independent of this gradient's noise
                mine["bias"].copy_(next_bias(bias, g, helpers, beta))
            elif s.rule == "oracle":
                true = truth.gradient[:, j]
                spread = (s.oracle_variance / n / g.numel()) ** 0.5
                bias = replies.mean(true, weights) - true[position]
                bias = bias + spread * torch.randn(bias.shape, generator=noise, dtype=torch.float64).to(bias)
            g = weighted_gradient(g, helpers, s.alpha_at(t, n, beta), bias)
        if s.optimizer == "momentum":
            g = mine["first"].copy_(s.momentum * mine["first"] + g)
        if s.optimizer == "adam":
            mine["steps"] += 1
            g = adam_direction(g, mine["first"], mine["second"], int(mine["steps"]))
        mine["theta"] -= s.lr * g

    def personalize(self, cohort: Cohort) -> Replies[Any]:
        """Send each user its own state; other clients get the mean of all states and make their own steps from it."""
        theta = self.state["theta"]
        mean = theta.mean(0)
        mine = [self.row.get(client) if self.setup.same_clients else None for client in cohort.clients]
        states = torch.stack([mean if i is None else theta[i] for i in mine])
        steps = torch.tensor([[0.0 if i is not None else self.settings.personalize_steps] for i in mine])
        cohort.record("user", torch.tensor([[float(i is not None)] for i in mine], dtype=torch.float64))
        return cohort.send(UserModel(states, mean, steps.double()))

    def _weights(
        self, clients: Sequence[str], gradients: Tensor, present: Tensor, new: Mapping[str, Tensor], position: int
    ) -> Tensor:
        """Return the weights ``[c]`` of a user's helpers, given the user's row; they sum to 1, or are 0."""
        rule = self.settings.weights
        weights = present.double()
        weights[position] = 0
        tiny = torch.finfo(torch.float64).tiny ** 0.5
        if isinstance(rule, dict):
            weights *= torch.tensor([rule.get(client, 0.0) for client in clients], dtype=torch.float64)
        elif rule == "cosine":
            g = gradients.double()
            weights *= (g @ g[position] / (g.norm(dim=1) * g[position].norm()).clamp(min=tiny)).clamp(min=0)
        elif rule == "inverse_variance":
            variances = new["variances"][[self.setup.rows[client] for client in clients]]
            if bool((variances[weights > 0, 1] > 0).all()):  # none is known in the first exchange: equal weights
                weights /= (variances[:, 0] / variances[:, 1].clamp(min=1)).clamp(min=tiny)
        return weights / weights.sum() if bool(weights.any()) else weights

    def _note_variances(
        self, new: dict[str, Tensor], cohort: Cohort, responses: Sequence[tuple[int, Replies[Gradients]]]
    ) -> None:
        """Add this step's estimates of σ_i², one per client, averaged over all states; used from the next step on."""
        for position, client in enumerate(cohort.clients):
            measurements = [
                (states, replies.variance[position, 0]) for states, replies in responses if replies.present[position]
            ]
            if measurements and "variances" in new:
                variances = new["variances"][self.setup.rows[client]]
                variances[0] += sum(states * estimate for states, estimate in measurements) / sum(
                    states for states, _ in measurements
                )
                variances[1] += 1


# --- the client -------------------------------------------------------------------------------------------------------


class WGAClient(base.ClientAlgorithm):
    """Client that answers with gradients at other users' states, on its own data."""

    predictors = ("personal", "global")
    settings: WGASettings

    def __init__(self, settings: WGASettings, setup: Setup) -> None:
        super().__init__(settings, setup)
        weights = settings.weights if isinstance(settings.weights, dict) else {}
        for key, client in [("user", settings.user), *(("weights", client) for client in weights)]:
            if client is not None and client not in setup.roster:
                some = " or ".join(setup.roster[:1] + setup.roster[-1:])
                raise ExperimentError(
                    f"algorithm.{key}: {client!r} is not a seen client; choose one, such as {some}",
                    key=f"algorithm.{key}",
                    found=client,
                )

    @conversation
    def train(self, clients: ClientGroup, opening: SharedStates) -> Conversation:
        """Perform Algorithm 1: sample, compute, share, as often as the server asks."""
        s, model, roster, g = self.settings, self.setup.model, self.setup.roster, len(clients)
        local = LocalTrainer(model, clients)
        draws = local.batches(s.batch_size, [s.steps_per_round] * g, "train")
        message: SharedStates | TrueGradients = opening
        step = -1
        while True:
            if isinstance(message, SharedStates) and int(message.step) > step:
                step, batch = int(message.step), next(draws)
            gradient = message.theta.new_zeros(g, s.block_of(roster), model.layout.size)
            variance, loss, states, count = message.theta.new_zeros(4, g, 1, dtype=torch.float64)
            for j, state in enumerate(message.theta):
                theta = state.expand(g, -1)
                if isinstance(message, TrueGradients):
                    gradient[:, j], _ = local.gradient_at(theta, *local.everything())
                    count += 1
                    continue
                owner = roster[int(message.users[j])]
                own = torch.tensor([[client.id == owner] for client in clients.clients], device=theta.device)
                is_used = own if s.rule == "alone" else torch.ones_like(own)  # the others would be unused
                if is_used.any():
                    slope, local_loss, spread = gradient_of(local, theta, batch, halved=s.weights == "inverse_variance")
                    gradient[:, j] = torch.where(is_used, slope, 0)
                    variance, states, count = variance + spread * is_used, states + is_used, count + is_used
                    loss = torch.where(own, local_loss, loss)
            message = yield Gradients(gradient, variance / states.clamp(min=1), loss, count)

    @conversation
    def personalize(self, clients: ClientGroup, opening: UserModel) -> Predictors:
        """Return ``personal``, the client's own state or the mean after its own steps, and ``global``, the mean."""
        s, model, mean = self.settings, self.setup.model, opening.mean.expand(len(clients), -1)

        def stepped() -> dict[str, Tensor]:
            personal = opening.theta
            if new := [i for i, steps in enumerate(opening.steps.flatten().tolist()) if steps]:
                sgd = LocalSGD(steps=int(opening.steps.max()), batch_size=s.batch_size, lr=s.lr, momentum=0.0)
                personal = adapt(model, clients, personal, sgd, new, purpose="personalize", key="lr")
            return {"personal": personal, "global": mean}

        return or_shared_alone(model, clients, mean, stepped)


def gradient_of(
    local: LocalTrainer, theta: Tensor, batch: Batch, *, halved: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a batch's gradient at θ ``[g, d]``, its loss, and the gradient's variance, ``[g, 1]`` float64.

    An unbiased estimate of the variance follows from the two halves of a batch; it is 0 for one that is not
    ``halved``. With b₁ + b₂ = b independent examples, E‖g₁ - g₂‖² = s² (1/b₁ + 1/b₂), where s²/b is the variance of the
    whole. A client with one example is lost.
    """
    if not halved:
        g, loss = local.gradient_at(theta, batch)
        return g, loss.double()[:, None], torch.zeros_like(loss, dtype=torch.float64)[:, None]
    for i, n in zip(local.members, local.sizes, strict=True):
        if n < 2:
            local.group.fail_client(i, "it has one train example, but a variance needs two")
    one, other, share = local.halves(batch)
    (g_1, loss_1), (g_2, loss_2) = local.gradient_at(theta, one), local.gradient_at(theta, other)
    variance = (g_1 - g_2).double().square().sum(1, keepdim=True) * share * (1 - share)
    a, b = share.to(g_1.dtype), (1 - share).to(g_1.dtype)
    return a * g_1 + b * g_2, (a[:, 0] * loss_1 + b[:, 0] * loss_2).double()[:, None], variance


# --- settings ---------------------------------------------------------------------------------------------------------

Fraction = Annotated[float, Field(ge=0, le=1)]
Weight = Annotated[float, Field(ge=0)]
Schedule = Fraction | tuple[Fraction, ...] | Literal["harmonic", "optimal"]
"""Fixed number, or one per exchange (the last one repeats), or 1/(t + 1), or the optimum of the theory.

For a harmonic β, t counts the observations of the user's own estimate, which is then their mean.
"""


class Known(Settings):
    """Constants that theory needs for an optimal α or β (docs/theory.md)."""

    bias: float = Field(ge=0, description="ζ², squared distance between the helpers' mean gradient and user 0's")
    noise: float = Field(ge=0, description="σ², variance of one user's stochastic gradient")
    horizon: int | None = Field(default=None, ge=1, description="T, exchanges in the whole run (for an optimal β)")
    smoothness: float = Field(default=1.0, gt=0, description="L, the smoothness of user 0's objective")
    scaling: float = Field(default=0.0, ge=0, description="m, growth of the squared bias with ‖∇f_0‖²")

    def constants(self, helpers: float) -> CollaborationConstants:
        """Return the constants for N helpers; the μ of the PL condition affects no weight."""
        return CollaborationConstants(helpers, self.bias, self.noise, self.smoothness, self.smoothness, self.scaling)


class WGASettings(Settings):
    """Keys of ``algorithm`` for WGA and Bias Correction."""

    rule: Literal["alone", "wga", "bc", "oracle"] = Field(
        default="bc",
        description="own gradient alone; Algorithm 2; Algorithm 3; or Algorithm 3 with the true bias (§5.1)",
    )
    users: Literal["one", "all"] = Field(
        default="one", description="choice of user 0: one client, or every seen client, each with its own state"
    )
    user: str | None = Field(default=None, description="id of user 0 (users: one); null is the first seen client")
    alpha: Schedule = Field(default=0.5, description="α: a number, one for each exchange, harmonic, or optimal")
    beta: Schedule = Field(default=0.1, description="β of bc: a number, one for each exchange, harmonic, or optimal")
    known: Known | None = Field(default=None, description="constants of the problem, for an optimal α or β")
    weights: Literal["uniform", "inverse_variance", "cosine"] | dict[str, Weight] = Field(
        default="uniform",
        description="weights of the helpers: equal; 1/σ_i² (footnote 1), estimated in earlier exchanges; the cosine of "
        "their gradient with user 0's, 0 where negative; or a mapping from client to weight",
    )
    lr: float = Field(default=0.05, gt=0, description="learning rate η")
    optimizer: Literal["sgd", "momentum", "adam"] = Field(
        default="sgd", description="optimizer of the corrected gradient"
    )
    momentum: float = Field(default=0.9, ge=0, lt=1, description="momentum, for optimizer: momentum")
    batch_size: int = Field(default=32, ge=1, description="examples of a stochastic gradient")
    steps_per_round: int = Field(default=1, ge=1, description="exchanges of gradients, and steps, in one round")
    oracle_variance: float = Field(default=0.0, ge=0, description="v² of the bias oracle for one helper (Theorem 2)")
    personalize_steps: int = Field(
        default=0, ge=0, description="local SGD steps, from the mean of all states, for a client without a state"
    )
    block: int = Field(default=8, ge=1, description="states in one message (users: all), which bounds the memory")

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        self._check_schedules()
        if self.user is not None and self.users == "all":
            raise ValueError(f"user: must be null with users: all (got {self.user!r})")
        if self.weights == "inverse_variance" and self.batch_size < 2:
            raise ValueError("weights: inverse_variance needs batches of 2 examples or more (got batch_size 1)")
        return self

    def _check_schedules(self) -> None:
        for name in ("alpha", "beta"):
            schedule = getattr(self, name)
            if schedule == ():
                raise ValueError(f"{name} is empty; give at least one number")
            if schedule == "optimal" and self.known is None:
                raise ValueError(f"{name}: optimal needs known: {{bias, noise, horizon}}")
        if self.beta == "optimal" and self.known is not None and self.known.horizon is None:
            raise ValueError("beta: optimal needs known.horizon: T, exchanges in the whole run")

    def block_of(self, roster: Sequence[str]) -> int:
        """Return the rows of :class:`Gradients`, the same for every message of a run."""
        return 1 if self.users == "one" else min(self.block, len(roster))

    def alpha_at(self, t: int, helpers: float, beta: float) -> float:
        """Return α of exchange t = 0, 1, ... with this number of helpers."""
        if self.known is None or self.alpha != "optimal":
            return _at(self.alpha, t)
        constants = self.known.constants(helpers)
        if self.rule == "oracle":
            return collaboration.optimal_alpha_oracle(constants, self.oracle_variance)
        if self.rule == "bc":
            return collaboration.optimal_alpha_bc(constants, self.lr, beta)
        return collaboration.optimal_alpha(constants, self.lr)

    def beta_at(self, t: int, helpers: float) -> float:
        """Return β of exchange t = 0, 1, ... with this number of helpers."""
        if self.known is None or self.known.horizon is None or self.beta != "optimal":
            return _at(self.beta, t)
        return collaboration.optimal_beta(self.known.constants(helpers), self.known.horizon)


def _at(schedule: float | tuple[float, ...] | str, t: int) -> float:
    if isinstance(schedule, tuple):
        return schedule[min(t, len(schedule) - 1)]
    return 1 / (t + 1) if isinstance(schedule, str) else schedule


# --- messages ---------------------------------------------------------------------------------------------------------


class SharedStates(Message):
    """States at which to evaluate stochastic gradients; the first opens training (Algorithm 1, all users in parallel).

    All exchanges of one step use the same examples.
    """

    theta: Tensor = broadcast(Quantity.MODEL)  # [b, d]
    users: Tensor = broadcast(Quantity.COUNT)  # [b] float64, owners as positions in the roster
    step: Tensor = broadcast(Quantity.COUNT)  # [1] float64, 0 ... steps_per_round - 1


class TrueGradients(Message):
    """States at which to evaluate gradients over all of a client's data, for the bias oracle (§5.1)."""

    theta: Tensor = broadcast(Quantity.MODEL)  # [b, d]


class Gradients(Message):
    """Gradients at the states; rows beyond b are zero."""

    gradient: Tensor = rows(Quantity.GRADIENT, "block", "d")  # [c, block, d]
    variance: Tensor = rows(Quantity.OTHER, 1)  # [c, 1] float64, of one gradient, estimated; 0 unless weights need it
    loss: Tensor = rows(Quantity.LOSS, 1)  # [c, 1] float64, of the client's own state, if it is among them
    steps: Tensor = rows(Quantity.COUNT, 1)  # [c, 1] float64, gradients evaluated


class UserModel(Message):
    """Opening of personalization: the client's own state, or the mean of all for a client without one."""

    theta: Tensor = rows(Quantity.MODEL)  # [c, d]
    mean: Tensor = broadcast(Quantity.MODEL)  # [d]
    steps: Tensor = rows(Quantity.COUNT)  # [c, 1] float64, local steps to make from there


RULES = {"alone": "Alone", "wga": "WGA", "bc": "Bias Correction", "oracle": "Bias Correction, oracle"}


class WeightedGradientAveraging(base.Algorithm):
    """Weighted gradient averaging and Bias Correction."""

    name = "wga"
    no_sums = "weights each client's own gradient for each user at the server"
    settings = WGASettings
    example = {"batch_size": 4, "steps_per_round": 2}
    server = WGAServer
    client = WGAClient
    messages = (SharedStates, TrueGradients, Gradients, UserModel)
    needs = ("no buffers",)
    roster_data = "data of each client"
    no_example_privacy = (
        "Clients send gradients of the same examples at the states of many users, and variances, which have no noise."
    )

    def titles(self, settings: Any) -> Mapping[str, str]:
        """Return the name of each predictor in tables."""
        return {"personal": RULES[settings.rule], "global": f"{RULES[settings.rule]}, mean of all"}


WGA = WeightedGradientAveraging()
