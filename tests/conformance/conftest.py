"""Which methods the conformance kit runs, and with what settings (docs/federation.md, "The conformance kit")."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from conformance_kit import TINY, Federation, federation

from fedloom.algorithms.base import available, find


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--algorithm", help="run the conformance kit for this method alone")
    parser.addoption("--settings", help="the method's settings on the tiny federation, as YAML")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``method`` is every registered algorithm, some with a second setting, ``trained`` those that have rounds."""
    chosen = metafunc.config.getoption("--algorithm", default=None)
    methods = available() if chosen is None else (find(chosen).name,)
    names = [*methods, *(name for name in TINY if ":" in name and _method(name) in methods)]
    if "method" in metafunc.fixturenames:
        metafunc.parametrize("method", names)
    if "trained" in metafunc.fixturenames:
        metafunc.parametrize("trained", [name for name in names if find(_method(name)).trains])


def _method(name: str) -> str:
    return name.partition(":")[0]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def tiny(request: pytest.FixtureRequest, tiny_root: Path, tmp_path: Path) -> Federation:
    """The method of this test on eight clients of very different sizes, two of them unseen."""
    name = request.getfixturevalue("method" if "method" in request.fixturenames else "trained")
    given = request.config.getoption("--settings", default=None)
    settings = yaml.safe_load(given) if given is not None else TINY.get(name, {})
    return federation(tmp_path, tiny_root, _method(name), settings)
