"""pFedHN against autograd through the whole hypernetwork and PyTorch's SGD (Shamsian et al., ICML 2021)."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federations import CLASSES, IMAGE, Federation, clients, close, federation, group, mean_loss
from torch import Tensor

from fedloom.algorithms.base import Setup
from fedloom.algorithms.batches import batches
from fedloom.algorithms.client import train
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.pfedhn import PFEDHN, PFedHNSettings, PFedHNTrainRequest
from fedloom.data.federated import ClientData
from fedloom.federation.randomness import generator
from fedloom.models.networks import MLP

SIZES = (4, 9, 6)
SEED = 7  # of the federations
MODEL = MLP(IMAGE, [2], CLASSES)
EXCHANGES = 3


def made(**changes: Any) -> PFedHNSettings:
    base: dict[str, Any] = {
        "local": {"epochs": 2, "batch_size": 3, "lr": 0.05},
        "embedding_size": 4,
        "hypernetwork": "S",
        "server_lr": 0.05,
        "embedding_lr": 0.2,
        "server_decay": 0.01,
        "personalize_exchanges": EXCHANGES,
    }
    return PFedHNSettings.model_validate(base | changes)


def problem(same: bool = True) -> Setup:
    return Setup(MODEL, CLASSES, IMAGE, 3, torch.float64, roster=("c0", "c1"), same_clients=same)


def run(folder: Path, s: PFedHNSettings, **keys: Any) -> Federation:
    keys = {"rounds": 2, "unseen": ["c2"]} | keys
    f = federation(folder, PFEDHN, s, keys.pop("problem", problem()), keys.pop("data", clients(SIZES)), **keys)
    f.run()
    return f


def start(folder: Path, s: PFedHNSettings) -> dict[str, Tensor]:
    return federation(folder, PFEDHN, s, problem(), clients(SIZES), unseen=["c2"]).state


def hypernetwork(state: dict[str, Tensor], e: Tensor) -> Tensor:
    """Return linear layers with ReLU between them, none before the last, with autograd through all of it."""
    layers = sorted({name.split(".")[1] for name in state if name.startswith("h.")})
    for i, layer in enumerate(layers):
        e = F.linear(e, state[f"h.{layer}.weight"], state[f"h.{layer}.bias"])
        e = F.relu(e) if i < len(layers) - 2 else e
    return e


def visit(theta: Tensor, c: ClientData, s: PFedHNSettings, purpose: str, round: int) -> Tensor:
    members = ClientGroup([c], lambda client, use: generator(SEED, f"{purpose.partition('/')[0]}/{use}", client, round))
    return train(MODEL, members, theta.detach()[None], s.local, purpose=purpose.partition("/")[2]).theta[0]


@pytest.mark.parametrize("clip", [50.0, 0.01])
@pytest.mark.usefixtures("each_task")
def test_rounds_are_pytorchs_sgd_on_the_joint_gradient(tmp_path: Path, clip: float) -> None:
    """The mean over clients for the hypernetwork, each client's own gradient for its embedding; one norm is clipped."""
    s, data = made(clip=clip), clients(SIZES)[:2]
    state = start(tmp_path / "start", s)
    h = {name: t.clone().requires_grad_() for name, t in state.items() if name.startswith("h.")}
    rows = [state["embeddings"][i].clone().requires_grad_() for i in range(2)]
    sgd = torch.optim.SGD(
        [{"params": list(h.values()), "lr": s.server_lr}, {"params": rows, "lr": s.embedding_lr}],
        momentum=s.server_momentum, weight_decay=s.server_decay,
    )  # fmt: skip
    for t in (1, 2):
        sgd.zero_grad()
        thetas = [hypernetwork(h, row) for row in rows]
        losses = [
            theta @ (theta.detach() - visit(theta, c, s, "train/train", t))
            for theta, c in zip(thetas, data, strict=True)
        ]
        for parameter, g in zip(
            h.values(), torch.autograd.grad(sum(losses) / 2, list(h.values()), retain_graph=True), strict=True
        ):
            parameter.grad = g
        for row, loss in zip(rows, losses, strict=True):
            (row.grad,) = torch.autograd.grad(loss, [row], retain_graph=True)
        torch.nn.utils.clip_grad_norm_([*h.values(), *rows], clip)
        sgd.step()
    f = run(tmp_path / "run", s)
    for name, parameter in h.items():
        close(f.state[name], parameter.detach())
        assert not torch.equal(f.state[name], state[name])
    close(f.state["embeddings"][:2], torch.stack(rows).detach())
    for i, c in enumerate(data):
        close(f.predictors[2, c.id]["personal"].tensors()["theta"], hypernetwork(h, rows[i]).detach())


@pytest.mark.parametrize("clip", [0.05, 50.0])
def test_a_clients_gradient_is_clipped_on_request(clip: float) -> None:
    """Clip by the norm over all parameters before every step, as the authors' code does at 50."""
    local = {"steps": 4, "batch_size": 3, "lr": 0.05, "momentum": 0.9, "clip": clip}
    c, w = clients(SIZES)[1], MODEL.init(torch.Generator().manual_seed(3), torch.float64)
    half, theta = PFEDHN.client(made(local=local), problem()), w.clone().requires_grad_()
    found = next(half.open(group([c]), PFedHNTrainRequest(w[None]))).tensors()["delta_theta"][0]
    optimizer, norms = torch.optim.SGD([theta], lr=0.05, momentum=0.9), []
    for index in batches(len(c.train), 3, 4, generator(0, "train", c.id, 1)):
        optimizer.zero_grad()
        mean_loss(MODEL.logits(theta, c.train.x[index]), c.train.y[index]).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_([theta], clip)))
        optimizer.step()
    assert (max(norms) > clip) is (clip < 1)
    close(found, theta.detach() - w)


@pytest.mark.parametrize("clip", [50.0, 0.01])
@pytest.mark.usefixtures("each_task")
def test_an_unseen_client_is_embedded_by_descent_with_a_frozen_hypernetwork(tmp_path: Path, clip: float) -> None:
    s, c = made(clip=clip), clients(SIZES)[2]
    f = run(tmp_path, s)
    state = f.state
    e = state["embeddings"][-1].clone().requires_grad_()
    sgd = torch.optim.SGD([e], lr=s.embedding_lr, momentum=s.server_momentum, weight_decay=s.server_decay)
    for t in range(EXCHANGES):
        sgd.zero_grad()
        theta = hypernetwork(state, e)
        (theta @ (theta.detach() - visit(theta, c, s, f"evaluate/search-{t}", 2))).backward()
        torch.nn.utils.clip_grad_norm_([e], clip)
        sgd.step()
    close(f.predictors[2, "c2"]["personal"].tensors()["theta"], hypernetwork(state, e).detach())
    before, after = state, f.state
    f.loop.evaluate()
    assert all(torch.equal(before[name], after[name]) for name in before)
    half = PFEDHN.client(s, problem())
    assert half.personalization_steps("personal", 6) == EXCHANGES * s.local.count(6) == 12


def test_unknown_clients_do_not_affect_known_ones(tmp_path: Path) -> None:
    found = [run(tmp_path / str(size), made(), evaluation_cohort=size) for size in (1, 3)]
    for c in ("c0", "c1", "c2"):
        one, other = (f.predictors[2, c]["personal"].tensors()["theta"] for f in found)
        assert torch.equal(one, other)


def test_embeddings_of_uncounted_clients_are_unchanged_to_the_bit(tmp_path: Path) -> None:
    """Keep the embedding of a client that was not drawn or was lost: momentum does not move it either."""
    begun = run(tmp_path / "begun", made(), rounds=2)
    lost = run(tmp_path / "lost", made(), rounds=1, lost={0: 1})
    first = start(tmp_path / "start", made())
    assert torch.equal(lost.state["embeddings"][1:], first["embeddings"][1:])
    assert not torch.equal(lost.state["embeddings"][0], first["embeddings"][0])
    for t in range(4):
        before = begun.state
        begun.loop.schedule = replace(begun.loop.schedule, clients_per_round=1, rounds=9)
        begun.loop._train_round()
        drawn = begun.loop.journal.counted()[-1].conversations[0].clients
        for i, c in enumerate(("c0", "c1", "new")):
            for name in ("embeddings", "embeddings.momentum"):
                assert torch.equal(begun.state[name][i], before[name][i]) is (c not in drawn), (t, c)


def test_without_exchanges_every_client_gets_the_model_of_an_embedding(tmp_path: Path) -> None:
    f = run(tmp_path / "none", made(personalize_exchanges=0))
    for i, c in enumerate(("c0", "c1", "c2")):
        close(f.predictors[2, c]["personal"].tensors()["theta"], hypernetwork(f.state, f.state["embeddings"][i]))
    assert PFEDHN.client(made(personalize_exchanges=0), problem()).personalization_steps("personal", 6) == 0


def test_clients_of_another_partition_are_unknown(tmp_path: Path) -> None:
    f = run(tmp_path / "other", made(personalize_exchanges=0), rounds=0, problem=problem(same=False))
    thetas = [f.predictors[0, c]["personal"].tensors()["theta"] for c in ("c0", "c1", "c2")]
    assert all(torch.equal(a, b) for a, b in pairwise(thetas))


def test_only_models_are_sent(tmp_path: Path) -> None:
    f = run(tmp_path, made(), rounds=1)
    (attempt,) = f.loop.journal.counted()
    d = MODEL.layout.size
    assert (attempt.payload_down, attempt.payload_up) == (8 * 2 * d, 8 * 2 * (d + 2))
    assert PFEDHN.requires_fixed_population(made()) is not None
    size = PFEDHN.server(made(embedding_size=None), problem(), torch.Generator()).state["embeddings"].shape
    assert size == (3, 1 + 3 // 4)
