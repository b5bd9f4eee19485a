"""MLflow and Weights & Biases as installed by pip install 'fedloom[mlflow,wandb]', in a separate environment."""

from __future__ import annotations

import csv
import json
import subprocess
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SWEEP = """
import fedloom

keys = {"data__root": ROOT, "federation__rounds": 2, "evaluation__every": 1, "runtime__workers": 0}
found = fedloom.sweep(
    EXPERIMENT, grid={"algorithm.local.lr": [0.01, 0.03]}, parallel=2, out="sweep", report=False,
    tracking=["mlflow", "wandb", "csv"], **keys,
)
assert not found.failures
"""
"""Two runs that begin at once, so that both meet an MLflow that has no database yet."""

READ = """
import json
from mlflow.tracking import MlflowClient

client = MlflowClient()
number = client.get_experiment_by_name("fedloom").experiment_id
found = {}
for run in client.search_runs([number]):
    history = client.get_metric_history(run.info.run_id, "seen/accuracy_mean")
    numbers = {m.step: m.value for m in history}
    found[run.info.run_name] = [run.info.status, run.data.params["algorithm.local.lr"], numbers]
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.exhaustive
def test_parallel_runs_log_to_mlflow_and_wandb(tmp_path: Path) -> None:
    if not (ROOT / ".venv" / "bin" / "uv").exists():
        pytest.skip("there is no uv, which installs in seconds")
    home = tmp_path / "data" / "datasets" / "vowel"
    home.mkdir(parents=True)
    (home / "Vowel.rda").write_bytes((ROOT / "tests" / "fixtures" / "Vowel.rda").read_bytes())
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    needed = [*extras["mlflow"], *extras["wandb"]]
    command = [ROOT / ".venv/bin/uv", "pip", "install", "--quiet", "--python", python, *needed]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"packages cannot be had here: {done.stderr}")
    # FedLoom and torch are those of this environment: the packages installed above take precedence.
    ours = sysconfig.get_path("purelib")
    theirs = next((tmp_path / "venv" / "lib").glob("python*")) / "site-packages"
    (theirs / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    script = SWEEP.replace("ROOT", repr(str(tmp_path / "data"))).replace(
        "EXPERIMENT", repr(str(ROOT / "experiments" / "vowel.yaml"))
    )
    swept = subprocess.run([python, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert swept.returncode == 0, swept.stderr
    assert "tracking:" not in swept.stderr
    read = subprocess.run([python, "-c", READ], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert read.returncode == 0, read.stderr
    logged = json.loads(read.stdout)
    assert len(logged) == 2
    for name, (status, rate, numbers) in logged.items():
        run = tmp_path / "sweep" / name
        with (run / "tracking.csv").open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["name"] == "seen/accuracy_mean"]
        assert numbers == {row["round"]: float(row["value"]) for row in rows}
        assert set(numbers) == {"0", "1", "2"}
        assert status == "FINISHED"
        assert f"lr={rate}" in name
        (offline,) = (run / "wandb").glob("offline-run-*/*.wandb")
        assert b"seen/accuracy_mean" in offline.read_bytes()
