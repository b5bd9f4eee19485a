"""Assembly of a federation's server and client sides from an experiment and a partition."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fedloom
from fedloom.algorithms.base import Algorithm, ClientAlgorithm, ServerAlgorithm, Setup, find_algorithm
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.example_privacy import check_example_privacy
from fedloom.algorithms.sums import sums_of
from fedloom.core.words import pluralize
from fedloom.data.augment import augmentation
from fedloom.data.federated import ClientData, ClientEntry, FederatedDataset, Manifest, Normalization, OwnDataset
from fedloom.data.own import OWN, OwnClients, own_manifest
from fedloom.data.partition import partition_dataset
from fedloom.data.requirements import Own
from fedloom.errors import DataError, ExperimentError, argument
from fedloom.evaluation.group_statistics import summed_metrics
from fedloom.evaluation.measure import metrics
from fedloom.evaluation.plan import EvaluationPlan
from fedloom.experiment import Data, Experiment, OwnData
from fedloom.federation.client_side import ClientConfig, ClientSide
from fedloom.federation.inprocess import InProcess
from fedloom.federation.loop import vocabulary
from fedloom.federation.randomness import generator
from fedloom.federation.states import StoredStates
from fedloom.messages import Message, SummedMetrics
from fedloom.models.fitting import fitted
from fedloom.models.predictors import Predictors
from fedloom.privacy.examples import ExamplePrivacy
from fedloom.runner.constants import digests_of_run
from fedloom.runner.device import missing_device
from fedloom.runner.evaluation_plan import evaluation_plan
from fedloom.runner.open_federation import answers_digest, run_digest
from fedloom.runner.training_privacy import check_private_buffers
from fedloom.runs.folder import RunFolder
from fedloom.security.signing import NO_SIGNING, Signing
from fedloom.storage import is_url, open_store
from fedloom.sums.held_answers import HeldAnswers
from fedloom.sums.revealed_sums import RevealedSums
from fedloom.sums.summation import Summation

DTYPE = torch.float32
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunContext:
    """Server and client algorithms, model, settings and evaluation of an experiment, for the clients of a manifest."""

    experiment: Experiment
    manifest: Manifest
    algorithm: Algorithm
    setup: Setup
    plan: EvaluationPlan
    standardizes: bool = False  # integers are standardized like features, because the model cannot take them

    def examples_of(self, dataset: FederatedDataset) -> Callable[[str], ClientData]:
        """Return a function of a client's id that returns its data as the model takes them."""
        if dataset.manifest.spec.targets != self.setup.targets:  # the model takes numbers in their own units
            spec = dataclasses.replace(dataset.manifest.spec, targets=self.setup.targets)
            dataset = dataset.described_by(dataclasses.replace(dataset.manifest, spec=spec))
        return dataset.standardized if self.standardizes else dataset.client

    @property
    def settings(self) -> Any:
        """Settings of the algorithm."""
        return self.experiment.algorithm.settings

    @property
    def summation(self) -> Summation | None:
        """Answers in training that are only summed: under secure aggregation, or with privacy of clients."""
        federation = self.experiment.federation
        privacy = federation.privacy if federation.privacy is not None and federation.privacy.of == "clients" else None
        if federation.secure_aggregation is None and privacy is None:
            return None
        secure, fields = federation.secure_aggregation, dict(self.algorithm.sums(self.settings))
        if secure is not None:
            fields |= sums_of(SummedMetrics)
        own = isinstance(self.experiment.data, OwnData)
        return Summation(
            fields,
            secure,
            privacy,
            self.setup.dtype,
            1 if secure is None else secure.signature_bytes,
            federation.clients_per_round,
            run=answers_digest(self.experiment, self.manifest),
            sizes={} if own else {entry.id: entry.train for entry in self.manifest.clients},
        )

    @property
    def vocabulary(self) -> dict[str, type[Message]]:
        """Messages that the run's conversations can contain, by name."""
        summation = self.summation
        return {**vocabulary(self.algorithm), **({} if summation is None else summation.vocabulary)}

    def server_algorithm(self) -> ServerAlgorithm:
        """Return a new server algorithm; its initial state depends on the seed alone."""
        return self.algorithm.server(self.settings, self.setup, generator(self.experiment.seed, "init"))

    def client_algorithm(self) -> ClientAlgorithm:
        """Return a new client algorithm."""
        return self.algorithm.client(self.settings, self.setup)

    def after_steps(self) -> dict[int, ClientAlgorithm]:
        """Return a client algorithm for each number of extra local steps in ``evaluation.own_steps``."""
        steps = self.experiment.evaluation.own_steps or ()
        return {k: self.algorithm.client(self.algorithm.after_steps(self.settings, k), self.setup) for k in steps}


def make_parts(experiment: Experiment, manifest: Manifest, trained_on: Manifest | None = None) -> RunContext:
    """Build the parts of an experiment from its manifest.

    ``trained_on`` is the manifest that the run was trained with, if it is another.

    Raise ExperimentError if the model does not fit the data, the method does not fit the model, or ``federation.until``
    does not fit the task.
    """
    trained_on = manifest if trained_on is None else trained_on
    plan = evaluation_plan(experiment, manifest)
    if (until := experiment.federation.until) is not None:
        until.check(plan.task.headline)
    found = fitted(experiment.model, manifest.spec.inputs, manifest.spec.outputs, plan.task, plan.targets.shape)
    spec = manifest.spec
    model, kind, targets = found.model, spec.kind, spec.targets
    if model.raw_targets and targets is not None:
        targets = targets.raw()
        plan = evaluation_plan(
            experiment, dataclasses.replace(manifest, spec=dataclasses.replace(spec, targets=targets))
        )
    brought = isinstance(experiment.data, OwnData)
    setup = Setup(
        model=model,
        classes=spec.classes,
        input_shape=spec.input_shape,
        kind="features" if found.standardizes and kind == "integers" else kind,
        targets=targets,
        clients=0 if brought else len(trained_on.clients),
        dtype=DTYPE,
        roster=() if brought else trained_on.roster,
        same_clients=brought or trained_on.fingerprint == manifest.fingerprint,
        protects_examples=experiment.protects_examples,
        seed=experiment.seed,
    )
    parts = RunContext(experiment, manifest, find_algorithm(experiment.algorithm.name), setup, plan, found.standardizes)
    parts.algorithm.check_inputs(kind)
    parts.algorithm.check_model(parts.settings, model)
    if experiment.protects_examples:
        check_example_privacy(parts.algorithm, parts.settings)
    if experiment.evaluation.label_mask and not (plan.task.target_kind == "classification" and setup.classes):
        raise ExperimentError(
            f"evaluation.label_mask must be false unless the task is classification (the task is {plan.task.name}).",
            key="evaluation.label_mask",
            found=True,
        )
    check_private_buffers(experiment, model)
    model.check_steps(
        clients=experiment.runtime.clients_at_once,
        twice=parts.algorithm.differentiates_twice(parts.settings),
        examples=experiment.protects_examples,
    )
    parts.client_algorithm()  # raises on unsupported settings before anything is written
    return parts


def for_newcomers(parts: RunContext, clients: int | None = None) -> RunContext:
    """Return the parts for clients from outside the run, whose ids do not refer to the run's roster.

    ``clients`` is the number of clients of the run, if the manifest does not state it.
    """
    known = parts.setup.clients if clients is None else clients
    return dataclasses.replace(parts, setup=dataclasses.replace(parts.setup, clients=known, same_clients=False))


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


def check_own(experiment: Experiment, own: Own, clients: OwnClients) -> None:
    """Raise DataError unless the clients' data match the experiment, ExperimentError if the method cannot use them."""
    clients.check(own)
    manifest = own_manifest(own, (), experiment.seed, Normalization.identity(own.spec.numbers))
    parts = make_parts(experiment, manifest)
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


def use_device(name: str, threads: int) -> torch.device:
    """Set this process up for deterministic computation.

    Raise ExperimentError if the device is not available.
    """
    torch.set_num_threads(threads)
    if name == "cuda":
        if not torch.cuda.is_available():
            raise missing_device()
        # cuBLAS reads this on first use; without it, its sums may differ from call to call.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)
        free, total = (amount // 2**20 for amount in torch.cuda.mem_get_info())
        _log.info("computing on %s, %d of %d MiB free", torch.cuda.get_device_name(), free, total)
    return torch.device(name)


Conclude = Callable[[Predictors, ClientGroup], Message]
"""Function applied to the clients' final predictors."""


def client_side(
    parts: RunContext,
    dataset: FederatedDataset,
    device: torch.device,
    states: str | None,
    conclude: Conclude | None = None,
    *,
    secret: bytes | None = None,
    signing: Signing = NO_SIGNING,
    revealed: RevealedSums | None = None,
    only_sums: bool = False,
) -> ClientSide:
    """Return the client side of every conversation; by default it evaluates the predictors.

    ``states`` is the folder or URL of the clients' states, shared by all workers of the run. ``secret`` is the key of
    the noise that hides values from the aggregator; None in a simulation, where the seed determines the noise.
    ``signing`` holds the signatures of keys in secure sums, and ``revealed`` the sums that this process has helped to
    reveal, None in a simulation. ``only_sums`` refuses secure sums with fewer neighbours than by default.

    Raise ExperimentError if the method keeps client states and ``states`` is None.
    """
    algorithm = parts.client_algorithm()
    if algorithm.stateful and states is None:
        raise ExperimentError(
            f"{argument('states')} must be given: {parts.algorithm.name} keeps a state with every client, in a "
            "folder or store that every worker allowed to serve the client reaches.",
            key="states",
        )
    e = parts.experiment
    if device.type != "cpu" or e.runtime.clients_at_once > 1:
        parts.setup.model.check_steps(
            clients=e.runtime.clients_at_once,
            twice=parts.algorithm.differentiates_twice(parts.settings),
            device=device,
            examples=e.protects_examples,
        )

    def evaluate(predictors: Predictors, clients: ClientGroup) -> Message:
        size = e.evaluation.batch_size
        found = metrics(predictors, clients.clients, algorithm.predictors, batch_size=size, plan=parts.plan)
        return found if e.federation.secure_aggregation is None else summed_metrics(found, parts.plan)

    noise = e.seed if secret is None else secret
    config = ClientConfig(
        e.seed,
        device,
        e.runtime.clients_at_once,
        start_afresh=e.federation.lost_state == "afresh",
        secret=secret,
        augment=augmentation(e.data.augment, dataset.manifest.spec.normalization),
        held=None
        if parts.summation is None
        else HeldAnswers(parts.summation, signing, noise, revealed, run_digest(e), only_sums=only_sums),
        examples=ExamplePrivacy.of(e.federation.privacy),
    )
    return ClientSide(
        algorithm,
        parts.vocabulary,
        parts.examples_of(dataset),
        conclude or evaluate,
        config,
        states=StoredStates(open_store(states)) if algorithm.stateful and states is not None else None,
        after_steps=parts.after_steps(),
    )


def in_process(
    parts: RunContext,
    dataset: FederatedDataset,
    folder: RunFolder,
    conclude: Conclude | None = None,
    *,
    secret: bytes | None = None,
) -> InProcess:
    """Return clients in this process, on the experiment's device; their states stay where the run keeps them."""
    runtime = parts.experiment.runtime
    device = use_device(runtime.device, runtime.threads)
    return InProcess(client_side(parts, dataset, device, states_of(folder), conclude, secret=secret), DTYPE)


def states_of(folder: RunFolder) -> str:
    """Return the folder or URL of a run's client states: its folder, or where it is published.

    Raise DataError if ``published.json`` has no URL.
    """
    if folder.states.is_dir() or (published := folder.json_or_none("published.json")) is None:
        return str(folder.states)
    if not isinstance(published.get("url"), str):
        raise DataError(f"{folder.path / 'published.json'}: has no key 'url'")
    return f"{published['url']}/states"


def welcome(parts: RunContext) -> str:
    """Return the welcome message for workers: the shared part of the experiment and the partition's fingerprint.

    Clients with data of their own get the normalization instead of the fingerprint; null until it is known. Digests of
    the run's constants follow, if it has some.
    """
    about: dict[str, Any] = {"partition": parts.manifest.fingerprint}
    if isinstance(parts.experiment.data, OwnData):
        spec = parts.manifest.spec
        about = {"normalization": vars(spec.normalization) if spec.is_normalized else None}
    if constants := digests_of_run(parts):
        about["constants"] = constants
    return json.dumps({"experiment": parts.experiment.shared_json(), **about})


def fingerprint(experiment: Experiment) -> dict[str, Any]:
    """Return the versions and settings, besides the experiment, that a run's bits depend on (docs/design.md, §4)."""
    return {
        "fedloom": fedloom.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mkldnn": bool(torch._C._has_mkldnn),
        "machine": platform.machine(),
        "system": platform.system(),
        "threads": experiment.runtime.threads,
        "device": experiment.runtime.device,
    }
