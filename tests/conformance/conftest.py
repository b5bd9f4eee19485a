"""Methods and settings of the conformance kit (docs/federation.md, "The conformance kit")."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_data
import torch
import yaml
from conformance_kit import TINY, Federation, federation

from fedloom.algorithms.base import available, find_algorithm
from fedloom.data import datasets

PROBE = "probe"
"""The method of conformance_probe.py, which is registered for the tests that ask for it."""

SUMMED = {"drfa": {"replace": False, "gamma": 0.0}}
"""Settings with which sums over the cohort suffice for a method, where those of ``TINY`` need each client's answer."""

BY_NAME = ("fedavg", "scaffold", "fedrep", "pfedbayes", "comfedl")
"""Methods that go through every fault of secure sums, one for each kind of answer; `make test` takes these alone."""

IN_TURN = {
    "method": ("test_clients_lost_in_an_evaluation_are_left_out", "test_an_evaluation_without_replies"),
    "trained": (
        "test_losing_any_client_at_any_exchange_and_replaying_it",
        "test_client_steps_count_the_clients_that_made_them",
        "test_a_state_that_would_not_be_finite_is_discarded",
        "test_an_attempt_that_loses_every_client_changes_nothing_and_is_retried",
    ),
    "summed": (
        "test_losing_any_client_at_any_exchange_and_replaying_it",
        "test_too_few_clients_fail_the_attempt_and_another_cohort_completes_the_round",
        "test_resuming_after_a_kill_at_any_exchange",
        "test_grpc_gives_the_bits_of_one_process",
        "test_a_worker_killed_at_a_step_is_restarted",
        "test_cutting_a_workers_connection_at_every_step_loses_nothing",
        "test_an_aggregator_killed_during_a_secure_sum_is_resumed",
        "test_the_sum_includes_a_worker_absent_at_its_end",
        "test_losing_a_client_of_a_batch_keeps_the_others",
        "test_a_round_that_fails_after_the_confirmations_is_left_out",
        "test_placement_of_clients_does_not_change_results",
    ),
}
"""Tests of faults in code that all methods share, by fixture. They are distributed over the methods, one to each;
those in ``ALL_FAULTS`` run all."""

FIRST_TIER = {
    "test_too_few_clients_fail_the_attempt_and_another_cohort_completes_the_round": "scaffold",
    "test_losing_a_client_of_a_batch_keeps_the_others": "comfedl",
    "test_placement_of_clients_does_not_change_results": "fedavg",
    "test_grpc_gives_the_bits_of_one_process": "pfedbayes",
    "test_a_round_that_fails_after_the_confirmations_is_left_out": "comfedl",
    "test_cutting_a_workers_connection_at_every_step_loses_nothing": "fedrep",
    "test_the_sum_includes_a_worker_absent_at_its_end": "fedavg",
    "test_secure_sums_equal_plain_sums": "pfedbayes",
}
"""Method with which `make test` runs each slow test of secure sums."""

SECOND_TIER = {
    "test_losing_any_client_at_any_exchange_and_replaying_it",
    "test_a_worker_killed_at_a_step_is_restarted",
    "test_an_aggregator_killed_during_a_secure_sum_is_resumed",
    "test_resuming_after_a_kill_at_any_exchange",
}
"""Tests that only `make test-all` runs: each kills or loses at every exchange."""

THOROUGH = ("pefll", "fedrep")
"""Three exchanges and a server that puts work off; one exchange and clients that keep a state."""

WHOLE = ("fedrep", PROBE, "wga")
"""Methods that `make test` takes through the whole kit: clients that keep states; one that was written for the kit,
with two conversations in a round; gradients in place of models.

The others share these parts; of them `make test` runs what is in ``OWN``, and `make test-all` everything.
"""

ALL_FAULTS = {"method": (*WHOLE, "pefll"), "trained": (*WHOLE, "pefll"), "summed": BY_NAME}
"""Methods that run every test in ``IN_TURN``."""

OWN = (
    "test_clients_not_seen_in_training_get_predictors",
    "test_evaluation_changes_no_state_and_is_repeatable",
    "test_results_equal_the_recorded_bits",
)
"""Tests that depend most on what a method's own file does."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--algorithm", help="run the conformance kit for this method alone")
    parser.addoption("--settings", help="the method's settings on the tiny federation, as YAML")
    parser.addoption("--keep-bits", action="store_true", help="write kept_bits.json anew (test_kept_bits.py)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize ``method`` by all registered algorithms, some with two settings, ``trained`` by those with rounds.

    Of these, ``thorough`` are the methods that are killed at every exchange, and ``sampled`` the others: killing and
    resuming concern the loop, the journal and the clients' states, which all methods share. A method selected by
    ``--algorithm`` is thorough. ``summed`` are the methods whose servers need only sums, for secure aggregation.
    """
    chosen = metafunc.config.getoption("--algorithm", default=None)
    methods = available() if chosen is None else (find_algorithm(chosen).name,)
    names = [*methods, *(name for name in TINY if ":" in name and _method(name) in methods)]
    trained = [name for name in names if find_algorithm(_method(name)).trains]
    thorough = [PROBE, *THOROUGH] if chosen is None else trained
    sampled = [name for name in trained if name not in thorough]
    summed = [name for name in trained if find_algorithm(_method(name)).sums_suffice(_settings(name)) is None]
    every = {"method": names, "trained": trained, "thorough": thorough, "sampled": sampled, "summed": summed}
    own = chosen is not None or metafunc.function.__name__ in OWN

    some = () if metafunc.function.__name__ in SECOND_TIER else WHOLE
    if "summed" in metafunc.fixturenames:
        name = metafunc.function.__name__
        some = () if name in SECOND_TIER else (FIRST_TIER[name],) if name in FIRST_TIER else BY_NAME

    def param(name: str) -> Any:
        first_tier = own or name in some
        shares_runs = pytest.mark.group(f"conformance {name}")
        return pytest.param(name, marks=[shares_runs, *([] if first_tier else [pytest.mark.exhaustive])])

    for fixture, values in every.items():
        if fixture in metafunc.fixturenames:
            tests = IN_TURN.get(fixture, ())
            if chosen is None and metafunc.function.__name__ in tests:
                turn, whole = tests.index(metafunc.function.__name__), ALL_FAULTS[fixture]
                values = [name for i, name in enumerate(values) if name in whole or i % len(tests) == turn]
            metafunc.parametrize(fixture, [param(name) for name in values])


def _method(name: str) -> str:
    return name.partition(":")[0]


def _settings(name: str) -> Any:
    """Return the settings of a method for secure sums."""
    return find_algorithm(_method(name)).settings(**{**TINY.get(name, {}), **SUMMED.get(name, {})})


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def every_client(summed: str, pytestconfig: pytest.Config) -> bool:
    """Return True if each client is lost in turn: for methods in ``BY_NAME``, and for one selected by ``--algorithm``.

    For other methods one client is lost at each exchange: a sum handles a lost client equally for every method.
    """
    return summed in BY_NAME or pytestconfig.getoption("--algorithm", default=None) is not None


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the tiny data and the recorded runs of this session."""
    place = tmp_path_factory.mktemp("place")
    tiny_data.fetch(place / "given", place / "root")
    return place


@pytest.fixture
def tiny(request: pytest.FixtureRequest, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Federation:
    """Return the method of this test on eight clients of very different sizes, two of them unseen."""
    kinds = ("method", "trained", "thorough", "sampled", "summed")
    which = next(name for name in kinds if name in request.fixturenames)
    name = request.getfixturevalue(which)
    if name == PROBE:
        about = tmp_path / "site" / "fedloom_probe-0.1.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: fedloom-probe\nVersion: 0.1\n")
        (about / "entry_points.txt").write_text("[fedloom.algorithms]\nprobe = conformance_probe:PROBE\n")
        monkeypatch.syspath_prepend(about.parent)
    monkeypatch.setitem(datasets.DATASETS, "tiny", tiny_data.source(tiny_data.files()))
    given = request.config.getoption("--settings", default=None)
    settings = yaml.safe_load(given) if given is not None else TINY.get(name, {})
    if which == "summed":
        settings = {**settings, **SUMMED.get(name, {})}
    return federation(tmp_path, place, _method(name), settings)
