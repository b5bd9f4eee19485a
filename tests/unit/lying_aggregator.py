"""Aggregator that lies to members of secure sums, and records everything that it gets.

The members are real: conversations, signature keys, held answers, records of revealed sums. The aggregator runs the
honest code for its part, over a transport that changes what chosen members are sent. It knows all experiments and
messages, so it tells each member the digest of the question that this member was asked.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from federations import IMAGE, client, setup
from numpy.typing import NDArray
from torch import Tensor

from fedloom.algorithms.base import ClientAlgorithm, Conversation, conversation
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.sums import Summed, sums_of
from fedloom.core.settings import Settings
from fedloom.errors import FedloomError
from fedloom.federation.client_side import ClientConfig, ClientSide
from fedloom.federation.cohort import RoundConfig, TooFewReplies
from fedloom.federation.round_attempt import RoundAttempt
from fedloom.federation.silence import Silence
from fedloom.federation.transport import Call, ConversationKey, Lost, MissingConversation, Refusals, Traffic
from fedloom.member.guard import PolicyEnforcer
from fedloom.member.policy import only_sums_policy
from fedloom.messages import Message, Quantity, broadcast, rows
from fedloom.models.networks import MLP
from fedloom.privacy.settings import SecureAggregation
from fedloom.runs.journal import Attempt
from fedloom.security.signing import KeySigner, KeyVerifier, RegisteredKey, Signing
from fedloom.sums.held_answers import HeldAnswers
from fedloom.sums.messages import VOCABULARY, MaskedAnswer, Question, SumSession, names_from_bytes
from fedloom.sums.revealed_sums import RevealedSums
from fedloom.sums.summation import Summation

SIZE = 400
"""Coordinates of an answer: many, so that independent answers hardly correlate."""

NAMES = tuple(f"m{i}" for i in range(7))
VICTIM = NAMES[0]

SECURE = SecureAggregation(signatures="keys", bits=64, range=100.0, examples=1000)


class Ask(Message):
    theta: Tensor = broadcast(Quantity.MODEL)  # [3]


class Measure(Message):
    theta: Tensor = broadcast(Quantity.MODEL)  # [3]


class ToldApart(Message):
    theta: Tensor = rows(Quantity.MODEL)  # [c, 3]


class Reply(Message):
    delta: Tensor = rows(Quantity.MODEL_UPDATE, SIZE)  # [c, SIZE]


@cache
def features(name: str, kind: type[Message]) -> Tensor:
    """Return what a client's answers are made of, independent between clients and kinds of question: ``[SIZE, 3]``."""
    seed = zlib.crc32(f"{name} {kind.__name__}".encode())
    return torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Clients(ClientAlgorithm):
    """Clients whose answer is linear in what they are sent; a model of zeros makes it vanish.

    With ``batches`` part of it is drawn anew in each round.
    """

    batches = 0.0

    def _answer(self, clients: ClientGroup, theta: Tensor, kind: type[Message] = Ask) -> Tensor:
        found = torch.stack([features(one.id, kind) @ theta for one in clients.clients])
        if self.batches:
            drawn = [clients.generator(i, "batches") for i in range(len(clients))]
            found += self.batches * torch.stack([torch.randn(SIZE, generator=g, dtype=torch.float64) for g in drawn])
        return found

    @conversation
    def train(self, clients: ClientGroup, opening: Ask) -> Conversation:
        """Answer in a round."""
        yield Reply(self._answer(clients, opening.theta))
        return None

    @conversation
    def train_alone(self, clients: ClientGroup, opening: ToldApart) -> Conversation:
        """Answer a message for each client."""
        yield Reply(self._answer(clients, opening.theta[0]))
        return None

    @conversation
    def personalize(self, clients: ClientGroup, opening: Measure) -> Conversation:
        """Answer in an evaluation."""
        yield Reply(self._answer(clients, opening.theta, Measure))
        return None


class Drawing(Clients):
    """Clients of which a part of the answer depends on the round."""

    batches = 1.0


Lie = Callable[[str, ConversationKey, Message], tuple[ConversationKey, Message]]
"""Returns what a member is sent in place of a message."""


def truth(name: str, key: ConversationKey, message: Message) -> tuple[ConversationKey, Message]:
    """Change nothing."""
    return key, message


@dataclass
class Liar:
    """Transport that tells members lies; also the aggregator's record of what they have answered."""

    members: Mapping[str, ClientSide]
    summations: Mapping[str, Summation]
    lie: Lie = truth
    asked: dict[tuple[str, ConversationKey], Question] = field(default_factory=dict)
    masked: list[NDArray[np.float64]] = field(default_factory=list)
    sent: dict[str, list[Message]] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    traffic: Traffic = field(default_factory=Traffic)
    refusals: Refusals = field(default_factory=Refusals)
    silence: Silence = field(default_factory=Silence)

    def exchange(self, call: Call) -> Sequence[Message | Lost]:
        """Send each member its message."""
        return [self._send(call, i) for i in range(len(call.rows))]

    def _send(self, call: Call, i: int) -> Message | Lost:
        name, row = call.clients[i], call.rows[i]
        key, message = self.lie(name, call.key, call.message.select([i]))
        if isinstance(message, SumSession):
            message = self._fitting(name, key, message)
        elif type(message).__name__ not in VOCABULARY:
            asked = self.asked.get((name, key), Question())
            self.asked[name, key] = asked.then(Question.from_message(message))
        self.sent.setdefault(name, []).append(message)
        try:
            ((_, answer),) = self.members[name].answer(key, call.exchange, [row], [name], message)
        except MissingConversation:
            return Lost("has no such conversation")
        if isinstance(answer, MaskedAnswer):
            self.masked.append(answer.values[0].numpy().view("<i8").astype(np.float64)[:SIZE])
        if isinstance(answer, Lost):
            self.reasons.append(answer.reason)
        elif type(answer) not in call.shapes:  # an aggregator can make nothing of it
            return Lost("another answer")
        return answer

    def _fitting(self, name: str, key: ConversationKey, message: SumSession) -> SumSession:
        """Return a session whose question is the one that the member was asked."""
        asked = self.asked.get((name, key), Question())
        try:
            members = names_from_bytes(message.members)
            digest = self.summations[name].question(key, asked, Reply, float(message.clip), members)
        except (ValueError, FedloomError):
            return message
        return replace(message, question=torch.frombuffer(bytearray(digest), dtype=torch.uint8))

    def close(self, key: ConversationKey) -> None:
        """Keep conversations open: whatever the members allow may be asked again."""


def federation(
    clients: type[ClientAlgorithm] = Clients,
    lie: Lie = truth,
    summations: Mapping[str, Summation] | None = None,
    records: Mapping[str, RevealedSums] | None = None,
    invented: Sequence[str] = (),
) -> Liar:
    """Return members with registered keys, the aggregator that lies to them, and members that it has invented."""
    everyone = (*NAMES, *invented)
    keys = {name: Ed25519PrivateKey.generate() for name in everyone}
    register = KeyVerifier([RegisteredKey(name, keys[name].public_key()) for name in NAMES])
    given, members = {name: summation() for name in everyone} | dict(summations or {}), {}
    for name in everyone:
        signing = Signing(KeySigner(keys[name]), register)
        revealed = RevealedSums() if records is None or name in invented else records[name]
        held = HeldAnswers(
            given[name], signing, name.encode() * 16, revealed, "run", guard=PolicyEnforcer(only_sums_policy())
        )
        data = client(name, 40)
        members[name] = ClientSide(
            clients(Settings(), setup(MLP(IMAGE, [5], 3))),
            {cls.__name__: cls for cls in (Ask, Measure, ToldApart, Reply)} | dict(VOCABULARY),
            lambda asked, data=data: data,
            lambda predictors, group: Reply(torch.zeros(len(group), SIZE)),
            ClientConfig(7, secret=name.encode(), held=held),
        )
    return Liar(members, given, lie)


def summation(**changes: Any) -> Summation:
    """Return the settings of a member's sums."""
    fields = sums_of(Reply, delta=Summed("examples"))
    found = Summation(fields, SECURE, None, torch.float64, SECURE.signature_bytes, run=b"experiment")
    return replace(found, **changes)


THETA = torch.tensor([1.0, -0.5, 0.25], dtype=torch.float64)


def ask(
    liar: Liar,
    names: Sequence[str] = NAMES,
    *,
    round: int = 1,
    attempt: int = 1,
    purpose: str = "train",
    message: Message | None = None,
) -> NDArray[np.float64] | None:
    """Ask a cohort, and return the weighted sum that the aggregator gets; None if it gets none."""
    config = RoundConfig(
        seed=7,
        clients_per_round=len(names),
        deadline_s=20.0,
        min_replies=3,
        shapes={Reply: {"delta": (SIZE,)}},
        stop=threading.Event(),
        judge=lambda name, answer: None,
        summation=summation(),
    )
    with ThreadPoolExecutor(1) as helper:
        made = Attempt(round, attempt)
        session = RoundAttempt(made, purpose, NAMES, dict.fromkeys(names, 40), liar, config, helper)
        try:
            sums = session.hold(names).send(Ask(THETA) if message is None else message, Reply)
        except (TooFewReplies, FedloomError):
            return None
        return sums.delta.value.numpy()


def part(name: str = VICTIM, theta: Tensor = THETA, kind: type[Message] = Ask) -> NDArray[np.float64]:
    """Return the part of a client in a sum."""
    return 40 * (features(name, kind) @ theta).numpy()


def explained(seen: Sequence[NDArray[np.float64]], wanted: NDArray[np.float64]) -> float:
    """Return which share of a vector follows, by least squares, from those that were seen."""
    if not seen:
        return 0.0
    columns = np.stack([one / max(np.linalg.norm(one), 1e-300) for one in seen], axis=1)
    fit = columns @ np.linalg.lstsq(columns, wanted, rcond=1e-9)[0]
    return float(1 - np.sum((wanted - fit) ** 2) / np.sum(wanted**2))
