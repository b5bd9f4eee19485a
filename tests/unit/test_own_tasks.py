"""Programs behind docs/results/own-tasks.md: the problems' data, equal grids, and folding."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import own_tasks
import pages_own_tasks
import pytest
import torch
from own_tasks import GRIDS, PROBLEMS
from task_problems import Clients


@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_data_of_a_seed_never_change(problem: str) -> None:
    draw = PROBLEMS[problem].draw
    first, again, other = draw(1), draw(1), draw(2)
    inputs = [np.concatenate([np.ravel(x) for x in _inputs(clients)]) for clients in (first, again, other)]
    assert np.array_equal(inputs[0], inputs[1])
    assert not np.array_equal(inputs[0], inputs[2])
    assert all(np.array_equal(first[name][1], again[name][1]) for name in first)


def _inputs(clients: Clients) -> list[np.ndarray]:
    each = [x for x, _ in clients.values()]
    return [part for x in each for part in (x.values() if isinstance(x, dict) else [x])]


@pytest.mark.parametrize("problem", [name for name, about in PROBLEMS.items() if callable(about.model)])
def test_the_module_of_a_problem_accepts_its_inputs(problem: str) -> None:
    make = PROBLEMS[problem].model
    assert callable(make)
    x, y = PROBLEMS[problem].draw(1)["c00"]
    module = make()
    if isinstance(x, dict):
        outputs = module(**{name: torch.as_tensor(part) for name, part in x.items()})
    else:
        outputs = module(torch.as_tensor(x).float())
    sizes = {"regression": (1,), "signals": (4,), "shapes": (3, 16, 16), "categories": (3,)}
    assert outputs.shape == (len(y), *sizes[problem])


@pytest.mark.parametrize("problem", PROBLEMS)
def test_all_methods_of_a_problem_have_equally_many_settings(problem: str) -> None:
    numbers = {method: len(list(own_tasks.settings(problem, method))) for method in GRIDS[problem]}
    assert len(set(numbers.values())) == 1


@pytest.mark.parametrize(("rate", "chosen"), [(0.003, True), (0.01, False)])
def test_folding_marks_the_chosen_setting_and_keeps_a_line_per_seed(tmp_path: Path, rate: float, chosen: bool) -> None:
    searched = [{"setting": {"lr": 0.003}, "validation": 0.75}, {"setting": {"lr": 0.01}, "validation": None}]
    tests = {seed: dict.fromkeys(pages_own_tasks.COLUMNS[1:], 0.5 + seed / 100) for seed in own_tasks.TESTS}
    found = {"headline": "accuracy", "chosen": {"lr": 0.003}, "search": searched, "tests": tests}
    (tmp_path / "cameras").mkdir()
    about = dict.fromkeys(GRIDS["cameras"], found)
    (tmp_path / "cameras" / own_tasks.FOUND).write_text(json.dumps(about))
    runs = pages_own_tasks.folded(tmp_path)
    assert [line["seen_mean"] for line in runs["cameras/test/local"]] == pytest.approx([52, 53, 54])
    [line] = runs[f"cameras/search/local/lr={rate:g}"]
    assert line.values == ({"validation": 75} if chosen else {})
    assert "**0.003: 75.0**" in pages_own_tasks.of_search(runs, "cameras")
