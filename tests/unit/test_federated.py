"""The federated dataset on disk: a client gets what the manifest states, or an error names the fault."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from fedloom.core import digests
from fedloom.data import datasets
from fedloom.data import partition as partitioning
from fedloom.data.assignment import PartitionSettings
from fedloom.data.datasets import Dataset, Owners, Pool, RawDataset
from fedloom.data.datasets.base import DataFile
from fedloom.data.federated import FederatedDataset, Manifest, normalize
from fedloom.data.partition import partition_dataset
from fedloom.data.schemes import ClassesScheme, NaturalScheme
from fedloom.data.spec import DataSpec, InputSpec, Normalization, TensorKind
from fedloom.errors import DataError, ExitCode, ExperimentError

SCHEME = ClassesScheme(clients=6, classes_per_client=2)


def make(root: Path, **changes: Any) -> Path:
    fix = changes.pop("fix", False)
    settings = {"scheme": SCHEME, "seed": 1, "held_out_fraction": 1 / 3, "validation_fraction": 0.25} | changes
    return partition_dataset("tiny", PartitionSettings(**settings), root=root, fix=fix)


@pytest.fixture
def folder(tiny_root: Path) -> Path:
    return make(tiny_root)


def rewrite(folder: Path, client: str, tensors: dict[str, torch.Tensor]) -> None:
    """Replace a shard, and its hash in the manifest."""
    content = safetensors.torch.save(tensors)
    (folder / "shards" / f"{client}.safetensors").write_bytes(content)
    manifest = FederatedDataset.open(folder).manifest
    entries = tuple(
        replace(entry, sha256=hashlib.sha256(content).hexdigest()) if entry.id == client else entry
        for entry in manifest.clients
    )
    (folder / "partition.json").write_text(replace(manifest, clients=entries).to_json())


def test_clients_get_the_examples_of_the_manifest(folder: Path, tiny_root: Path) -> None:
    dataset = FederatedDataset.open(folder)
    manifest = dataset.manifest
    whole = datasets.load_dataset(datasets.find_dataset("tiny"), tiny_root)
    assert (manifest.dataset, manifest.spec.classes, manifest.spec.input_shape, manifest.spec.kind) == (
        "tiny",
        5,
        (1, 6, 6),
        "pixels",
    )
    assert len(manifest.roster) == 4
    assert len(manifest.unseen) == 2
    assert sorted(manifest.roster + manifest.unseen) == [f"client-000{i}" for i in range(6)]
    official = [{image.tobytes() for image in pool.inputs} for pool in (whole.train, whole.test)]
    for entry in manifest.clients:
        client = dataset.client(entry.id)
        assert entry.owner is None
        assert client is dataset.client(entry.id)
        for split, pool in (("train", 0), ("validation", 0), ("test", 1)):
            data = getattr(client, split)
            assert len(data) == entry.size(split) > 0
            assert data.x.dtype == torch.float32
            assert torch.bincount(data.y, minlength=5).tolist() == list(entry.class_counts[split])
            pixels = (data.x * manifest.spec.normalization.std[0] + manifest.spec.normalization.mean[0]) * 255
            assert all(image.round().byte().numpy().tobytes() in official[pool] for image in pixels)
        assert client.present.tolist() == [count > 0 for count in entry.class_counts["train"]]
        assert int(client.present.sum()) == 2


def test_class_proportions_are_those_of_the_train_splits(folder: Path) -> None:
    manifest = FederatedDataset.open(folder).manifest
    proportions = manifest.class_proportions()
    assert proportions.shape == (6, 5)
    assert proportions.dtype == torch.float64
    assert torch.allclose(proportions.sum(1), torch.ones(6, dtype=torch.float64))
    first = manifest.clients[0]
    assert proportions[0].tolist() == [count / first.train for count in first.class_counts["train"]]


def test_normalization_by_channel_and_by_feature() -> None:
    by_two = Normalization((0.5, 0.2), (0.25, 0.1))
    pixels = torch.tensor([[[[0, 255]], [[51, 102]]]], dtype=torch.uint8)
    expected = torch.tensor([[[[-2.0, 2.0]], [[0.0, 2.0]]]])
    assert torch.allclose(normalize(pixels, InputSpec("pixels", (2, 1, 2), by_two)), expected, atol=1e-6)
    features = torch.tensor([[0.75, 0.2], [0.0, 0.4]])
    expected = torch.tensor([[1.0, 0.0], [-2.0, 2.0]])
    assert torch.allclose(normalize(features, InputSpec("features", (2,), by_two)), expected, atol=1e-6)


OWNERS = np.arange(90) % 3


def features() -> RawDataset:
    """Three speakers, 2 features, 3 classes."""
    rng = np.random.default_rng(0)
    x = rng.normal(5, 3, (90, 2)).astype(np.float32)
    y = np.arange(90) // 3 % 3
    pools = (Pool(x[part], y[part], OWNERS[part]) for part in (slice(0, 60), slice(60, 90)))
    return RawDataset(*pools, Owners(("ann", "bob", "cem"), divided=True))


def tokens() -> RawDataset:
    """Three roles, windows of 4 tokens of 3, each window a view of the text."""
    text = (np.arange(94) * np.arange(94) % 7 % 3).astype(np.uint8)
    x, y, owners = np.lib.stride_tricks.sliding_window_view(text, 4)[:90], text[4:].astype(np.int64), OWNERS
    pools = (Pool(x[part], y[part], np.sort(owners[part])) for part in (slice(0, 60), slice(60, 90)))
    return RawDataset(*pools, Owners(("ann", "bob", "cem"), divided=True, overlap=4))


MAKERS: dict[TensorKind, tuple[Callable[[], RawDataset], tuple[int, ...]]] = {
    "features": (features, (2,)),
    "tokens": (tokens, (4,)),
}


@pytest.fixture
def other_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[TensorKind, RawDataset], Path]:
    """Register a source ``other`` of some kind that returns these examples, and return its data root."""

    def make(kind: TensorKind, whole: RawDataset) -> Path:
        content = b"what these examples stand in"
        (tmp_path / "given").mkdir()
        (tmp_path / "given" / "data").write_bytes(content)
        source = Dataset(
            name="other",
            title="Other",
            spec=DataSpec.single(kind, MAKERS[kind][1], ("a", "b", "c")),
            licence="none",
            files=(DataFile("data", len(content), hashlib.sha256(content).hexdigest()),),
            read=lambda contents: whole,
        )
        monkeypatch.setitem(datasets.DATASETS, "other", source)
        datasets.fetch_dataset(source, tmp_path / "root", copy_from=tmp_path / "given")
        return tmp_path / "root"

    return make


def make_other(root: Path) -> Path:
    return partition_dataset("other", PartitionSettings(NaturalScheme(), 1, 1 / 3, 0.25), root=root, fix=True)


@pytest.mark.parametrize("kind", list(MAKERS))
def test_owners_features_and_tokens_reach_the_client(
    kind: TensorKind, other_source: Callable[[TensorKind, RawDataset], Path]
) -> None:
    whole = MAKERS[kind][0]()
    dataset = FederatedDataset.open(make_other(other_source(kind, whole)))
    manifest = dataset.manifest
    assert (manifest.spec.kind, manifest.spec.input_shape, manifest.spec.classes) == (kind, MAKERS[kind][1], 3)
    assert [entry.owner for entry in manifest.clients] == ["ann", "bob", "cem"]
    assert [entry.id for entry in manifest.clients] == ["client-0000", "client-0001", "client-0002"]
    assert manifest.scheme == {
        "scheme": "natural", "clients": None, "min_examples": 10, "test_fraction": None, "train_per_client": None,
        "test_per_client": None,
    }  # fmt: skip
    assert Manifest.from_json(manifest.to_json()) == manifest
    train = torch.cat([dataset.client(client).train.x for client in manifest.roster])
    if kind == "features":
        assert train.dtype == torch.float32
        assert torch.allclose(train.mean(0), torch.zeros(2), atol=1e-5)
        assert torch.allclose(train.std(0, correction=0), torch.ones(2), atol=1e-5)
    else:
        assert train.dtype == torch.uint8
        assert manifest.spec.normalization == Normalization((), ())
    for owner, entry in enumerate(manifest.clients):
        client, pool = dataset.client(entry.id), whole.test
        expected = torch.from_numpy(pool.inputs[pool.owners == owner].copy())
        assert torch.equal(client.test.x, normalize(expected, manifest.spec.inputs[""]))
        assert client.test.y.tolist() == pool.labels[pool.owners == owner].tolist()


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("features", lambda pool: replace(pool, inputs=np.float64(pool.inputs)), "float64 .*float32"),
        ("features", lambda pool: replace(pool, inputs=pool.inputs[:, :1]), r"\[1\]; .*\[2\]"),
        ("features", lambda pool: replace(pool, inputs=pool.inputs * np.float32(np.inf)), "feature.*inf"),
        ("features", lambda pool: replace(pool, labels=pool.labels + 1), "label.* 1 to 3.*0 to 2"),
        ("tokens", lambda pool: replace(pool, inputs=pool.inputs + np.uint8(1)), "token.* 3.*0 to 2"),
    ],
)  # fmt: skip
def test_examples_that_contradict_their_source_are_rejected(
    kind: TensorKind, change: Callable[[Pool], Pool], words: str, other_source: Callable[[TensorKind, RawDataset], Path]
) -> None:
    whole = MAKERS[kind][0]()
    root = other_source(kind, replace(whole, test=change(whole.test)))
    with pytest.raises(DataError, match=f"test examples of other: .*{words}"):
        make_other(root)
    assert [path for path in (root / "partitions").iterdir() if path.suffix != ".lock"] == []


def test_a_manifest_round_trips_through_json(folder: Path) -> None:
    manifest = FederatedDataset.open(folder).manifest
    again = Manifest.from_json(manifest.to_json())
    assert again == manifest
    assert again.fingerprint == hashlib.sha256((folder / "partition.json").read_bytes()).hexdigest()


def test_equal_settings_give_equal_bytes_on_another_machine(folder: Path, tiny_root: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "datasets").symlink_to(tiny_root / "datasets")
    other = make(tmp_path / "other")
    assert other.name == folder.name
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    assert len(files) == 7
    for path in files:
        assert (other / path).read_bytes() == (folder / path).read_bytes()


def test_every_setting_changes_the_partitions_name(tiny_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [
        make(tiny_root).name,
        make(tiny_root, seed=2).name,
        make(tiny_root, held_out_fraction=0.5).name,
        make(tiny_root, validation_fraction=0.3).name,
        make(tiny_root, scheme=ClassesScheme(clients=6, classes_per_client=3)).name,
        make(tiny_root, scheme=ClassesScheme(clients=6, classes_per_client=2, train_per_client=8)).name,
    ]
    monkeypatch.setattr(partitioning, "ASSIGNMENT", 999)
    names.append(make(tiny_root).name)
    assert len(set(names)) == len(names)
    assert all(name.startswith("tiny-") and len(name) == len("tiny-") + 12 for name in names)


def test_a_partition_is_created_once(folder: Path, tiny_root: Path) -> None:
    for path in (tiny_root / "datasets" / "tiny").iterdir():
        path.unlink()
    assert make(tiny_root) == folder
    with pytest.raises(DataError, match="fedloom data fetch tiny"):
        make(tiny_root, seed=2)


def test_a_failed_partition_leaves_nothing_behind(tiny_root: Path) -> None:
    with pytest.raises(ExperimentError, match=r"clients.*\b500\b"):
        make(tiny_root, scheme=ClassesScheme(clients=500, classes_per_client=2))
    assert [path for path in (tiny_root / "partitions").iterdir() if path.suffix != ".lock"] == []


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (flip, ["damaged", "sha256"]),
        (lambda path: path.write_bytes(path.read_bytes()[:-10]), ["damaged", "sha256"]),
        (Path.unlink, ["missing"]),
    ],
)
def test_a_damaged_shard_is_reported_and_can_be_repaired(
    damage: Callable[[Path], None], words: list[str], folder: Path, tiny_root: Path
) -> None:
    shard = folder / "shards" / "client-0003.safetensors"
    intact = shard.read_bytes()
    damage(shard)
    dataset = FederatedDataset.open(make(tiny_root))
    dataset.client("client-0002")
    with pytest.raises(DataError, match="client-0003"):
        dataset.verify()
    with pytest.raises(DataError) as error:
        dataset.client("client-0003")
    assert error.value.exit_code == ExitCode.DATA
    for word in [*words, str(shard), "fedloom partition EXPERIMENT"]:
        assert word in str(error.value)
    assert make(tiny_root, fix=True) == folder
    assert shard.read_bytes() == intact
    FederatedDataset.open(folder).client("client-0003")


def test_a_missing_manifest_is_reported_and_can_be_repaired(folder: Path, tiny_root: Path) -> None:
    intact = (folder / "partition.json").read_bytes()
    (folder / "partition.json").unlink()
    with pytest.raises(DataError, match=r"manifest .*partition\.json.*\n.*fedloom partition"):
        FederatedDataset.open(folder)
    make(tiny_root, fix=True)
    assert (folder / "partition.json").read_bytes() == intact


def change(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest.update(values)


def change_client(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest["clients"][1].update(values)


def change_spec(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest["spec"].update(values)


def change_input(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest["spec"]["inputs"][""].update(values)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (change_input(kind="sounds"), ["kind: ", "'pixels', 'features', 'tokens'"]),
        (change_input(shape=[6]), ["input_shape: [6]", "[channels, height, width]"]),
        (change_input(kind="integers"), ["high"]),
        (change_input(channel_axis="last"), ["channel_axis"]),
        (change_spec(inputs={}), ["inputs"]),
        (change_spec(targets={"task": "regression", "shape": [], "outputs": 1}), ["classes"]),
        (change_input(kind="tokens", shape=[6]), ["give 0 of each"]),
        (change_input(kind="features", shape=[6]), ["give 6 of each"]),
        (change_input(shape=[1, 0, 6]), ["input_shape: [1, 0, 6]"]),
        (change_spec(class_names="five"), ["class_names"]),
        (change_spec(class_names=["a", "a", "b", "c", "d"]), ["classes", "'a' occurs twice"]),
        (change_input(normalization={"mean": [0.1, 0.2], "std": [1.0, 1.0]}), ["2 means", "give 1"]),
        (change_input(normalization={"mean": [0.1], "std": [0.0]}), ["above 0"]),
        (change_client(id="../../etc/passwd"), ["clients.1.id"]),
        (change_client(sha256="abc"), ["clients.1.sha256"]),
        (change_client(test=-1), ["clients.1.test"]),
        (lambda manifest: manifest.pop("seed"), ["seed"]),
    ],
)
def test_a_damaged_manifest_is_named(damage: Callable[[dict[str, Any]], None], words: list[str], folder: Path) -> None:
    path = folder / "partition.json"
    content = json.loads(path.read_text())
    del content["digest"]
    damage(content)
    path.write_text(digests.with_compact_digest(json.dumps(content)))
    with pytest.raises(DataError) as error:
        FederatedDataset.open(folder)
    for word in [*words, str(path), "is damaged", "fedloom partition EXPERIMENT"]:
        assert word in str(error.value)


def test_a_manifest_of_an_older_version_is_reported_as_such(folder: Path) -> None:
    content = json.loads((folder / "partition.json").read_text()) | {"version": 1}
    del content["spec"]
    with pytest.raises(DataError, match=r"version 1.*version 4"):
        Manifest.from_json(json.dumps(content))


def test_any_flipped_bit_of_a_manifest_is_detected(folder: Path) -> None:
    content = (folder / "partition.json").read_bytes()
    for at in range(0, len(content), 3):
        changed = bytearray(content)
        changed[at] ^= 1 << at % 8
        with pytest.raises(DataError, match="manifest"):
            Manifest.from_json(bytes(changed))


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00\xff"])
def test_invalid_manifests_are_rejected(text: str) -> None:
    with pytest.raises(DataError, match=r"manifest.*damaged"):
        Manifest.from_json(text)


def test_an_unknown_client_is_rejected_with_the_known_ones(folder: Path) -> None:
    with pytest.raises(DataError, match=r"'client-9' .*client-0000.* more"):
        FederatedDataset.open(folder).client("client-9")


def test_a_client_may_lack_labels(folder: Path) -> None:
    tensors = safetensors.torch.load_file(folder / "shards" / "client-0001.safetensors")
    del tensors["train_y"]
    rewrite(folder, "client-0001", tensors)
    dataset = FederatedDataset.open(folder)
    client = dataset.client("client-0001")
    assert client.train.y is None
    assert client.test.y is not None
    with pytest.raises(DataError, match=r"client-0001.*labels"):
        _ = client.present


def test_an_unlabelled_client_has_no_class_mix(folder: Path) -> None:
    manifest = FederatedDataset.open(folder).manifest
    counts = {**manifest.clients[0].class_counts, "train": (0, 0, 0, 0, 0)}
    unlabelled = replace(manifest, clients=(replace(manifest.clients[0], class_counts=counts), *manifest.clients[1:]))
    assert Manifest.from_json(unlabelled.to_json()).class_proportions()[0].tolist() == [0.0] * 5


def test_a_shard_that_is_not_safetensors_is_rejected(folder: Path) -> None:
    shard = folder / "shards" / "client-0001.safetensors"
    shard.write_bytes(b"not a shard")
    manifest = FederatedDataset.open(folder).manifest
    entries = [replace(entry, sha256=hashlib.sha256(b"not a shard").hexdigest()) for entry in manifest.clients]
    (folder / "partition.json").write_text(replace(manifest, clients=tuple(entries)).to_json())
    with pytest.raises(DataError, match="safetensors"):
        FederatedDataset.open(folder).client("client-0001")
