"""A published partition: complete once it has a manifest, and fetched and verified one client at a time."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import Result
from facts import tells
from s3_support import S3Server
from typer.testing import CliRunner

from fedloom.cli.main import app
from fedloom.data import folders
from fedloom.data.assignment import PartitionSettings
from fedloom.data.federated import FederatedDataset
from fedloom.data.manifest import read_manifest, shard_path
from fedloom.data.partition import partition_dataset
from fedloom.data.remote import Remote, publish
from fedloom.data.schemes import ClassesScheme
from fedloom.errors import DataError, ExitCode, ExperimentError, RefusedError, StorageError
from fedloom.storage import Store, open_store
from fedloom.storage.folder import FolderStore


def dealt(root: Path, seed: int = 1) -> Path:
    scheme = ClassesScheme(clients=6, classes_per_client=2)
    return partition_dataset("tiny", PartitionSettings(scheme, seed, 1 / 3, 0.25), root=root)


@pytest.fixture
def folder(tiny_root: Path) -> Path:
    return dealt(tiny_root)


@pytest.fixture
def environment(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return s3_server


@pytest.fixture
def published(folder: Path, environment: S3Server) -> Store:
    store = open_store(f"s3://{environment.new_bucket()}/partitions/p")
    publish(folder, store)
    return store


class Counting(FolderStore):
    """Store that records reads and writes, and stops writing after a while."""

    def __init__(self, folder: Path, may_write: int = 10**9) -> None:
        super().__init__(folder)
        self.written: list[str] = []
        self.may_write = may_write

    def write(self, name: str, content: bytes, *, durably: bool = True) -> None:
        if len(self.written) == self.may_write:
            raise StorageError("the network is down")
        self.written.append(name)
        super().write(name, content, durably=durably)


def same(a: Any, b: Any) -> bool:
    return all(
        torch.equal(getattr(a, split).x, getattr(b, split).x) and torch.equal(getattr(a, split).y, getattr(b, split).y)
        for split in ("train", "validation", "test")
    )


def test_only_the_clients_of_the_folder_are_fetched(folder: Path, published: Store) -> None:
    here, there = FederatedDataset.open(folder), FederatedDataset.open(published.url)
    assert there.manifest == here.manifest
    assert not list(there.folder.glob("shards/*"))
    for client in ("client-0003", "client-0001"):
        assert same(there.client(client), here.client(client))
    assert sorted(path.stem for path in there.folder.glob("shards/*")) == ["client-0001", "client-0003"]
    there.verify(["client-0005"])
    assert shard_path(there.folder, "client-0005").exists()
    there.verify()
    assert len(list(there.folder.glob("shards/*"))) == 6


def test_a_temporary_cache_is_removed_with_the_dataset(published: Store) -> None:
    dataset = FederatedDataset.open(published.url)
    dataset.verify(["client-0000"])
    folder = dataset.folder
    assert folder.exists()
    del dataset
    gc.collect()
    assert not folder.exists()


def test_a_cache_is_shared_and_its_damaged_files_are_fetched_again(published: Store, tmp_path: Path) -> None:
    first = FederatedDataset.open(published.url, tmp_path / "cache")
    client = first.client("client-0000")
    published.remove(["shards/client-0000.safetensors"])
    again = FederatedDataset.open(published.url, tmp_path / "cache")
    assert again.folder == first.folder
    assert same(again.client("client-0000"), client)  # from the cache: it is no longer in the store
    first.verify(["client-0001"])
    shard_path(first.folder, "client-0001").write_bytes(b"half a sh")
    again.verify(["client-0001"])
    FederatedDataset.open(first.folder).verify(["client-0001"])  # the cache is a valid partial partition


def test_nothing_is_written_twice_and_the_manifest_is_last(folder: Path, tmp_path: Path) -> None:
    store = Counting(tmp_path / "store")
    publish(folder, store)
    assert len(store.written) == 7
    assert store.written[-1] == "partition.json"
    assert FolderStore(tmp_path / "store").read("partition.json") == (folder / "partition.json").read_bytes()
    publish(folder, store)
    assert store.written[7:] == ["partition.json"]  # restored


def test_an_interrupted_download_resumes_and_is_incomplete_until_then(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="the network is down"):
        publish(folder, Counting(tmp_path / "store", may_write=4))
    with pytest.raises(DataError, match=r"partition\.json"):
        Remote(FolderStore(tmp_path / "store")).manifest()
    there = {entry.name for entry in FolderStore(tmp_path / "store").entries()}
    store = Counting(tmp_path / "store")
    publish(folder, store)
    assert there.isdisjoint(store.written)
    assert len(there) + len(store.written) == 7
    FederatedDataset.open(tmp_path / "store").verify()


def test_another_partition_is_not_overwritten(folder: Path, tiny_root: Path, tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "store")
    publish(folder, store)
    with pytest.raises(DataError, match="partition"):
        publish(dealt(tiny_root, seed=2), store)
    FederatedDataset.open(tmp_path / "store").verify()


def test_a_damaged_partition_is_not_published(folder: Path, tmp_path: Path) -> None:
    shard_path(folder, "client-0002").write_bytes(b"damaged")
    store = FolderStore(tmp_path / "store")
    with pytest.raises(DataError, match=r"client-0002.*damaged"):
        publish(folder, store)
    assert "partition.json" not in [entry.name for entry in store.entries()]


def test_a_shard_missing_or_damaged_in_the_store_is_named(published: Store) -> None:
    published.remove(["shards/client-0001.safetensors"])
    published.write("shards/client-0002.safetensors", b"damaged")
    dataset = FederatedDataset.open(published.url)
    with pytest.raises(DataError, match=f"client-0001 .*{published.url}/shards/client-0001"):
        dataset.client("client-0001")
    with pytest.raises(DataError, match=r"client-0002\.safetensors.*damaged"):
        dataset.client("client-0002")
    with pytest.raises(DataError, match="'client-9'"):
        dataset.verify(["client-9"])
    dataset.client("client-0003")


def test_a_manifest_missing_or_damaged_in_the_store_is_named(published: Store) -> None:
    with pytest.raises(DataError, match=f"{published.url}/elsewhere/partition.json"):
        FederatedDataset.open(f"{published.url}/elsewhere")
    published.write("partition.json", b"{}")
    with pytest.raises(DataError, match=f"{published.url}/partition.json.*damaged"):
        FederatedDataset.open(published.url)


def test_stores_that_cannot_be_opened(environment: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ExperimentError, match=r"gs://bucket/x.*s3://BUCKET/PREFIX") as refused:
        FederatedDataset.open("gs://bucket/x")
    assert refused.value.found == "gs://bucket/x"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(RefusedError, match="credentials"):
        FederatedDataset.open(f"s3://{environment.new_bucket()}/x")


def test_a_manifest_with_another_hash_creates_another_cache(folder: Path, published: Store, tmp_path: Path) -> None:
    first = FederatedDataset.open(published.url, tmp_path / "cache")
    changed = replace(first.manifest, seed=99)
    published.write("partition.json", changed.to_json().encode())
    assert FederatedDataset.open(published.url, tmp_path / "cache").folder != first.folder


def test_republishing_repairs_a_partition(folder: Path, tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "store")
    publish(folder, store)
    for path in (tmp_path / "store").rglob("*.*"):
        os.utime(path, (0, 0))
    publish(folder, store)
    found = {entry.name: entry.modified > 0 for entry in store.entries()}
    assert {name for name, new in found.items() if new} == {"partition.json"}


def test_a_published_partition_needs_no_dataset(folder: Path, published: Store, tmp_path: Path) -> None:
    """A restarted aggregator does not depend on the source of the dataset."""
    experiment = tmp_path / "e.yaml"

    def again(seed: int) -> Result:
        data = {
            "dataset": "tiny",
            "root": str(tmp_path / "empty"),
            "partition": {"scheme": "classes", "clients": 6, "classes_per_client": 2},
            "held_out_fraction": 1 / 3,
            "validation_fraction": 0.25,
        }
        parts = {
            "model": {"name": "mlp"},
            "algorithm": {"name": "fedavg"},
            "federation": {"rounds": 1, "clients_per_round": 2},
        }
        experiment.write_text(yaml.safe_dump({"name": "e", "seed": seed, "data": data, **parts}))
        return CliRunner().invoke(app, ["partition", str(experiment), "--fetch", "--out", published.url])

    found = again(seed=1)
    assert found.exit_code == 0, found.output
    assert "already" in found.output
    assert not (tmp_path / "empty").exists()
    assert again(seed=2).exit_code != 0  # a different one: it has to be created, and the files are missing


# --- a data root shared by two users ----------------------------------------------------------------------------------


@pytest.fixture
def root() -> Iterator[Path]:
    """Return a data root of the first user, readable by others."""
    if os.geteuid() != 0:
        pytest.skip("becoming another user takes root")
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        (Path(made) / "datasets").mkdir(0o755)
        yield Path(made) / "datasets"


@contextmanager
def second_user() -> Iterator[None]:
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_the_second_user_waits_for_the_same_lock(root: Path) -> None:
    with folders.locked(root / "mnist"):
        pass
    with second_user(), folders.locked(root / "mnist"):
        pass


def test_the_second_user_learns_the_owner_and_the_remedy(root: Path) -> None:
    with second_user(), pytest.raises(StorageError) as caught, folders.locked(root / "mnist"):
        pass
    assert caught.value.exit_code is ExitCode.STORAGE
    assert tells(str(caught.value), root / ".mnist.lock", root, "root", "FEDLOOM_DATA", "chmod")


def test_the_second_user_cannot_replace_files_and_gets_an_error(root: Path) -> None:
    with folders.locked(root / "mnist"), folders.published(root / "mnist") as staging:
        (staging / "a").write_text("first")
    with second_user(), pytest.raises(StorageError) as caught, folders.published(root / "mnist"):
        pass
    assert tells(str(caught.value), root / "mnist", "root", "FEDLOOM_DATA")
    assert (root / "mnist" / "a").read_text() == "first"


def test_an_inaccessible_root_is_named(root: Path) -> None:
    root.chmod(0o700)
    with second_user(), pytest.raises(StorageError) as caught, folders.locked(root / "mnist"):
        pass
    assert tells(str(caught.value), "root", "FEDLOOM_DATA")


def test_an_error_in_the_block_is_raised_unchanged(root: Path) -> None:
    with pytest.raises(PermissionError, match="mine"), folders.locked(root / "mnist"):
        raise PermissionError("mine")


def test_a_private_partition_of_the_first_user_is_named(root: Path) -> None:
    (root / "p").mkdir()
    (root / "p" / "partition.json").write_text("{}")
    (root / "p" / "partition.json").chmod(0o600)
    with second_user(), pytest.raises(StorageError) as caught:
        read_manifest(root / "p")
    assert tells(str(caught.value), root / "p" / "partition.json", "root", "FEDLOOM_DATA")
