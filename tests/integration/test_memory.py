"""PeFLL's aggregator does not grow with the number of clients (DESIGN §3, papers/001 §3)."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_processes import WAIT_S, ended, experiment, started, until

from fedloom.algorithms.base import Setup, find_algorithm
from fedloom.federation.randomness import generator
from fedloom.models.networks import LeNet

MB = 1 << 20


def test_state_size_does_not_depend_on_the_number_of_clients(tmp_path: Path) -> None:
    pefll = find_algorithm("pefll")
    settings = pefll.settings.model_validate(
        {"local": {"steps": 1}, "descriptor": {"size": 25}, "server": {"rule": "adam"}}
    )
    model = LeNet((1, 28, 28), 10)
    sizes = []
    for clients in (100, 1000):
        setup = Setup(model, 10, (1, 28, 28), clients)
        state = pefll.server(settings, setup, generator(1, "init")).state
        sizes.append({name: tuple(tensor.shape) for name, tensor in state.items()})
    assert sizes[0] == sizes[1]


def peak_memory(path: Path, out: Path) -> int:
    """Return the peak resident bytes of a run's aggregator; its worker holds the data."""
    peak = 0
    with started("run", path, "--workers", 1, "--no-report", "--out", out) as process:

        def finished() -> bool:
            nonlocal peak
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
            except FileNotFoundError:
                return True
            measured = [int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM")]
            peak = max([peak, *measured])
            return (out / "clients.csv").exists() or process.poll() is not None

        until(finished, "the end of the run", WAIT_S)
        ended(process, 0)
    return peak


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.exhaustive
@pytest.mark.group("runs")
def test_ten_times_the_clients_use_no_more_memory(fresh_root: Path, tmp_path: Path) -> None:
    from fedloom.engine.run_data import make_partition
    from fedloom.experiment import load_experiment

    peaks = []
    for clients in (20, 200):
        partition = {
            "scheme": "classes", "clients": clients, "classes_per_client": 2,
            "train_per_client": 200, "test_per_client": 20,
        }  # fmt: skip
        path = experiment(
            tmp_path / str(clients),
            fresh_root,
            data={"partition": partition},
            algorithm={"name": "pefll", "local": {"steps": 2}, "descriptor": {"size": 8}},
            federation={"rounds": 4, "checkpoint_every_s": 30},
        )
        make_partition(load_experiment(path))  # here, so that the aggregator does not do it
        peaks.append(peak_memory(path, tmp_path / str(clients) / "run"))
    # The 180 additional clients have 28 MB of training images as bytes, and four times as much as floats.
    assert abs(peaks[1] - peaks[0]) < 12 * MB, peaks
