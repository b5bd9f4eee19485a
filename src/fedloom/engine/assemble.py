"""Assembly of a federation's server and client sides from an experiment and a manifest."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

import fedloom
from fedloom.algorithms.base import Algorithm, ClientAlgorithm, ServerAlgorithm, Setup, find_algorithm
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.requirements import check_example_privacy
from fedloom.algorithms.sums import sums_of
from fedloom.core import digests
from fedloom.core.processes import processor
from fedloom.data.augment import augmentation
from fedloom.data.federated import ClientData, FederatedDataset, Manifest
from fedloom.data.spec import Targets
from fedloom.engine.sums import sums_part
from fedloom.engine.training_privacy import check_private_buffers
from fedloom.errors import DataError, ExperimentError, argument
from fedloom.evaluation.group_statistics import summed_metrics
from fedloom.evaluation.measure import metrics
from fedloom.evaluation.plan import EvaluationPlan
from fedloom.evaluation.planning import make_plan
from fedloom.experiment import Experiment, OwnData
from fedloom.federation.client_side import ClientConfig, ClientSide, InProcess
from fedloom.federation.cohort import Summing
from fedloom.federation.loop import vocabulary
from fedloom.federation.progress import Saves
from fedloom.federation.randomness import generator
from fedloom.federation.states import States
from fedloom.federation.transport import Guard, ModelKeeper
from fedloom.federation.worker_record import WorkerRecord
from fedloom.messages import Message, SummedMetrics
from fedloom.models.factories import check_permitted
from fedloom.models.fitting import fitted
from fedloom.models.module_layers import digests_of
from fedloom.models.predictors import Predictors
from fedloom.privacy.examples import ExamplePrivacy
from fedloom.runs.folder import RunFolder
from fedloom.security.signing import NO_SIGNING, Signing
from fedloom.storage import open_store

DTYPE = torch.float32

GPU_FILES = ("nvidia[0-9]*", "kfd", "dxg")
"""Device files of GPUs below ``/dev``: NVIDIA's, AMD's, and those of Windows' subsystem for Linux."""

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
    def summation(self) -> Summing | None:
        """Answers in training that are only summed: under secure aggregation, or with privacy of clients."""
        federation = self.experiment.federation
        privacy = federation.privacy if federation.privacy is not None and federation.privacy.of == "clients" else None
        if federation.secure_aggregation is None and privacy is None:
            return None
        secure, fields = federation.secure_aggregation, dict(self.algorithm.sums(self.settings))
        if secure is not None:
            fields |= sums_of(SummedMetrics)
        own = isinstance(self.experiment.data, OwnData)
        return sums_part().Summation(
            fields,
            secure,
            privacy,
            self.setup.dtype,
            1 if secure is None else secure.signature_bytes,
            federation.clients_per_round,
            run=answers_digest(self.experiment, self.manifest, self.algorithm.version),
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


CheckSize: TypeAlias = Callable[[int], None]
"""Check of a model's size in bytes, which raises if it is refused."""


def any_size(size: int) -> None:
    """Accept a model of any size."""


def make_parts(
    experiment: Experiment,
    manifest: Manifest,
    trained_on: Manifest | None = None,
    check_size: CheckSize = any_size,
) -> RunContext:
    """Build the parts of an experiment from its manifest.

    ``trained_on`` is the manifest that the run was trained with, if it is another. ``check_size`` gets the model's size
    in bytes and may raise, before parameters are allocated.

    Raise ExperimentError if the model does not fit the data, the method does not fit the model, or ``federation.until``
    does not fit the task.
    """
    trained_on = manifest if trained_on is None else trained_on
    plan = evaluation_plan(experiment, manifest)
    if (until := experiment.federation.until) is not None:
        until.check(plan.task.headline)
    fitted_model = fitted(experiment.model, manifest.spec.inputs, manifest.spec.outputs, plan.task, plan.targets.shape)
    spec = manifest.spec
    model, kind, targets = fitted_model.model, spec.kind, spec.targets
    check_size(model.layout.size * DTYPE.itemsize)
    if model.raw_targets and targets is not None:
        targets = targets.raw()
        plan = evaluation_plan(
            experiment, dataclasses.replace(manifest, spec=dataclasses.replace(spec, targets=targets))
        )
    has_own_data = isinstance(experiment.data, OwnData)
    setup = Setup(
        model=model,
        classes=spec.classes,
        input_shape=spec.input_shape,
        kind="features" if fitted_model.standardizes and kind == "integers" else kind,
        targets=targets,
        clients=0 if has_own_data else len(trained_on.clients),
        dtype=DTYPE,
        roster=() if has_own_data else trained_on.roster,
        same_clients=has_own_data or trained_on.fingerprint == manifest.fingerprint,
        protects_examples=experiment.protects_examples,
        seed=experiment.seed,
    )
    parts = RunContext(
        experiment, manifest, find_algorithm(experiment.algorithm.name), setup, plan, fitted_model.standardizes
    )
    parts.algorithm.check_inputs(kind)
    parts.algorithm.check_model(parts.settings, model)
    if experiment.protects_examples:
        check_example_privacy(parts.algorithm, parts.settings)
    if experiment.evaluation.label_mask and not (plan.task.kind.is_class and setup.classes):
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
    clients_known = parts.setup.clients if clients is None else clients
    return dataclasses.replace(parts, setup=dataclasses.replace(parts.setup, clients=clients_known, same_clients=False))


def missing_device(devices: Path = Path("/dev")) -> ExperimentError:
    """Return the error of ``runtime.device: cuda`` where torch has no CUDA device, with the reason.

    A device file of a GPU in the folder ``devices`` shows that there is a GPU, but torch cannot use it.
    """
    devices_present = sorted(str(path) for pattern in GPU_FILES for path in devices.glob(pattern))
    seen = f", although {' and '.join(devices_present)} exist here" if devices_present else ""
    if torch.version.cuda is None and torch.version.hip is None:
        message = f"runtime.device is cuda, but this torch ({torch.__version__}) is built without CUDA{seen}"
        hint = "use a torch with CUDA (in a pod: the image worker-cuda, docs/chart.md), or set runtime.device to cpu"
    else:
        message = f"runtime.device is cuda, but torch has no usable CUDA device{seen}: {_reason()}"
        hint = (
            "in a pod, request a GPU in the limits of its container (docs/cluster.md); elsewhere, install a driver "
            f"that this torch ({torch.__version__}) can use, or set runtime.device to cpu"
        )
    return ExperimentError(message, hint=hint, key="runtime.device", found="cuda", allowed=["cpu"])


def _reason() -> str:
    """Return the first sentence of torch's own message about its missing device."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return str(error).partition(". ")[0].rstrip(".")
    return "no device is visible"


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
    revealed_sums: object = None,
    guard: Guard | None = None,
    models: ModelKeeper | None = None,
    record: WorkerRecord | None = None,
) -> ClientSide:
    """Return the client side of every conversation; by default it evaluates the predictors.

    ``states`` is the folder or URL of the clients' states, shared by all workers of the run. ``secret`` is the key of
    the noise that hides values from the aggregator; None in a simulation, where the seed determines the noise.
    ``signing`` holds the signatures of keys in secure sums, and ``revealed_sums`` the sums that this process helped to
    reveal, None in a simulation. ``guard`` is the policy of a member. ``models`` keeps the clients' models.
    ``record`` is that of a worker.

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
        measurements = metrics(predictors, clients.clients, algorithm.predictors, batch_size=size, plan=parts.plan)
        if record is not None:
            names = [client.id for client in clients.clients]
            record.measured(names, measurements, algorithm.predictors, parts.plan)
        if guard is not None:
            measurements = guard.withhold(measurements, parts.plan)
        return measurements if e.federation.secure_aggregation is None else summed_metrics(measurements, parts.plan)

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
        else sums_part().HeldAnswers(parts.summation, signing, noise, revealed_sums, run_digest(e), guard=guard),
        examples=ExamplePrivacy.from_settings(e.federation.privacy),
        saves=None
        if states is None or e.runtime.save_every_s is None
        else Saves(open_store(states), e.runtime.save_every_s, lambda: _training_digest(parts)),
        guard=guard,
        models=models,
    )
    return ClientSide(
        algorithm,
        parts.vocabulary,
        parts.examples_of(dataset),
        conclude or evaluate,
        config,
        states=States(open_store(states)) if algorithm.stateful and states is not None else None,
        after_steps=parts.after_steps(),
    )


def _training_digest(parts: RunContext) -> bytes:
    """Return a digest of everything that shapes a local training, except its clients and messages."""
    answers = answers_digest(parts.experiment, parts.manifest, parts.algorithm.version)
    facts, constants = fingerprint(parts.experiment), digests_of(parts.setup.model.constants)
    return digests.combined_digest(answers.hex(), json.dumps([facts, constants], sort_keys=True))


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
    if folder.states.is_dir() or (record := folder.json_or_none("published.json")) is None:
        return str(folder.states)
    if not isinstance(record.get("url"), str):
        raise DataError(f"{folder.path / 'published.json'}: has no key 'url'")
    return f"{record['url']}/states"


def fingerprint(experiment: Experiment) -> dict[str, Any]:
    """Return the versions and settings, besides the experiment, that a run's bits depend on (docs/design.md, §4)."""
    return {
        "fedloom": fedloom.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": processor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mkldnn": bool(torch._C._has_mkldnn),
        "machine": platform.machine(),
        "system": platform.system(),
        "threads": experiment.runtime.threads,
        "device": experiment.runtime.device,
    }


# --- evaluation -------------------------------------------------------------------------------------------------------


def evaluation_plan(experiment: Experiment, manifest: Manifest) -> EvaluationPlan:
    """Return the task of an experiment with its settings, and the metrics that clients measure.

    Raise ExperimentError if the data are of another task, its settings do not fit their outputs, or a metric is
    unknown, fails, or may not be called in this process.
    """
    targets = manifest.spec.targets or Targets("classification", (), manifest.spec.classes, manifest.spec.class_names)
    # A sketch tells something of a member's own model, so only simulations measure it.
    simulated = not isinstance(experiment.data, OwnData) and experiment.federation.secure_aggregation is None
    names = experiment.evaluation.metrics
    return make_plan(experiment.task, targets, manifest.dataset, names, check_permitted, sketches=simulated)


# --- digests ----------------------------------------------------------------------------------------------------------


def fixed_when_open(tree: dict[str, object]) -> dict[str, object]:
    """Return the settings that stay the same on resume of an open federation."""
    algorithm = tree["algorithm"]
    assert isinstance(algorithm, dict)
    fixed = {key: tree[key] for key in ("name", "seed", "data", "model")}
    return {**fixed, "algorithm.name": algorithm["name"]}


def run_digest(experiment: Experiment) -> str:
    """Return a digest of the settings that stay the same on resume, except the name, which affects no answer.

    Runs with equal digests may ask a client for the same answers.
    """
    fixed = {
        key: value for key, value in fixed_when_open(json.loads(experiment.shared_json())).items() if key != "name"
    }
    return digests.short_digest(json.dumps(fixed, sort_keys=True).encode())


def answers_digest(experiment: Experiment, manifest: Manifest, version: int) -> bytes:
    """Return a digest of all settings that shape a client's answer, as one side of a federation knows them.

    Sides that differ only in a name, deadlines, numbers of rounds and attempts, or the version of the fedloom package
    have equal digests; those with another ``version`` of the method have others, and cannot be members of one sum.
    """
    settings = json.loads(experiment.shared_json())
    shaping = ("clients_per_round", "lost_state", "privacy", "secure_aggregation")
    federation = {key: settings["federation"][key] for key in shaping}
    figures = manifest.spec.normalization
    description = {**settings, "name": "", "federation": federation, "figures": [figures.mean, figures.std]}
    if version > 1:  # release 0.1.0 does not digest it, and has only first versions
        description["version"] = version
    return digests.combined_digest(json.dumps(description, sort_keys=True))
