"""PeFLL against its definition (papers/001, §3): end-to-end autograd in float64, torch's own optimizers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federations import CLASSES, IMAGE, Federation, client, clients, federation, group, mean_loss, setup
from pydantic import ValidationError
from torch import Tensor

from fedloom.algorithms.base import Setup
from fedloom.algorithms.batches import batches
from fedloom.algorithms.optimizers import AdamAscent
from fedloom.algorithms.pefll import (
    PEFLL,
    Descriptor,
    DescriptorRequest,
    PeFLLClient,
    PeFLLServer,
    PeFLLSettings,
    PeFLLTrainRequest,
    PersonalizedModel,
)
from fedloom.data.federated import ClientData, Split
from fedloom.errors import DataError, ExperimentError
from fedloom.federation.randomness import generator
from fedloom.models.networks import MLP, LeNet

BETA = 0.05
SIZES = (4, 9, 6)
LENGTH = 4  # l


def literal(**changes: Any) -> PeFLLSettings:
    """Return settings of one full-batch step, no momentum, and the paper's server update."""
    local = {"steps": 1, "batch_size": 1000, "lr": BETA, "momentum": 0.0, "lambda_theta": 0.02}
    given = {
        "local": local | changes.pop("local", {}),
        "descriptor": {"size": LENGTH, "batch_size": 1000} | changes.pop("descriptor", {}),
        "lambda_h": 0.03,
        "lambda_v": 0.07,
        **changes,
    }
    return PeFLLSettings.model_validate(given)


# --- the objective in plain PyTorch -----------------------------------------------------------------------------------


def lenet(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """Return the network of tables 3 and 4, in the order of the paper."""
    h = F.max_pool2d(F.relu(F.conv2d(x, p["conv1.weight"], p["conv1.bias"])), 2)
    h = F.max_pool2d(F.relu(F.conv2d(h, p["conv2.weight"], p["conv2.bias"])), 2).flatten(1)
    h = F.relu(h @ p["fc1.weight"].T + p["fc1.bias"])
    h = F.relu(h @ p["fc2.weight"].T + p["fc2.bias"])
    return h @ p["fc3.weight"].T + p["fc3.bias"]


def embed(s: PeFLLSettings, p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    onehot = F.one_hot(y, CLASSES).double() if y.dim() == 1 else y.double()  # numbers and labels are used as they are
    if s.embedding.network == "linear":
        return onehot @ p["fc.weight"].T + p["fc.bias"]
    if s.embedding.network == "mlp":
        h = torch.cat([x.flatten(1), onehot], 1) if s.embedding.labels else x.flatten(1)
        return F.relu(h @ p["fc1.weight"].T + p["fc1.bias"]) @ p["fc2.weight"].T + p["fc2.bias"]
    if s.embedding.labels:
        x = torch.cat([x, onehot[:, :, None, None].expand(-1, -1, *x.shape[2:])], 1)
    return lenet(p, x)


def hyper(s: PeFLLSettings, p: dict[str, Tensor], v: Tensor) -> Tensor:
    layers = len(p) // 2
    for i in range(1, layers):
        v = p[f"fc{i}.weight"] @ v + p[f"fc{i}.bias"]
        if i < layers - 1 or s.hypernetwork.output_relu:
            v = F.relu(v)
    return p[f"fc{layers}.weight"] @ v + p[f"fc{layers}.bias"]


def in_space(s: PeFLLSettings, problem: Setup, v: Tensor) -> Tensor:
    """Return θ from the hypernetwork's output: itself, or θ₀ + P v with a dense P."""
    if s.hypernetwork.subspace is None:
        return v
    subspace = s.hypernetwork.subspace.of(problem.model, problem.seed, torch.float64)
    p = torch.zeros(problem.model.layout.size, len(v), dtype=torch.float64)
    p[torch.arange(len(p)), subspace.groups] = subspace.entries
    return subspace.origin + p @ v


def parameters(state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return η_v and η_h of a state, as leaves."""
    eta_v = state["eta_v"].clone().requires_grad_()
    prefix = "eta_h."
    eta_h = {k.removeprefix(prefix): v.clone().requires_grad_() for k, v in state.items() if k.startswith(prefix)}
    return eta_v, eta_h


def objective(
    s: PeFLLSettings,
    problem: Setup,
    eta_v: Tensor,
    eta_h: dict[str, Tensor],
    data: list[ClientData],
    shift: Tensor | float = 0.0,
    scale: Tensor | float = 1.0,
    regularized: bool = True,
) -> Tensor:
    """Return λ_h‖η_h‖² + λ_v‖η_v‖² + (1/n) Σ f_i(h(v(S_i; η_v); η_h)) (eq. 1)."""
    layout = PeFLLClient(s, problem).embedding.layout
    total = torch.zeros((), dtype=torch.float64)
    for c in data:
        x, y = c.train.x, c.train.y
        assert y is not None
        v = embed(s, layout.split(eta_v), x, y).mean(0)
        theta = in_space(s, problem, hyper(s, eta_h, (v - shift) / scale))
        p = problem.model.layout.split(theta)
        logits = lenet(p, x) if isinstance(problem.model, LeNet) else problem.model.forward(p, x)
        total = total + mean_loss(logits, y) + s.local.lambda_theta * theta.square().sum()
    total = total / len(data)
    if regularized:
        total = total + s.lambda_h * sum(p.square().sum() for p in eta_h.values()) + s.lambda_v * eta_v.square().sum()
    return total


def expect(after: dict[str, Tensor], eta_v: Tensor, eta_h: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    expected = {"eta_v": eta_v, **{f"eta_h.{name}": value for name, value in eta_h.items()}}
    for name, value in expected.items():
        torch.testing.assert_close(
            after[name], value.detach(), rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def gradient_step(
    s: PeFLLSettings, problem: Setup, before: dict[str, Tensor], data: list[ClientData], **standard: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Make one step of rate β on the objective."""
    eta_v, eta_h = parameters(before)
    d_v, *d_h = torch.autograd.grad(objective(s, problem, eta_v, eta_h, data, **standard), [eta_v, *eta_h.values()])
    moved = {name: p - BETA * d for (name, p), d in zip(eta_h.items(), d_h, strict=True)}
    for name, d in zip(eta_h, d_h, strict=True):
        assert d.abs().max() > 1e-6, f"the test says nothing about {name}"
    assert d_v.abs().max() > 1e-6
    return eta_v - BETA * d_v, moved


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("changes", "model", "sizes"),
    [
        ({}, MLP(IMAGE, [5], CLASSES), SIZES),
        ({}, MLP(IMAGE, [5], CLASSES), (5,)),
        ({"descriptor": {"train": "all"}}, MLP(IMAGE, [], CLASSES), SIZES),
        ({}, LeNet(IMAGE, CLASSES), (3, 5)),
        ({"embedding": {"labels": False}}, MLP(IMAGE, [5], CLASSES), SIZES),
        ({"embedding": {"network": "linear"}}, MLP(IMAGE, [5], CLASSES), SIZES),
        ({"embedding": {"network": "mlp", "width": 7}}, MLP(IMAGE, [5], CLASSES), SIZES),
        ({"embedding": {"network": "mlp", "labels": False}}, MLP(IMAGE, [5], CLASSES), SIZES),
        ({"hypernetwork": {"size": "S", "output_relu": False}}, MLP(IMAGE, [5], CLASSES), SIZES),
        ({"hypernetwork": {"size": "L"}, "lambda_h": 0.0}, MLP(IMAGE, [5], CLASSES), SIZES),
        ({}, MLP(IMAGE, [5], CLASSES), tuple(range(3, 13))),  # two tiles of the hypernetwork
        ({"hypernetwork": {"subspace": {"size": 17}}}, MLP(IMAGE, [5], CLASSES), SIZES),
    ],
    ids=[
        "paper",
        "one client",
        "descriptor of all",
        "lenet",
        "unlabelled",
        "linear",
        "mlp",
        "mlp unlabelled",
        "S",
        "L",
        "ten clients",
        "subspace",
    ],
)
@pytest.mark.usefixtures("each_task")
def test_a_round_is_a_gradient_step_of_the_objective(
    tmp_path: Path, changes: dict[str, Any], model: Any, sizes: tuple[int, ...]
) -> None:
    s, problem, data = literal(**changes), setup(model), clients(sizes)
    run = federation(tmp_path, PEFLL, s, problem, data)
    before = run.state
    run.run()
    expect(run.state, *gradient_step(s, problem, before, data))


def test_standardization_is_part_of_the_network_and_frozen(tmp_path: Path) -> None:
    s, problem, data = literal(descriptor={"standardize": "first"}), setup(), clients(SIZES)
    first = federation(tmp_path / "1", PEFLL, s, problem, data, rounds=1)
    second = federation(tmp_path / "2", PEFLL, s, problem, data, rounds=2)
    start = first.state
    y = data[0].train.y
    assert y is not None
    layout = PeFLLClient(s, problem).embedding.layout
    v = embed(s, layout.split(start["eta_v"]), data[0].train.x, y).mean(0)
    shift, scale = v.mean(), v.std()
    first.run()
    expect(first.state, *gradient_step(s, problem, start, data, shift=shift, scale=scale))
    second.run()
    torch.testing.assert_close(second.state["standard"], torch.stack([shift, scale, torch.ones(()).double()]))
    expect(second.state, *gradient_step(s, problem, first.state, data, shift=shift, scale=scale))


def test_unseen_clients_do_not_train(tmp_path: Path) -> None:
    s, problem, data = literal(), setup(), clients(SIZES)
    run = federation(tmp_path, PEFLL, s, problem, data, unseen=["c1"])
    before = run.state
    evaluation = run.run()
    expect(run.state, *gradient_step(s, problem, before, [data[0], data[2]]))
    assert evaluation.present.all()


# --- the server's update ----------------------------------------------------------------------------------------------


def mean_gradient(
    s: PeFLLSettings, problem: Setup, eta_v: Tensor, eta_h: dict[str, Tensor], data: list[ClientData]
) -> list[Tensor]:
    """Return -mean (Δη_v, Δη_h): β times the gradient of (1/n) Σ f_i, without the server's own terms."""
    value = objective(s, problem, eta_v, eta_h, data, regularized=False)
    return [BETA * g for g in torch.autograd.grad(value, [eta_v, *eta_h.values()])]


@pytest.mark.parametrize("decay", ["decoupled", "l2"])
@pytest.mark.parametrize("clip", [None, 1e-3, 1e3])
def test_adam_equals_torchs(tmp_path: Path, clip: float | None, decay: str) -> None:
    """Compare with AdamW, or Adam with its own weight decay."""
    server = {"rule": "adam", "lr": 1e-2, "clip": clip, "decay": decay}
    s, problem, data = literal(server=server), setup(), clients(SIZES)
    run = federation(tmp_path, PEFLL, s, problem, data, rounds=3)
    eta_v, eta_h = parameters(run.state)
    both = [eta_v, *eta_h.values()]
    reference = (torch.optim.AdamW if decay == "decoupled" else torch.optim.Adam)(
        [
            {"params": [eta_v], "weight_decay": 2 * s.lambda_v},
            {"params": list(eta_h.values()), "weight_decay": 2 * s.lambda_h},
        ],
        lr=1e-2,
    )
    for _ in range(3):
        for p, g in zip(both, mean_gradient(s, problem, eta_v, eta_h, data), strict=True):
            p.grad = g
        if clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(both, clip)
            assert (norm > clip) == (clip < 1)  # one of the cases clips
        reference.step()
    run.run()
    expect(run.state, eta_v, eta_h, tolerance=1e-9)


def test_l2_inside_adam_equals_torchs_to_the_bit_and_vanishes_without_lambda() -> None:
    random = torch.Generator().manual_seed(3)
    eta = [torch.randn(7, 5, generator=random), torch.randn(33, generator=random)]
    found = {}
    for decay, inside in ((0.05, True), (0.0, True), (0.0, False)):
        ours, theirs = [p.clone() for p in eta], [p.clone().requires_grad_() for p in eta]
        rule = AdamAscent(1e-2, decay, inside)
        memory, torchs = rule.start(ours), torch.optim.Adam(theirs, lr=1e-2, weight_decay=2 * decay, fused=True)
        updates = torch.Generator().manual_seed(4)
        for _ in range(5):
            changes = [torch.randn(p.shape, generator=updates) for p in eta]
            for p, change in zip(theirs, changes, strict=True):
                p.grad = -change
            torchs.step()
            rule.apply(ours, changes, memory, 1.0)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        found[decay, inside] = ours
    assert all(torch.equal(a, b) for a, b in zip(found[0.0, True], found[0.0, False], strict=True))
    assert not torch.equal(found[0.05, True][0], found[0.0, True][0])


def test_l2_is_only_inside_adam() -> None:
    with pytest.raises(ValidationError, match=r"decay: l2 .*rule: adam"):
        literal(server={"decay": "l2"})


def test_clipping_uses_the_joint_norm(tmp_path: Path) -> None:
    s, problem, data = literal(server={"clip": 1e-3}), setup(), clients(SIZES)
    run = federation(tmp_path, PEFLL, s, problem, data)
    eta_v, eta_h = parameters(run.state)
    both = [eta_v, *eta_h.values()]
    for p, g in zip(both, mean_gradient(s, problem, eta_v, eta_h, data), strict=True):
        p.grad = g
    assert torch.nn.utils.clip_grad_norm_(both, 1e-3) > 1e-3
    run.run()
    decay = {"eta_v": s.lambda_v} | dict.fromkeys(eta_h, s.lambda_h)
    moved = {
        name: (1 - 2 * BETA * decay[name]) * p.detach() - p.grad
        for name, p in {"eta_v": eta_v, **eta_h}.items()
        if p.grad is not None
    }
    expect(run.state, moved.pop("eta_v"), moved)


def test_an_update_that_is_not_finite_changes_nothing(tmp_path: Path) -> None:
    server = PeFLLServer(literal(), setup(), torch.Generator().manual_seed(0))
    before = {name: tensor.clone() for name, tensor in server.state.items()}
    bad = {name: torch.zeros_like(p) for name, p in server.eta_h.items()}
    bad["fc2.bias"][3] = torch.inf
    with pytest.raises(FloatingPointError, match="not finite"):
        server._update(bad, torch.zeros_like(server.state["eta_v"]), torch.ones(3).double(), 1)
    assert all(torch.equal(before[name], tensor) for name, tensor in server.state.items())


def test_a_resumed_server_keeps_the_order_of_its_layers(tmp_path: Path) -> None:
    """A file of tensors may have another order, while gradients and moments are matched by position."""
    s, problem, data = literal(server={"rule": "adam"}), setup(), clients(SIZES)
    first = federation(tmp_path, PEFLL, s, problem, data)
    first.run()
    again = federation(tmp_path, PEFLL, s, problem, data)
    fresh = again.loop.server.eta_h  # type: ignore[attr-defined]
    again.loop.resume()
    assert list(again.loop.server.eta_h) == list(fresh)  # type: ignore[attr-defined]
    again.loop.checkpoints.close()


# --- absence ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exchange", [0, 1])
@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_client_lost_before_training_does_not_count(tmp_path: Path, exchange: int, row: int) -> None:
    s, problem, data = literal(), setup(), clients(SIZES)
    run = federation(tmp_path, PEFLL, s, problem, data, lost={exchange: row})
    before = run.state
    run.run()
    expect(run.state, *gradient_step(s, problem, before, [c for i, c in enumerate(data) if i != row]))
    (attempt,) = run.loop.journal.counted()
    assert attempt.statistics["client_steps"] == 2


def test_a_client_lost_at_the_last_exchange_counts_only_for_the_hypernetwork(tmp_path: Path) -> None:
    s, problem, data = literal(), setup(), clients(SIZES)
    run = federation(tmp_path, PEFLL, s, problem, data, lost={2: 1})
    before = run.state
    run.run()
    _, eta_h = gradient_step(s, problem, before, data)
    eta_v, _ = gradient_step(s, problem, before, [data[0], data[2]])
    expect(run.state, eta_v, eta_h)
    (attempt,) = run.loop.journal.counted()
    assert attempt.statistics["client_steps"] == 3


@pytest.mark.parametrize("cohort", [1, 3])
def test_a_client_with_broken_data_is_lost_and_others_continue(tmp_path: Path, cohort: int) -> None:
    s, problem, data = literal(), setup(), clients(SIZES)
    data[1].train.x[0, 0, 0, 0] = torch.nan
    run = federation(tmp_path, PEFLL, s, problem, data, evaluation_cohort=cohort)
    before = run.state
    evaluation = run.run()
    expect(run.state, *gradient_step(s, problem, before, [data[0], data[2]]))
    (conversation,) = run.loop.journal.counted()[0].conversations
    assert [(loss.client, loss.exchange) for loss in conversation.lost] == [("c1", 0)]
    assert "Descriptor.v" in conversation.lost[0].reason
    assert evaluation.present.tolist() == [True, False, True]
    assert evaluation.records["descriptor"].shape == (3, LENGTH)  # rows stay aligned when a whole cohort is lost


# --- prediction -------------------------------------------------------------------------------------------------------


def test_prediction_follows_algorithm_1(tmp_path: Path) -> None:
    s, problem, data = literal(descriptor={"evaluate": "all", "standardize": "first"}), setup(), clients(SIZES)
    run = federation(tmp_path, PEFLL, s, problem, data, unseen=["c2"])
    run.run()
    state = run.state
    eta_v, eta_h = parameters(state)
    layout = PeFLLClient(s, problem).embedding.layout
    for c in data:
        v = embed(s, layout.split(eta_v), c.train.x, c.train.y).mean(0)
        theta = hyper(s, eta_h, (v - state["standard"][0]) / state["standard"][1])
        predictor = run.predictors[1, c.id]["personal"]
        torch.testing.assert_close(predictor.tensors()["theta"], theta, rtol=0, atol=1e-12)
        expected = problem.model.logits(theta, c.test.x).softmax(1)
        torch.testing.assert_close(predictor.probabilities(c.test.x), expected, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("each_task")
def test_a_client_may_fine_tune_its_generated_model(tmp_path: Path) -> None:
    """By torch's SGD on its own batches; training and the state do not change."""
    data, problem, steps = clients(SIZES), setup(), 5
    local = {"steps": 1, "batch_size": 3, "lr": 0.1, "momentum": 0.9}
    runs = {
        k: federation(tmp_path / str(k), PEFLL, literal(local=local, personalize_steps=k), problem, data, unseen=["c2"])
        for k in (0, steps)
    }
    for run in runs.values():
        run.run()
    assert all(torch.equal(a, b) for a, b in zip(runs[0].state.values(), runs[steps].state.values(), strict=True))
    for c in data:
        handed = runs[0].predictors[1, c.id]["personal"].tensors()["theta"]
        theta = handed.clone().requires_grad_()
        sgd = torch.optim.SGD([theta], lr=0.1, momentum=0.9)
        for index in batches(len(c.train), 3, steps, generator(7, "evaluate/fine-tune", c.id, 1)):
            loss = mean_loss(problem.model.logits(theta, c.train.x[index]), c.train.y[index])
            (theta.grad,) = torch.autograd.grad(loss + 0.02 * theta.square().sum(), [theta])
            sgd.step()
        found = runs[steps].predictors[1, c.id]["personal"].tensors()["theta"]
        torch.testing.assert_close(found, theta.detach(), rtol=0, atol=1e-10)
        assert not torch.equal(found, handed)
    half = PeFLLClient(literal(personalize_steps=steps), problem)
    assert half.personalization_steps("personal", 9) == steps
    assert PEFLL.titles(literal()) == {"personal": "PeFLL"}
    assert PEFLL.titles(literal(personalize_steps=1)) == {"personal": "PeFLL + fine-tuning"}


def open_with(s: PeFLLSettings, opening: type, c: ClientData, round: int = 1) -> Any:
    half = PeFLLClient(s, setup())
    eta_v = half.embedding.init(torch.Generator().manual_seed(5), torch.float64)
    return half.open(group([c], round=round), opening(eta_v))


def test_the_batch_of_a_descriptor_is_drawn_once_per_round() -> None:
    s, c = literal(descriptor={"batch_size": 3}), client("c0", 9)

    def v(opening: type, round: int) -> Tensor:
        answer = next(open_with(s, opening, c, round))
        assert isinstance(answer, Descriptor)
        return answer.v

    assert torch.equal(v(PeFLLTrainRequest, 1), v(PeFLLTrainRequest, 1))
    assert not torch.equal(v(PeFLLTrainRequest, 1), v(PeFLLTrainRequest, 2))
    assert not torch.equal(v(PeFLLTrainRequest, 1), v(DescriptorRequest, 1))


# --- errors -----------------------------------------------------------------------------------------------------------


def without_labels(c: ClientData) -> ClientData:
    return ClientData(c.id, Split(c.train.x, None), c.validation, c.test, c.classes)


def test_only_the_unlabelled_variant_describes_an_unlabelled_client() -> None:
    c = without_labels(client("c7", 4))
    with pytest.raises(DataError, match=r"client c7: .*\n.*embedding\.labels: false"):
        next(open_with(literal(), DescriptorRequest, c))
    conversation = open_with(literal(embedding={"labels": False}), DescriptorRequest, c)
    next(conversation)
    with pytest.raises(StopIteration) as end:
        conversation.send(PersonalizedModel(torch.zeros(1, setup().model.layout.size).double()))
    assert end.value.value[0]["personal"].probabilities(c.test.x).shape == (2, CLASSES)


def test_an_unlabelled_client_cannot_train() -> None:
    conversation = open_with(literal(embedding={"labels": False}), PeFLLTrainRequest, without_labels(client("c7", 4)))
    next(conversation)
    with pytest.raises(DataError, match=r"client c7: .*labels"):
        conversation.send(PersonalizedModel(torch.zeros(1, setup().model.layout.size).double()))


@pytest.mark.parametrize("opening", [PeFLLTrainRequest, DescriptorRequest])
def test_a_client_without_training_examples_reports_the_reason(opening: type) -> None:
    c = client("c7", 4)
    empty = ClientData("c7", Split(c.train.x[:0], torch.zeros(0).long()), c.validation, c.test, c.classes)
    with pytest.raises(DataError, match=r"client c7: .*empty"):
        next(open_with(literal(), opening, empty))


def test_contradictory_settings_are_rejected() -> None:
    with pytest.raises(ValidationError, match=r"linear.*labels=False"):
        literal(embedding={"network": "linear", "labels": False})
    with pytest.raises(ValidationError, match=r"steps=.*epochs="):
        literal(local={"epochs": 1})


@pytest.mark.parametrize("shape", [(1, 15, 28), (3, 8, 8)])
def test_a_lenet_embedding_of_too_small_inputs_is_rejected(shape: tuple[int, ...]) -> None:
    problem = Setup(MLP(shape, [], CLASSES), CLASSES, shape, 3, torch.float64)
    with pytest.raises(ExperimentError, match="16x16") as refused:
        PeFLLServer(literal(), problem, torch.Generator())
    assert (refused.value.key, refused.value.found) == ("algorithm.embedding.network", "lenet")
    PeFLLServer(literal(embedding={"network": "linear"}), problem, torch.Generator())


def test_with_a_subspace_a_client_receives_coordinates(tmp_path: Path) -> None:
    """Its model is θ₀ + P v'; the server keeps no row per parameter."""
    s = literal(hypernetwork={"subspace": {"size": 17}}, descriptor={"evaluate": "all"})
    problem, data = replace(setup(), seed=3), clients(SIZES)
    f = federation(tmp_path, PEFLL, s, problem, data, unseen=["c2"])
    f.run()
    eta_v, eta_h = parameters(f.state)
    layout = PeFLLClient(s, problem).embedding.layout
    assert (
        sum(value.numel() for value in f.state.values())
        < 100_000
        < sum(value.numel() for value in PeFLLServer(literal(), problem, torch.Generator()).state.values())
    )
    for c in data:
        v = hyper(s, eta_h, embed(s, layout.split(eta_v), c.train.x, c.train.y).mean(0))
        found = f.predictors[1, c.id]["personal"].tensors()["theta"]
        torch.testing.assert_close(found, in_space(s, problem, v).detach(), rtol=0, atol=1e-12)
    with pytest.raises(ExperimentError, match=r"^algorithm\.hypernetwork\.subspace\.size: "):
        PEFLL.check_model(literal(hypernetwork={"subspace": {"size": 10**6}}), problem.model)


def test_a_width_without_effect_is_rejected() -> None:
    with pytest.raises(ValidationError, match=r"lenet.*width=7"):
        literal(embedding={"width": 7})


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "length"), [(100, 26), (500, 126), (1000, 251), (3, 1)])
def test_the_descriptor_size_is_a_quarter_of_the_clients_plus_one(n: int, length: int) -> None:
    assert PeFLLSettings().descriptor_size(n) == length
    assert literal().descriptor_size(n) == LENGTH


def test_defaults_are_the_papers() -> None:
    s = PeFLLSettings()
    assert (s.local.steps, s.local.batch_size, s.local.momentum, s.local.lambda_theta) == (50, 32, 0.9, 0.0)
    assert (s.lambda_h, s.lambda_v, s.server.rule, s.descriptor.batch_size) == (1e-3, 1e-3, "paper", 32)
    assert (s.descriptor.train, s.descriptor.evaluate, s.descriptor.standardize) == ("batch", "batch", "none")
    assert (s.hypernetwork.size, s.hypernetwork.output_relu, s.embedding.network) == ("M", True, "lenet")


@pytest.mark.parametrize("subspace", [None, {"size": 17}])
def test_a_clients_traffic_matches_the_paper(tmp_path: Path, subspace: dict[str, int] | None) -> None:
    """Expect 2 (|θ| + |η_v| + |v|) numbers per client and round (A.3), and two more up: steps and loss.

    In a subspace of k dimensions |θ| is k, both ways.
    """
    s, problem, data = literal(hypernetwork={"subspace": subspace}), setup(), clients(SIZES)
    run: Federation = federation(tmp_path, PEFLL, s, problem, data)
    run.run()
    made = problem.model.layout.size if subspace is None else subspace["size"]
    size = made + run.state["eta_v"].numel() + LENGTH
    (attempt,) = run.loop.journal.counted()
    assert attempt.payload_down == 8 * 3 * size
    assert attempt.payload_up == 8 * 3 * (size + 2)


def test_the_model_at_the_origin_of_a_subspace_is_the_initial_one() -> None:
    s, model = literal(hypernetwork={"start": "model", "subspace": {"size": 17}}), MLP((1, 16, 16), [], CLASSES)
    server = PeFLLServer(s, Setup(model, CLASSES, (1, 16, 16), 3, seed=5), torch.Generator().manual_seed(1))
    subspace = s.hypernetwork.subspace.of(model, 5, torch.float32)
    made = subspace.expand(server.hypernetwork(server.eta_h, torch.randn(4, LENGTH)))
    assert torch.equal(made, subspace.origin.expand(4, -1))
