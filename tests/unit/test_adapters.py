"""peft adapters as the clients' model: trained, generated from descriptors, and saved in peft's format."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import adapter_models
import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from adapter_models import IMAGE, LENGTH, WORDS
from facts import refusing
from lazy import lazy_or_skip
from torch import Tensor, nn
from typer.testing import CliRunner

import fedloom
from fedloom.cli.main import app
from fedloom.engine import assemble
from fedloom.errors import ExperimentError
from fedloom.models.embedding import EmbeddingSettings, PretrainedEmbedding
from fedloom.models.factories import FACTORIES
from fedloom.models.flat import FlatModel
from fedloom.models.hypernetwork import Hypernetwork
from fedloom.models.module_call import SingleInput
from fedloom.models.registry import ModuleSettings
from fedloom.runs.folder import RunFolder
from fedloom.serving.serve import serve_run
from fedloom.tasks.registry import task_of

peft = lazy_or_skip("peft")
lazy_or_skip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

N, CLASSES = 40, 3
RNG = np.random.default_rng(3)
TOKENS = RNG.integers(0, WORDS, (2 * N, LENGTH))
IMAGES = RNG.integers(0, 256, (2 * N, *IMAGE), dtype=np.uint8)
LABELS = TOKENS[:, 0] % CLASSES
SHAPE = {"": SingleInput("integers", (LENGTH,), WORDS)}
LORA = {"rank": 2, "targets": ["query", "value"], "train": ["classifier"]}
OF_IMAGES = ["query", "value"] if version("transformers").startswith("4.") else ["q_proj", "v_proj"]
LOCAL = {"steps": 3, "batch_size": 8, "lr": 0.1}
FEDAVG = {"name": "fedavg", "local": LOCAL, "personalize_steps": 3}
PEFLL = {
    "name": "pefll",
    "local": LOCAL,
    "descriptor": {"size": 3, "evaluate": "all"},
    "embedding": {"network": "pretrained"},
    "hypernetwork": {"start": "model"},
    "server": {"rule": "adam", "lr": 0.01},
}
MODELS: dict[str, dict[str, Any]] = {
    "bert": {"name": "module", "factory": "adapter_models:bert", "lora": LORA},
    "vit": {"name": "module", "factory": "adapter_models:vit", "lora": {**LORA, "targets": OF_IMAGES}},
    "gpt": {"name": "module", "factory": "adapter_models:gpt", "lora": {"rank": 2, "targets": ["c_attn"]}},
    "sentences": {"name": "module", "factory": "adapter_models:Sentences"},
}


def inputs(model: str) -> tuple[Any, Any]:
    """Return inputs and targets of both clients."""
    if model == "vit":
        return IMAGES, LABELS
    return TOKENS, np.roll(TOKENS, -1, 1) if model == "gpt" else LABELS


def ran(model: str, algorithm: dict[str, Any], folder: Path, rounds: int = 2) -> fedloom.Run:
    """Run two clients."""
    x, y = inputs(model)
    clients = {name: (x[rows], y[rows]) for name, rows in (("a", slice(0, N)), ("b", slice(N, None)))}
    more: dict[str, Any] = {"task": "next_token", "outputs": WORDS} if model == "gpt" else {}
    experiment = {
        "name": "adapters",
        "seed": 1,
        "data": fedloom.Federated.from_arrays(clients, root=folder / "data", **more),
        "model": MODELS[model],
        "algorithm": algorithm,
        "federation": {"rounds": rounds, "clients_per_round": 2},
        "evaluation": {"every": max(rounds, 1)},
        "runtime": {"workers": 0},
    }
    return fedloom.run(experiment, out=folder / "run", report=False, progress=False)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., fedloom.Run]:
    """Return a function that runs each model and method once for all tests, which only read the run."""
    runs: dict[str, fedloom.Run] = {}

    def of(model: str, algorithm: dict[str, Any], rounds: int = 2) -> fedloom.Run:
        key = json.dumps([model, algorithm, rounds])
        if key not in runs:
            runs[key] = ran(model, algorithm, tmp_path_factory.mktemp("run"), rounds)
        return runs[key]

    return of


def made(lora: dict[str, Any] | None = None) -> FlatModel:
    """Return BERT with adapters as a function of θ."""
    settings = ModuleSettings.model_validate({**MODELS["bert"], "lora": lora or LORA})
    return settings.build(SHAPE, CLASSES, "integers")


@pytest.fixture(autouse=True)
def permitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Permit the factories of this file."""
    monkeypatch.setenv(FACTORIES, ",".join(model["factory"] for model in MODELS.values()))


# --- θ ----------------------------------------------------------------------------------------------------------------


def test_theta_holds_the_adapters_and_the_named_layers() -> None:
    model = made()
    two_factors, head = 2 * 16 * 2, 16 * CLASSES + CLASSES
    assert model.layout.size == 2 * 2 * two_factors + head  # two layers, two matrices each
    assert (
        sum(
            dict(zip((n for n, _ in model.layout.entries), model.layout.sizes, strict=True))[n]
            for n in model.layout.head
        )
        == head
    )
    base = adapter_models.bert(CLASSES).eval()
    frozen = {name: t for name, t in base.state_dict().items() if name != "position_ids"}
    kept = list(model.constants.values())
    assert all(any(t.shape == k.shape and torch.equal(t, k) for k in kept) for t in frozen.values())


def test_training_starts_at_the_pretrained_model() -> None:
    """B = 0, so for any A the outputs are the base's."""
    x = torch.from_numpy(TOKENS[:5])
    expected = adapter_models.bert(CLASSES).eval()(input_ids=x).logits
    model = made()
    for seed in (0, 1):
        theta = model.init(torch.Generator().manual_seed(seed))
        assert torch.equal(model.logits(theta, x), expected)


def test_invalid_adapters_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    with refusing(ExperimentError, "model.lora.targets", "nowhere", "query"):
        made({**LORA, "targets": ["nowhere"]})
    with refusing(ExperimentError, "model.lora.train", "nowhere"):
        made({**LORA, "train": ["nowhere"]})
    with refusing(ExperimentError, "model.lora"):
        made({**LORA, "layers": [7]})
    twice = ModuleSettings.model_validate({**MODELS["sentences"], "lora": LORA})
    with refusing(ExperimentError, "model.lora"):
        twice.build(SHAPE, CLASSES, "integers")
    monkeypatch.setitem(sys.modules, "peft", None)
    with refusing(ExperimentError, "model.lora", "peft", "fedloom[adapters]"):
        made()


# --- generated adapters -----------------------------------------------------------------------------------------------


def test_a_hypernetwork_initialized_at_a_model_gives_it_to_every_client() -> None:
    h = Hypernetwork(4, 30)
    random = torch.Generator().manual_seed(0)
    drawn, theta = h.layout.split(h.init(random)), torch.randn(30, generator=random)
    started = h.started_at(theta, drawn)
    v = torch.randn(9, 4, generator=random)
    assert torch.equal(h(started, v), theta.expand(9, 30))
    assert all(torch.equal(started[name], drawn[name]) for name in drawn if not name.startswith(h.last))
    _, pullback = h.vjp(started, v)
    back = pullback(torch.ones(9, 30), torch.full((9,), 1 / 9))
    moved = {name: t + g for (name, t), g in zip(started.items(), back.d_eta_h().values(), strict=True)}
    assert h(moved, v).std(0).min() > 0  # after one update, models of different clients differ


@pytest.mark.parametrize(
    "algorithm", [PEFLL, {"name": "pfedhn", "local": LOCAL, "start": "model"}], ids=["pefll", "pfedhn"]
)
def test_generated_adapters_start_at_the_pretrained_model(algorithm: dict[str, Any], tmp_path: Path) -> None:
    run = ran("bert", algorithm, tmp_path, rounds=0)
    x = torch.from_numpy(TOKENS[:5])
    expected = adapter_models.bert(CLASSES).eval()(input_ids=x).logits.softmax(1)
    for model in run.models().values():
        torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-6)


def test_generated_adapters_differ_between_clients_after_training(done: Any) -> None:
    run = done("bert", PEFLL)
    a, b = (model.state_dict() for model in run.models(["a", "b"]).values())
    moved = [name for name in a if not torch.equal(a[name], b[name])]
    assert any("lora_A" in name for name in moved)
    assert any("lora_B" in name for name in moved)
    assert any("classifier" in name for name in moved)
    assert all("lora_" in name or "modules_to_save" in name for name in moved)


@pytest.mark.parametrize("labels", [True, False])
def test_the_pretrained_embedding_is_an_mlp_on_standardized_features(labels: bool) -> None:
    model = made()
    network = EmbeddingSettings(network="pretrained", labels=labels, width=7).network_for(
        "tokens", (LENGTH,), CLASSES, 4, model=model
    )
    assert isinstance(network, PretrainedEmbedding)
    random = torch.Generator().manual_seed(2)
    p = network.layout.leaves(network.init(random), requires_grad=True)
    x, y = torch.from_numpy(TOKENS[:5]), torch.from_numpy(LABELS[:5])
    bert = adapter_models.bert(CLASSES).eval()
    features = bert.bert(input_ids=x).pooler_output.detach()
    rows = (features - features.mean(1, keepdim=True)) / (features.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
    if labels:
        rows = torch.cat([rows, F.one_hot(y, CLASSES).float()], 1)
    hidden = (rows @ p["fc1.weight"].T + p["fc1.bias"]).relu()
    expected = (hidden @ p["fc2.weight"].T + p["fc2.bias"]).mean(0)
    found = network.describe(p, x, y if labels else None)
    torch.testing.assert_close(found, expected)
    assert set(p) == {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"}
    assert p["fc1.weight"].shape == (7, 16 + CLASSES * labels)


def test_the_pretrained_embedding_accepts_named_inputs() -> None:
    shape = {
        name: SingleInput("integers", (LENGTH,), high) for name, high in (("input_ids", WORDS), ("attention_mask", 2))
    }
    model = ModuleSettings.model_validate(MODELS["bert"]).build(shape, CLASSES, "named")
    network = EmbeddingSettings(network="pretrained", labels=False).network_for("named", (), CLASSES, 4, model=model)
    p = network.layout.split(network.init(torch.Generator().manual_seed(2)))
    x = {"input_ids": torch.from_numpy(TOKENS[:5]), "attention_mask": torch.ones(5, LENGTH).long()}
    x["attention_mask"][:, 3:] = 0
    rows = F.layer_norm(adapter_models.bert(CLASSES).eval().bert(**x).pooler_output, (16,))
    expected = F.linear(F.relu(F.linear(rows, p["fc1.weight"], p["fc1.bias"])), p["fc2.weight"], p["fc2.bias"])
    torch.testing.assert_close(network.forward(p, x, None), expected)


def test_a_model_without_features_has_no_pretrained_embedding() -> None:
    gpt = ModuleSettings.model_validate(MODELS["gpt"]).build(
        SHAPE, WORDS, "integers", task_of("next_token", WORDS), (LENGTH,)
    )
    with refusing(ExperimentError, "algorithm.embedding.network", "pretrained", "lstm"):
        EmbeddingSettings(network="pretrained").network_for("tokens", (LENGTH,), WORDS, 4, gpt.task, (LENGTH,), gpt)


# --- saved in peft's format -------------------------------------------------------------------------------------------


def opened(model: str, folder: Path) -> nn.Module:
    """Return the adapter of a folder on its base."""
    base = {
        "bert": lambda: adapter_models.bert(CLASSES),
        "vit": lambda: adapter_models.vit(CLASSES),
        "gpt": adapter_models.gpt,
        "sentences": adapter_models.encoder,
    }[model]()
    found: nn.Module = peft.PeftModel.from_pretrained(base, str(folder)).eval()
    return found


def logits_of(model: str, module: nn.Module, personal: Any) -> Tensor:
    """Return the logits of a module on raw inputs."""
    x = torch.from_numpy(inputs(model)[0][:7])
    if model == "vit":
        x = (x.float() / 255 - personal.mean) / personal.std
    with torch.no_grad():
        found: Tensor = module(x).logits
    return found


@pytest.mark.parametrize(
    ("model", "method"), [("bert", "fedavg"), ("bert", "pefll"), ("vit", "ditto"), ("gpt", "fedavg"), ("gpt", "pefll")]
)
def test_peft_loads_the_adapter_of_every_client(model: str, method: str, done: Any, tmp_path: Path) -> None:
    pefll = {**PEFLL, "embedding": {"network": "lstm", "width": 4}} if model == "gpt" else PEFLL
    algorithm = {"fedavg": FEDAVG, "ditto": {"name": "ditto", "local": LOCAL}, "pefll": pefll}[method]
    run = done(model, algorithm)
    predictions = []
    for client, personal in run.models().items():
        files = personal.save(tmp_path / f"{client}.peft")
        assert {file.name for file in files} == {
            "adapter_config.json", "adapter_model.safetensors", "fedloom.json", "README.md"
        }  # fmt: skip
        kept = safetensors.torch.load_file(tmp_path / f"{client}.peft" / "adapter_model.safetensors")
        assert sum(t.numel() for t in kept.values()) == run_size(run)
        module = opened(model, tmp_path / f"{client}.peft")
        found = logits_of(model, module, personal).softmax(-1)
        expected = personal(torch.from_numpy(inputs(model)[0][:7]))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        assert json.loads((tmp_path / f"{client}.peft" / "fedloom.json").read_text())["client"] == client
        predictions.append(found)
    base = opened(model, tmp_path / f"{client}.peft")
    with base.disable_adapter():  # type: ignore[operator]
        assert not torch.allclose(logits_of(model, base, personal).softmax(-1), predictions[-1], atol=1e-4)
    assert not torch.equal(*predictions)


def run_size(run: fedloom.Run) -> int:
    """Return the length d of θ."""
    return int(assemble.make_parts(run.experiment, RunFolder(run.folder).manifest()).setup.model.layout.size)


def test_layers_trained_beside_the_adapter_are_saved_with_it(done: Any, tmp_path: Path) -> None:
    personal = done("sentences", FEDAVG).models("a")
    personal.save(tmp_path / "a.peft")
    whole = adapter_models.Sentences(CLASSES)
    whole.encoder = opened("sentences", tmp_path / "a.peft")  # type: ignore[assignment]
    beside = safetensors.torch.load_file(tmp_path / "a.peft" / "trained_beside.safetensors")
    assert set(beside) == {"head.weight", "head.bias"}
    whole.load_state_dict(beside, strict=False)
    x = torch.from_numpy(TOKENS[:7])
    torch.testing.assert_close(whole.eval()(x).softmax(1), personal(x), rtol=0, atol=1e-6)
    done("bert", FEDAVG).models("a").save(tmp_path / "a.peft")  # which has no such layers
    assert not (tmp_path / "a.peft" / "trained_beside.safetensors").exists()


def test_the_command_line_saves_adapters(done: Any, tmp_path: Path) -> None:
    run, out = done("bert", FEDAVG), tmp_path / "adapters"
    output = CliRunner().invoke(app, ["personalize", str(run.folder), "--out", str(out), "--set", "format=peft"])
    assert output.exit_code == 0, output.output
    models = run.models()
    assert {folder.name for folder in out.iterdir()} == {f"{client}.peft" for client in models}
    for client, personal in models.items():
        found = logits_of("bert", opened("bert", out / f"{client}.peft"), personal).softmax(1)
        torch.testing.assert_close(found, personal(torch.from_numpy(TOKENS[:7])), rtol=0, atol=1e-6)
    for arguments in (
        ["--out", str(tmp_path / "x"), "--set", "format=gguf"],
        ["--out", "x.peft", "--set", "format=peft"],
    ):
        refused = CliRunner().invoke(app, ["personalize", str(run.folder), *arguments]).exception
        assert isinstance(refused, ExperimentError)
        assert refused.key == "format"


def test_a_new_client_saves_its_adapter(done: Any, tmp_path: Path) -> None:
    run = done("bert", PEFLL)
    personal = fedloom.personalize(run.folder, TOKENS[:20], LABELS[:20])
    personal.save(tmp_path / "new.peft")
    found = logits_of("bert", opened("bert", tmp_path / "new.peft"), personal).softmax(1)
    torch.testing.assert_close(found, personal(torch.from_numpy(TOKENS[:7])), rtol=0, atol=1e-6)


def test_a_server_and_a_folder_give_equal_adapters(done: Any, tmp_path: Path) -> None:
    run = done("bert", PEFLL)
    here = fedloom.personalize(run.folder, TOKENS[:20], LABELS[:20], client="new")
    stop, ready, at = threading.Event(), threading.Event(), list[str]()

    def started(address: str) -> None:
        at.append(address)
        ready.set()

    thread = threading.Thread(target=lambda: serve_run(str(run.folder), "127.0.0.1:0", stop=stop, started=started))
    thread.start()
    try:
        assert ready.wait(60)
        there = fedloom.personalize(at[0], TOKENS[:20], LABELS[:20], client="new")
    finally:
        stop.set()
        thread.join(60)
    for model, name in ((here, "here.peft"), (there, "there.peft")):
        model.save(tmp_path / name)
    weights = "adapter_model.safetensors"
    assert (tmp_path / "here.peft" / weights).read_bytes() == (tmp_path / "there.peft" / weights).read_bytes()


def test_a_resumed_run_has_the_same_adapters(done: Any, tmp_path: Path) -> None:
    whole, resumed = done("bert", PEFLL), ran("bert", PEFLL, tmp_path, rounds=1)
    again = fedloom.run(
        resumed.experiment, out=resumed.folder, resume=True, federation__rounds=2, report=False, progress=False
    )
    for (_, a), (_, b) in zip(whole.models().items(), again.models().items(), strict=True):
        for name, tensor in a.state_dict().items():
            assert torch.equal(tensor, b.state_dict()[name]), name


def test_models_without_a_single_adapter_are_rejected(tmp_path: Path) -> None:
    neighbours = ran("bert", {"name": "knn-per", "local": LOCAL}, tmp_path / "knn").models("a")
    with refusing(ExperimentError, ".peft", "adapters"):
        neighbours.save(tmp_path / "a.peft")
    assert not (tmp_path / "a.peft").exists()


def test_an_adapter_that_changes_its_base_is_rejected(tmp_path: Path) -> None:
    config = peft.LoraConfig(r=2, target_modules=["query"], init_lora_weights="olora", modules_to_save=["classifier"])
    x, y = inputs("bert")
    experiment = {
        "name": "olora",
        "data": fedloom.Federated.from_arrays({"a": (x, y)}, root=tmp_path / "data"),
        "algorithm": FEDAVG,
        "federation": {"rounds": 1, "clients_per_round": 1},
        "runtime": {"workers": 0},
    }
    model = peft.get_peft_model(adapter_models.bert(CLASSES), config)
    run = fedloom.run(experiment, model=model, out=tmp_path / "run", report=False, progress=False)
    with refusing(ExperimentError, ".peft", "olora"):
        run.models("a").save(tmp_path / "a.peft")


# --- FLowDUP ----------------------------------------------------------------------------------------------------------

FLOWDUP = {
    "name": "flowdup",
    "local": LOCAL,
    "subspace": {"size": 20},
    "embedding": {"network": "pretrained", "labels": False},
    "embedding_size": 4,
    "hypernetwork": {"size": "S", "start": "model"},
}


@pytest.mark.parametrize(
    "algorithm",
    [FLOWDUP, {**PEFLL, "hypernetwork": {"start": "model", "subspace": {"size": 20}}}],
    ids=["flowdup", "pefll"],
)
def test_adapters_in_a_subspace_start_at_the_pretrained_model(algorithm: dict[str, Any], tmp_path: Path) -> None:
    x = torch.from_numpy(TOKENS[:5])
    expected = adapter_models.bert(CLASSES).eval()(input_ids=x).logits.softmax(1)
    start = ran("bert", algorithm, tmp_path / "start", rounds=0)
    for model in start.models().values():
        torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-6)
    a, b = ran("bert", algorithm, tmp_path / "trained").models().values()
    assert not torch.allclose(a(x), expected, atol=1e-4)
    assert not torch.equal(a(x), b(x))
    a.save(tmp_path / "a.peft")
    found = logits_of("bert", opened("bert", tmp_path / "a.peft"), a).softmax(1)
    torch.testing.assert_close(found, a(torch.from_numpy(TOKENS[:7])), rtol=0, atol=1e-6)
