"""A factory named only by a run's folder, a URL or an aggregator is foreign code, which is never imported."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from facts import telling, tells
from s3_support import S3Server
from test_local_data import TASK, people

import fedloom as fl
from fedloom import experiment as experiments
from fedloom.cli.runs import evaluate_command as evaluate
from fedloom.errors import ExperimentError
from fedloom.models import factories
from fedloom.models.factories import FACTORIES
from fedloom.reporting.report import write_report
from fedloom.runs.folder import RunFolder
from fedloom.runs.published import Publisher
from fedloom.serving.commands import personalize_command as personalize
from fedloom.serving.serve import serve_run as serve
from fedloom.storage import open_store

NAME = "somebodys_models:small"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with code that records its import, and with a run of it by its user."""
    folder = tmp_path_factory.mktemp("made")
    code = folder / "code"
    code.mkdir()
    (code / "somebodys_models.py").write_text(
        "import os\nfrom pathlib import Path\nfrom torch import nn\nPath(os.environ['RAN']).touch()\n"
        "def small(classes, input_shape):\n    return nn.Linear(input_shape[0], classes)\n"
    )
    data = fl.Federated.from_arrays(people(), root=folder / "data", held_out_fraction=0.25)
    model = {"name": "module", "factory": NAME}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(code))
        patch.setenv("RAN", str(folder / "ran"))
        patch.delenv(FACTORIES, raising=False)
        patch.setattr(factories, "_permitted", set())
        run = fl.run(TASK, data=data, model=model, out=folder / "run", report=False, progress=False)
        assert run.models("ann")(torch.zeros(1, 3)).shape == (1, 2)  # its user's process continues
    sys.modules.pop("somebodys_models")
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a run's folder as another user gets it; its factory can be imported here and records that."""
    monkeypatch.syspath_prepend(str(made / "code"))
    monkeypatch.setenv("RAN", str(tmp_path / "ran"))
    monkeypatch.delenv(FACTORIES, raising=False)
    forget(tmp_path, monkeypatch)
    shutil.copytree(made / "run", tmp_path / "published")
    yield tmp_path / "published"
    sys.modules.pop("somebodys_models", None)


def forget(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the imported module, like another process."""
    monkeypatch.setattr(factories, "_permitted", set())
    sys.modules.pop("somebodys_models", None)
    (folder / "ran").unlink(missing_ok=True)


USES: dict[str, Callable[[Path, Path], Any]] = {
    "evaluate": lambda run, tmp: evaluate(run),
    "personalize": lambda run, tmp: personalize(str(run), tmp / "models"),
    "personalize, one client": lambda run, tmp: fl.personalize(str(run), people()["bob"][0], people()["bob"][1]),
    "serve": lambda run, tmp: serve(str(run), "127.0.0.1:0"),
    "Run.models": lambda run, tmp: fl.load(run).models("ann"),
    "run, of the run's experiment": lambda run, tmp: fl.run(run / "experiment.yaml", out=tmp / "x", progress=False),
    "partition, of the run's experiment": lambda run, tmp: experiments.load_experiment(run / "experiment.yaml"),
    "another experiment with the same name": lambda run, tmp: experiments.from_shared_json(
        fl.load(run).experiment.shared_json()
    ),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_code_named_by_a_runs_folder_is_not_imported(
    use: Callable[[Path, Path], Any], run: Path, tmp_path: Path
) -> None:
    with telling(ExperimentError, "model.factory", NAME, FACTORIES, f"{FACTORIES}={NAME}"):
        use(run, tmp_path)
    assert not (tmp_path / "ran").exists()
    assert "somebodys_models" not in sys.modules
    assert not (tmp_path / "models").exists()


def test_code_named_by_a_published_run_is_not_imported(
    run: Path, tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    url = f"s3://{s3_server.new_bucket()}/run"
    Publisher(RunFolder(run), open_store(url), "one").publish(1)
    open_store(url).write("experiment.yaml", (run / "experiment.yaml").read_bytes())
    x, y = people()["bob"]
    for use in (
        lambda: fl.personalize(url, x, y),
        lambda: serve(url, "127.0.0.1:0"),
        lambda: fl.load(url).models("ann"),
        lambda: experiments.load_experiment(f"{url}/experiment.yaml"),
    ):
        with telling(ExperimentError, "model.factory", NAME, FACTORIES):
            use()
    assert fl.load(url).experiment.model.factory == NAME  # type: ignore[attr-defined]
    assert not (tmp_path / "ran").exists()


@pytest.mark.usefixtures("unrendered")
def test_reading_a_run_imports_no_user_code(run: Path, tmp_path: Path) -> None:
    found = fl.load(run)
    assert found.experiment.model.factory == found.factory == NAME  # type: ignore[attr-defined]
    assert len(found.clients) == 4
    assert fl.compare([run]).table.shape[0] > 0
    write_report(run)
    with pytest.raises(ExperimentError) as error:  # the folder has another experiment
        fl.run(TASK, data=found.experiment.data, out=run, resume=True, progress=False)
    assert tells(str(error.value), "resume", "model.factory", NAME)
    assert not (tmp_path / "ran").exists()


def test_environment_or_user_may_permit_imports(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FACTORIES, f"a:b, {NAME}")
    evaluate(run)
    assert (tmp_path / "ran").exists()
    monkeypatch.delenv(FACTORIES)
    forget(tmp_path, monkeypatch)
    with telling(ExperimentError, "model", NAME, "other_models:small"):
        fl.load(run, model="other_models:small")
    with pytest.raises(ExperimentError):
        fl.load(run).models("ann")
    answer = fl.load(run, model=NAME).models("ann")(torch.tensor(np.zeros((1, 3), np.float32)))
    assert answer.shape == (1, 2)
    forget(tmp_path, monkeypatch)
    named = f"model={{name: module, factory: {NAME!r}}}"  # on the command line, with --set
    assert experiments.load_experiment(run / "experiment.yaml", [named]).model.factory == NAME  # type: ignore[attr-defined]
