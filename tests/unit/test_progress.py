"""Local training that continues from a save after its process was killed."""

from __future__ import annotations

import itertools
import logging
import os
import random
import signal
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from every_method import METHODS, PLAIN, made
from federations import CLASSES, IMAGE, clients, problem_of
from torch import Tensor, nn

from fedloom.algorithms.fedavg import FEDAVG, FedAvgSettings, SharedModel
from fedloom.data.augment import augmentation
from fedloom.data.federated import Normalization
from fedloom.federation.client_side import ClientConfig, ClientSide
from fedloom.federation.loop import vocabulary
from fedloom.federation.progress import FOLDER, Saved, Saves
from fedloom.federation.transport import ConversationKey, Lost
from fedloom.messages import Message
from fedloom.models.module import ModuleModel
from fedloom.privacy.examples import ExamplePrivacy
from fedloom.storage import open_store

KEY = ConversationKey(1, 1, 0, "train")
FOUR = ("fedavg", "scaffold", "ditto", "pefll")
"""Methods that are killed at many places."""
UNSAVED = {"local", "pfedgp", "wga"}
"""Methods without rounds, or with steps of their own (docs/member.md)."""


class Killed(BaseException):
    """Exception that ends a run at once, like SIGKILL, but in this process."""


class Counting(Saves):
    """Saves after every step, which count the steps made in rounds, and kill the process after one of them."""

    def __init__(self, folder: Path, kill_after: int | None = None, every_s: float = 1e-9, run: bytes = b"run") -> None:
        super().__init__(open_store(folder), every_s, lambda: run)
        self.steps, self._kill_after = 0, kill_after

    def remove(self, names: Iterable[str]) -> None:
        """Remove saves, unless the process is dead: here the loop still closes its conversations."""
        if self.steps != self._kill_after:
            super().remove(names)

    def begin(self, *question: Any) -> Saved:
        """Return the saves of a conversation, which count its steps."""
        found, step, trains = super().begin(*question), Saved.is_due, question[0].purpose == "train"

        def is_due(*, finished: bool = False) -> bool:
            self.steps += trains and not finished
            if self.steps == self._kill_after:
                raise Killed
            return step(found, finished=finished)

        found.is_due = is_due  # type: ignore[method-assign]
        return found


def ends(folder: Path, name: str, saves: Saves | None, **how: Any) -> dict[str, Tensor]:
    """Run to the end, or continue a run in the folder, and return the server's state."""
    f = made(folder, name, saves=saves, checkpoint_every_s=0.0, **how)
    if (folder / "journal.jsonl").exists():
        f.loop.resume()
    f.run()
    return f.state


def check_kills(tmp: Path, name: str, places: int, rounds: int = 1, **how: Any) -> None:
    """Kill a run after random steps; the runs that continue have the same bits, and make each step once.

    Only the step whose end the process does not survive is made again, and in runs of several rounds those after the
    last checkpoint, which is written in the background.
    """
    how["rounds"] = rounds
    whole = Counting(tmp / "saves")
    expected = ends(tmp / "whole", name, whole, **how)
    plain = ends(tmp / "plain", name, None, **how)
    assert same(expected, plain)
    assert not files(tmp / "saves")
    chosen = random.Random(name)
    for place in sorted(chosen.sample(range(1, whole.steps + 1), min(places, whole.steps))):
        saves, folder = tmp / f"saves-{place}", tmp / f"killed-{place}"
        first = Counting(saves, place)
        with pytest.raises(Killed):
            ends(folder, name, first, **how)
        second = Counting(saves)
        assert same(ends(folder, name, second, **how), expected), f"killed after step {place} of {whole.steps}"
        assert rounds > 1 or first.steps + second.steps <= whole.steps + 1  # fewer, if a client is drawn twice
        assert not files(saves)


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def files(folder: Path) -> list[Path]:
    return sorted((folder / FOLDER).rglob("*.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_killed_training_continues_with_the_same_bits(tmp_path: Path, name: str) -> None:
    check_kills(tmp_path, name, 3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FOUR)
def test_killed_at_fifty_places(tmp_path: Path, name: str) -> None:
    local = {"steps": 7, "batch_size": 3, "lr": 0.05}
    more = {"personal": local} if name == "ditto" else {}
    check_kills(tmp_path, name, 50, local=local, **more)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FOUR)
def test_killed_in_later_rounds(tmp_path: Path, name: str) -> None:
    check_kills(tmp_path, name, 8, rounds=3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(set(METHODS) - set(FOUR)))
def test_every_method_continues_with_the_same_bits(tmp_path: Path, name: str) -> None:
    whole = Counting(tmp_path)
    ends(tmp_path / "steps", name, whole, rounds=1)
    assert (whole.steps == 0) == (name in UNSAVED)
    if whole.steps:
        check_kills(tmp_path, name, 6)


# --- one visit --------------------------------------------------------------------------------------------------------


def dropping() -> nn.Module:
    """Return a network with dropout and running statistics."""
    layers = nn.Flatten(), nn.Linear(256, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, CLASSES)
    return nn.Sequential(*layers)


class Visits:
    """Visits to some clients by FedAvg, each as if by a process of its own."""

    def __init__(self, model: Any = PLAIN, examples: ExamplePrivacy | None = None, **settings: Any) -> None:
        if model is dropping:
            model = ModuleModel(dropping, IMAGE, CLASSES, "pixels")
        self.data, self._examples = clients((9, 6)), examples
        local = {"steps": 6, "batch_size": 3, "lr": 0.05, **settings}
        self._half = FEDAVG.client(FedAvgSettings.model_validate({"local": local}), problem_of(model, self.data))
        self.theta = model.init(torch.Generator().manual_seed(0), torch.float64)

    def side(
        self, saves: Saves | None, at_once: int = 1, secret: bytes | None = None, augment: Any = None
    ) -> ClientSide:
        config = ClientConfig(
            7, clients_at_once=at_once, secret=secret, augment=augment, examples=self._examples, saves=saves
        )
        by_id = {client.id: client for client in self.data}
        return ClientSide(self._half, vocabulary(FEDAVG), by_id.__getitem__, lambda *_: None, config)  # type: ignore[arg-type,return-value]

    def ask(self, side: ClientSide, key: ConversationKey = KEY, message: Message | None = None) -> list[Message]:
        names = [client.id for client in self.data]
        answers = dict(side.answer(key, 0, range(len(names)), names, message or SharedModel(self.theta)))
        assert not any(isinstance(answer, Lost) for answer in answers.values())
        return [answers[row] for row in sorted(answers)]  # type: ignore[misc]


def equal(found: Sequence[Message], expected: Sequence[Message]) -> bool:
    return all(same(a.tensors(), b.tensors()) for a, b in zip(found, expected, strict=True))


HOW: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "momentum": ({"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, {}),
    "adam": ({"optimizer": "adam", "clip": 1.0}, {}),
    "accumulate": ({"accumulate": 2, "momentum": 0.9}, {}),
    "epochs": ({"steps": None, "epochs": 3, "optimizer": "adamw"}, {}),
    "together": ({"steps": None, "epochs": 3, "momentum": 0.9}, {"at_once": 2}),
    "dropout": ({"model": dropping}, {}),
    "augmented": ({}, {"augment": augmentation(["RandomHorizontalFlip"], Normalization.identity(1))}),
    "noise": ({"examples": ExamplePrivacy(1.0, 0.5)}, {}),
    "secret noise": ({"examples": ExamplePrivacy(1.0, 0.5)}, {"secret": b"s" * 32}),
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("place", [2, 9])
def test_visit_continues_with_all_that_it_draws(tmp_path: Path, how: str, place: int) -> None:
    settings, config = HOW[how]
    visits = Visits(**settings)
    whole = Counting(tmp_path / "whole")
    expected = visits.ask(visits.side(whole, **config))
    assert equal(visits.ask(visits.side(None, **config)), expected)
    place = min(place, whole.steps)
    first, second = Counting(tmp_path / "saves", place), Counting(tmp_path / "saves")
    with pytest.raises(Killed):
        visits.ask(visits.side(first, **config))
    assert equal(visits.ask(visits.side(second, **config)), expected)
    assert first.steps + second.steps == whole.steps + 1


def test_save_is_not_used_under_another_question(tmp_path: Path) -> None:
    """Another round, model, run, purpose or client's data starts afresh, and removes the save."""
    visits = Visits()

    def kill() -> None:
        with pytest.raises(Killed):
            visits.ask(visits.side(Counting(tmp_path, 4)))
        assert len(files(tmp_path)) == 1

    def afresh(key: ConversationKey = KEY, message: Message | None = None, of: Visits = visits, **how: Any) -> bool:
        kill()
        saves = Counting(tmp_path, **how)
        side = of.side(saves)
        of.ask(side, key, message)
        side.close_all()
        assert not files(tmp_path)
        return saves.steps == 12

    assert not afresh()
    assert not afresh(ConversationKey(1, 2, 0, "train"))  # another attempt asks the same question
    assert afresh(ConversationKey(2, 1, 0, "train"))
    assert afresh(message=SharedModel(visits.theta + 1))
    assert afresh(run=b"another")
    other = Visits()
    other.data[0].train.x[0] += 1
    assert afresh(of=other)


def test_damaged_save_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    visits = Visits()
    expected = visits.ask(visits.side(None))
    with pytest.raises(Killed):
        visits.ask(visits.side(Counting(tmp_path, 4)))
    (file,) = files(tmp_path)
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    saves = Counting(tmp_path)
    with caplog.at_level(logging.WARNING, "fedloom.states"):
        assert equal(visits.ask(visits.side(saves)), expected)
    assert saves.steps == 12
    assert file.name in caplog.text


def test_training_goes_on_where_nothing_can_be_saved(tmp_path: Path) -> None:
    visits = Visits()
    (tmp_path / FOLDER).write_text("a file in the place of the folder")
    assert equal(visits.ask(visits.side(Counting(tmp_path))), visits.ask(visits.side(None)))


def test_short_training_is_not_saved(tmp_path: Path) -> None:
    visits = Visits()
    saves = Counting(tmp_path, every_s=60.0)
    side = visits.side(saves)
    visits.ask(side)
    assert saves.steps == 12
    assert not files(tmp_path)


def test_saves_are_private(tmp_path: Path) -> None:
    visits = Visits()
    with pytest.raises(Killed):
        visits.ask(visits.side(Counting(tmp_path, 4)))
    assert [file.stat().st_mode & 0o077 for file in files(tmp_path)] == [0]


# --- killed processes -------------------------------------------------------------------------------------------------


STEPS = 1500


def visit_in_child(visits: Visits, folder: Path, out: Path, at: int) -> None:
    """Train in a forked process that writes whether each step is saved, and kills itself ``at`` a step."""
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        return
    with out.open("w", buffering=1) as steps:

        class Recorded(Counting):
            def begin(self, *question: Any) -> Saved:
                saved = super().begin(*question)
                due, count = saved.is_due, itertools.count(1)

                def is_due(*, finished: bool = False) -> bool:
                    is_saved = due(finished=finished)
                    steps.write(f"{is_saved:d}\n")
                    if next(count) == at:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return is_saved

                saved.is_due = is_due  # type: ignore[method-assign]
                return saved

        visits.ask(visits.side(Recorded(folder, every_s=0.02)))
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_killed_process_repeats_the_steps_since_its_last_save(tmp_path: Path, seed: int) -> None:
    visits, at = Visits(steps=STEPS), random.Random(seed).randint(STEPS // 2, STEPS - 1)
    visits.data = visits.data[:1]
    expected = visits.ask(visits.side(None))
    visit_in_child(visits, tmp_path / "saves", tmp_path / "steps", at)
    *before, _ = (tmp_path / "steps").read_text().split()
    assert len(before) == at - 1
    last = len(before) - before[::-1].index("1")
    saves = Counting(tmp_path / "saves")
    assert equal(visits.ask(visits.side(saves)), expected)
    assert saves.steps == STEPS - last
