"""Properties of every method: held-out examples affect no model; without own steps a new client has the shared one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from every_method import METHODS, SIZES, ours, run
from facts import tells
from federations import CLASSES, clients, held_out_elsewhere, made_by

from fedloom.algorithms.base import find_algorithm
from fedloom.data.federated import ClientData, Split
from fedloom.errors import ExperimentError
from fedloom.experiment import load_experiment
from fedloom.models.networks import LSTM

OWN = """\
name: own
data: {own: {kind: features, input_shape: [5], classes: [a, b, c]}}
model: {name: mlp, hidden: [8]}
algorithm: {name: fedavg}
federation: {rounds: 2, clients_per_round: 2}
"""


NORMALIZED = (
    OWN.replace("features, input_shape: [5]", "pixels, input_shape: [1, 6, 6]")
    .replace("mlp, hidden: [8]", "vgg, channels: [3], norm: batch")
)  # fmt: skip
"""Own data, and a model with normalization layers."""


def test_every_method_is_covered() -> None:
    assert ours() == {name.split()[0] for name in METHODS}


def test_methods_whose_server_needs_each_update() -> None:
    """All others need only sums with their default settings; ``local`` has no rounds."""
    each = {name for name in ours() if find_algorithm(name).sums_suffice(find_algorithm(name).settings()) is not None}
    assert each == {"afl", "drfa", "heurfedamp", "local", "pefll", "pfedhn", "pfnm", "tr-maml", "wga"}


ROSTER = {"afl", "drfa", "feddyn", "heurfedamp", "pefll", "pfedhn", "pfnm", "scaffold", "tr-maml", "wga"}


@pytest.mark.parametrize("name", sorted(ours()))
def test_methods_that_need_a_fixed_roster_are_rejected_in_open_federations(tmp_path: Path, name: str) -> None:
    rounds = 2 if find_algorithm(name).trains else 0
    text = NORMALIZED if name == "fedbn" else OWN
    keys = f"{name}, local_parameters: ['*bias']" if name == "fedsa-lora" else name
    (tmp_path / "own.yaml").write_text(text.replace("fedavg", keys).replace("rounds: 2", f"rounds: {rounds}"))
    if name not in ROSTER:
        load_experiment(tmp_path / "own.yaml")
        return
    with pytest.raises(ExperimentError) as error:
        load_experiment(tmp_path / "own.yaml")
    key = "descriptor.size" if name == "pefll" else "name"
    assert tells(str(error.value), f"line 4, algorithm.{key}: ", "with data.own")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", METHODS)
def test_held_out_data_change_no_model(tmp_path: Path, name: str) -> None:
    """With other validation and test examples all models of a run are equal to the bit, also for an unseen client."""
    data = clients(SIZES)
    found, other = (
        made_by(run(tmp_path / str(i), name, data=those, unseen=["c2"]))
        for i, those in enumerate((data, held_out_elsewhere(data)))
    )
    assert found.keys() == other.keys()
    assert any(key.startswith("c2.personal.") for key in found)
    assert all(torch.equal(tensor, other[key]) for key, tensor in found.items())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", METHODS)
def test_clients_train_together_as_one_by_one(tmp_path: Path, name: str, recwarn: pytest.WarningsRecorder) -> None:
    """Clients of unequal sizes, of which some have a state in the second round and at the end, and others none.

    Torch does not warn that it runs an operation of stacked clients one by one.
    """
    data = clients((4, 9, 6, 5))
    together, alone = (
        made_by(run(tmp_path / str(n), name, data=data, unseen=["c3"], rounds=2, cohort=2, at_once=n)) for n in (3, 1)
    )
    assert together.keys() == alone.keys()
    for key, tensor in together.items():
        torch.testing.assert_close(tensor, alone[key], atol=1e-9, rtol=0, msg=lambda m, key=key: f"{key}: {m}")
    assert [str(warning.message) for warning in recwarn if "batching rule" in str(warning.message)] == []


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", sorted(set(METHODS) - {"pfnm", "fedbn"}))  # MLPs alone; normalization layers
def test_byte_tokens_train_as_equal_integers(tmp_path: Path, name: str) -> None:
    """No tensor is computed in the type of the inputs of an LSTM."""

    def read(dtype: torch.dtype) -> list[ClientData]:
        found = []
        for i, c in enumerate(clients(SIZES)):
            random = torch.Generator().manual_seed(i)
            splits = {
                which: Split(torch.randint(CLASSES, (len(split), 4), generator=random).to(dtype), split.y)
                for which, split in (("train", c.train), ("validation", c.validation), ("test", c.test))
            }
            found.append(replace(c, **splits))
        return found

    model = LSTM(CLASSES, embedding=2, hidden=4, layers=1)
    tokens, numbers = (
        made_by(run(tmp_path / str(dtype), name, model, read(dtype), unseen=["c2"]))
        for dtype in (torch.uint8, torch.float64)
    )
    assert tokens.keys() == numbers.keys()
    for key, tensor in tokens.items():
        torch.testing.assert_close(tensor, numbers[key], atol=1e-6, rtol=0)


NO_STEPS = {
    "apfl", "ditto", "fedavg", "fedala", "fedbabu", "feddyn", "fedadam", "fedavgm", "fedyogi", "fedprox", "moon",
    "per-fedavg", "scaffold", "q-fedavg", "drfa", "fgdro-kl", "tr-maml", "pfnm", "afl", "pfedbayes",
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", sorted(NO_STEPS))
def test_without_own_steps_a_new_client_gets_the_shared_model_to_the_bit(tmp_path: Path, name: str) -> None:
    fields = find_algorithm(name).settings.model_fields
    (key,) = {"personalize_steps", "personalize_epochs"} & set(fields)
    f = run(tmp_path, name, unseen=["c2"], **{key: 0})
    named = next(named for (_, client), named in f.predictors.items() if client == "c2")
    personal, shared = (named[which].tensors() for which in ("personal", "global"))
    assert personal.keys() == shared.keys()
    assert all(torch.equal(tensor, shared[part]) for part, tensor in personal.items())
