"""The check of a computing device: ``fedloom device``, and a worker whose device is missing."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from facts import mentions
from typer.testing import CliRunner

from fedloom.cli.main import app
from fedloom.engine import device as checks
from fedloom.engine.assemble import missing_device, use_device
from fedloom.errors import ExperimentError
from fedloom.models.networks import MLP

CPU = torch.device("cpu")
runner = CliRunner()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clients_together_equal_single_ones(dtype: torch.dtype) -> None:
    found = checks.check_model("mlp", MLP(checks.IMAGE, [4], checks.CLASSES), dtype, CPU, 3)
    assert found.passes
    assert found.difference < checks.LIMITS[dtype]
    assert found.steps_per_s > 0
    assert found.bytes_per_client is None


def test_a_device_fails_on_wrong_values_or_unrepeatable_bits() -> None:
    good = checks.DeviceCheck("mlp", "float32", 1e-7, 1e-3, True, 10.0, None)
    assert good.passes
    assert not dataclasses.replace(good, repeats=False).passes
    assert not dataclasses.replace(good, difference=2e-3).passes
    assert not dataclasses.replace(good, difference=math.nan).passes


@pytest.mark.slow
def test_the_command_checks_each_model_and_type_and_sets_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    done = runner.invoke(app, ["device", "cpu", "--clients", "2", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert (report["device"], report["torch"], report["clients"]) == ("CPU", torch.__version__, 2)
    rows = [(row["model"], row["dtype"], row["repeats"]) for row in report["checks"]]
    assert rows == [(model, dtype, True) for model in ("mlp", "lenet", "lstm") for dtype in ("float64", "float32")]
    monkeypatch.setitem(checks.LIMITS, torch.float32, 0.0)  # a limit below any rounding error
    failed = runner.invoke(app, ["device", "cpu", "--clients", "2"])
    assert isinstance(failed.exception, ExperimentError)
    assert int(failed.exception.exit_code) == 2
    assert mentions(str(failed.exception), "float32")
    assert "float64" not in str(failed.exception)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_missing_device_is_rejected_with_torchs_reason() -> None:
    with pytest.raises(ExperimentError) as error:
        use_device("cuda", 1)
    assert (error.value.key, error.value.found, error.value.allowed) == ("runtime.device", "cuda", ["cpu"])


def test_an_unsupported_device_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod has a GPU, but its image has the CPU version of torch."""
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "/nvidia" not in str(missing_device(tmp_path))
    for name in ("nvidia0", "nvidiactl", "kfd", "null"):
        (tmp_path / name).touch()
    output = str(missing_device(tmp_path))
    assert mentions(output, torch.__version__, str(tmp_path / "nvidia0"), str(tmp_path / "kfd"), "worker-cuda")
    assert str(tmp_path / "nvidiactl") not in output  # exists on every node with a driver
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    if not torch.cuda.is_available():
        assert mentions(str(missing_device(tmp_path)), str(tmp_path / "nvidia0"), "limits")
