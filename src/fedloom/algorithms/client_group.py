"""Clients that one coroutine of a client algorithm serves, and batches of their examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256, shake_256
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.algorithms.progress import Progress
from fedloom.core.draws import seed_from
from fedloom.data.augment import Augmentation
from fedloom.data.federated import ClientData
from fedloom.data.inputs import each
from fedloom.errors import DataError
from fedloom.privacy.examples import ExamplePrivacy


@dataclass(frozen=True, eq=False)
class Batch:
    """Examples of g clients; all tensors have a first axis g if g > 1.

    It also fixes the model's random draws: every loss and gradient of it in training mode draws the same numbers.
    Methods that use a batch several times in a step, such as for a difference of gradients, need this.
    """

    x: Any  # [b, ...], or such tensors by name
    y: Tensor | None  # [b, ...]
    weight: Tensor  # [b], weight of each example in its client's loss
    active: Tensor | None = None  # [g] bool: clients that step on the batch; None for all
    seed: int | None = None  # of the draws; None if the model draws nothing
    each: Tensor | None = None  # [g], weight of an example of a batch that was drawn for a noisy step; None for others
    rows: Tensor | None = None  # [b], positions in the train split of a single client's noisy step; None for others

    @property
    def of_first(self) -> Batch:
        """First client's part of a stack, in the form of a single client."""
        y = None if self.y is None else self.y[0]
        of_each = None if self.each is None else self.each[:1]
        return Batch(each(self.x, lambda t: t[0]), y, self.weight[0], seed=self.seed, each=of_each)


class StepProbe(Protocol):
    """Audit of a client's noisy steps: it chooses gradients of canary examples, and sees the noisy sums."""

    def chosen(self, batch: Batch, flat: list[Tensor]) -> list[Tensor]:
        """Return the gradients of the examples of a batch by leaf, ``[b, d]`` each, with those of canaries replaced."""

    def released(self, batch: Batch, noisy: Tensor) -> None:
        """Record the noisy sum over a batch, ``[d]``, up to a factor."""


class ClientGroup:
    """Clients that one coroutine serves: up to ``runtime.clients_at_once``, by default one.

    Parameters
    ----------
    clients
        Data of the clients, already on ``device``.
    generator
        ``(client id, purpose) -> torch.Generator``, keyed with seed, purpose, client and round; always on the CPU.
    states
        State that each client kept in the last round that counted it; None for a client that no round has counted.
    may_keep
        False in conversations that change no state.
    secret
        32 random bytes unknown to the aggregator: the key of noise that hides something from it. None in a simulation,
        where that noise also comes from ``generator``.
    round
        Number of the training round, from 1; None outside training.
    augment
        Augmentation of training examples; None without.
    examples
        Differential privacy of examples: steps of training rounds are noisy then; None without.
    progress
        Saves of local training; None without.

    Attributes
    ----------
    probe
        Audit of the noisy steps of a group of one client; None in every other run.
    """

    def __init__(
        self,
        clients: Sequence[ClientData],
        generator: Callable[[str, str], torch.Generator],
        states: Sequence[dict[str, Tensor] | None] | None = None,
        *,
        may_keep: bool = True,
        secret: bytes | None = None,
        round: int | None = None,
        augment: Augmentation | None = None,
        examples: ExamplePrivacy | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.clients = tuple(clients)
        self.augment = augment
        self.examples = examples
        self.round = round
        self.progress = progress
        self._trainings = 0
        self.probe: StepProbe | None = None
        self._generator = generator
        self._states = tuple(states) if states is not None else (None,) * len(self.clients)
        self._may_keep = may_keep
        self._secret = secret
        self._streams: dict[tuple[int, str], torch.Generator] = {}
        self._noisy_sums = [0] * len(self.clients)
        self.drew = [False] * len(self.clients)
        """For each client, whether its values depend on random draws, and with them on the round."""
        self.kept: dict[int, dict[str, Tensor]] = {}  # new state by position
        self.lost: dict[int, str] = {}  # reason by position

    def __len__(self) -> int:
        return len(self.clients)

    def generator(self, i: int, purpose: str, *, orders: bool = False) -> torch.Generator:
        """Return the random generator of the i-th client for a purpose.

        It only ``orders`` examples that are all used together: then the client's values depend on it by rounding alone.
        """
        self.drew[i] = self.drew[i] or not orders
        return self._generator(self.clients[i].id, purpose)

    def stream(self, i: int, purpose: str, *, hidden: bool = False) -> torch.Generator:
        """Return a generator of the i-th client that keeps its state between uses in the conversation.

        ``hidden`` selects :meth:`hidden` in place of :meth:`generator`.
        """
        if (i, purpose) not in self._streams:
            self._streams[i, purpose] = (self.hidden if hidden else self.generator)(i, purpose)
        return self._streams[i, purpose]

    def hidden(self, i: int, purpose: str) -> torch.Generator:
        """Return a generator of the i-th client whose seed the server does not know; :meth:`generator` in a simulation.

        It is for draws that belong to an example, such as its dropout. If a guarantee depends on the draws, use
        :meth:`uniform` instead: torch's generator uses only 32 bits of a seed.
        """
        if self._secret is None:
            return self.generator(i, purpose)
        made = torch.Generator()
        made.manual_seed(int(self._words(i, purpose, self._moment(i, purpose), 1)[0] >> np.uint64(1)))
        return made

    def uniform(self, i: int, purpose: str, size: int) -> Tensor:
        """Return numbers ``[size]`` float64, uniform in [0, 1), that the server does not know, like :meth:`noise`."""
        if self._secret is None:
            return torch.rand(size, dtype=torch.float64, generator=self.generator(i, purpose))
        words = self._words(i, purpose, self._moment(i, purpose), size)
        return torch.from_numpy((words >> np.uint64(11)).astype(np.float64) / 2.0**53)

    def noise(self, i: int, purpose: str, about: bytes, size: int) -> Tensor:
        """Return standard normal numbers ``[size]``, float64, that hide something of the i-th client from the server.

        With a secret they are a pseudorandom function (SHAKE-256) of the secret, the client, the purpose, and
        ``about``, which encodes everything that determines the value they protect. A repeated request therefore gets
        the same noise and discloses nothing more; any other request gets independent noise.
        """
        if self._secret is None:
            return torch.randn(size, dtype=torch.float64, generator=self.generator(i, purpose))
        words = self._words(i, purpose, about, size)
        uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53  # in (0, 1), both ends excluded
        numbers: Tensor = torch.special.ndtri(torch.from_numpy(uniform))
        return numbers

    def noise_for(self, i: int, total: Tensor) -> Tensor:
        """Return the :meth:`noise` ``[d]`` of the next noisy sum over examples of the i-th client, ``[d]`` float64.

        With a secret it is a function of the sum, of its number in the conversation, and of the client, purpose and
        round. An exchange that is repeated gives the same sums and noise, and so discloses nothing more.
        """
        purpose = f"example-noise/{self._noisy_sums[i]}"
        self._noisy_sums[i] += 1
        about = b"" if self._secret is None else sha256(self._moment(i, purpose) + total.numpy().tobytes()).digest()
        return self.noise(i, purpose, about, len(total))

    def _moment(self, i: int, purpose: str) -> bytes:
        """Return bytes that differ between purposes, conversations and rounds."""
        return seed_from(self.generator(i, purpose)).to_bytes(8, "little")

    def _words(self, i: int, purpose: str, about: bytes, count: int) -> NDArray[np.uint64]:
        """Return 64-bit words that are a pseudorandom function of the secret, the i-th client, and the arguments."""
        assert self._secret is not None
        parts = (self._secret, self.clients[i].id.encode(), purpose.encode(), about)
        key = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        return np.frombuffer(shake_256(key).digest(8 * count), dtype="<u8")

    def next_training(self) -> int:
        """Return the number of the next local training of the conversation, from 0."""
        self._trainings += 1
        return self._trainings - 1

    def draws(self) -> dict[str, Tensor]:
        """Return the state of the streams and of what is counted, for :meth:`restore_draws`."""
        streams = {f"stream/{i}/{purpose}": made.get_state() for (i, purpose), made in self._streams.items()}
        return {**streams, "noisy_sums": torch.tensor(self._noisy_sums), "drew": torch.tensor(self.drew)}

    def restore_draws(self, saved: Mapping[str, Tensor]) -> None:
        """Continue all streams from a saved state."""
        for name, state in saved.items():
            if name.startswith("stream/"):
                _, i, purpose = name.split("/", 2)
                self._streams[int(i), purpose] = torch.Generator()
                self._streams[int(i), purpose].set_state(state)
        self._noisy_sums = saved["noisy_sums"].tolist()
        self.drew = [a or b for a, b in zip(self.drew, saved["drew"].tolist(), strict=True)]

    @property
    def new(self) -> list[int]:
        """Positions of the clients without a kept state."""
        return [i for i, state in enumerate(self._states) if state is None]

    def load_state(self, name: str, default: Tensor) -> Tensor:
        """Return the rows that clients kept under a name in the last round that counted them, ``[g, ...]``.

        A client gets its default if it is new, or kept nothing under that name (because of other settings, which an
        open federation may change).

        Raise DataError if a kept row differs in shape from its default.
        """
        old = []
        for client, state, row in zip(self.clients, self._states, default, strict=True):
            kept = row if state is None or name not in state else state[name].to(row)
            if kept.shape != row.shape:
                raise DataError(
                    f"client {client.id}: its state has {name} of shape {tuple(kept.shape)}, and the model of this run "
                    f"has {tuple(row.shape)}"
                )
            old.append(kept)
        return torch.stack(old)

    def save_state(self, **named: Tensor) -> None:
        """Keep rows ``[g, ...]``, one per client, for later rounds.

        Call it before yielding the answer that the rows belong to, so that a round that counts the client has its
        state. A method that keeps rows must be ``stateful`` and keep some in every training conversation.

        Raise RuntimeError in a conversation that changes no state.
        """
        if not self._may_keep:
            raise RuntimeError("personalization cannot save states")
        for i in range(len(self)):
            self.kept.setdefault(i, {}).update({name: rows[i].detach().clone() for name, rows in named.items()})

    def fail_client(self, i: int, reason: str) -> None:
        """Drop the i-th client, which answers with this reason; the rest of the group continues."""
        self.lost.setdefault(i, reason)
