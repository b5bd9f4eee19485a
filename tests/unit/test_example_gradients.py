"""Noisy steps on clipped gradients of examples, against a loop of autograd over single examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federations import CLASSES, IMAGE, client, clients
from torch import Tensor, nn

from fedloom.algorithms import losses
from fedloom.algorithms.client import Correction, LocalTrainer, proximal, train
from fedloom.algorithms.client_group import Batch, ClientGroup
from fedloom.algorithms.local_sgd import LocalSGD
from fedloom.algorithms.losses import clipped_sums
from fedloom.data.augment import augmentation
from fedloom.data.federated import ClientData, Normalization, Split
from fedloom.federation.randomness import generator
from fedloom.models.flat import FlatModel, Leaves, bfloat16
from fedloom.models.module import ModuleModel
from fedloom.models.networks import LSTM, MLP, ConvNet, LeNet
from fedloom.privacy.examples import ExamplePrivacy

TINY, HUGE = 1e-13, 1e9
SMALL = MLP(IMAGE, [5], CLASSES)
UNEVEN = (3, 21, 6, 1, 13)


def private(clip: float = 0.5, z: float = TINY, sampling: Any = "poisson") -> ExamplePrivacy:
    return ExamplePrivacy(clip, z, sampling)


def group(
    data: Sequence[ClientData], how: ExamplePrivacy | None = None, *, seed: int = 0, round: int | None = 1, **keys: Any
) -> ClientGroup:
    """Return a batch of clients of a training round whose generators are keyed as in a run."""
    keyed = lambda client, purpose: generator(seed, purpose, client, round or 0)  # noqa: E731
    return ClientGroup(data, keyed, round=round, examples=how or private(), **keys)


def starts(model: FlatModel, g: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.stack([model.init(torch.Generator().manual_seed(i), dtype) for i in range(g)])


def one_by_one(
    loss: Callable[[dict[str, Tensor], Any, Tensor], Tensor], w: Mapping[str, Tensor], x: Any, y: Tensor, clip: float
) -> dict[str, Tensor]:
    """Return Σ of clipped gradients by a loop of autograd, for the leaves in w."""
    total = {name: torch.zeros_like(leaf) for name, leaf in w.items()}
    for i in range(len(y)):
        leaves = {name: leaf.detach().clone().requires_grad_() for name, leaf in w.items()}
        one = x[i : i + 1] if isinstance(x, Tensor) else {name: t[i : i + 1] for name, t in x.items()}
        loss(leaves, one, y[i : i + 1]).sum().backward()
        norm = math.sqrt(sum(float(leaf.grad.square().sum()) for leaf in leaves.values() if leaf.grad is not None))
        for name, leaf in leaves.items():
            if leaf.grad is not None:
                total[name] += leaf.grad * min(1.0, clip / norm)
    return total


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Linear(16, 8), nn.Linear(8, CLASSES)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.layer(self.embed(x[:, 0])).mean(1))
        return found


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), nn.GroupNorm(2, 4), nn.SiLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, groups=2),
        nn.InstanceNorm2d(4, affine=True), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.LayerNorm(16),
        nn.utils.parametrizations.weight_norm(nn.Linear(16, 7)), nn.PReLU(), nn.Linear(7, CLASSES),
    )  # fmt: skip


MODELS: dict[str, Callable[[], FlatModel]] = {
    "mlp": lambda: SMALL,
    "lenet": lambda: LeNet(IMAGE, CLASSES),
    "convnet": lambda: ConvNet(IMAGE, [4, 6], [5], CLASSES),
    "layers": lambda: ModuleModel(convolutions, IMAGE, CLASSES, "pixels"),
    "attention": lambda: ModuleModel(Attention, IMAGE, CLASSES, "pixels"),
}


@pytest.mark.parametrize("clip", [0.3, HUGE])
@pytest.mark.parametrize("name", MODELS)
def test_sums_equal_those_of_single_examples(name: str, clip: float) -> None:
    model, c = MODELS[name](), client("c0", 7)
    dtype = torch.float64 if name in ("mlp", "lenet", "convnet") else torch.float32
    w = model.layout.leaves(model.init(torch.Generator().manual_seed(1), dtype))
    x, weight = c.train.x.to(dtype), torch.tensor([1, 1, 0, 1, 1, 1, 0]).to(dtype)
    found = clipped_sums(model.in_training(), Leaves(w), [*w], Batch(x, c.train.y, weight), clip, stacked=False)
    counted = weight > 0
    training = model.in_training()
    expected = one_by_one(
        lambda w, x, y: F.cross_entropy(training.forward(Leaves(w), x), y), w, x[counted], c.train.y[counted], clip
    )
    for name, total in zip(w, found, strict=True):
        torch.testing.assert_close(total, expected[name], rtol=1e-5, atol=1e-6)


def test_sums_for_recurrent_networks_and_named_inputs() -> None:
    model = LSTM(6, 3, 4, 2)
    x, y = torch.randint(6, (5, 4)), torch.randint(6, (5,))
    w = model.layout.leaves(model.init(torch.Generator().manual_seed(1), torch.float64))
    found = clipped_sums(model, Leaves(w), [*w], Batch(x, y, torch.ones(5).double()), 0.2, stacked=False)
    expected = one_by_one(lambda w, x, y: F.cross_entropy(model.forward(w, x), y), w, x, y, 0.2)
    for name, total in zip(w, found, strict=True):
        torch.testing.assert_close(total, expected[name], rtol=0, atol=1e-10)


def test_chunks_and_stacked_clients_do_not_change_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LeNet(IMAGE, CLASSES)
    theta, data = starts(model, 3), clients((6, 6, 6))
    w = LocalTrainer(model, group(data)).parameters(theta)
    x = torch.stack([c.train.x for c in data])
    y = torch.stack([c.train.y for c in data if c.train.y is not None])
    weight = torch.ones(3, 6).double()
    weight[1, 2:] = 0
    whole = clipped_sums(model, w, [*w], Batch(x, y, weight), 0.5, stacked=True)
    monkeypatch.setattr(losses, "MOST_NUMBERS", 1)
    pieces = clipped_sums(model, w, [*w], Batch(x, y, weight), 0.5, stacked=True)
    for i in range(3):
        one = Leaves({name: leaf[i] for name, leaf in w.items()})
        alone = clipped_sums(model, one, [*w], Batch(x[i], y[i], weight[i]), 0.5, stacked=False)
        for a, b, c in zip(whole, pieces, alone, strict=True):
            torch.testing.assert_close(a[i], c, rtol=0, atol=1e-12)
            torch.testing.assert_close(b[i], c, rtol=0, atol=1e-12)


def test_each_example_contributes_at_most_the_clipping_norm() -> None:
    model, c = SMALL, client("c0", 4)
    w = Leaves(model.layout.leaves(model.init(torch.Generator().manual_seed(1), torch.float32)))
    x = torch.stack([c.train.x[0] * 1e20, c.train.x[1] * torch.nan, c.train.x[2] * 1e30, c.train.x[3]]).float()
    for chosen in ([0], [1], [2], [3], [0, 1, 2, 3]):
        weight = torch.zeros(4)
        weight[chosen] = 1
        sums = clipped_sums(model, w, [*w], Batch(x, c.train.y, weight), 0.25, stacked=False)
        norm = torch.cat([one.flatten() for one in sums]).norm()
        assert norm.isfinite()
        assert norm <= 0.25 * len(chosen) * (1 + 1e-5)


def by_hand(
    model: FlatModel, theta: Tensor, c: ClientData, s: LocalSGD, how: ExamplePrivacy, members: ClientGroup, pull: float
) -> Tensor:
    """Return θ after noiseless steps of torch.optim on clipped gradients of batches over their expected size."""
    p = theta.clone().requires_grad_()
    kinds: dict[str, Any] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    if s.optimizer == "sgd":
        optimizer: Any = torch.optim.SGD([p], s.lr, s.momentum or 0.0, weight_decay=s.weight_decay)
    else:
        optimizer = kinds[s.optimizer]([p], s.lr, weight_decay=s.weight_decay)
    n, steps = len(c.train), s.count(len(c.train))
    b = min(s.batch_size * s.accumulate, n)
    for t in range(steps):
        u = members.uniform(0, f"train/sample/{t}", n)
        index = (u < b / n).nonzero()[:, 0] if how.sampling == "poisson" or b == n else u.argsort()[:b]
        total = one_by_one(
            lambda w, x, y: F.cross_entropy(model.logits(w["p"], x), y),
            {"p": p},
            c.train.x[index],
            c.train.y[index],
            how.clip,
        )
        p.grad = total["p"] / b + 2 * s.lambda_theta * p.detach() + pull * (p.detach() - theta)
        optimizer.step()
    return p.detach()


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"momentum": 0.0},
    "momentum and decay": {"weight_decay": 0.01, "lambda_theta": 0.1},
    "adam": {"optimizer": "adam", "lr": 0.01},
    "adamw": {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.01},
    "accumulated": {"accumulate": 2},
    "all examples": {"batch_size": 40},
}


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
@pytest.mark.parametrize("name", OPTIONS)
def test_steps_equal_torchs_on_clipped_gradients(name: str, sampling: str) -> None:
    s = LocalSGD.model_validate({"steps": 6, "batch_size": 4, "lr": 0.05, **OPTIONS[name]})
    c, how, theta = client("c0", 11), private(0.3, sampling=sampling), starts(SMALL, 1)
    found = train(SMALL, group([c], how), theta, s, correct=proximal(0.5))
    expected = by_hand(SMALL, theta[0], c, s, how, group([c], how), pull=0.5)
    # Adam divides by the size of a gradient: without a gradient, by that of the noise.
    torch.testing.assert_close(found.theta[0], expected, rtol=0, atol=1e-6 if name.startswith("adam") else 1e-9)
    assert found.steps.tolist() == [[6]]
    assert found.loss.tolist() == [[0]]  # a loss is computed from the data
    assert (found.theta - theta).abs().max() > 1e-4


def test_without_clipping_and_noise_steps_equal_plain_ones() -> None:
    """Every example is in every batch; then batches are those of plain SGD, too."""
    s, data, theta = LocalSGD(steps=5, batch_size=64, lr=0.1), clients((9, 4)), starts(SMALL, 2)
    plain = train(SMALL, group(data, round=None), theta, s)
    found = train(SMALL, group(data, private(HUGE, 1e-20)), theta, s)
    torch.testing.assert_close(found.theta, plain.theta, rtol=0, atol=1e-9)
    assert plain.loss.min() > 0


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
@pytest.mark.parametrize("model", [SMALL, LeNet(IMAGE, CLASSES)], ids=["mlp", "lenet"])
def test_clients_together_equal_single_ones(model: FlatModel, sampling: str) -> None:
    """With noise, and with clients that finish before others."""
    s, how = LocalSGD(epochs=2, batch_size=4, lr=0.05), private(0.5, 0.7, sampling)
    data, theta = clients(UNEVEN), starts(model, len(UNEVEN))
    together = train(model, group(data, how), theta, s, correct=proximal(0.1))
    for i, c in enumerate(data):
        alone = train(model, group([c], how), theta[i : i + 1], s, correct=proximal(0.1))
        torch.testing.assert_close(together.theta[i], alone.theta[0], rtol=0, atol=1e-8)
        assert together.steps[i] == alone.steps[0]
    assert torch.equal(together.theta, train(model, group(data, how), theta, s, correct=proximal(0.1)).theta)


def test_only_the_selected_part_is_clipped_and_moved() -> None:
    s, how, c, theta = LocalSGD(steps=4, batch_size=4, lr=0.05), private(0.2), client("c0", 11), starts(SMALL, 1)
    size = SMALL.layout.body_size
    head = train(SMALL, group([c], how), theta, s, only="head").theta
    assert torch.equal(head[:, :size], theta[:, :size])
    one = LocalSGD(steps=1, batch_size=64, lr=1.0, momentum=0.0)
    moved = train(SMALL, group([c], how), theta, one, only="head").theta - theta
    p = SMALL.layout.split(theta[0])
    frozen = {name: p[name] for name in SMALL.layout.body}
    expected = one_by_one(
        lambda w, x, y: F.cross_entropy(SMALL.forward({**frozen, **w}, x), y),
        {name: p[name] for name in SMALL.layout.head}, c.train.x, c.train.y, 0.2,
    )  # fmt: skip
    total = torch.cat([expected[name].flatten() for name in SMALL.layout.head])
    torch.testing.assert_close(moved[0, size:], -total / 11, rtol=0, atol=1e-9)


# --- noise ------------------------------------------------------------------------------------------------------------


def test_noise_has_the_stated_deviation_over_the_expected_batch_size() -> None:
    """One step of rate 1 from θ: only the noise differs between rounds if all examples are in each batch."""
    c, z, clip = client("c0", 8), 1.5, 0.4
    s, theta, how = LocalSGD(steps=1, batch_size=8, lr=1.0, momentum=0.0), starts(SMALL, 1), private(0.4, 1.5)
    moved = torch.stack([train(SMALL, group([c], how, round=t), theta, s).theta[0] for t in range(1, 41)])
    spread = moved.std(0)
    assert torch.isclose(spread.square().mean().sqrt(), torch.tensor(z * clip / 8).double(), rtol=0.02)
    assert spread.min() > 0.4 * z * clip / 8
    noiseless = train(SMALL, group([c], private(clip)), theta, s).theta[0]
    assert (moved.mean(0) - noiseless).abs().max() < 6 * z * clip / 8 / math.sqrt(40)
    columns = (moved - moved.mean(0))[:, :200]
    assert torch.corrcoef(columns.T).fill_diagonal_(0).abs().mean() < 0.2  # coordinates are independent


def test_empty_batches_are_pure_noise() -> None:
    """One example of 200 is expected in a batch, so a third of the batches are empty; none of them fails."""
    c, theta = client("c0", 200), starts(SMALL, 1)
    s, how = LocalSGD(steps=12, batch_size=1, lr=1.0, momentum=0.0), private(1.0, 2.0)
    members = group([c], how)
    local = LocalTrainer(SMALL, members)
    sizes = [int((batch.weight > 0).sum()) for (batch,) in local.steps(s, [12], "train")]
    assert 0 in sizes
    assert max(sizes) > 1
    empty = sizes.index(0)
    w = local.parameters(theta)
    batch = [batch for (batch,) in local.steps(s, [12], "train")][empty]
    gradient = torch.cat([part.flatten() for part in local.gradient(w, batch)[0]])
    assert 1.9 < float(gradient.std()) < 2.1
    assert train(SMALL, group([c], how), theta, s).theta.isfinite().all()


def test_batches_are_drawn_as_the_accountant_assumes() -> None:
    data, steps = clients((50, 7, 20)), 400
    s = LocalSGD(steps=steps, batch_size=10)
    for sampling in ("poisson", "fixed"):
        local = LocalTrainer(SMALL, group(data, private(sampling=sampling)))
        sizes = torch.stack([(batch.weight > 0).sum(1) for (batch,) in local.steps(s, [steps] * 3, "train")]).double()
        assert torch.allclose(sizes.mean(0), torch.tensor([10.0, 7.0, 10.0]).double(), atol=0.7)
        if sampling == "fixed":
            assert torch.equal(sizes, torch.tensor([[10.0, 7.0, 10.0]]).double().expand(steps, -1))
        else:
            assert torch.allclose(sizes.var(0), torch.tensor([8.0, 0.0, 5.0]).double(), rtol=0.3)
    alone = LocalTrainer(SMALL, group(data[:1], private()))
    drawn = [batch.x[batch.weight > 0] for (batch,) in alone.steps(s, [steps], "train")]
    times = torch.stack([(torch.cat(drawn) == x).flatten(1).all(1).sum() for x in data[0].train.x]).double()
    assert times.min() > 40  # of 400 steps at a rate of 1/5, each example
    assert times.max() < 125
    shares = [batch.each for (batch,) in alone.steps(s, [3], "train")]
    assert all(share is not None and share.tolist() == [0.1] for share in shares)


def test_secret_noise_and_batches_do_not_follow_from_the_seed() -> None:
    c, theta, how = client("c0", 30), starts(SMALL, 1), private(0.5, 1.0)
    s = LocalSGD(steps=3, batch_size=5, lr=0.1)

    def made(secret: bytes | None, round: int = 1) -> Tensor:
        return train(SMALL, group([c], how, secret=secret, round=round), theta, s).theta

    one = made(b"a" * 32)
    assert torch.equal(one, made(b"a" * 32))  # a repeated exchange discloses nothing more
    assert not torch.equal(one, made(b"b" * 32))
    assert not torch.equal(one, made(None))
    assert torch.equal(made(None), made(None))
    first, second = (group([c], how, secret=b"a" * 32, round=t) for t in (1, 2))
    assert not torch.equal(first.uniform(0, "train/sample/0", 30), second.uniform(0, "train/sample/0", 30))
    total = torch.zeros(500).double()
    noises = [members.noise_for(0, total) for members in (first, first, second)]  # equal sums in three steps
    assert torch.corrcoef(torch.stack(noises)).fill_diagonal_(0).abs().max() < 0.3
    assert not torch.equal(first.noise_for(0, total), group([c], how, secret=b"a" * 32).noise_for(0, total + 1))
    assert first.hidden(0, "draws").initial_seed() != group([c], how).hidden(0, "draws").initial_seed()


# --- models that draw, augmentation, precision ------------------------------------------------------------------------


def test_dropout_differs_between_examples() -> None:
    module = lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(256, CLASSES))  # noqa: E731
    model = ModuleModel(module, IMAGE, CLASSES, "pixels")
    w = model.layout.leaves(model.init(torch.Generator().manual_seed(1)))
    x, y = torch.ones(2, *IMAGE), torch.zeros(2).long()
    alone = [
        clipped_sums(model.in_training(), Leaves(w), [*w], Batch(x, y, torch.tensor(weight)), HUGE, stacked=False)[0]
        for weight in ([1.0, 0.0], [0.0, 1.0])
    ]
    dropped = [(one == 0).all(0) for one in alone]
    assert not torch.equal(*dropped)
    assert all(90 < int(mask.sum()) < 166 for mask in dropped)
    s, data, theta = LocalSGD(steps=3, batch_size=4, lr=0.1), clients((9, 5)), starts(model, 2, torch.float32)
    data = [ClientData(c.id, Split(c.train.x.float(), c.train.y), c.validation, c.test, c.classes) for c in data]
    found = [train(model, group(data, private(1.0, 0.1)), theta, s).theta for _ in range(2)]
    assert torch.equal(*found)


def test_augmented_images_are_clipped_separately() -> None:
    pytest.importorskip("torchvision")
    shape = (1, 16, 16)
    c = client("c0", 12, shape=shape)
    c = ClientData(c.id, Split(c.train.x.clamp(0, 1).float(), c.train.y), c.validation, c.test, c.classes)
    flipped = augmentation(["RandomHorizontalFlip"], Normalization((0.0,), (1.0,)))
    s = LocalSGD(steps=4, batch_size=3, lr=0.1)
    members = [group([c, c][:g], private(1.0, 0.5), augment=flipped) for g in (1, 2)]
    local = [LocalTrainer(SMALL, one) for one in members]
    alone = [batch for (batch,) in local[0].steps(s, [4], "train")]
    both = [batch for (batch,) in local[1].steps(s, [4, 4], "train")]
    for one, two in zip(alone, both, strict=True):
        n = int((one.weight > 0).sum())
        assert torch.equal(one.x[:n], two.x[0, :n])
    plain = [batch for (batch,) in LocalTrainer(SMALL, group([c], private())).steps(s, [4], "train")]
    assert any(not torch.equal(one.x, other.x) for one, other in zip(alone, plain, strict=True))


def test_bfloat16_gradients_are_clipped_in_the_parameters_type() -> None:
    model, c = bfloat16(ConvNet(IMAGE, [4], [5], CLASSES)), client("c0", 6)
    w = Leaves(model.layout.leaves(model.init(torch.Generator().manual_seed(1))))
    batch = Batch(c.train.x.float(), c.train.y, torch.ones(6))
    sums = clipped_sums(model.in_training(), w, [*w], batch, 0.01, stacked=False)
    assert all(one.dtype == torch.float32 for one in sums)
    assert 0.01 < torch.cat([one.flatten() for one in sums]).norm() <= 0.06 * (1 + 1e-5)


# --- operations rejected in noisy training ----------------------------------------------------------------------------


def test_losses_and_second_derivatives_are_rejected_with_noise() -> None:
    c, theta = client("c0", 6), starts(SMALL, 1)
    local = LocalTrainer(SMALL, group([c]))
    w, batch = local.parameters(theta), next(local.batches(3, [1], "train"))
    refused: list[Callable[[], Any]] = [
        local.everything,
        lambda: local.value(w, batch),
        lambda: local.measured(w, batch),
        lambda: local.halves(batch),
        lambda: local.gradient(w, batch, differentiable=True),
        lambda: local.gradient(w, batch, batch),
        lambda: LocalTrainer(SMALL, group([c]), mask_absent=True),
        lambda: local.gradient(w, Batch(batch.x, batch.y, batch.weight)),
    ]
    for each in refused:
        with pytest.raises(RuntimeError):
            each()
    plain = LocalTrainer(SMALL, group([c]), at_home=True)
    with pytest.raises(RuntimeError):
        plain.gradient(plain.parameters(theta), batch)


def test_local_only_training_has_no_noise() -> None:
    c, theta, s = client("c0", 9), starts(SMALL, 1), LocalSGD(steps=5, batch_size=3)
    how = private(0.1, 5.0)
    plain = train(SMALL, ClientGroup([c], group([c])._generator), theta, s)
    personalizing = ClientGroup([c], group([c])._generator, examples=how)
    assert torch.equal(train(SMALL, personalizing, theta, s).theta, plain.theta)
    assert torch.equal(train(SMALL, group([c], how), theta, s, at_home=True).theta, plain.theta)
    assert not torch.equal(train(SMALL, group([c], how, round=None), theta, s, at_home=False).theta, plain.theta)


def test_corrections_are_added_after_the_noise() -> None:
    """Such terms do not depend on data: a correction of 1000 is not clipped."""
    c, theta = client("c0", 9), starts(SMALL, 1)
    s, how = LocalSGD(steps=1, batch_size=16, lr=1e-3, momentum=0.0), private(1e-6)

    def change(gradients: list[Tensor], *_: Any) -> list[Tensor]:
        return [gradient + 1000 for gradient in gradients]

    moved = train(SMALL, group([c], how), theta, s, correct=Correction(change)).theta - theta
    torch.testing.assert_close(moved, torch.full_like(moved, -1.0), rtol=0, atol=1e-8)
