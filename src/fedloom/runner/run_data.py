"""Data of the clients of a run with a fixed set of clients."""

from __future__ import annotations

from fedloom.algorithms.base import find_algorithm
from fedloom.data.federated import FederatedDataset
from fedloom.errors import ExperimentError, argument
from fedloom.experiment import Experiment, OwnData
from fedloom.runner import assemble
from fedloom.runner.options import RunOptions
from fedloom.runs.folder import RunFolder


def run_dataset(e: Experiment, options: RunOptions) -> FederatedDataset:
    """Return the data of a run: packed folders, an existing partition, or the experiment's own, created if needed."""
    if options.packed or options.observe:
        if options.partition is not None:
            raise ExperimentError(
                f"{argument('partition')} cannot be combined with {argument('packed')}.", key="partition"
            )
        normalization = None
        if isinstance(e.data, OwnData) and options.replay is not None:
            normalization = RunFolder(options.replay).manifest().figures
        return assemble.open_own(e, options.packed, options.observe, normalization)
    if options.partition is None:
        return assemble.make_partition(e)
    return assemble.open_partition(e, options.partition, verify=options.serving is None)


def check_roster(e: Experiment, options: RunOptions) -> None:
    """Raise ExperimentError, with the first such client, if the method cannot train on one of the clients.

    The partition is read, and created if necessary, only if the method does not accept every client.
    """
    refusal = find_algorithm(e.algorithm.name).check_client(e.algorithm.settings, 1, 1)  # the smallest possible client
    if refusal is not None:
        run_dataset(e, options)
