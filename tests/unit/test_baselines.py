"""The experiments of research/baselines.py: equally many settings for every method, all of which are valid."""

from __future__ import annotations

import baselines
import pytest

from fedloom.experiment import load_experiment


@pytest.mark.parametrize("name", sorted(baselines.REGIMES))
def test_every_method_has_equally_many_settings_and_folders(name: str) -> None:
    methods = baselines.REGIMES[name].methods.values()
    assert len({len(method.settings()) for method in methods}) == 1
    assert all(len({baselines.named(s) for s in m.settings()}) == len(m.settings()) for m in methods)


@pytest.mark.parametrize("name", sorted(baselines.REGIMES))
def test_the_first_and_last_settings_of_every_grid_are_valid_with_equal_rounds(name: str) -> None:
    regime = baselines.REGIMES[name]
    file = baselines.ROOT / "experiments" / f"{regime.file}.yaml"
    for where in (regime.search, *regime.tests.values()):
        rounds = {
            load_experiment(file, [*where, *method.overrides(setting)]).federation.rounds
            for method in regime.methods.values()
            for setting in (method.settings()[0], method.settings()[-1])
        }
        assert len(rounds - {0}) == 1  # 0: Local


def test_a_setting_sets_all_keys_of_its_axis() -> None:
    regime = baselines.REGIMES["adapt"]
    ditto = regime.methods["ditto"]
    file = baselines.ROOT / "experiments" / f"{regime.file}.yaml"
    found = load_experiment(file, [*regime.search, *ditto.overrides({"lr": 0.2, "proximity": 1})]).algorithm.settings
    assert (found.local.lr, found.personal.lr, found.proximity) == (0.2, 0.2, 1)
