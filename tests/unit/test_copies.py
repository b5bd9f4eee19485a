"""Equal inputs stay in one split, omissions are noted, and data of unseen clients change no inputs of others."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from facts import refusing, tells
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from typer.testing import CliRunner

import fedloom
from fedloom.cli.main import app
from fedloom.data.apportion import choose_about, equal_inputs, first_groups
from fedloom.data.assignment import Assignment, PartitionSettings, assign_examples
from fedloom.data.datasets import Dataset, Pool, RawDataset
from fedloom.data.datasets.base import DataFile, Owners
from fedloom.data.federated import FederatedDataset
from fedloom.data.manifest import Manifest
from fedloom.data.partition import notes_of, partition_dataset
from fedloom.data.scheme_base import Reserve
from fedloom.data.schemes import (
    ClassesScheme,
    DirichletScheme,
    DominantScheme,
    FixedScheme,
    IidScheme,
    ImbalancedScheme,
    NaturalScheme,
    Scheme,
)
from fedloom.data.spec import DataSpec
from fedloom.errors import DataError, ExperimentError

SPLITS = ("train", "validation", "test")
CLASSES = 3
RNG = np.random.default_rng(0)

SCHEMES: tuple[Scheme, ...] = (
    NaturalScheme(),
    NaturalScheme(test_fraction=0.3, train_per_client=6),
    IidScheme(clients=3),
    ClassesScheme(clients=3, classes_per_client=2),
    DirichletScheme(clients=3, alpha=10.0),
    DominantScheme(clients=3, rho=0.5),
    ImbalancedScheme(clients=3, large_size=12, small_size=6),
    FixedScheme(clients=3, train_per_class=4, test_per_class=3, labels_per_client=2),
)


def repeated(copies: list[int], owners: int, seed: int) -> tuple[NDArray[np.float32], NDArray[np.int64], list[int]]:
    """Return so many copies of each input, in a mixed order, with labels and owners."""
    random = np.random.default_rng(seed)
    x = np.repeat(np.arange(len(copies)), copies).astype(np.float32)[:, None]
    x = x[random.permutation(len(x))]
    return x, random.integers(0, CLASSES, len(x)), random.integers(0, owners, len(x)).tolist()


def own(copies: list[int], owners: int = 3, seed: int = 0, *, divided: bool = False) -> RawDataset:
    """Return user data with these copies; train and test share no input, unless the source has given splits."""
    x, y, whose = repeated(copies, owners, seed)
    test = np.random.default_rng(seed).random(len(x)) < 0.3 if divided else np.isin(x[:, 0], np.unique(x)[::5])
    pools = [Pool(x[part], y[part], np.array(whose)[part]) for part in (~test, test)]
    named = Owners(tuple(f"owner {i}" for i in range(owners)), divided)
    return RawDataset(*pools, named, equal_inputs(np.concatenate([pool.inputs for pool in pools])))


def shared(official: RawDataset, dealt: Assignment) -> set[str]:
    """Return the pairs of splits, of any clients, with a common input."""
    inputs = np.concatenate([official.train.inputs, official.test.inputs])[:, 0]
    seen = {split: set(inputs[np.concatenate(dealt.examples[split])].tolist()) for split in SPLITS}
    return {f"{a}, {b}" for i, a in enumerate(SPLITS) for b in SPLITS[i + 1 :] if seen[a] & seen[b]}


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.scheme)
@settings(max_examples=15)
@given(
    copies=st.lists(st.integers(1, 5), min_size=60, max_size=90),
    seed=st.integers(0, 1000),
    reserve=st.sampled_from([None, None, Reserve(share=0.2)]),
)
def test_no_input_is_in_two_splits_for_any_scheme(
    scheme: Scheme, copies: list[int], seed: int, reserve: Reserve | None
) -> None:
    official = own(copies, seed=seed)
    how = PartitionSettings(scheme.model_copy(update={"reserve": reserve}), seed, 0.3, 0.25)
    try:
        dealt = assign_examples(official, CLASSES, how)
    except ExperimentError:  # so many copies and an exact size are not always possible together
        return
    assert shared(official, dealt) == set()


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.scheme)
def test_a_dataset_with_duplicates_can_be_partitioned(scheme: Scheme) -> None:
    """Show that the property above is one of partitions, not of rejections."""
    dealt = [
        assign_examples(own([2] * 90, seed=seed), CLASSES, PartitionSettings(scheme, seed, 0.3, 0.25))
        for seed in (1, 2, 3)
    ]
    assert all(min(len(part) for split in SPLITS for part in each.examples[split]) > 0 for each in dealt)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.scheme)
def test_data_without_duplicates_are_partitioned_as_before(scheme: Scheme) -> None:
    official = own([1] * 120)
    bare = RawDataset(official.train, official.test, official.owners)
    one, two = (assign_examples(of, CLASSES, PartitionSettings(scheme, 5, 0.3, 0.25)) for of in (official, bare))
    for split in SPLITS:
        assert all(np.array_equal(a, b) for a, b in zip(one.examples[split], two.examples[split], strict=True))


def test_predefined_splits_are_kept_and_their_duplicates_noted() -> None:
    official = own([3] * 40, divided=True)
    dealt = assign_examples(official, CLASSES, PartitionSettings(NaturalScheme(), 1, 0.3, 0.25))
    assert "train, validation" not in shared(official, dealt)
    tests = np.concatenate(dealt.examples["test"])
    assert sorted(tests.tolist()) == list(range(len(official.train), 120))
    common = np.isin(official.test.inputs, official.train.inputs)
    assert any(tells(note, "split", int(common.sum()), f"{len(common)} test examples") for note in dealt.notes)
    # Another split, if requested, keeps equal inputs together.
    again = assign_examples(official, CLASSES, PartitionSettings(NaturalScheme(test_fraction=0.2), 1, 0.3, 0.25))
    assert shared(official, again) == set()


@pytest.mark.parametrize(
    "scheme", [IidScheme(clients=3), NaturalScheme(min_examples=3)], ids=lambda scheme: scheme.scheme
)
def test_reserved_examples_share_no_input_with_the_rest(scheme: Scheme) -> None:
    official = own([3] * 120, owners=6)
    sides = []
    for deal in (False, True):
        reserve = Reserve(share=0.5, deal=deal)
        how = PartitionSettings(scheme.model_copy(update={"reserve": reserve}), 1 + deal, 0.0, 0.25)
        dealt = assign_examples(official, CLASSES, how)
        positions = np.concatenate([part for split in SPLITS for part in dealt.examples[split]])
        sides.append((set(official.group[positions].tolist()), dealt.reserved))
    assert sides[0][0]
    assert sides[1][0]
    assert not sides[0][0] & sides[1][0]
    assert sides[0][1] == sides[1][1]


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=30), target=st.integers(0, 60), more=st.integers(0, 20))
def test_groups_are_chosen_whole_and_close_to_the_target(sizes: list[int], target: int, more: int) -> None:
    whole = np.array(sizes)
    target = min(target, int(whole.sum()))
    chosen = choose_about(whole, target)
    if len(sizes) > 1 and 0 < target < whole.sum():
        assert chosen.any()
        assert not chosen.all()
    assert abs(int(whole[chosen].sum()) - target) <= max(sizes) + (target if len(sizes) == 1 else 0)
    singles = np.ones(len(sizes), dtype=np.int64)
    few = min(target, len(sizes))
    assert (
        choose_about(singles, few).tolist()
        == first_groups(singles, few).tolist()
        == (np.arange(len(sizes)) < few).tolist()
    )
    assert not (first_groups(whole, target) & ~first_groups(whole, target + more)).any()


def test_equal_inputs_get_equal_numbers() -> None:
    x = np.array([[0.0, 1.0], [-0.0, 1.0], [1.0, 0.0], [0.0, 1.0]], dtype=np.float32)
    assert equal_inputs(x).tolist() == [0, 0, 2, 0]


def rows(opened: FederatedDataset, split: str) -> set[bytes]:
    return {
        row.tobytes() for entry in opened.manifest.clients for row in opened.tensors(entry.id)[f"{split}_x"].numpy()
    }


def entrances(folder: Path) -> dict[str, fedloom.Federated]:
    """Return one dataset of fifteen inputs, four times each, in every form of user data."""
    x, y = np.repeat(RNG.integers(0, 256, (15, 2, 2)), 4, 0), np.repeat(np.arange(15) % 3, 4)
    p = np.random.default_rng(1).permutation(60)
    x, y, who = x[p].astype(np.uint8), y[p], np.arange(60) % 2
    flat = x.reshape(60, -1).astype(np.float64)
    root = folder / "data"
    frame = pandas.DataFrame(flat, columns=list("abcd")).assign(label=[f"c{c}" for c in y], who=[f"w{w}" for w in who])
    frame.to_csv(folder / "t.csv", index=False)
    np.savez(folder / "a.npz", x=flat, y=y, who=who)
    for i in range(60):
        place = folder / "images" / f"w{who[i]}" / f"c{y[i]}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(x[i]).save(place / f"{i}.png")

    def files(dataset: str, path: str, client: str, scheme: dict[str, Any]) -> fedloom.Federated:
        source = {"path": str(folder / path), "client": client}
        return fedloom.Federated({"dataset": dataset, "source": source, "root": str(root), "partition": scheme})

    natural, iid = {"scheme": "natural"}, {"scheme": "iid", "clients": 2}
    from_arrays = fedloom.Federated.from_arrays
    return {
        "arrays in memory": from_arrays({f"w{w}": (flat[who == w], y[who == w]) for w in (0, 1)}, root=root),
        "arrays, dealt out": from_arrays({"w": (flat, y)}, root=root, partition=iid),
        "frame": fedloom.Federated.from_frame(frame, label="label", client="who", root=root),
        "frame, dealt out": fedloom.Federated.from_frame(
            frame.drop(columns="who"), label="label", scheme=iid, root=root
        ),
        "torchvision": fedloom.Federated.from_torchvision(
            [(torch.from_numpy(image)[None], int(label)) for image, label in zip(x, y, strict=True)], iid, root=root
        ),
        "table": files("table", "t.csv", "who", natural),
        "table, dealt out": files("table", "t.csv", "who", iid),
        "arrays in a file": files("arrays", "a.npz", "who", natural),
        "folder": files("folder", "images", "folder", natural),
        "folder, dealt out": files("folder", "images", "folder", iid),
    }


def test_own_data_in_every_form_keep_equal_inputs_in_one_split(tmp_path: Path) -> None:
    for name, data in entrances(tmp_path).items():
        for seed in (1, 2):
            opened = data.open(seed)
            train, validation, test = (rows(opened, split) for split in SPLITS)
            assert min(len(train), len(validation), len(test)) > 0, name
            assert len(train | validation | test) == len(train) + len(validation) + len(test), name


EXPERIMENT = """name: t
data: {{dataset: table, source: {{path: {path}, split: split}}, root: {root}, partition: {{scheme: iid, clients: 2}}}}
model: {{name: logistic}}
algorithm: {{name: fedavg, local: {{epochs: 1, batch_size: 8, lr: 0.05}}}}
federation: {{rounds: 1, clients_per_round: 2}}
"""


def test_a_split_column_with_duplicates_is_noted_on_the_command_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x = RNG.normal(size=(40, 2)).round(3)
    x[20:30] = x[30:] = x[:10]
    frame = pandas.DataFrame(x, columns=["a", "b"]).assign(label=[*range(2)] * 20)
    frame.assign(split=np.repeat(["train", "validation", "test"], [20, 10, 10])).to_csv(tmp_path / "t.csv", index=False)
    (tmp_path / "e.yaml").write_text(EXPERIMENT.format(path=tmp_path / "t.csv", root=tmp_path / "data"))
    for _ in range(2):  # also if the partition exists already
        caplog.clear()
        assert CliRunner().invoke(app, ["partition", str(tmp_path / "e.yaml")]).exit_code == 0
        assert any(tells(text, "split", 10, "10 test examples") for text in warned(caplog))


@pytest.mark.parametrize("repeated", [True, False])
def test_repeated_inputs_of_published_data_are_noted_and_stay_where_they_are(repeated: bool, tmp_path: Path) -> None:
    x, y = RNG.normal(size=(80, 2)).astype(np.float32), np.arange(80) % 2
    if repeated:
        x[60:70] = x[:10]
    official = RawDataset(Pool(x[:60], y[:60]), Pool(x[60:], y[60:]))
    content = x.tobytes()
    (tmp_path / "datasets/published").mkdir(parents=True)
    (tmp_path / "datasets/published/x").write_bytes(content)
    files = (DataFile("x", len(content), hashlib.sha256(content).hexdigest()),)
    source = Dataset(
        "published", "", DataSpec.single("features", (2,), ("a", "b")), "", lambda contents: official, files
    )
    given_settings = PartitionSettings(IidScheme(clients=2), 1, 0.0, 1 / 6)
    folder = partition_dataset(source, given_settings, root=tmp_path)
    train, validation, test = (rows(FederatedDataset.open(folder), split) for split in SPLITS)
    assert len(train) + len(validation) == 60
    assert bool(train & test) is repeated
    assert not train & validation
    notes = notes_of(folder)
    assert len(notes) == repeated
    assert all(tells(note, "0 validation", f"{len(train & test)} test examples", "published") for note in notes)


def test_damaged_notes_are_rejected_and_rewritten(tmp_path: Path) -> None:
    data = {"all": (np.repeat(RNG.normal(size=(30, 3)), 2, 0), np.arange(60) % 2)}
    made = fedloom.Federated.from_arrays(data, root=tmp_path)
    (path,) = (tmp_path / "partitions").glob(f"{made.open().manifest.dataset}-*/notes.json")
    whole = path.read_bytes()
    for damaged in (b"[", b"[]", b'{"version": 9, "notes": []}'):
        path.write_bytes(damaged)
        with refusing(DataError, "notes.json"):
            made.open()
        experiment = {"name": "t", "data": made.section, "model": {"name": "logistic"}, "algorithm": {"name": "local"}}
        experiment["federation"] = {"rounds": 0, "clients_per_round": 1}
        (tmp_path / "e.json").write_text(json.dumps(experiment))
        assert CliRunner().invoke(app, ["partition", str(tmp_path / "e.json")], catch_exceptions=False).exit_code == 0
        assert path.read_bytes() == whole


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_client_with_too_few_examples_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sizes = {"ann": 30, "bob": 9, "cy": 40, "dee": 2}
    clients = {name: (RNG.normal(size=(n, 3)), np.arange(n) % 2) for name, n in sizes.items()}
    opened = fedloom.Federated.from_arrays(clients, root=tmp_path).open()
    assert [entry.owner for entry in opened.manifest.clients] == ["ann", "cy"]
    (note,) = warned(caplog)
    assert tells(note, "2 of 4", "bob, dee", "fewer than 10 examples (min_examples)")
    caplog.clear()
    few = {"partition": {"scheme": "natural", "min_examples": 3}, "validation_fraction": 0.5}
    fedloom.Federated.from_arrays({"ann": clients["ann"], "bob": clients["bob"]}, root=tmp_path, **few).open()
    assert warned(caplog) == []


def test_a_rare_class_that_limits_all_clients_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    y = np.where(np.arange(2000) < 30, 2, np.arange(2000) % 2)
    data = {"all": (RNG.normal(size=(2000, 3)), y)}
    scheme = {"scheme": "dirichlet", "clients": 3, "alpha": 1.0}
    opened = fedloom.Federated.from_arrays(data, root=tmp_path, partition=scheme).open()
    used = sum(entry.train for entry in opened.manifest.clients)
    class_2 = sum(entry.class_counts["train"][2] for entry in opened.manifest.clients)
    assert used < 600
    assert class_2 <= 20
    (note,) = warned(caplog)
    assert tells(note, f"{used:,} of 1,333 train examples", "class 2", 20)
    caplog.clear()  # no warning if few examples were requested
    fedloom.Federated.from_arrays(data, root=tmp_path, partition={**scheme, "train_per_client": 5, "alpha": 1e6}).open()
    fedloom.Federated.from_arrays(data, root=tmp_path, partition={"scheme": "iid", "clients": 3}).open()
    assert [note for note in warned(caplog) if "train examples" in note] == []


@pytest.mark.parametrize("scheme", [{"scheme": "natural"}, {"scheme": "natural", "train_per_client": 5}])
def test_data_of_unseen_clients_do_not_change_inputs_of_seen_ones(scheme: dict[str, Any], tmp_path: Path) -> None:
    clients = {name: (RNG.normal(size=(40, 3)), np.arange(40) % 2) for name in ("ann", "bob", "cy", "dee")}

    def opened(clients: dict[str, Any]) -> FederatedDataset:
        return fedloom.Federated.from_arrays(clients, root=tmp_path, partition=scheme, held_out_fraction=0.25).open()

    before = opened(clients)
    (unseen,) = (entry.owner for entry in before.manifest.clients if not entry.seen)
    after = opened(clients | {unseen: (clients[unseen][0] + 100, clients[unseen][1])})
    assert before.manifest.unseen == after.manifest.unseen
    assert before.manifest.spec.normalization == after.manifest.spec.normalization
    for client in before.manifest.roster:
        assert torch.equal(before.client(client).train.x, after.client(client).train.x)
    if "train_per_client" not in scheme:
        theirs = np.concatenate([before.tensors(client)["train_x"].numpy() for client in before.manifest.roster])
        assert np.allclose(before.manifest.spec.normalization.mean, theirs.astype(np.float64).mean(0))
        assert np.allclose(before.manifest.spec.normalization.std, theirs.astype(np.float64).std(0))


def test_normalization_over_the_pool_includes_unseen_clients_and_changes_the_partition(tmp_path: Path) -> None:
    clients = {name: (RNG.normal(size=(40, 3)) + at, np.arange(40) % 2) for at, name in enumerate(("ann", "bob", "cy"))}

    def opened(**keys: Any) -> FederatedDataset:
        mine = {"root": tmp_path, "partition": {"scheme": "natural"}, "held_out_fraction": 0.34, **keys}
        return fedloom.Federated.from_arrays(clients, **mine).open()

    seen, pool = opened(), opened(normalization="pool")
    assert seen.manifest.unseen
    assert seen.manifest.unseen == pool.manifest.unseen
    assert seen.manifest.fingerprint == opened(normalization="seen").manifest.fingerprint != pool.manifest.fingerprint
    everyone = np.concatenate([pool.tensors(entry.id)["train_x"].numpy() for entry in pool.manifest.clients])
    assert np.allclose(pool.manifest.spec.normalization.mean, everyone.astype(np.float64).mean(0))
    assert not np.allclose(seen.manifest.spec.normalization.mean, pool.manifest.spec.normalization.mean)
    assert Manifest.from_json(pool.manifest.to_json()) == pool.manifest


def test_examples_of_unseen_clients_and_reserved_ones_are_not_measured() -> None:
    official = own([1] * 200)
    reserve = Reserve(share=0.2)
    for scheme in SCHEMES[2:6]:
        how = PartitionSettings(scheme.model_copy(update={"reserve": reserve}), 1, 0.34, 0.25)
        dealt = assign_examples(official, CLASSES, how)
        for is_seen, mine in zip(dealt.seen, dealt.examples["train"], strict=True):
            assert len(mine) > 0
            assert np.isin(mine, dealt.measured).all() if is_seen else not np.isin(mine, dealt.measured).any()
        assert not dealt.seen.all()
        assert np.isin(dealt.measured, dealt.training_pool).all()
        alike = PartitionSettings(how.scheme, 1, 0.0, 0.25)
        assert np.array_equal(
            *(getattr(assign_examples(official, CLASSES, alike), what) for what in ("measured", "training_pool"))
        )


def test_classes_without_a_client_are_named() -> None:
    official = own([1] * 200)
    how = PartitionSettings(ClassesScheme(clients=2, classes_per_client=1), 1, 0.0, 0.25)
    dealt = assign_examples(official, CLASSES, how)
    (idle,) = set(range(CLASSES)) - set(official.train.labels[np.concatenate(dealt.examples["train"])].tolist())
    assert any(tells(note, "train examples", f"class {idle}") for note in dealt.notes)
