"""Introduction of a worker to the aggregator, and the aggregator's Welcome or refusal."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import fedloom
from fedloom.core.words import REASON_CHARACTERS, printable
from fedloom.errors import DataError, FedloomError, RefusedError, argument
from fedloom.federation.roster import Member
from fedloom.transport.frames import Refusal, WireError, parse_frame
from fedloom.transport.stream import PROTOCOL
from fedloom.transport.wire import federation_pb2 as wire


@dataclass(frozen=True)
class Introduction:
    """Introduction of a worker to the aggregator."""

    worker: str
    """Name, unique in the federation; a restarted worker returns under the same name."""
    clients: Sequence[str]
    """Ids of the clients that it may serve."""
    algorithms: Mapping[str, int]
    """Names and versions of its algorithms."""
    device: str = "cpu"
    """Device that it computes on."""
    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Id of this process; conversations are kept as long as it stays the same."""
    members: Sequence[Member] = ()
    """Announcements of the clients, in the same order, if they have their own data."""

    def hello(self) -> wire.Hello:
        """Return it as the first part of a stream."""
        return wire.Hello(
            protocol=PROTOCOL,
            package=fedloom.__version__,
            worker=self.worker,
            incarnation=self.incarnation,
            clients=self.clients,
            device=self.device,
            algorithms=dict(self.algorithms),
            announced=[
                wire.Announced(**{name: value for name, value in vars(member).items() if name != "id"})
                for member in self.members
            ],
        )


@dataclass(frozen=True)
class Joined:
    """Welcome received from the aggregator: the run, the id of the aggregator's process, the experiment (JSON)."""

    run: str
    incarnation: str
    experiment: str


def parse_welcome(address: str, data: bytes) -> wire.Welcome:
    """Return the Welcome in the first frame of a stream; raise if the frame refuses us or holds anything else."""
    first = parse_frame(wire.AggregatorFrame, data).parts[0]
    if first.WhichOneof("part") == "refused":
        raise refusal_error(address, first.refused)
    if first.WhichOneof("part") != "welcome":
        raise WireError(Refusal.GARBAGE, "the first part was not a Welcome")
    welcome: wire.Welcome = first.welcome
    return welcome


def refusal_error(address: str, refused: wire.Refused) -> FedloomError:
    """Return the error of a worker that the aggregator refuses."""
    same_version = "install the same version of fedloom on both sides"
    hints = {
        wire.REFUSAL_CODE_PROTOCOL: same_version,
        wire.REFUSAL_CODE_PACKAGE: same_version,
        wire.REFUSAL_CODE_ALGORITHM: "install the same version of the algorithm's package on both sides",
        wire.REFUSAL_CODE_REPLACED: f"give every worker a unique name with {argument('name')}",
    }
    reason = printable(refused.reason, REASON_CHARACTERS)
    if refused.code == wire.REFUSAL_CODE_CLIENTS:
        return DataError(
            f"the aggregator at {address} refused: {reason}",
            hint="create the partition from the aggregator's experiment file: fedloom partition EXPERIMENT",
        )
    return RefusedError(f"the aggregator at {address} refused: {reason}", hint=hints.get(refused.code))
