"""Data of a run's clients: partitions, packed folders, and their manifests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from fedloom.algorithms.base import find_algorithm
from fedloom.core.urls import is_url
from fedloom.core.words import pluralize
from fedloom.data.federated import ClientEntry, FederatedDataset, Manifest, Normalization, OwnDataset
from fedloom.data.own import OWN, GivenNormalization, Own, OwnClients, own_manifest, own_normalization
from fedloom.data.partition import partition_dataset
from fedloom.engine.assemble import CheckSize, any_size, make_parts
from fedloom.engine.options import RunOptions
from fedloom.errors import ExperimentError, argument
from fedloom.experiment import Data, Experiment, OwnData
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
            normalization = RunFolder(options.replay).manifest().spec.normalization
        return open_own(e, options.packed, options.observe, normalization)
    if options.partition is None:
        return make_partition(e)
    return open_partition(e, options.partition, verify=options.serving is None)


def check_roster(e: Experiment, options: RunOptions) -> None:
    """Raise ExperimentError, with the first such client, if the method cannot train on one of the clients.

    The partition is read, and created if necessary, only if the method does not accept every client.
    """
    refusal = find_algorithm(e.algorithm.name).check_client(e.algorithm.settings, 1, 1)  # the smallest possible client
    if refusal is not None:
        run_dataset(e, options)


def own_of(experiment: Experiment) -> Own | None:
    """Return the requirements on every client's data; None without ``data.own``."""
    return experiment.data.own if isinstance(experiment.data, OwnData) else None


def known_normalization(own: Own, folder: RunFolder) -> Normalization | None:
    """Return the normalization if it is given, not needed, or was measured at the start of the run; else None.

    Raise DataError if the run's manifest is damaged.
    """
    if isinstance(own.normalization, GivenNormalization) or not own.spec.numbers:
        return own_normalization(own, ())
    before = folder.read("partition.json")
    if before is None:
        return None
    return Manifest.from_json(before, source=str(folder.path / "partition.json")).spec.normalization


def open_manifest(experiment: Experiment, own: Own, found: Normalization | None) -> Manifest:
    """Return a manifest without clients, and without a normalization if it is not known yet."""
    return own_manifest(own, (), experiment.seed, Normalization((), ()) if found is None else found)


def has_normalization(manifest: Manifest) -> bool:
    """Return whether the manifest's normalization is known."""
    return manifest.spec.is_normalized


def make_partition(experiment: Experiment) -> FederatedDataset:
    """Return the experiment's partition; create it if it does not exist, and verify it.

    Raise DataError if the data set, or a part of the partition, is missing or damaged. Raise ExperimentError if the
    data cannot satisfy the settings.
    """
    dataset = make_data(_dataset_section(experiment), experiment.seed)
    _check_roster(experiment, dataset.manifest)
    return dataset


def make_data(data: Data, seed: int) -> FederatedDataset:
    """Return the partition of a ``data`` section, created if needed and verified; raise as :func:`make_partition`."""
    dataset = FederatedDataset.open(partition_dataset(data.opened(), data.partition_settings(seed), root=data.root))
    dataset.verify()
    return dataset


def open_partition(experiment: Experiment, where: str, *, verify: bool) -> FederatedDataset:
    """Open an existing partition and check that it matches the experiment.

    ``where`` is its folder or URL. ``verify``: check the shards of a folder now, not when a client is first served;
    shards of a store are checked then.

    Raise DataError if the partition is missing or damaged. Raise ExperimentError if the partition does not match the
    experiment, or the data cannot satisfy its settings.
    """
    dataset = FederatedDataset.open(where)
    manifest = dataset.manifest
    if isinstance(experiment.data, OwnData) and manifest.dataset == OWN:  # an audit's packed clients with canaries
        if (
            own_manifest(experiment.data.own, manifest.clients, experiment.seed, manifest.spec.normalization)
            != manifest
        ):
            raise ExperimentError(
                f"{argument('partition')}: {where} was made for other data than data.own describes.",
                key="partition",
            )
        dataset.verify()
        _check_roster(experiment, manifest)
        return dataset
    data = _dataset_section(experiment)
    found = {
        "data.dataset": (manifest.dataset, data.opened().name),
        "seed": (manifest.seed, experiment.seed),
        "data.held_out_fraction": (manifest.held_out_fraction, data.held_out_fraction),
        "data.validation_fraction": (manifest.validation_fraction, data.validation_fraction),
        "data.normalization": (manifest.measured_on, data.normalization),
    }
    asked = data.partition.model_dump(mode="json")
    found |= {
        f"data.partition.{key}": (manifest.scheme.get(key), asked.get(key)) for key in {**manifest.scheme, **asked}
    }
    differences = [
        f"{key}: the partition has {had!r}, the experiment {has!r}" for key, (had, has) in found.items() if had != has
    ]
    if differences:
        raise ExperimentError(
            f"{argument('partition')}: {where} is not the experiment's partition:\n  " + "\n  ".join(differences[:10]),
            hint="create it from the same experiment file: fedloom partition EXPERIMENT",
        )
    if verify and not is_url(where):
        dataset.verify()
    _check_roster(experiment, manifest)
    return dataset


def open_own(
    experiment: Experiment,
    data: Sequence[Path],
    observe: Sequence[Path] = (),
    normalization: Normalization | None = None,
) -> OwnDataset:
    """Open clients with data of their own, ordered by id.

    Clients in the folders ``data`` train, and those in ``observe`` are only evaluated. ``normalization`` is that of a
    run that started with other clients; None: compute it from these clients.

    Raise DataError if a folder is missing or damaged, or does not match the experiment. Raise ExperimentError if the
    experiment has no ``data.own``, or needs more clients than there are.
    """
    if not isinstance(experiment.data, OwnData):
        raise ExperimentError(
            f"{argument('packed')} needs an experiment with data.own, and this one has data.dataset.", key="packed"
        )
    own = experiment.data.own
    clients = OwnClients.open(data, observe)
    check_own(experiment, own, clients)
    found = clients.measured(own) if normalization is None else normalization
    dataset = OwnDataset(clients, own_manifest(own, clients.entries, experiment.seed, found))
    dataset.verify()
    if normalization is None:
        _check_roster(experiment, dataset.manifest)
    return dataset


def check_own(experiment: Experiment, own: Own, clients: OwnClients, check_size: CheckSize = any_size) -> None:
    """Raise DataError unless the clients' data match the experiment, ExperimentError if the method cannot use them.

    ``check_size`` is that of :func:`~fedloom.engine.assemble.make_parts`.
    """
    clients.check(own)
    manifest = own_manifest(own, (), experiment.seed, Normalization.identity(own.spec.numbers))
    parts = make_parts(experiment, manifest, check_size=check_size)
    if parts.setup.model.needs_labels and not parts.algorithm.trains_unlabelled(parts.settings):
        clients.check_labels()
    check_clients(experiment, clients.entries)


def check_clients(experiment: Experiment, clients: Iterable[ClientEntry]) -> None:
    """Raise ExperimentError, with the client and the reason, if the method cannot train on a client's examples."""
    method, unfit = experiment.algorithm, list[tuple[str, str]]()
    algorithm = find_algorithm(method.name)
    for entry in clients if experiment.federation.rounds else ():
        classes = sum(count > 0 for count in entry.class_counts["train"])
        wrong = algorithm.check_client(method.settings, entry.train, classes) if entry.seen else None
        if wrong is not None:
            unfit.append((entry.id, wrong))
    if unfit:
        (first, wrong), others = unfit[0], f" and {pluralize(len(unfit) - 1, 'other')}" if len(unfit) > 1 else ""
        raise ExperimentError(f"{method.name} cannot train {first}{others}: {wrong}", key="algorithm.name")


def _dataset_section(experiment: Experiment) -> Data:
    """Return the ``data`` section of an experiment with a data set; raise ExperimentError if it is ``data.own``."""
    if isinstance(experiment.data, OwnData):
        raise ExperimentError(
            f"data.own needs the folders of packed clients: give them with {argument('packed')}.",
            hint="make them: fedloom data pack SOURCE --out DIR --experiment EXPERIMENT",
        )
    return experiment.data


def _check_roster(experiment: Experiment, manifest: Manifest) -> None:
    check_clients(experiment, manifest.clients)
    federation = experiment.federation
    if federation.rounds and federation.clients_per_round > len(manifest.roster):
        raise ExperimentError(
            f"federation.clients_per_round is {federation.clients_per_round}; set it to at most "
            f"{len(manifest.roster)}, the seen clients of {manifest.dataset} "
            f"({pluralize(len(manifest.clients), 'client')}).",
            key="federation.clients_per_round",
            found=federation.clients_per_round,
        )
