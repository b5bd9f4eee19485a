"""Methods with a shared and a personal part of the model: FedPer, LG-FedAvg, FedBABU, FedRep and FedRoD."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from federations import CLASSES, IMAGE, Federation, answers_as_alone, clients, close, federation, group, setup, sgd
from safetensors.torch import load_file
from torch import Tensor

from fedloom.algorithms.base import Algorithm
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.fedavg import FEDAVG, FedAvgSettings
from fedloom.algorithms.fedbabu import FEDBABU
from fedloom.algorithms.fedper import FEDPER
from fedloom.algorithms.fedrep import FEDREP
from fedloom.algorithms.fedrod import FEDROD
from fedloom.algorithms.lgfedavg import LGFEDAVG
from fedloom.data.federated import ClientData
from fedloom.errors import ExperimentError
from fedloom.federation.randomness import generator
from fedloom.federation.transport import Call, Lost
from fedloom.models.networks import MLP

SIZES = (4, 9, 6)
SEED = 7  # of the federations
LOCAL = {"epochs": 2, "batch_size": 3, "lr": 0.05}
SMALL = MLP(IMAGE, [5], CLASSES)
BODY, ALL = SMALL.layout.body_size, SMALL.layout.size
WHOLE, OF_BODY, HEAD = slice(None), slice(BODY), slice(BODY, None)


@dataclass(frozen=True)
class Case:
    """A method, the numbers that it sends each way besides loss and weight, and how it trains."""

    algorithm: Algorithm
    down: int
    up: int
    phases: tuple[tuple[str, slice, str], ...] = (("local", WHOLE, "train"),)
    """Settings, trained part and purpose of each phase of a visit."""
    kept: slice | None = None
    """Part that stays with a client."""
    tuned: tuple[str, slice, str] = ("local", HEAD, "personalize")
    """Settings, trained part and purpose of personalization."""
    steps: int = 4
    """Steps of personalization with six examples."""
    further: dict[str, Any] = field(default_factory=lambda: {"personalize_epochs": 2})
    atol: float = 1e-12

    @property
    def settings(self) -> Any:
        return self.algorithm.settings.model_validate({"local": LOCAL} | self.further)

    def run(self, folder: Path, data: list[ClientData], **keys: Any) -> Federation:
        f = federation(folder, self.algorithm, self.settings, setup(), data, rounds=2, **{"unseen": ["c2"], **keys})
        f.run()
        return f


REP = {"head": {"epochs": 2, "batch_size": 2, "lr": 0.1}, "personalize_epochs": 2}
CASES = [
    Case(FEDBABU, ALL, BODY, (("local", OF_BODY, "train"),), tuned=("local", WHOLE, "fine-tune")),
    Case(FEDPER, BODY, BODY, kept=HEAD),
    Case(
        FEDREP, BODY, BODY, (("head", HEAD, "head"), ("local", OF_BODY, "train")), HEAD, ("head", HEAD, "personalize"),
        steps=6, further=REP, atol=1e-10,
    ),
    Case(LGFEDAVG, ALL, ALL - BODY, kept=OF_BODY, tuned=("local", OF_BODY, "personalize")),
    Case(FEDROD, ALL, ALL, kept=HEAD, steps=0, further={}),
]  # fmt: skip
methods = pytest.mark.parametrize("case", CASES, ids=lambda case: case.algorithm.name)


def drawn_head(client: str, where: str, round: int) -> Tensor:
    return SMALL.init(generator(SEED, f"{where}/own-head", client, round), torch.float64)[HEAD]


def trained(case: Case, theta: Tensor, c: ClientData, phase: tuple[str, slice, str], where: str, round: int) -> Tensor:
    """Train a part of θ by torch's SGD; heads and bodies have separate generators."""
    key, part, purpose = phase
    random = generator(SEED, f"{where}/{purpose}", c.id, round)
    return sgd(SMALL, theta, c, getattr(case.settings, key), part, random)


@pytest.mark.parametrize("case", CASES[:4], ids=lambda case: case.algorithm.name)
@pytest.mark.usefixtures("each_task")
def test_rounds_are_sgd_on_the_parts_and_a_mean_of_the_shared_one(case: Case, tmp_path: Path) -> None:
    """A client keeps its part; a new client trains one, and the shared part does not change."""
    data, s = clients(SIZES), case.settings
    theta = federation(tmp_path / "start", case.algorithm, s, setup(), data).state["theta"]
    assert len(theta) == case.down
    theta = torch.cat([theta, torch.zeros(ALL - len(theta)).double()])
    first, own = theta, dict[str, Tensor]()
    shared = HEAD if case.kept == OF_BODY else OF_BODY
    weights = torch.tensor(SIZES[:2] if s.weighting == "examples" else (1, 1)).double()
    assert s.weighting == ("uniform" if case.algorithm is FEDREP else "examples")
    for t in (1, 2):
        ends = []
        for c in data[:2]:
            w = theta.clone()
            if case.kept is not None:
                new = first[OF_BODY] if case.kept == OF_BODY else drawn_head(c.id, "train", 1)
                w[case.kept] = own.get(c.id, new)
            for phase in case.phases:
                w = trained(case, w, c, phase, "train", t)
            ends.append(w)
            own[c.id] = w[case.kept or HEAD]
        theta = theta.clone()
        theta[shared] = ((weights[:, None] * torch.stack(ends)).sum(0) / weights.sum())[shared]
    f = case.run(tmp_path / "run", data)
    close(f.state["theta"], theta[: case.down])
    for c in data:
        w = theta.clone()
        if c.id != "c2" and case.kept is not None:
            w[case.kept] = own[c.id]
        else:
            if case.kept == HEAD:
                w[HEAD] = drawn_head("c2", "evaluate", 2)
            w = trained(case, w, c, case.tuned, "evaluate", 2)
        found = f.predictors[2, c.id]["personal"].tensors()["theta"]
        close(found, w)
        if case.kept is not None:
            assert torch.equal(found[shared], f.state["theta"][shared])
    half = case.algorithm.client(s, setup())
    assert (half.personalization_steps("personal", 6), half.stateful) == (case.steps, case.kept is not None)
    without = s.model_copy(update={"personalize_epochs": 0})
    assert case.algorithm.client(without, setup()).personalization_steps("personal", 6) == 0
    steps = sum(getattr(s, key).count(n) for key, _, _ in case.phases for n in SIZES[:2])
    assert [a.statistics["client_steps"] for a in f.loop.journal.counted()] == [steps, steps]


@methods
def test_only_the_shared_part_is_sent(case: Case, tmp_path: Path) -> None:
    f = case.run(tmp_path, clients(SIZES))
    attempts = f.loop.journal.counted()
    assert len(attempts) == 2
    for attempt in attempts:
        assert (attempt.payload_down, attempt.payload_up) == (8 * 2 * case.down, 8 * 2 * (case.up + 2))
    assert {name: tuple(t.shape) for name, t in f.state.items()} == {"theta": (case.down,)}


@methods
def test_a_batch_of_clients_replies_as_single_clients(case: Case) -> None:
    """One of them already has a personal part, the others have none."""
    theta, own = (SMALL.init(torch.Generator().manual_seed(seed), torch.float64) for seed in (3, 4))
    name = "body" if case.kept == OF_BODY else "head"
    states = None if case.kept is None else [None, {name: own[case.kept]}, None]
    opening, *_, ask = case.algorithm.messages
    half, sent = case.algorithm.client(case.settings, setup()), theta[: case.down]
    asked = ask(sent) if "personalize_epochs" in case.further else None
    answers_as_alone(half, clients((9, 4, 6)), opening(sent), asked, states, case.atol)


@methods
def test_a_model_of_one_layer_is_rejected(case: Case) -> None:
    with pytest.raises(ExperimentError) as refused:
        case.algorithm.check_model(case.settings, MLP(IMAGE, [], CLASSES))
    assert refused.value.key == "model.name"


# --- special cases against FedAvg -------------------------------------------------------------------------------------


def test_fedper_with_a_common_head_gives_fedavgs_round_to_the_bit() -> None:
    s, data = CASES[1].settings, clients(SIZES)
    theta = SMALL.init(torch.Generator().manual_seed(3), torch.float64)
    for members in ([data[0]], data):
        mine = ClientGroup(members, group(members)._generator, [{"head": theta[HEAD]}] * len(members))
        found = FEDPER.train(SMALL, mine, theta[OF_BODY].expand(len(members), -1), s)
        expected = FEDAVG.train(SMALL, group(members), theta.expand(len(members), -1), s)
        assert torch.equal(found.theta, expected.theta[:, OF_BODY])
        assert torch.equal(found.loss, expected.loss)
        assert torch.equal(torch.stack([kept["head"] for kept in mine.kept.values()]), expected.theta[:, HEAD])


class NoGradientToTheHead(MLP):
    """MLP of the same values that passes no gradient to its head."""

    def forward(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        held = {name: p.detach() + 0 * p if name in self.layout.head else p for name, p in parameters.items()}
        return super().forward(held, x)


def test_fedbabu_equals_fedavg_without_head_gradients_to_the_bit(tmp_path: Path) -> None:
    s, problem = FedAvgSettings.model_validate({"local": LOCAL}), setup(NoGradientToTheHead(IMAGE, [5], CLASSES))
    avg = federation(tmp_path / "avg", FEDAVG, s, problem, clients(SIZES), rounds=2, unseen=["c2"])
    start = avg.state["theta"]
    avg.run()
    babu = CASES[0].run(tmp_path / "babu", clients(SIZES)).state["theta"]
    assert torch.equal(babu, avg.state["theta"])
    assert torch.equal(babu[HEAD], start[HEAD])
    assert not torch.equal(babu[OF_BODY], start[OF_BODY])


# --- a head of a round that did not count -----------------------------------------------------------------------------


class Late:
    """Transport that loses c1's answers in the second round, after c1 has trained and stored its head."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def exchange(self, call: Call) -> list[Any]:
        late = call.key.purpose == "train" and call.key.round == 2
        answers = zip(call.clients, self._transport.exchange(call), strict=True)
        return [Lost("late") if late and client == "c1" else answer for client, answer in answers]


def test_the_head_of_a_lost_client_is_that_of_its_last_counted_round(tmp_path: Path) -> None:
    def kept_head(client: str, round: int) -> Tensor:
        (path,) = (tmp_path / "states" / client).glob(f"{round}-*.safetensors")
        return load_file(path)["head"]

    f = federation(tmp_path, FEDREP, CASES[2].settings, setup(), clients(SIZES), rounds=2)
    f.loop.transport = Late(f.loop.transport)
    f.loop._train_round()
    first = {c: kept_head(c, 1) for c in ("c0", "c1", "c2")}
    f.run()
    assert not torch.equal(kept_head("c1", 2), first["c1"])  # of the round that did not count it
    for name, head in first.items():
        theta = f.predictors[2, name]["personal"].tensors()["theta"]
        assert torch.equal(theta[OF_BODY], f.state["theta"])
        assert torch.equal(theta[HEAD], head) is (name == "c1")
