"""Saves of local training in the store of clients' states: a worker that was killed continues from the last one.

A save is a file ``training/<client>/<question>-<training>.safetensors``. The question is a digest of everything that
shapes the result: run, round, purpose, clients with their training examples and states, and the opening message. The
file also has the digest of all messages up to the exchange of the training, so that a save is never used under another
question. It is removed when its conversation is closed, its client is asked another question in training, or the run
is over.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from fedloom.core.digests import combined_digest
from fedloom.data.federated import ClientData
from fedloom.errors import FedloomError
from fedloom.federation.transport import TRAIN, ConversationKey
from fedloom.messages import Message
from fedloom.runs.checkpoint import decode_tensors, tensor_parts
from fedloom.storage import Absent, Store

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

_log = logging.getLogger("fedloom.states")

FOLDER = "training"

IN_TRAINING, AT_END = 0.75, 0.25
"""Fractions of ``every_s`` that may be lost of the training that was interrupted, and of trainings before it."""


class Saves:
    """Saves of local training of one worker.

    Parameters
    ----------
    store
        Store of clients' states.
    every_s
        Maximum number of seconds of training that are lost with the process.
    run
        Returns a digest of everything that shapes answers in the run; called when it is first needed.
    """

    def __init__(self, store: Store, every_s: float, run: Callable[[], bytes]) -> None:
        self.store, self.every_s, self._run, self._digest = store, every_s, run, b""
        self.left: set[str] = set()
        """Names of the saves that a killed process may have left."""

    @property
    def run(self) -> bytes:
        """Digest of the run."""
        self._digest = self._digest or self._run()
        return self._digest

    def look(self) -> None:
        """List the saves in the store, before clients are asked a question."""
        try:
            self.left = {entry.name for entry in self.store.entries(f"{FOLDER}/")}
        except FedloomError as error:
            _log.warning("saves of local training cannot be listed: %s", error)

    def begin(
        self,
        key: ConversationKey,
        clients: Sequence[ClientData],
        states: Sequence[Mapping[str, Tensor] | None] | None,
        opening: Message,
    ) -> Saved:
        """Return the saves of a conversation; a round removes those of other questions to its clients."""
        folders = tuple(f"{FOLDER}/{client.id}/" for client in clients)
        saved = Saved(self, folders[0], lambda: self._question(key, clients, states, opening))
        old = {name for name in self.left if name.startswith(folders)}
        if key.purpose == TRAIN and old:  # an evaluation may come before a round that is resumed
            self.remove(name for name in old if not name.startswith(saved.prefix))
        return saved

    def remove(self, names: Iterable[str]) -> None:
        """Remove saves, and partial files of killed workers beside them."""
        gone = set(names)
        try:
            self.store.remove(gone)
            for folder in {name.rpartition("/")[0] for name in gone}:
                self.store.tidy(f"{folder}/")
        except FedloomError as error:
            _log.warning("saves of local training cannot be removed: %s", error)
        self.left -= gone

    def end(self, clients: Iterable[str]) -> None:
        """Remove the saves of these clients: the run is over."""
        self.look()
        folders = tuple(f"{FOLDER}/{client}/" for client in clients)
        if names := {name for name in self.left if name.startswith(folders)}:
            self.remove(names)

    def _question(
        self,
        key: ConversationKey,
        clients: Sequence[ClientData],
        states: Sequence[Mapping[str, Tensor] | None] | None,
        opening: Message,
    ) -> bytes:
        """Return the digest of a question. It ignores the attempt, on which no answer depends."""
        found = hashlib.sha256(combined_digest(self.run.hex(), key.purpose, str(key.round)))
        for client, state in zip(clients, states or [None] * len(clients), strict=True):
            x, y = client.train.x, client.train.y
            inputs = {"": x} if isinstance(x, Tensor) else dict(x)
            _add(found, client.id, inputs | ({} if y is None else {"targets": y}))
            _add(found, "no state" if state is None else "state", state or {})
        _add(found, type(opening).__name__, opening.tensors())
        return found.digest()


class Saved:
    """Saves of one conversation of a group of clients; the ``Progress`` of its local trainings.

    Nothing is read, hashed or written for trainings that are short.
    """

    def __init__(self, saves: Saves, folder: str, question: Callable[[], bytes]) -> None:
        self._saves, self._folder, self._question = saves, folder, question
        self._asked = b""
        self._heard = hashlib.sha256()  # of the messages after the opening, but for the last
        self._last: Message | None = None
        self._names: set[str] = set()
        self._begun, self._unsaved_s = time.monotonic(), 0.0

    @property
    def prefix(self) -> str:
        """Beginning of the names of the conversation's files."""
        self._asked = self._asked or self._question()
        return f"{self._folder}{self._asked.hex()[:32]}-"

    def hear(self, message: Message) -> None:
        """Note a message of a later exchange."""
        self._hash_last()
        self._last = message

    def _hash_last(self) -> None:
        if self._last is not None:
            _add(self._heard, type(self._last).__name__, self._last.tensors())
            self._last = None

    def _about(self) -> dict[str, object]:
        """Return the metadata of a file, with the whole question and everything heard since."""
        self._hash_last()
        return {"question": self._asked.hex(), "heard": self._heard.hexdigest()}

    def _name(self, training: int) -> str:
        return f"{self.prefix}{training}.safetensors"

    def begin(self, training: int) -> Mapping[str, Tensor] | None:
        """Begin a training; return its last save, if there is one of the same question."""
        left = any(name.startswith(self._folder) for name in self._saves.left)
        found = self._read(self._name(training)) if left else None
        self._begun = time.monotonic()
        return found

    def _read(self, name: str) -> Mapping[str, Tensor] | None:
        if name not in self._saves.left:
            return None
        self._names.add(name)
        try:
            tensors, about = decode_tensors(self._saves.store.read(name))
        except Absent:
            return None
        except (ValueError, FedloomError) as error:
            _log.warning("local training starts afresh: its save %s cannot be used: %s", name, error)
            return None
        if about != self._about():
            return None
        _log.info("local training continues after step %d", int(tensors["done"]))
        return tensors

    def is_due(self, *, finished: bool = False) -> bool:
        """Return whether to save the training that has begun last, after a step or after its last step."""
        passed, every = time.monotonic() - self._begun, self._saves.every_s
        if not finished:
            return passed >= IN_TRAINING * every
        due = self._unsaved_s + passed >= AT_END * every
        self._unsaved_s += 0.0 if due else passed
        return due

    def save(self, training: int, state: Mapping[str, Tensor]) -> None:
        """Save a training, replacing its earlier save. If the store fails, it continues without."""
        name = self._name(training)
        try:
            self._saves.store.write_parts(name, tensor_parts(state, self._about()))
            self._names.add(name)
        except FedloomError as error:
            _log.warning("local training cannot be saved: %s", error)
        self._begun = time.monotonic()

    def ends(self, steps_left: int) -> bool:
        """Return False: all steps are made."""
        return False

    def close(self) -> None:
        """Remove the saves: the conversation has ended."""
        if self._names:
            self._saves.remove(self._names)


def _add(digest: hashlib._Hash, name: str, tensors: Mapping[str, Tensor]) -> None:
    """Add named tensors to a digest."""
    digest.update(f"{name} {[(key, t.dtype, tuple(t.shape)) for key, t in tensors.items()]}\n".encode())
    for tensor in tensors.values():
        digest.update(cast("Buffer", tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
