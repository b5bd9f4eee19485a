"""Errors for a user without a home folder, such as any user id in a container: they name the variable to set."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest
from facts import tells

from fedloom.cluster import api
from fedloom.core.home import expanded
from fedloom.data.folders import data_root
from fedloom.errors import ExitCode, ExperimentError
from fedloom.storage import open_store


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    for name in ("HOME", "FEDLOOM_DATA", "KUBECONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.usefixtures("homeless")
def test_the_variable_to_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ExperimentError) as raised:
        data_root()
    assert raised.value.exit_code == ExitCode.EXPERIMENT
    assert tells(str(raised.value.hint), "FEDLOOM_DATA", "HOME")
    with pytest.raises(ExperimentError) as raised:
        open_store("~/runs")
    assert tells(str(raised.value.hint), "HOME")
    with pytest.raises(ExperimentError) as raised:
        api._configuration(object())
    assert tells(str(raised.value.hint), "KUBECONFIG")
    monkeypatch.setenv("FEDLOOM_DATA", "/data")
    assert data_root() == Path("/data")


@pytest.mark.usefixtures("homeless")
def test_a_path_without_a_home_folder_is_kept() -> None:
    assert expanded("data/x") == Path("data/x")
    assert data_root("/d") == Path("/d")


def test_only_one_module_looks_up_the_home_folder() -> None:
    """``Path.expanduser`` and ``Path.home`` raise unexpected errors."""
    source = Path(__file__).parents[2] / "src" / "fedloom"
    found = [
        path for path in source.rglob("*.py") if any(w in path.read_text() for w in (".expanduser()", "Path.home("))
    ]
    assert found == [source / "core" / "home.py"]
