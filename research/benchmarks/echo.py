"""Methods whose clients answer at once, and the worker process that serves them.

    python research/benchmarks/echo.py METHOD HOST:PORT NAME CLIENTS      (started by the benchmarks)

``echo``: a client returns the model that it receives, so that a round costs what FedLoom costs: sampling, batching,
encoding, wire, validation, stacking. ``summed-echo``: the same with one shared model and secure sums of the answers.
``instant-pefll``: PeFLL's unchanged server algorithm, with clients that have a descriptor ready and only receive the
model that the hypernetwork makes of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedloom.algorithms.base import (
    Algorithm,
    ClientAlgorithm,
    Cohort,
    Conversation,
    Round,
    ServerAlgorithm,
    Setup,
    Statistics,
    conversation,
)
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.pefll import (
    PEFLL,
    Descriptor,
    DescriptorRequest,
    DescriptorSettings,
    PeFLLServer,
    PeFLLSettings,
    PersonalizedModel,
)
from fedloom.algorithms.sums import SummedFields, sums_of
from fedloom.core.settings import Settings
from fedloom.data.federated import ClientData, Split
from fedloom.evaluation.plan import EvaluationPlan
from fedloom.federation.client_side import ClientConfig, ClientSide
from fedloom.messages import Message, Metrics, Quantity, Replies, broadcast, rows
from fedloom.models.networks import LeNet
from fedloom.models.predictors import Predictors, predictors_of
from fedloom.privacy.settings import SecureAggregation
from fedloom.security.certificates import make_ca, make_certificate
from fedloom.security.options import FILES, ClientOptions, Credentials, Protection, ServerOptions
from fedloom.security.signing import NO_SIGNING
from fedloom.sums.held_answers import HeldAnswers
from fedloom.sums.messages import VOCABULARY
from fedloom.sums.summation import Summation
from fedloom.transport.aggregator import Aggregator
from fedloom.transport.exchanges import ServedRun
from fedloom.transport.stream import Introduction
from fedloom.transport.worker import serve

CLASSES = 10
LENET = LeNet((1, 28, 28), CLASSES)  # d = 85,822
DESCRIPTOR_SIZE = 32


class Model(Message):
    """Opening of training, with a separate model for each client."""

    theta: Tensor = rows(Quantity.MODEL)  # [c, d]


class Update(Message):
    """Answer of a client."""

    delta_theta: Tensor = rows(Quantity.MODEL_UPDATE, "d")  # [c, d]


class EchoServer(ServerAlgorithm):
    """Server algorithm that sends each client its row of θ [c, d] and receives as much: PeFLL's second exchange."""

    def __init__(self, theta: Tensor) -> None:
        self.state = {"theta": theta}
        self.sizes = {"d": theta.shape[1]}
        self.received = torch.zeros(0)

    def train_round(self, round: Round) -> Statistics:
        """Run one exchange with a cohort of as many clients as θ has rows."""
        theta = self.state["theta"]
        self.received = round.sample(len(theta)).send(Model(theta), Update).delta_theta
        return {"client_steps": 0.0}

    def personalize(self, cohort: Cohort) -> Replies[Any]:
        """Run the same exchange; an echo's predictor is the model that it received."""
        return cohort.send(Model(self.state["theta"][: len(cohort.clients)]), Update)


class EchoClient(ClientAlgorithm):
    """Client algorithm that answers at once."""

    @conversation
    def train(self, clients: ClientGroup, opening: Model) -> Conversation:
        """Return the model unchanged."""
        yield Update(opening.theta)
        return None


class SharedModel(Message):
    """Opening of training, with one model for all clients."""

    theta: Tensor = broadcast(Quantity.MODEL)  # [d]


class SummedEchoServer(EchoServer):
    """Server algorithm that sends all clients θ [1, d] and receives the sum of their answers."""

    cohort = 0

    def train_round(self, round: Round) -> Statistics:
        """Run one exchange with a cohort of this size."""
        updates = round.sample(self.cohort).send(SharedModel(self.state["theta"][0]), Update)
        self.received = updates.mean(updates.delta_theta)[None]
        return {"client_steps": 0.0}


class SummedEchoClient(ClientAlgorithm):
    """Client algorithm that answers at once."""

    @conversation
    def train(self, clients: ClientGroup, opening: SharedModel) -> Conversation:
        """Return the model unchanged."""
        yield Update(opening.theta[None])
        return None


class InstantClient(ClientAlgorithm):
    """Algorithm 1 of papers/001 for a client with a fixed descriptor."""

    @conversation
    def personalize(self, clients: ClientGroup, opening: DescriptorRequest) -> Conversation:
        """Run lines 2-6."""
        model: PersonalizedModel = yield Descriptor(torch.full((len(clients), DESCRIPTOR_SIZE), 0.1))
        return predictors_of(LENET, personal=model.theta)


class Echo(Algorithm):
    """Method whose clients return the model that they receive."""

    name = "echo"
    settings = Settings
    client = EchoClient
    messages = (Model, Update)

    def server(self, settings: Any, setup: Any, generator: torch.Generator) -> EchoServer:
        """Return the server algorithm."""
        return EchoServer(torch.randn(1, 1, generator=generator))


class SummedEcho(Algorithm):
    """Method whose clients return the shared model, as a sum."""

    name = "summed-echo"
    settings = Settings
    client = SummedEchoClient
    messages = (SharedModel, Update)

    def sums(self, settings: Any) -> SummedFields:
        """Return the plain sum of the updates."""
        return sums_of(Update)

    def server(self, settings: Any, setup: Any, generator: torch.Generator) -> SummedEchoServer:
        """Return the server algorithm."""
        return SummedEchoServer(torch.randn(1, 1, generator=generator))


class InstantPeFLL(Algorithm):
    """PeFLL with clients that have fixed descriptors."""

    name = "instant-pefll"
    settings = Settings
    client = InstantClient
    messages = (*PEFLL.messages, Metrics)

    def server(self, settings: Any, setup: Any, generator: torch.Generator) -> PeFLLServer:
        """Return PeFLL's server algorithm."""
        settings = PeFLLSettings(descriptor=DescriptorSettings(size=DESCRIPTOR_SIZE))
        return PeFLLServer(settings, Setup(LENET, CLASSES, (1, 28, 28), 100), generator)


ECHO, SUMMED_ECHO, INSTANT_PEFLL = Echo(), SummedEcho(), InstantPeFLL()
METHODS: dict[str, Algorithm] = {method.name: method for method in (ECHO, SUMMED_ECHO, INSTANT_PEFLL)}
SECURE = Summation(SUMMED_ECHO.sums(None), SecureAggregation())


def names(clients: int) -> list[str]:
    """Return the ids of this many clients."""
    return [f"c{i:06d}" for i in range(clients)]


def vocabulary(method: Algorithm) -> dict[str, type[Message]]:
    """Return the method's messages by name, and those of its sums."""
    sums = VOCABULARY if method.sums(None) else {}
    return {message.__name__: message for message in method.messages} | dict(sums)


@contextmanager
def federation(method: Algorithm, clients: int, workers: int, tls: Path | None = None) -> Iterator[Aggregator]:
    """Yield an aggregator whose worker processes serve all clients; with a folder ``tls``, over mutual TLS."""
    protection, environment = None, dict(os.environ)
    if tls is not None:
        ca = make_ca(tls).certificate
        server, member = make_certificate("server", tls, tls, hosts=["127.0.0.1"]), make_certificate("member", tls, tls)
        protection = Protection(ServerOptions(certificate=server.certificate, key=server.key, ca=ca))
        files = {"ca": ca, "certificate": member.certificate, "key": member.key}
        environment |= {FILES[name]: str(path) for name, path in files.items()}
    run = ServedRun(
        name="bench",
        incarnation="a1",
        experiment="{}",
        algorithm=method.name,
        version=method.version,
        vocabulary={**vocabulary(method), **VOCABULARY},
        dtype=torch.float32,
        clients=names(clients),
    )
    aggregator = Aggregator(run, protection=protection)
    address = aggregator.start("127.0.0.1:0")
    command = [sys.executable, __file__, method.name, address]
    processes = [subprocess.Popen([*command, f"worker-{i}", str(clients)], env=environment) for i in range(workers)]
    try:
        aggregator.wait_for(names(clients), 60, workers=workers)
        yield aggregator
    finally:
        aggregator.stop(finished=True)
        for process in processes:
            process.wait()


@cache
def _without_data(client: str) -> ClientData:
    nothing = Split(torch.zeros(0, 1), None)
    return ClientData(client, nothing, nothing, nothing, 2)


def _nothing_measured(predictors: Predictors, clients: ClientGroup) -> Message:
    return EvaluationPlan.of_classes(CLASSES).nothing(len(predictors), 1)


def main() -> None:
    """Serve until the aggregator ends the run."""
    torch.set_num_threads(1)
    name, address, worker, clients = sys.argv[1:]
    method = METHODS[name]
    half = method.client(None, _no_task())
    held = HeldAnswers(SECURE, NO_SIGNING) if method is SUMMED_ECHO else None
    serve(
        address,
        Introduction(worker, names(int(clients)), {method.name: method.version}),
        make_session=lambda joined: ClientSide(
            half, {**vocabulary(method), **VOCABULARY}, _without_data, _nothing_measured, ClientConfig(1, held=held)
        ),
        stop=threading.Event(),
        reconnect_s=5.0,
        credentials=Credentials(ClientOptions.from_folder()),
    )


def _no_task() -> Any:
    return None  # these clients use no data


if __name__ == "__main__":
    main()
