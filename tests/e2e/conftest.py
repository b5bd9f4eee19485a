"""The clusters of the end-to-end tests, and the run that each federation must equal."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from e2e_places import UNREPORTED, Case, Place, processes, real

from fedloom import experiment as experiments
from fedloom.data.remote import publish
from fedloom.engine import run_data

NEEDED = ("FEDLOOM_E2E_KUBECONFIG", "FEDLOOM_E2E_IMAGE", "FEDLOOM_E2E_NAMESPACE", "FEDLOOM_E2E_S3_ENDPOINT")

EXPERIMENT: dict[str, Any] = {
    "name": "e2e",
    "seed": 7,
    "data": {
        "dataset": "fashion-mnist",
        "partition": {
            "scheme": "classes", "clients": 12, "classes_per_client": 2, "shares": [0.7, 0.3],
            "train_per_client": 40, "test_per_client": 20,
        },
        "held_out_fraction": 0.25,
    },
    "model": {"name": "mlp", "hidden": [16]},
    # Client states persist between rounds: a worker that takes a client over has to find them.
    "algorithm": {
        "name": "pfedbayes", "steps": 20, "batch_size": 20, "zeta": 1.0, "optimizer": "adam",
        "lr_personal": 0.003, "lr_global": 0.003, "draws": 2,
    },
    "federation": {"rounds": 24, "clients_per_round": 9, "checkpoint_every_s": 0, "deadline_s": 600},
    "evaluation": {"every": 12, "batch_size": 100},
    "runtime": {"workers": 0},
}  # fmt: skip


@pytest.fixture(
    scope="session", params=[pytest.param("processes", id="processes"), pytest.param("real", id="real-cluster")]
)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Return a real cluster if the environment names one, else the cluster of processes."""
    missing = [name for name in NEEDED if not os.environ.get(name)]
    if request.param == "real":
        if missing:
            pytest.skip(f"no real cluster is named: {', '.join(missing)} not set (docs/e2e.md)")
        with real() as found:
            yield found
    else:
        if not missing:
            pytest.skip("a real cluster is named, and tested instead")
        root = tmp_path_factory.mktemp("cluster")
        with processes(root, request.getfixturevalue("s3_server")) as found:
            yield found


@pytest.fixture(scope="session")
def case(place: Place, fashion_mnist_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Return the experiment, its partition in the store, and its run in one pod."""
    folder = tmp_path_factory.mktemp("case")
    text = yaml.safe_dump({**EXPERIMENT, "storage": place.storage})
    dealt_here = {**EXPERIMENT, "data": {**EXPERIMENT["data"], "root": str(folder / "root")}}
    (folder / "root").mkdir()
    (folder / "root" / "datasets").symlink_to(fashion_mnist_root.resolve() / "datasets")
    (folder / "experiment.yaml").write_text(yaml.safe_dump(dealt_here))
    dataset = run_data.make_partition(experiments.load_experiment(folder / "experiment.yaml"))
    fingerprint = dataset.manifest.fingerprint
    publish(dataset.folder, place.store.under(f"partitions/{fingerprint}"))
    place.store.write("reference.yaml", text.encode())
    partition, reference = f"{place.storage}/partitions/{fingerprint}", f"{place.storage}/reference"
    command = ["fedloom", "run", f"{place.storage}/reference.yaml", "--partition", partition]
    pod = place.start(
        "reference", [*command, "--out", "/work/run", "--workers", "0", "--publish", reference], UNREPORTED
    )
    code, output = place.ended(pod)
    assert code == 0, output
    return Case(text, fingerprint, place.fetch("reference", folder / "reference"))
