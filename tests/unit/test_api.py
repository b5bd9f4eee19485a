"""FedLoom from Python: runs as objects, with tables, figures and the clients' models."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from facts import refusing, telling, tells
from safetensors.torch import load_file
from vowel_data import vowel_experiment

import fedloom
from fedloom.api.watch import Watch
from fedloom.engine.run_data import make_partition
from fedloom.errors import DataError, ExperimentError


@pytest.fixture(scope="module")
def vowels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return vowel_experiment(
        tmp_path_factory.mktemp("vowels"),
        algorithm={"name": "fedavg", "local": {"steps": 2}, "personalize_steps": 2},
        federation={"rounds": 2, "clients_per_round": 3},
        evaluation={"every": 1},
    )


@pytest.fixture(scope="module")
def run(vowels: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> fedloom.Run:
    out = tmp_path_factory.mktemp("run") / "run"
    return fedloom.run(vowels, out=out, report=False, progress=False)


def test_a_run_offers_tables(run: fedloom.Run) -> None:
    history = run.history
    assert list(history.index) == [0, 1, 2]
    last = history.loc[2]
    assert last["unseen.accuracy_mean"] == run.summary["unseen"]["accuracy_mean"]
    assert last["train.loss"] > 0
    clients = run.clients
    assert len(clients) == 15
    assert clients["seen"].dtype == bool
    unseen = clients[~clients["seen"]]
    assert unseen["personal_accuracy_unmasked"].mean() == pytest.approx(
        run.summary["unseen"]["accuracy_mean"], abs=1e-6
    )
    assert run.finished
    assert run.experiment.federation.rounds == 2


def test_progress_reports_clients_without_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    group = {"accuracy_mean": 0.5, "accuracy_pooled": 0.5, "loss_mean": 1.0}
    line = {"round": 3, "seen": group, "unseen": None, "global": None, "left_out": {"absent": 2, "untested": 0}}
    Watch().evaluated(line)
    assert tells(
        capsys.readouterr().err, "after round 3", "seen 0.5000", "2 clients without an answer", "journal.jsonl"
    )
    Watch().evaluated(line | {"left_out": {"absent": 0, "untested": 1}})
    assert "without an answer" not in capsys.readouterr().err
    unmeasured = line | {"validation_pooled": None, "validation_loss": None}
    Watch(choosing=True).evaluated(unmeasured | {"seen": None})
    assert tells(output := capsys.readouterr().err, "none", "no client answered", "2 clients without an answer")
    assert "no validation examples" not in output
    Watch(choosing=True).evaluated(unmeasured)
    assert "no validation examples" in capsys.readouterr().err


def test_models_are_those_that_were_evaluated(run: fedloom.Run) -> None:
    threads = torch.get_num_threads()
    models = run.models()
    assert set(models) == set(run.clients.index)
    model = run.models("client-0003")
    assert isinstance(model, torch.nn.Module)
    x = torch.randn(5, 9)
    assert torch.equal(model(x), models["client-0003"](x))
    assert torch.allclose(model(x).sum(1), torch.ones(5))
    assert not torch.equal(model(x), run.models("client-0003", predictor="global")(x))
    assert torch.get_num_threads() == threads
    dataset = make_partition(run.experiment)
    for client, model in models.items():
        raw = load_file(dataset.folder / "shards" / f"{client}.safetensors")
        accuracy = (model(raw["test_x"]).argmax(1) == raw["test_y"]).float().mean()
        assert run.clients.loc[client, "personal_accuracy_unmasked"] == pytest.approx(float(accuracy), abs=1e-6)
    with pytest.raises(DataError):
        run.models("client-9999")
    with telling(ExperimentError, "predictor", "personal", "nobody"):
        run.models("client-0003", predictor="nobody")


@pytest.mark.slow
def test_figures_are_matplotlib_figures(run: fedloom.Run, tmp_path: Path) -> None:
    assert run.figures
    figure = run.figure(run.figures[0])
    figure.savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000
    assert figure._repr_png_().startswith(b"\x89PNG")  # the representation that a notebook shows without pyplot
    with telling(ExperimentError, "nothing", run.figures[0]):
        run.figure("nothing")


@pytest.mark.slow
def test_figures_are_redrawn_when_a_file_changes_but_not_its_size(run: fedloom.Run, tmp_path: Path) -> None:
    folder = shutil.copytree(run.folder, tmp_path / "run")
    copy = fedloom.load(folder)
    before = copy.figure(copy.figures[0])
    assert copy.figure(copy.figures[0]) is before
    again = (folder / "metrics.jsonl").read_bytes()
    (folder / "other").write_bytes(again)
    (folder / "other").rename(folder / "metrics.jsonl")
    assert copy.figure(copy.figures[0]) is not before


def test_every_form_of_an_experiment_gives_equal_results(vowels: dict[str, Any], tmp_path: Path) -> None:
    import yaml

    (tmp_path / "e.yaml").write_text(yaml.safe_dump(vowels))
    from fedloom.experiment import load_experiment, of

    expected = load_experiment(tmp_path / "e.yaml", ["seed=3", "federation.rounds=7"])
    assert of(tmp_path / "e.yaml", seed=3, federation__rounds=7) == expected
    assert of(vowels, seed=3, federation__rounds=7) == expected
    assert of(load_experiment(tmp_path / "e.yaml"), seed=3, federation__rounds=7) == expected
    objects = fedloom.Federation(rounds=7, clients_per_round=3)
    assert of({**vowels, "federation": objects}, seed=3) == expected
    assert of(vowels, seed=3, federation=objects) == expected


@pytest.mark.parametrize(
    ("what", "keys", "output"),
    [
        (3, {}, ("mapping", "int")),
        ({"name": "x"}, {}, ("data", "model", "algorithm", "missing")),
        (None, {"federation__round": 3}, ("federation.round", "rounds?")),
        (None, {"algorithm": object()}, ("algorithm", "object")),
        (None, {"federation__clients_per_round": 50}, ("federation.clients_per_round", "50")),
    ],
)
def test_an_invalid_experiment_gives_a_one_sentence_error(
    vowels: dict[str, Any], what: Any, keys: dict[str, Any], output: tuple[str, ...], tmp_path: Path
) -> None:
    with telling(ExperimentError, *output):
        fedloom.run(vowels if what is None else what, out=tmp_path / "run", progress=False, **keys)
    assert not (tmp_path / "run").exists()


def test_a_finished_run_is_loaded_and_compared(run: fedloom.Run, vowels: dict[str, Any], tmp_path: Path) -> None:
    loaded = fedloom.load(run.folder)
    assert loaded.summary == run.summary
    assert "accuracy" in loaded._repr_html_()
    again = fedloom.run(vowels, out=run.folder, resume=True, report=False, progress=False)
    assert again.summary == run.summary
    other = fedloom.run(vowels, out=tmp_path / "local", report=False, progress=False, algorithm__personalize_steps=5)
    comparison = fedloom.compare([run, other.folder])
    assert set(comparison.table["seen_clients"]) == {12}
    assert "FedAvg" in repr(comparison)
    assert len(comparison.pairs)
    assert len(fedloom.compare(run).table) >= 1
    with refusing(ExperimentError, "one run", "sweep", "folder") as none:
        fedloom.compare([])
    assert none.value.key == "runs"
    with telling(DataError, str(tmp_path / "nowhere")):
        fedloom.load(tmp_path / "nowhere")
    shutil.copytree(run.folder, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    unfinished = fedloom.load(tmp_path / "run")
    assert len(unfinished.history) == 3
    with telling(DataError, "summary", "not finished"):
        _ = unfinished.summary


def test_importing_fedloom_is_fast_and_does_not_import_torch() -> None:
    code = """
import sys, fedloom
heavy = {"torch", "numpy", "pandas", "pydantic", "rich", "matplotlib", "grpc", "typer"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert set(fedloom.__all__) <= set(dir(fedloom))
fedloom.run, fedloom.sweep, fedloom.load, fedloom.compare, fedloom.Run
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_exported_name_exists() -> None:
    for name in fedloom.__all__:
        assert getattr(fedloom, name).__doc__
    with pytest.raises(AttributeError):
        _ = fedloom.nothing


def test_errors_name_arguments_instead_of_options(run: fedloom.Run, vowels: dict[str, Any], tmp_path: Path) -> None:
    def told(kind: type[Exception], **how: Any) -> str:
        with pytest.raises(kind) as error:
            fedloom.run(vowels, progress=False, **how)
        assert "--" not in str(error.value)
        return str(error.value)

    assert tells(told(ExperimentError, out=run.folder), "resume=True", "(out)")
    assert "federation.round" in told(ExperimentError, federation__round=3)
    with telling(ExperimentError, "parallel", "1", "0"):
        fedloom.sweep(vowels, seeds="1-2", parallel=0, out=tmp_path / "sweep")
    x = [[0.0] * 9]
    for key, value in {"checkpoint": "first", "epsilon": -1.0, "budget": 1.0, "delta": 0.1}.items():
        with pytest.raises(ExperimentError) as error:
            fedloom.personalize(str(run.folder), x, **{key: value})  # type: ignore[arg-type]
        assert "--" not in str(error.value)
        assert str(error.value).startswith(f"{key} ")
        assert (error.value.key, error.value.found) == (key, value)
    with pytest.raises(ExperimentError) as error:
        fedloom.load(run.folder).models(packed=[tmp_path])
    assert error.value.key == "packed"
    assert "--" not in str(error.value)


def test_invalid_trackers_grids_seeds_and_datasets_are_rejected(vowels: dict[str, Any], tmp_path: Path) -> None:
    with telling(ExperimentError, "'tensorbord'", "tensorboard"):
        fedloom.run(vowels, tracking=["tensorbord"], out=tmp_path / "run")
    for values in (0.1, "0.1"):
        with telling(ExperimentError, "grid['algorithm.local.lr']", "list", "0.1"):
            fedloom.sweep(vowels, grid={"algorithm.local.lr": values}, out=tmp_path / "sweep")  # type: ignore[dict-item]
    with telling(ExperimentError, "seeds", "3"):
        fedloom.sweep(vowels, seeds=3, out=tmp_path / "sweep")  # type: ignore[arg-type]
    root = vowels["data"]["root"]
    assert fedloom.fetch("vowel", root) == Path(root) / "datasets" / "vowel"
    with telling(ExperimentError, "'vowels'", "vowel"):
        fedloom.fetch("vowels", root)
