"""Modules whose buffers change, whose parameters are partly frozen, or whose layers get their shapes from inputs."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from every_method import METHODS, SIZES, run
from facts import refusing, tells
from federations import CLASSES, IMAGE, group, made_by
from test_local_data import TASK, people
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import fedloom
from fedloom.algorithms.base import find_algorithm
from fedloom.algorithms.batches import batches
from fedloom.algorithms.client import LocalTrainer, train
from fedloom.algorithms.fedopt import FEDADAM
from fedloom.algorithms.local_sgd import LocalSGD
from fedloom.data.federated import ClientData, Split
from fedloom.engine import assemble, distributed
from fedloom.engine.constants import are_close, figures_of
from fedloom.engine.options import WorkerOptions
from fedloom.engine.worker import Worker
from fedloom.errors import DataError, ExperimentError
from fedloom.evaluation.measure import metrics
from fedloom.experiment import of
from fedloom.models.factories import FACTORIES
from fedloom.models.module import ModuleModel, remember
from fedloom.models.module_call import SingleInput
from fedloom.models.predictors import predictors_of
from fedloom.runs.folder import RunFolder
from fedloom.serving.personal import DescribedRun
from fedloom.serving.serve import about
from fedloom.transport.stream import Joined

SHAPE = (3, 8, 8)


def examples(*sizes: int, shape: tuple[int, ...] = SHAPE, classes: int = 3) -> list[ClientData]:
    random = torch.Generator().manual_seed(2)
    found = []
    for i, n in enumerate(sizes):
        x, y = 2 * torch.randn(n, *shape, generator=random) + 1, torch.randint(classes, (n,), generator=random)
        found.append(ClientData(f"c{i}", *[Split(x, y)] * 3, classes))
    return found


def network(norm: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 4), nn.Linear(4, 3)
    )


class Average(nn.Module):
    """Layer that centres by an exponential mean of its inputs, which it replaces rather than changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.8 * self.mean + 0.2 * x.detach().mean((0, 2, 3))
        return x - self.mean[:, None, None]


class Teacher(nn.Module):
    """Convolution with a frozen teacher, an exponential average of it that equals it at the start and predicts."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Conv2d(4, 4, 1)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for t, p in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    t.mul_(0.9).add_(p, alpha=0.1)
            return self.student(x) + 0.1 * self.teacher(x)
        found: Tensor = 1.1 * self.teacher(x)
        return found


NORMS: dict[str, Any] = {
    "batch": lambda: nn.BatchNorm2d(4),
    "batch without statistics": lambda: nn.BatchNorm2d(4, track_running_stats=False),
    "batch, slow": lambda: nn.BatchNorm2d(4, momentum=0.01, affine=False),
    "instance": lambda: nn.InstanceNorm2d(4),
    "instance with statistics": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    "group": lambda: nn.GroupNorm(2, 4),
    "an average of its own": Average,
    "a frozen teacher": Teacher,
    "spectral": lambda: parametrizations.spectral_norm(nn.Conv2d(4, 4, 1)),
}


def model(norm: str = "batch", **keys: Any) -> ModuleModel:
    def make() -> nn.Module:
        return network(NORMS[norm]())

    return ModuleModel(make, SHAPE, 3, "pixels", **keys)


def by_torch(made: nn.Module, m: ModuleModel, theta: Tensor, client: ClientData, s: LocalSGD, random: Any) -> Tensor:
    """Return θ after a loop as in any tutorial."""
    named, tensors = m.layout.split(theta), {**dict(made.named_parameters()), **dict(made.named_buffers())}
    with torch.no_grad():
        for name, t in named.items():
            tensors[name].copy_(t)
    if m.layout.channels_last:
        made = made.to(memory_format=torch.channels_last)
    made.train()
    optimizer = torch.optim.SGD([p for p in made.parameters() if p.requires_grad], lr=s.lr, momentum=s.momentum)
    for index in batches(len(client.train), s.batch_size, s.count(len(client.train)), random):
        optimizer.zero_grad()
        F.cross_entropy(made(client.train.x[index]), client.train.y[index]).backward()
        optimizer.step()
    tensors = {**dict(made.named_parameters()), **dict(made.named_buffers())}
    return m.layout.join({name: tensors[name].detach() for name, _ in m.layout.entries})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("norm", NORMS)
def test_training_equals_a_bare_loop(norm: str) -> None:
    m, (client,) = model(norm), examples(20)
    theta, s = m.init(torch.Generator().manual_seed(1)), LocalSGD(steps=5, batch_size=8, lr=0.05)
    expected = by_torch(network(NORMS[norm]()), m, theta, client, s, group([client]).generator(0, "train"))
    found = train(m, group([client]), theta[None], s).theta[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    moved = m.layout.mask(m.layout.buffers)
    assert bool(moved.any()) == (norm not in ("batch without statistics", "instance", "group"))
    assert not torch.isclose(found, theta)[moved].all() or not moved.any()


@pytest.mark.slow
def test_resnet18_equals_a_bare_loop_to_the_bit() -> None:
    models = pytest.importorskip("torchvision.models")
    m = ModuleModel(lambda: models.resnet18(num_classes=3), (3, 32, 32), 3, "pixels")
    assert len(m.layout.buffers) == 40
    assert m.layout.head == ("fc.weight", "fc.bias")
    assert [name for name, _ in m.layout.entries][-42:] == [*m.layout.buffers, *m.layout.head]
    (client,) = examples(24, shape=(3, 32, 32))
    theta, s = m.init(torch.Generator().manual_seed(1)), LocalSGD(steps=3, batch_size=8, lr=0.05)
    expected = by_torch(models.resnet18(num_classes=3), m, theta, client, s, group([client]).generator(0, "train"))
    assert torch.equal(train(m, group([client]), theta[None], s).theta[0], expected)


def test_buffers_are_not_decayed_clipped_or_pulled() -> None:
    """With a rate of almost 0 only forward calls change them, for any options of the steps."""
    m, (client,) = model(), examples(20)
    theta = m.init(torch.Generator().manual_seed(1))
    plain = LocalSGD(steps=4, batch_size=8, lr=1e-12, momentum=0.0)
    other = plain.model_copy(update={"lambda_theta": 1e5, "clip": 1e-9, "momentum": 0.9})
    moved = m.layout.mask(m.layout.buffers)
    ends = [train(m, group([client]), theta[None], s).theta[0, moved] for s in (plain, other)]
    torch.testing.assert_close(*ends)


@pytest.mark.parametrize("norm", ["batch", "batch, slow", "instance with statistics", "group", "a frozen teacher"])
@pytest.mark.parametrize("batch_size", [4, 100])
def test_stacked_clients_equal_single_ones(norm: str, batch_size: int) -> None:
    """A finished client, here the smaller one, changes no buffers; batches of different lengths are not stacked."""
    m, data = model(norm), examples(12, 20)
    theta = m.init(torch.Generator().manual_seed(1)).expand(2, -1)
    s = LocalSGD(epochs=2, batch_size=batch_size, lr=0.1)
    if batch_size == 100 and norm != "group":
        with pytest.raises(ExperimentError) as error:
            train(m, group(data), theta, s)
        assert tells(str(error.value), "runtime.clients_at_once", "2", "1")
        return
    alone = torch.cat([train(m, group([c]), theta[:1], s).theta for c in data])
    torch.testing.assert_close(train(m, group(data), theta, s).theta, alone, rtol=1e-4, atol=1e-6)


REFUSED = {"apfl", "flowdup", "pefll", "pfedbayes", "pfedhn", "pfnm", "wga"}


@functools.cache
def small() -> ModuleModel:
    def make() -> nn.Module:
        convolved = (nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        return nn.Sequential(*convolved, nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, CLASSES))

    return ModuleModel(make, IMAGE, CLASSES, "pixels")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", sorted(METHODS.keys() - REFUSED))
def test_every_method_moves_statistics_and_keeps_variances_positive(tmp_path: Path, name: str) -> None:
    method = find_algorithm(name.split()[0])
    method.check_model(method.settings.model_validate(METHODS[name]), small())
    made = made_by(run(tmp_path, name, small()))
    assert all(value.isfinite().all() for value in made.values())
    size = small().layout.size
    models = [value.flatten() for key, value in made.items() if key.endswith("theta") and value.numel() == size]
    assert len(models) >= len(SIZES) or name == "pfedgp"
    for theta in models:
        named = small().layout.split(theta)
        assert (named["1.running_var"] > 0).all()
    assert any(small().layout.split(theta)["1.running_mean"].abs().min() > 0 for theta in models) or name == "pfedgp"


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_method_that_cannot_move_statistics_rejects_them(name: str) -> None:
    method = find_algorithm(name)
    with pytest.raises(ExperimentError) as error:
        method.check_model(method.settings.model_validate(METHODS[name]), small())
    assert tells(str(error.value), "model.", name)


def test_the_server_averages_statistics_with_any_optimizer(tmp_path: Path) -> None:
    """FedAdam's second moment would divide by them, and a rate above 1 could make a variance negative."""
    moved = small().layout.mask(small().layout.buffers)
    runs = {
        name: run(tmp_path / name, method, small(), **keys).state["theta"]
        for name, method, keys in (
            ("fedavg", "fedavg", {}),
            ("fast", "fedavg", {"server_lr": 3.0}),
            ("adam", "fedadam", {}),
            ("momentum", "fedavgm", {"server_lr": 2.0}),
        )
    }
    first, *others = runs.values()
    for theta in others:
        torch.testing.assert_close(theta[moved], first[moved])
        assert not torch.allclose(theta[~moved], first[~moved])
    assert FEDADAM.name == "fedadam"


def test_head_training_keeps_the_statistics() -> None:
    m, (client,) = model(), examples(20)
    theta, s = m.init(torch.Generator().manual_seed(1)), LocalSGD(steps=3, batch_size=8)
    head = train(m, group([client]), theta[None], s, only="head").theta[0]
    assert torch.equal(head[: m.layout.body_size], theta[: m.layout.body_size])
    body = train(m, group([client]), theta[None], s, only="body").theta[0]
    assert torch.equal(body[m.layout.body_size :], theta[m.layout.body_size :])
    moved = m.layout.mask(m.layout.buffers)
    assert not torch.isclose(body[moved], theta[moved]).any()


def test_measuring_and_predicting_change_no_statistics() -> None:
    m, (client,) = model(), examples(20)
    local = LocalTrainer(m, group([client]))
    w = local.parameters(m.init(torch.Generator().manual_seed(1))[None])
    before = local.join(w)
    local.measured(w, *local.everything())
    m.forward(w, client.test.x)
    m.features(w, client.test.x)
    assert torch.equal(local.join(w), before)
    local.gradient(w, *local.everything())
    assert not torch.equal(local.join(w), before)
    assert set(w) | set(w.buffers) == dict(m.layout.entries).keys()
    assert not set(w) & set(w.buffers)


def test_a_frozen_teacher_that_moves_belongs_to_each_client() -> None:
    m, (client, other) = model("a frozen teacher"), examples(20, 20)
    assert m.layout.buffers == ("1.teacher.weight", "1.teacher.bias")
    assert not m.constants
    theta, s = m.init(torch.Generator().manual_seed(1)), LocalSGD(steps=3, batch_size=8, lr=0.1)
    predicted = m.logits(theta, client.test.x)
    train(m, group([other]), theta[None] + 1, s)
    assert torch.equal(m.logits(theta, client.test.x), predicted)


class Hidden(nn.Module):
    """Module that keeps its teacher in a list, where torch does not see it."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(3, 3)
        self.teacher = [copy.deepcopy(self.student)]

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.teacher[0].weight.lerp_(self.student.weight, 0.1)
        found: Tensor = self.student(x)
        return found


class MovesInEvaluation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.teacher = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher.weight.mul_(0.9)
        found: Tensor = self.teacher(self.first(x))
        return found


@pytest.mark.parametrize(("made", "named"), [(Hidden, "teacher"), (MovesInEvaluation, "teacher.weight")])
def test_other_teachers_that_move_are_rejected_by_name(made: Any, named: str) -> None:
    with refusing(ExperimentError, named):
        ModuleModel(made, (3,), 3, "features")


def test_predicting_leaves_renormalized_embeddings_as_they_are() -> None:
    """nn.Embedding(max_norm=...) changes its weight in every call, in evaluation mode too."""

    def made() -> nn.Module:
        return nn.Sequential(nn.Embedding(9, 4, max_norm=0.5), nn.Flatten(), nn.Linear(12, 3))

    m = ModuleModel(made, {"": SingleInput("integers", (3,), 9)}, 3, "integers")
    theta, x = m.init(torch.Generator().manual_seed(1)), torch.randint(9, (5, 3))
    before, net = theta.clone(), made().eval()
    net.load_state_dict(m.layout.split(before.clone()))
    torch.testing.assert_close(m.logits(theta, x), net(x))
    assert torch.equal(theta, before)


def test_a_batch_of_one_example_is_reported(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    m, (client,) = ModuleModel(make, (3,), 2, "features"), examples(6, shape=(3,), classes=2)
    with pytest.raises(DataError) as error:
        train(m, group([client]), m.init(torch.Generator())[None], LocalSGD(steps=1, batch_size=1))
    assert tells(str(error.value), "batch_size", "2")
    for name, key in (("fedavg", "local.batch_size"), ("fedrep", "head.batch_size"), ("pfedme", "batch_size")):
        method = find_algorithm(name)
        section, _, last = key.rpartition(".")
        value = {section: {"epochs": 1, last: 1}} if section else {last: 1}
        with refusing(ExperimentError, f"algorithm.{key}", "2", "1"):
            method.check_model(method.settings.model_validate(value), m)
        method.check_model(method.settings.model_validate(value), model())  # there are pixels to normalize over


def test_without_running_statistics_a_client_is_predicted_in_batches(caplog: pytest.LogCaptureFixture) -> None:
    m, (client,) = model("batch without statistics"), examples(9)
    assert m.predicts_by_batch
    theta = m.init(torch.Generator().manual_seed(1))
    made = network(nn.BatchNorm2d(4, track_running_stats=False))
    made.load_state_dict(m.layout.split(theta))
    expected = 0.0
    for start in range(0, 9, 4):  # the last batch has one example
        x, y = client.test.x[start : start + 4], client.test.y[start : start + 4]
        expected += float(F.cross_entropy(made.eval()(x), y, reduction="sum").detach())
    found = metrics(predictors_of(m, personal=theta[None]), [client], ["personal"], batch_size=4)
    assert float(found.counts[0, 0, 1, 0, 2]) == pytest.approx(expected, rel=1e-5)

    flat = ModuleModel(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2)),
        (3,),
        2,
        "features",
    )
    start = flat.init(torch.Generator().manual_seed(1)).double()  # dividing by √eps magnifies how products round
    alone = flat.logits(start, torch.randn(1, 3).double())  # torch rejects such a batch; its mean is its only example
    named = flat.layout.split(start)
    torch.testing.assert_close(alone, F.linear(named["1.bias"][None], named["2.weight"], named["2.bias"]))


def test_lazy_layers_get_their_shapes_from_inputs() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))

    m, same = ModuleModel(make, SHAPE, 3, "pixels"), ModuleModel(make, SHAPE, 3, "pixels")
    assert dict(m.layout.entries)["4.weight"] == (3, 4 * 6 * 6)
    assert m.layout.buffers == ("1.running_mean", "1.running_var")
    first, again, other = (of_.init(torch.Generator().manual_seed(i)) for of_, i in ((m, 1), (same, 1), (m, 2)))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    named = m.layout.split(first)
    assert not named["1.running_mean"].any()  # the call that determines shapes changes nothing
    linear = nn.Sequential(nn.Flatten(), nn.LazyLinear(3))
    assert remember(linear) == remember(linear)
    with refusing(ExperimentError, "model.factory", "'1'", "LazyBatchNorm2d", "factory"):
        remember(make())


# --- frozen parameters ------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen backbone, tied to itself, with a trained adapter and head."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(3, 3).requires_grad_(False)
        self.again = self.base
        self.adapter = nn.Linear(3, 3)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.again(self.base(x)) + self.adapter(x))


def test_frozen_parameters_are_not_in_theta_and_keep_their_values(tmp_path: Path) -> None:
    torch.manual_seed(4)
    net = Adapted()
    kept = copy.deepcopy(net.state_dict())
    m = ModuleModel(lambda: copy.deepcopy(net), (3,), 2, "features")
    assert [name for name, _ in m.layout.entries] == ["adapter.weight", "adapter.bias", "head.weight", "head.bias"]
    assert set(m.constants) == {"base.weight", "base.bias"}
    data = fedloom.Federated.from_arrays(people(), root=tmp_path / "data")
    found = fedloom.run(TASK, data=data, model=net, out=tmp_path / "run", report=False, progress=False)
    state, _ = fedloom.runs.checkpoint.decode_tensors(
        next((tmp_path / "run" / "checkpoints").glob("*.safetensors")).read_bytes()
    )
    assert [len(t) for t in state.values()] == [12 + 8]  # only the server's state is ever sent
    personal, x = found.models("ann"), torch.randn(5, 3)
    saved = {
        file.suffix: file
        for file in itertools.chain(*(personal.save(tmp_path / f"m{s}") for s in (".pt2", ".safetensors")))
    }
    weights = safetensors.torch.load_file(saved[".safetensors"])
    for name in ("base.weight", "base.bias"):
        assert torch.equal(weights[name], kept[name])
    program = torch.export.load(saved[".pt2"]).module()
    torch.testing.assert_close(program(x), personal(x))
    theirs = Adapted()
    theirs.load_state_dict(weights, strict=False)
    personal.mean, personal.std = torch.zeros(1, 3), torch.ones(1, 3)
    torch.testing.assert_close(theirs(x).softmax(1), personal(x))
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.base.weight[0, 0] += 1
    assert found.models("ann")(x).shape == (5, 2)
    with pytest.raises(DataError) as error:
        fedloom.load(tmp_path / "run", model=other).models("ann")
    assert tells(str(error.value), "model.factory", "base.weight", "run")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_theta_of_an_adapted_language_model_is_its_adapters() -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
            rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            config = transformers.BertConfig(**sizes, **rates, intermediate_size=16, num_labels=2)
            adapters = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"])
            self.net = peft.get_peft_model(transformers.BertForSequenceClassification(config), adapters)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.net(input_ids=x.long()).logits
            return logits

    m = ModuleModel(Classifier, (6,), 2, "tokens")
    assert m.layout.size == 2 * 2 * 16 + 2 * 16 + 2  # two factors of one matrix, and the classifier
    assert all("lora" in name or "classifier" in name for name, _ in m.layout.entries)
    assert any("word_embeddings" in name for name in m.constants)


def test_a_completely_frozen_module_is_rejected() -> None:
    with refusing(ExperimentError, "model.factory", "frozen"):
        ModuleModel(lambda: nn.Linear(3, 2).requires_grad_(False), (3,), 2, "features")


FLOWDUP = {"name": "flowdup", "local": {"steps": 1}, "embedding": {"network": "mlp"}, "subspace": {"size": 5}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trains", "algorithm", "named"), [(False, TASK["algorithm"], "0.weight"), (True, FLOWDUP, "initialization")]
)
def test_every_process_verifies_values_that_are_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trains: bool, algorithm: dict[str, Any], named: str
) -> None:
    name = f"backbone_{named[0]}"  # a separate name: an imported module stays
    (tmp_path / f"{name}.py").write_text(
        "from pathlib import Path\nimport torch\nfrom torch import nn\n"
        "def backbone():\n"
        "    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))\n"
        "    net[0].requires_grad_(False).weight.fill_(float(Path(__file__).with_suffix('.txt').read_text()))\n"
        f"    net[0].requires_grad_({trains})\n"
        "    return net\n"
    )
    value = tmp_path / f"{name}.txt"
    value.write_text("0.5")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(FACTORIES, f"{name}:backbone")
    data = fedloom.Federated.from_arrays(people(), root=tmp_path / "data")
    e = of(TASK, data=data, model={"name": "module", "factory": f"{name}:backbone"}, algorithm=algorithm)
    keys: dict[str, Any] = {"report": False, "progress": False}
    found = fedloom.run(e, out=tmp_path / "run", **keys)
    parts = assemble.make_parts(e, RunFolder(tmp_path / "run").manifest())
    welcome, described = distributed.welcome(parts), about(assemble.for_newcomers(parts))
    worker = Worker("localhost:1", "w", WorkerOptions(str(data.open(seed=e.seed).folder)))
    joined = Joined("run", "life", welcome)
    worker._session(joined)
    DescribedRun.parse(described).parts(parts.manifest)
    again = fedloom.load(found.folder)
    assert again.models("ann") is not None

    value.write_text("0.25")
    checks = {
        "aggregator": lambda: worker._session(joined),
        "server": lambda: DescribedRun.parse(described).parts(parts.manifest),
        "run": lambda: fedloom.load(found.folder).models("ann"),
        str(found.folder): lambda: fedloom.run(e, out=tmp_path / "run", resume=True, federation__rounds=2, **keys),
        str(tmp_path / "run"): lambda: fedloom.run(e, out=tmp_path / "again", replay=found.folder, **keys),
    }
    for whose, check in checks.items():
        with pytest.raises(DataError) as error:
            check()
        assert tells(str(error.value), "model.factory", named, whose)
    assert not (tmp_path / "again").exists()
    reported = json.loads(welcome)
    del reported["constants"]
    with pytest.raises(DataError):  # the aggregator's model has none
        worker._session(dataclasses.replace(joined, experiment=json.dumps(reported)))


def test_an_initialization_may_differ_in_its_last_digits() -> None:
    theta = torch.randn(1000, dtype=torch.float64)
    figures = figures_of(theta)
    assert are_close(figures_of(theta * (1 + 1e-6 * torch.randn(1000))), figures)
    assert not are_close(figures_of(theta.flip(0)), figures)
    assert not are_close(figures_of(1.01 * theta), figures)
    assert not any(are_close(figures, damaged) for damaged in ("", "nan " * 9, figures[:-20], "a digest"))


def test_calls_of_a_model_keep_one_copy_of_its_parameters() -> None:
    """Copies for threads and modes have placeholders without memory for parameters, and share frozen ones."""
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    net[0].requires_grad_(False)
    m = ModuleModel(lambda: net, (3,), 2, "features")
    own = {name: p.clone() for name, p in net.named_parameters()}
    modules = [m.called_module(), m.in_training().called_module()]  # type: ignore[attr-defined]
    for module in modules:
        layers = dict(module.named_parameters())
        assert layers["0.weight"].data_ptr() == m.constants["0.weight"].data_ptr()
        assert all(p.untyped_storage().nbytes() == p.element_size() for p in layers.values() if p.requires_grad)
        assert {name: p.shape for name, p in layers.items()} == {name: p.shape for name, p in own.items()}
    assert modules[0].get_buffer("1.running_mean").data_ptr() != modules[1].get_buffer("1.running_mean").data_ptr()
    theta = m.init(torch.Generator().manual_seed(0))
    x = torch.randn(5, 3)
    torch.testing.assert_close(m.logits(theta, x), net.eval()(x))
    assert all(torch.equal(p, own[name]) for name, p in net.named_parameters())
