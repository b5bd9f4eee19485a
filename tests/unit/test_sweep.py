"""The points of a sweep: its runs, their names, and errors before any run."""

from __future__ import annotations

from pathlib import Path

import pytest
from facts import mentions
from hypothesis import example, given
from hypothesis import strategies as st

from fedloom.errors import ExperimentError
from fedloom.experiment import Point, as_yaml, grid_values, load_experiment, points
from fedloom.experiment.search_space import LONGEST_NAME

FILE = Path(__file__).parents[2] / "experiments" / "vowel.yaml"


def made(seeds: str | None = None, *grid: str) -> list[Point]:
    return points(FILE, (), seeds, grid)


def test_seeds_of_a_setting_are_adjacent_in_the_product() -> None:
    found = made("1,3-4", "algorithm.local.lr=0.01,3e-2", "federation.rounds=5")
    assert [point.name for point in found] == [
        f"lr={lr},rounds=5,seed={seed}" for lr in ("0.01", "0.03") for seed in (1, 3, 4)
    ]
    assert found[4].experiment.seed == 3
    assert found[4].experiment == load_experiment(FILE, found[4].overrides)
    assert "algorithm.local.lr=0.03" in found[4].overrides


def test_labels_are_the_shortest_distinct_suffixes() -> None:
    names = [
        p.name for p in made(None, "data.partition.min_examples=10", "model.hidden=[8],[16]", "evaluation.every=7")
    ]
    assert names[0].startswith("min_examples=10,hidden=_8_,every=7-")  # brackets are replaced, a hash distinguishes
    assert len(set(names)) == 2
    several = made(None, "algorithm.local.batch_size=4", "evaluation.batch_size=64")
    assert several[0].name == "local.batch_size=4,evaluation.batch_size=64"


def test_methods_have_their_display_names() -> None:
    fedavg = "{name: fedavg, local: {epochs: 1, lr: 0.1}}"
    names = [
        p.name for p in made(None, f"algorithm={fedavg},{{name: fedavg}},{{name: pefll, embedding: {{network: mlp}}}}")
    ]
    assert [name.split("-")[0] for name in names] == ["algorithm=_fedavg_", "algorithm=_fedavg_", "algorithm=_pefll_"]
    assert len(set(names)) == 3


def test_a_name_is_bounded_and_independent_of_the_rest_of_the_grid() -> None:
    long = ",".join(str(i / 1e9) for i in range(100))
    name = made(None, f"model={{name: mlp, hidden: [{', '.join(['32'] * 60)}]}}", "federation.rounds=1,2")[0].name
    assert len(name) <= LONGEST_NAME
    assert made(None, "algorithm.local.lr=0.1,0.2")[0].name == made(None, "algorithm.local.lr=0.1")[0].name
    assert len(long) > LONGEST_NAME


@pytest.mark.parametrize(
    ("seeds", "grid", "output"),
    [
        ("", [], ["seeds", "''"]),
        ("1,x", [], ["seeds", "x"]),
        ("3-1", [], ["seeds", "3-1"]),
        ("1,1", [], ["seeds", "1,1"]),
        (None, ["lr"], ["KEY=VALUE,VALUE"]),
        (None, ["=1,2"], ["KEY=VALUE,VALUE"]),
        (None, ["seed="], ["seed", "value"]),
        (None, ["federation.rounds=1,1"], ["federation.rounds", "1 twice"]),
        (None, ["federation.rounds=1", "federation.rounds=2"], ["federation.rounds twice"]),
        ("1", ["seed=2,3"], ["seed", "seeds"]),
        (None, ["federation.rounds=[1"], ["federation.rounds", "YAML"]),
        (None, ["federation.rounds=5,-1"], ["at federation.rounds=-1: "]),
        (None, ["federation.round=5"], ["federation.round", "rounds?"]),
        (None, ["model={name: mlp},{name: lenet}"], ["at model={name: lenet}: "]),
        ("1,2", ["federation.clients_per_round=5,50"], ["at federation.clients_per_round=50, seed=1: "]),
    ],
)
def test_invalid_grids_are_rejected(seeds: str | None, grid: list[str], output: list[str], tmp_path: Path) -> None:
    text = FILE.read_text().replace("{scheme: natural}", "{scheme: natural, clients: 15}")
    (tmp_path / "e.yaml").write_text(text)
    with pytest.raises(ExperimentError) as refused:
        points(tmp_path / "e.yaml", (), seeds, grid)
    assert mentions(str(refused.value), *output)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(), st.lists))
@example("?0")
@example("0?")
@example("a,b")
def test_any_value_survives_a_grid(value: object) -> None:
    key, values = grid_values(f"name={as_yaml(value)}")
    assert key == "name"
    assert values == [as_yaml(value)]
