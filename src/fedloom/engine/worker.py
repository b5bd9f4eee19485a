"""Worker process that serves a partition's clients to an aggregator until the run is over."""

from __future__ import annotations

import gc
import logging
import os
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedloom import experiment as experiments
from fedloom.algorithms.base import available, find_algorithm
from fedloom.core.address import split_address
from fedloom.core.files import storing
from fedloom.core.plugins import capability
from fedloom.core.urls import is_url
from fedloom.core.words import DEEPEST, parsed_json, printable, shortened
from fedloom.data.federated import FederatedDataset, Normalization, OwnDataset
from fedloom.data.own import AGAIN, ClientCard, Own, OwnClients, own_manifest, read_own_shard
from fedloom.engine import assemble, run_data
from fedloom.engine.assemble import CheckSize
from fedloom.engine.constants import check_constants
from fedloom.engine.member import membership_of
from fedloom.engine.options import WorkerOptions
from fedloom.engine.sums import sums_part
from fedloom.errors import DataError, ExperimentError, RefusedError, argument, spelled
from fedloom.experiment import Experiment, OwnData
from fedloom.federation.measuring import MeasuredClients, measuring_side
from fedloom.federation.progress import Saves
from fedloom.federation.roster import Member
from fedloom.federation.worker_record import WorkerRecord
from fedloom.security.options import Credentials
from fedloom.security.signing import signing_of
from fedloom.storage import open_store
from fedloom.transport.limits import parse_bandwidth
from fedloom.transport.stream import Introduction, Joined
from fedloom.transport.worker import Session, serve

log = logging.getLogger(__name__)


class Worker:
    """Worker that serves clients to an aggregator. The constructor checks everything that needs no connection.

    The ``aggregator`` is ``host:port``; the ``name`` is unique in the run; ``record`` is told what happens.

    Raise ExperimentError if an option is invalid; RefusedError if the worker's certificate is not currently valid;
    DataError if the clients' data are missing or damaged.
    """

    def __init__(self, aggregator: str, name: str, options: WorkerOptions, record: WorkerRecord | None = None) -> None:
        host, _ = split_address(aggregator, what=argument("aggregator"), lowest=1)
        self._credentials = Credentials(options.trust)
        self._credentials.show(host)
        self._aggregator = aggregator
        self._options = options
        self._provider = client_provider(options)
        self._own = self._provider if isinstance(self._provider, OwnDataProvider) else None
        self._settings = settings = experiments.settings_of(experiments.WorkerSettings, options.settings, "the worker")
        self._bandwidth = None if settings.bandwidth is None else parse_bandwidth(settings.bandwidth)
        self._device = assemble.use_device(settings.runtime.device, settings.runtime.threads)
        self._member = membership_of(options, aggregator, sends_class_counts=settings.class_counts)
        self._record = record or WorkerRecord()
        if self._member is not None:
            self._record.spent = self._member.spent
        # A partition's author has all its data, so noise comes from the seed there, as in a single process.
        self._secret = None if self._own is None else os.urandom(32)
        self._revealed: object = None  # kept across aggregators in this process
        self._models: Any = None
        if options.out is not None:
            self._models = capability("kept-models", argument("out"))(options.out, settings.model_format)
            self._record.listener = self._models.told
        self._introduction = Introduction(
            worker=name,
            clients=self._provider.clients,
            members=() if self._own is None else self._own.members(settings.class_counts),
            algorithms={method: find_algorithm(method).version for method in available()},
            device=settings.runtime.device,
        )

    def serve(self, stop: threading.Event) -> bool:
        """Serve until the run is over or ``stop`` is set; return whether the run is over.

        Raise DataError if the clients' data do not match the aggregator's run; RefusedError if the aggregator refuses
        the worker; AbandonedError if the aggregator is unreachable for too long; StorageError if a model could not be
        written.
        """
        gc.freeze()  # imported objects are never garbage; scanning them would slow every collection
        try:
            over = self._serve(stop)
        finally:
            if self._member is not None:
                self._member.close()
        if over and self._options.states is not None:
            Saves(open_store(self._options.states), 1.0, bytes).end(self._provider.clients)
        if self._models is not None:
            self._models.end()
        return over

    def _serve(self, stop: threading.Event) -> bool:
        return serve(
            self._aggregator,
            self._introduction,
            make_session=self._session,
            stop=stop,
            reconnect_s=self._options.reconnect_s,
            credentials=self._credentials,
            bandwidth=self._bandwidth,
            gate=self._member,
            record=self._record,
            health=self._options.health,
        )

    def _session(self, welcome: Joined) -> Session:
        facts = _described(welcome.experiment)
        options = self._options
        runtime = experiments.Runtime(workers=0, **dict(self._settings.runtime))
        member = self._member
        if member is not None:
            member.check_code(facts["experiment"])
        shared = experiments.from_shared_json(facts["experiment"], runtime=runtime)
        secure = shared.federation.secure_aggregation
        if member is not None:
            member.admit(shared, self._provider.sizes)
        signing = signing_of(None if secure is None else secure.signatures, options.trust)
        revealed_sums = None if secure is None or self._own is None else self._remembered()
        check_size = assemble.any_size if member is None else member.check_size
        if self._own is not None and facts.get("normalization", "") is None:  # it is not measured yet
            cards = self._own.measured_cards(shared, check_size)
            if secure is None:
                return measuring_side(cards, MeasuredClients(cards), guard=member)
            return sums_part().securely_measuring_side(cards, secure, signing, revealed_sums, guard=member)
        dataset = self._provider.dataset(shared, facts, check_size)
        parts = assemble.make_parts(shared, dataset.manifest, check_size=check_size)
        if member is not None:
            member.begin(parts.plan)
        check_constants(parts, _digests(facts), "the aggregator's model")
        if self._models is not None:
            self._models.begin(parts)
        return assemble.client_side(
            parts,
            dataset,
            self._device,
            options.states,
            secret=self._secret,
            signing=signing,
            revealed_sums=revealed_sums,
            guard=member,
            models=self._models,
            record=self._record,
        )

    def _remembered(self) -> object:
        """Return the secure sums that clients with their own data have helped to reveal, on disk if there is a folder.

        Raise DataError if their record is damaged; StorageError if it cannot be written.
        """
        if self._revealed is not None:
            return self._revealed
        states, folder = self._options.states, None
        if states is not None and not is_url(states):
            folder = Path(states)
            with storing(folder):
                folder.mkdir(parents=True, exist_ok=True)
        else:
            log.warning(
                "the secure sums that these clients help to reveal are forgotten when this process ends; give a folder "
                "of this machine (%s) to remember them",
                spelled(argument("states")),
            )
        self._revealed = sums_part().RevealedSums(folder)
        return self._revealed


def _described(text: str) -> dict[str, Any]:
    """Return the aggregator's description of its run; raise RefusedError if it cannot be parsed."""
    try:
        facts = parsed_json(text, DEEPEST)
    except ValueError as error:
        reason = printable(str(error), 300)
        raise RefusedError(f"cannot read the aggregator's description of its run: {reason}") from error
    if not isinstance(facts, dict) or not isinstance(facts.get("experiment"), str):
        raise RefusedError("the aggregator's description of its run has no experiment")
    return facts


def _digests(facts: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the digests of the model's constants in a description; raise RefusedError if they are malformed."""
    digests = facts.get("constants", {})
    if not isinstance(digests, dict) or not all(isinstance(digest, str) for digest in digests.values()):
        raise RefusedError("the aggregator's description of its run has invalid digests of constants")
    return {printable(name): printable(digest) for name, digest in digests.items()}


class PartitionProvider:
    """Clients of a partition that the aggregator also has.

    Raise DataError if the partition, or a shard of it, is missing or damaged.
    """

    def __init__(self, location: str, options: WorkerOptions) -> None:
        self._where = location
        self._dataset = FederatedDataset.open(location)
        everyone = [entry.id for entry in self._dataset.manifest.clients]
        self.clients = select_clients(everyone, options.clients)
        for client in self.clients:
            self._dataset.manifest.entry(client)
        # From a store, fetch now only shards that no other worker serves; others follow when their clients move here.
        if options.verify and (self.clients != everyone or not is_url(location)):
            self._dataset.verify(self.clients)

    @property
    def sizes(self) -> dict[str, int]:
        """Numbers of training examples of all clients that may be served."""
        return {entry.id: entry.train for entry in self._dataset.manifest.clients}

    def dataset(self, shared: Experiment, facts: Mapping[str, Any], check_size: CheckSize) -> FederatedDataset:
        """Return the clients' data; raise DataError if the aggregator has another partition, or none."""
        fingerprint = self._dataset.manifest.fingerprint
        if "partition" not in facts:
            raise DataError(
                f"{argument('partition')} is {self._where}, but the aggregator needs clients with their own data; give "
                f"their folders with {argument('packed')}.",
                key="partition",
                hint=AGAIN,
            )
        if facts["partition"] != fingerprint:
            raise DataError(
                f"{self._where} is partition {fingerprint[:12]}, not the aggregator's {facts['partition'][:12]}.",
                hint="create it from the aggregator's experiment file: fedloom partition EXPERIMENT",
            )
        return self._dataset


class OwnDataProvider:
    """Clients with their own data.

    Raise DataError if a folder or its shard is missing or damaged.
    """

    def __init__(self, options: WorkerOptions) -> None:
        self._packed = OwnClients.open(options.packed, options.observe)
        self.clients = select_clients(list(self._packed.cards), options.clients)
        for client in self.clients:
            if client not in self._packed.cards:
                names = ", ".join(self._packed.cards)
                raise ExperimentError(
                    f"{argument('clients')} names {client!r}, but the folders hold {shortened(names, 200)}.",
                    key="clients",
                    found=client,
                )
            if options.verify:
                read_own_shard(self._packed.folders[client], self._packed.cards[client])

    def members(self, class_counts: bool) -> list[Member]:
        """Return the clients' announcements to the aggregator."""
        return [member_of(self._packed, client, class_counts=class_counts) for client in self.clients]

    @property
    def sizes(self) -> dict[str, int]:
        """Numbers of training examples of the clients."""
        return {client: self._packed.cards[client].train for client in self.clients}

    def measured_cards(self, shared: Experiment, check_size: CheckSize) -> dict[str, ClientCard]:
        """Return the cards of the clients, whose inputs the aggregator measures; raise as :meth:`dataset`."""
        self._check(shared, check_size)
        return {client: self._packed.cards[client] for client in self.clients}

    def _check(self, shared: Experiment, check_size: CheckSize) -> Own:
        if not isinstance(shared.data, OwnData):
            raise DataError(
                f"{argument('packed')} names packed clients, but the aggregator's experiment has data.dataset "
                f"{shared.data.dataset}; give {argument('partition')}.",
                key="packed",
            )
        run_data.check_own(shared, shared.data.own, self._packed, check_size)
        return shared.data.own

    def dataset(self, shared: Experiment, facts: Mapping[str, Any], check_size: CheckSize) -> FederatedDataset:
        """Return the clients' data if they match the experiment.

        Raise DataError if they do not, or the experiment requires a partition.
        """
        own = self._check(shared, check_size)
        normalization = Normalization(*(tuple(facts["normalization"][key]) for key in ("mean", "std")))
        return OwnDataset(self._packed, own_manifest(own, self._packed.entries, shared.seed, normalization))


def member_of(packed: OwnClients, client: str, *, class_counts: bool) -> Member:
    """Return a packed client's announcement to the aggregator."""
    card = packed.cards[client]
    counts = card.class_counts["train"] if class_counts and card.labelled else ()
    observer = client in packed.observers
    return Member(client, card.train, card.validation, card.test, card.labelled, observer, counts)


def client_provider(options: WorkerOptions) -> PartitionProvider | OwnDataProvider:
    """Return the provider of the clients that a worker serves.

    Raise ExperimentError if both a partition and packed clients are given, or neither. Raise DataError if the data are
    missing or damaged.
    """
    has_own_data = bool(options.packed or options.observe)
    if has_own_data == (options.partition is not None):
        problem = "both were" if has_own_data else "neither was"
        raise ExperimentError(
            f"Give either {argument('partition')} or {argument('packed')} (and {argument('observe')}): {problem} given."
        )
    return OwnDataProvider(options) if options.partition is None else PartitionProvider(options.partition, options)


def select_clients(everyone: Sequence[str], clients: str | None) -> list[str]:
    """Return the ids of the clients that a worker serves.

    ``clients`` are comma-separated ids; or ``I/N``, the I-th (from 0) of N consecutive blocks of ``everyone`` whose
    sizes differ by at most one; None: all clients.

    Raise ExperimentError if there is no such block, or ``clients`` is empty.
    """
    if clients is None:
        return list(everyone)
    if "/" not in clients:
        names = [name.strip() for name in clients.split(",") if name.strip()]
        if not names:
            raise ExperimentError(
                f"{argument('clients')} must be ids of the partition's {len(everyone)} clients, such as {everyone[0]}, "
                f"separated by commas (got {clients!r}).",
                key="clients",
                found=clients,
            )
        return names
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", clients)
    i, n = (int(match[1]), int(match[2])) if match else (0, 0)
    if not i < n <= len(everyone):
        raise ExperimentError(
            f"{argument('clients')} must be ids, or I/N with I from 0 to N - 1 and N at most {len(everyone)}, the "
            f"number of clients (got {clients}).",
            key="clients",
            found=clients,
        )
    return list(everyone[i * len(everyone) // n : (i + 1) * len(everyone) // n])
