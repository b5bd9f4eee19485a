"""Training examples of clients, and their mini-batches: of one client, or of a group together."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import reduce
from itertools import islice, zip_longest
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.algorithms.client_group import Batch, ClientGroup
from fedloom.algorithms.local_sgd import LocalSGD
from fedloom.algorithms.progress import LoopState
from fedloom.core.draws import drawing_with, seed_from
from fedloom.data.augment import Augmentation
from fedloom.data.federated import ClientData, Split
from fedloom.data.inputs import Inputs, first, joined, selected, take, unflattened
from fedloom.errors import DataError, ExperimentError
from fedloom.models.flat import FlatModel

PIECE = 512
"""Examples per piece when a loss covers all of a client's data."""

_NO_DRAWS = nullcontext()

_Drawn = TypeVar("_Drawn")


def batches(n: int, size: int, steps: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield index batches of ``min(size, n)`` from a fresh permutation per epoch, dropping a shorter remainder."""
    size = min(size, n)
    while steps > 0:
        order = torch.randperm(n, generator=generator)
        yield from torch.split(order[: n - n % size], size)[:steps]
        steps -= n // size


class NothingToTrainOn(DataError):
    """Train split without examples, or without the labels that local training needs."""


def train_examples(client: ClientData, *, labelled: bool = False) -> Split:
    """Return a client's train split.

    Raise NothingToTrainOn if it is empty, or has no labels although ``labelled`` is set.
    """
    if len(client.train) == 0:
        raise NothingToTrainOn(f"client {client.id}: its train split is empty; at least one example is needed")
    if labelled and client.train.y is None:
        raise NothingToTrainOn(f"client {client.id}: its train split has no labels, which local training needs")
    return client.train


def visible_examples(client: ClientData, *, labels: bool) -> tuple[Inputs, Tensor | None]:
    """Return the inputs of a client's train split, and the labels if an embedding network takes them.

    Raise DataError if the split is empty, or lacks the labels.
    """
    train = train_examples(client)
    if labels and train.y is None:
        raise DataError(
            f"client {client.id}: its train split has no labels, which the embedding network takes",
            hint="train with algorithm.embedding.labels: false to describe unlabelled clients",
        )
    return train.x, train.y if labels else None


def _lengths(batch: Batch) -> list[int]:
    """Return the number of examples of each client in a batch, without padding."""
    lengths = (batch.weight > 0).sum(-1)
    return [int(n) for n in lengths.reshape(-1)]


def _joined(splits: Sequence[Split]) -> tuple[Inputs, Tensor | None]:
    """Return the examples of all clients, and their labels, unless one has none."""
    if len(splits) == 1:
        return splits[0].x, splits[0].y
    labels = [split.y for split in splits if split.y is not None]
    return joined([split.x for split in splits]), torch.cat(labels) if len(labels) == len(splits) else None


class TrainBatches:
    """Mini-batches of the train splits of g clients.

    Raise NothingToTrainOn if a client has no examples, or lacks the labels that the model needs. Raise ExperimentError
    if there are several clients, and the model predicts by the batch.

    Parameters
    ----------
    model
        Model that trains on them, in training mode.
    members
        Positions of the g clients in the group; all of them by default.
    at_home
        True if nothing computed from them leaves the clients or affects anything that does, so that it needs no noise.
        None: True outside training rounds, False in them.
    """

    def __init__(
        self, model: FlatModel, group: ClientGroup, *, members: Sequence[int] | None = None, at_home: bool | None = None
    ) -> None:
        self.group = group
        stays_local = group.round is None if at_home is None else at_home
        self.private = None if stays_local else group.examples
        """Privacy of examples, for which steps are noisy; None if they are not."""
        self.members = tuple(range(len(group)) if members is None else members)
        self.stacked = len(self.members) > 1
        self._model = model
        self._augmenting: dict[str, torch.Generator] = {}  # of the iterators of batches, by purpose and client
        self._saved: Mapping[str, Tensor] = {}  # state that the training continues from
        if self.stacked and model.predicts_by_batch:
            raise self._padded_batches()
        splits = [train_examples(group.clients[i], labelled=model.needs_labels) for i in self.members]
        self.sizes = [len(split) for split in splits]
        self._x, self._y = _joined(splits)
        self._device = first(self._x).device

    def _padded_batches(self) -> ExperimentError:
        return ExperimentError(
            f"runtime.clients_at_once: batches of {len(self.members)} clients together are padded to one length, and "
            "the model normalizes by the batch; set it to 1",
            key="runtime.clients_at_once",
        )

    def batches(
        self,
        size: int,
        counts: Sequence[int],
        purpose: str,
        totals: Sequence[float] | None = None,
        *,
        augmented: bool = True,
        shrinking: bool = False,
        skip: int = 0,
    ) -> Iterator[Batch]:
        """Yield mini-batches of ``size`` for ``counts`` steps of each client, drawn by the generators of a purpose.

        A client with fewer examples uses them all. A client that is done repeats its last batch and is inactive. It is
        left out of ``shrinking`` batches, for which the counts must be in descending order. The weights of a batch sum
        to ``totals`` per client, by default 1, so that its loss is a mean. The run's augmentation changes the examples,
        unless the batches are not ``augmented`` because nothing trains on them. For noisy steps (:attr:`private`),
        ``size`` is the expected or fixed size of batches, each drawn from all examples, and the weights of a batch of
        that size sum to ``totals``. The first ``skip`` batches are drawn and left out (:meth:`continued`).

        Raise ExperimentError if the model normalizes by the batch, and the batches of several clients differ in length.
        """
        if self.stacked and self._model.needs_whole_batches and len({min(size, n) for n in self.sizes}) > 1:
            raise self._padded_batches()
        draw = self._batches if self.private is None else self._private_batches
        batches, augment = draw(size, counts, purpose, totals, shrinking, skip), self.group.augment
        if augment is not None and augmented:
            batches = self._augmented(augment, batches, size, counts, purpose, skip)
        yield from batches

    def _augmented(
        self, augment: Augmentation, batches: Iterator[Batch], size: int, counts: Sequence[int], purpose: str, skip: int
    ) -> Iterator[Batch]:
        """Yield batches whose examples the augmentation has changed."""
        generator_of = self.group.generator if self.private is None else self.group.hidden
        generators = [generator_of(i, f"{purpose}/augment") for i in self.members]
        for i, generator in zip(self.members, generators, strict=True):
            if (state := self._saved.get(f"augment/{purpose}/{i}")) is not None:
                generator.set_state(state)
            self._augmenting[f"augment/{purpose}/{i}"] = generator
        lengths: list[int] = []
        for t, batch in enumerate(batches, skip):
            x = batch.x if self.stacked else batch.x[None]
            if not lengths or batch.each is not None:
                lengths = [min(size, n) for n in self.sizes] if batch.each is None else _lengths(batch)
            for rows, length, count, generator in zip(x, lengths, counts, generators, strict=False):
                if t < count and length:
                    rows[:length] = augment(rows[:length], generator)
            yield replace(batch, x=x if self.stacked else x[0])

    def _batches(
        self, size: int, counts: Sequence[int], purpose: str, totals: Sequence[float] | None, shrinking: bool, skip: int
    ) -> Iterator[Batch]:
        whole = [size >= n for n in self.sizes]
        generators = [self.group.generator(i, purpose, orders=w) for i, w in zip(self.members, whole, strict=True)]
        per_client = [batches(n, size, k, g) for n, k, g in zip(self.sizes, counts, generators, strict=True)]
        each = [total / min(size, n) for total, n in zip(totals or [1] * len(counts), self.sizes, strict=True)]
        if not self.stacked:
            weight = self._weight(min(size, self.sizes[0]), each[0])
            yield from (self._take(index, weight) for index in islice(per_client[0], skip, None))
            return
        tables = [torch.stack(list(indices)) for indices in per_client]
        length = max(counts)
        table, weight = self._padded([torch.cat([t, t[-1:].expand(length - len(t), -1)]) for t in tables], each)
        remaining, k = torch.tensor(counts, device=self._device), len(counts)
        for t in range(skip, length):
            if shrinking:
                while counts[k - 1] <= t:
                    k -= 1
                yield self._take(table[:k, t], weight[:k])
            else:
                yield self._take(table[:, t], weight, None if min(counts) == length else remaining > t)

    def _private_batches(
        self, size: int, counts: Sequence[int], purpose: str, totals: Sequence[float] | None, shrinking: bool, skip: int
    ) -> Iterator[Batch]:
        """Yield batches as the privacy accountant assumes them: each drawn independently of those before it.

        They are padded to the longest of the clients, and to one example, by examples of weight 0.
        """
        expected = [min(size, n) for n in self.sizes]
        each = [total / b for total, b in zip(totals or [1] * len(counts), expected, strict=True)]
        empty = torch.arange(0)
        for t in range(skip, max(counts)):
            going = [count > t for count in counts]
            k = sum(going) if shrinking else len(counts)
            samples = [self._sample(j, expected[j], f"{purpose}/sample/{t}") if going[j] else empty for j in range(k)]
            active = None if shrinking or all(going) else torch.tensor(going, device=self._device)
            yield self._private_batch(samples, each[:k], active)

    def _private_batch(self, samples: Sequence[Tensor], each: Sequence[float], active: Tensor | None) -> Batch:
        """Return the batch of these positions of the first clients' examples, padded to the same length, at least 1."""
        length = max([1, *map(len, samples)])
        rows = [F.pad(d, (0, length - len(d))) for d in samples]
        weights = [F.pad(self._weight(len(d), w), (0, length - len(d))) for d, w in zip(samples, each, strict=True)]
        if self.stacked:
            first = torch.tensor([0, *self.sizes]).cumsum(0)[: len(rows)]
            index = (torch.stack(rows) + first[:, None]).to(self._device)
            batch = self._take(index, torch.stack(weights), active)
        else:
            batch = replace(self._take(rows[0], weights[0]), rows=rows[0])
        return replace(batch, each=torch.tensor(each, dtype=torch.float64))

    def _sample(self, j: int, expected: int, purpose: str) -> Tensor:
        """Draw positions of the j-th client's examples: each with probability ``expected`` / n, or this many."""
        assert self.private is not None
        n = self.sizes[j]
        if expected == n:
            return torch.arange(n)
        u = self.group.uniform(self.members[j], purpose, n)
        return (u < expected / n).nonzero()[:, 0] if self.private.sampling == "poisson" else u.argsort()[:expected]

    def steps(
        self,
        s: LocalSGD,
        counts: Sequence[int],
        purpose: str,
        state: LoopState | None = None,
        *,
        shrinking: bool = False,
    ) -> Iterator[tuple[Batch, ...]]:
        """Yield the mini-batches of each step, ``accumulate`` of them; their weights sum to 1 in all.

        A noisy step has one batch of ``accumulate`` times the size: its gradients are computed in pieces in any case.
        With the ``state`` of the loop they are :meth:`continued`.
        """
        n, several = s.accumulate, self.private is None and s.accumulate > 1
        size = s.batch_size if self.private is None else n * s.batch_size
        each = [n * count for count in counts] if several else counts
        totals = [1 / n] * len(counts) if several else None

        def draw(done: int) -> Iterator[tuple[Batch, ...]]:
            skip = done * n if several else done
            batches = self.batches(size, each, purpose, totals, shrinking=shrinking, skip=skip)
            return zip(*[batches] * n, strict=True) if several else ((batch,) for batch in batches)

        return draw(0) if state is None else self.continued(draw, state, counts)

    def continued(
        self, draw: Callable[[int], Iterator[_Drawn]], state: LoopState, counts: Sequence[int]
    ) -> Iterator[_Drawn]:
        """Yield the batches of the steps that a local training has not made, from ``draw(steps made)``.

        If the group has :attr:`~ClientGroup.progress`, the training continues from its last save, and is saved between
        steps, when the next batches are asked for, and at its end.
        """
        # An audit sees every step, so its trainings start from the beginning.
        progress = None if self.group.probe is not None else self.group.progress
        training, done = self.group.next_training(), 0
        self._augmenting = {}
        saved = None if progress is None else progress.begin(training)
        if saved is not None:
            done, self._saved = int(saved["done"]), saved
            state.restore(saved)
            self.group.restore_draws(saved)

        def keep(*, finished: bool) -> None:
            if progress is not None and progress.is_due(finished=finished):
                kept = {**state.read(finished=finished), **self.group.draws(), "done": torch.tensor(done)}
                progress.save(training, kept | {name: made.get_state() for name, made in self._augmenting.items()})

        for drawn in draw(done):
            self._saved = {}
            yield drawn
            del drawn  # the next batch takes as much memory
            done += 1
            keep(finished=False)
            if progress is not None and progress.ends(max(counts) - done):
                break
        keep(finished=True)
        self._saved = {}

    def everything(self) -> list[Batch]:
        """Return all train data of each client, in pieces whose weights sum to 1; not for noisy steps."""
        self._refuse_if_private("a loss over all examples")
        pieces = [torch.split(torch.arange(n), PIECE) for n in self.sizes]
        if not self.stacked:
            return [self._take(index, self._weight(len(index), 1 / self.sizes[0])) for index in pieces[0]]
        found = []
        for indices in zip_longest(*pieces, fillvalue=torch.arange(0)):
            table, weight = self._padded([index[None] for index in indices], [1 / n for n in self.sizes])
            found.append(self._take(table[:, 0], weight))
        return found

    def halves(self, batch: Batch) -> tuple[Batch, Batch, Tensor]:
        """Return a batch in two parts, each with weights that sum to 1, and the first's share, ``[g, 1]`` float64."""
        self._refuse_if_private("halves of a batch")
        is_example = batch.weight > 0
        b = is_example.sum(-1, keepdim=True)
        first = torch.arange(is_example.shape[-1], device=b.device) < (b + 1) // 2
        one, other = self._part(batch, is_example & first), self._part(batch, is_example & ~first)
        return one, other, (((b + 1) // 2).double() / b).view(-1, 1)

    def _refuse_if_private(self, subject: str) -> None:
        """Raise RuntimeError if steps are noisy: such a method should have been rejected."""
        if self.private is not None:
            raise RuntimeError(f"{subject} would disclose examples without noise (federation.privacy: of examples)")

    def _part(self, batch: Batch, rows: Tensor) -> Batch:
        weight = torch.where(rows, 1 / rows.sum(-1, keepdim=True).clamp(min=1).to(batch.weight.dtype), 0)
        if self.stacked:
            return Batch(batch.x, batch.y, weight, seed=self.seed())
        y = None if batch.y is None else batch.y[rows]
        return Batch(take(batch.x, rows), y, weight[rows], seed=self.seed())

    def _weight(self, b: int, each: float) -> Tensor:
        # Tokens and integers cannot hold 1/b.
        x = first(self._x)
        dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
        return torch.full((b,), each, dtype=dtype, device=self._device)

    def _padded(self, tables: Sequence[Tensor], each: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Return indices into all clients' examples ``[g, t, b]``, and weights ``[g, b]``, 0 for padding."""
        missing = [(0, max(table.shape[1] for table in tables) - table.shape[1]) for table in tables]
        first = torch.tensor([0, *self.sizes]).cumsum(0)[:-1]
        index = torch.stack([F.pad(t, m) for t, m in zip(tables, missing, strict=True)]) + first[:, None, None]
        weights = [F.pad(self._weight(t.shape[1], w), m) for t, w, m in zip(tables, each, missing, strict=True)]
        return index.to(self._device), torch.stack(weights)

    def _take(self, index: Tensor, weight: Tensor, active: Tensor | None = None) -> Batch:
        if self.stacked:
            flat = index.flatten()  # an index of two axes takes three times as long
            x = unflattened(selected(self._x, flat), index.shape)
            y = None if self._y is None else self._y.index_select(0, flat).view(*index.shape, *self._y.shape[1:])
            return Batch(x, y, weight, active, self.seed())
        index = index.to(self._device)  # same rows as by [index], in half the time on a CPU
        y = None if self._y is None else self._y.index_select(0, index)
        return Batch(selected(self._x, index), y, weight, seed=self.seed())

    def seed(self) -> int | None:
        """Return a new seed of draws from the clients' streams; None if the model draws nothing."""
        if not self._model.draws:
            return None
        hidden = self.private is not None
        streams = [self.group.stream(i, "draws", hidden=hidden) for i in self.members]
        return reduce(operator.xor, map(seed_from, streams))

    def drawing(self, seed: int | None) -> AbstractContextManager[None]:
        """Seed the random draws of the model within the context."""
        return _NO_DRAWS if seed is None else drawing_with(seed, torch_alone=self._model.draws == ("torch",))
