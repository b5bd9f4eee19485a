"""Private answers are counted before they are requested, and stay counted when rounds are repeated."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from federations import Federation, clients, federation, setup
from published_runs import aggregator, run_folder

from fedloom.algorithms.pefll import PEFLL, PeFLLSettings
from fedloom.engine.results import _multiplier
from fedloom.errors import DataError, QuorumError, StorageError
from fedloom.federation.releases import BudgetSpent, Releases, count_releases, count_training_releases
from fedloom.federation.transport import Call, ConversationKey, Lost
from fedloom.privacy.accounting import EVERYONE, epsilon_of, gaussian_release, sampled
from fedloom.privacy.examples import Privacy
from fedloom.privacy.gaussian_mechanism import compose
from fedloom.privacy.tally import Tally
from fedloom.runs.files import RELEASES
from fedloom.runs.folder import RunFolder
from fedloom.runs.journal import Journal
from fedloom.storage import open_store

PRIVACY = {"clip": 0.7, "noise_multiplier": 2.5}
PROMISED = Privacy(("Descriptor",), 0.7, 2.5, 1e-5)
KEY = ConversationKey(3, 1, 0, "train")


def made(folder: Path, *, seed: int = 7, cohort: int = 1, **more: Any) -> Federation:
    """Return a federation with private descriptors; another seed draws other cohorts."""
    how = {"size": 4, "train": "all", "evaluate": "all", "privacy": PRIVACY}
    tree = {"local": {"steps": 1}, "embedding": {"network": "mlp"}, "descriptor": how}
    settings = PeFLLSettings.model_validate(tree)
    data = clients((4, 9, 6))
    return federation(folder, PEFLL, settings, setup(), data, seed=seed, cohort=cohort, rounds=3, private=True, **more)


def counts(folder: Path, *, repeatable: bool = False) -> dict[str, int]:
    return {
        c: sum(times.values()) for c, times in count_releases(RunFolder(folder), repeatable=repeatable).times.items()
    }


def asked_in(folder: Path) -> Counter[str]:
    """Count the calls of each client in the journal of rounds."""
    held = [held.clients for attempt in Journal(RunFolder(folder)).attempts for held in attempt.conversations]
    return Counter(name for names in held for name in names)


def test_a_round_repeated_with_another_cohort_counts_for_both(tmp_path: Path) -> None:
    """Kill the run between the count and a checkpoint."""
    f = made(tmp_path)
    f.loop._checkpoint()
    f.loop.checkpoints.wait()
    for _ in range(2):
        f.loop._train_round()
    first = asked_in(tmp_path)
    again = made(tmp_path, seed=1)
    again.loop.resume()
    assert asked_in(tmp_path) == Counter()
    for _ in range(2):
        again.loop._train_round()
    second = asked_in(tmp_path)
    assert first != second
    assert counts(tmp_path) == first + second


def test_a_client_asked_before_a_kill_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill it before the journal has a line of the attempt; the count is on disk first."""
    f = made(tmp_path)

    def killed(call: Call) -> None:
        assert counts(tmp_path) == dict.fromkeys(call.clients, 1)
        raise KeyboardInterrupt

    monkeypatch.setattr(f.loop.transport, "exchange", killed)
    with pytest.raises(KeyboardInterrupt):
        f.loop._train_round()
    assert not (tmp_path / "journal.jsonl").exists()
    assert sum(counts(tmp_path).values()) == 1
    again = made(tmp_path)
    again.loop._train_round()
    assert sum(counts(tmp_path).values()) == 2


def test_a_failed_attempt_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    f = made(tmp_path, cohort=2)
    monkeypatch.setattr(f.loop.transport, "exchange", lambda call: [Lost("silent")] * len(call.rows))
    with pytest.raises(QuorumError):
        f.loop._train_round()
    assert counts(tmp_path) == dict(asked_in(tmp_path))
    assert sum(counts(tmp_path).values()) == 2


def test_no_client_is_asked_if_it_cannot_be_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    f = made(tmp_path)
    asked: list[Call] = []
    monkeypatch.setattr(f.loop.transport, "exchange", asked.append)
    monkeypatch.setattr(RunFolder, "sync", lambda *_: (_ for _ in ()).throw(StorageError("no room")))
    with pytest.raises(StorageError, match="no room"):
        f.loop._train_round()
    assert asked == []


def test_a_release_repeated_by_a_simulation_counts_once(tmp_path: Path) -> None:
    made(tmp_path / "whole", checkpoint_every_s=0.0).run()
    f = made(tmp_path / "run")
    f.loop._checkpoint()
    f.loop.checkpoints.wait()
    f.loop._train_round()
    again = made(tmp_path / "run", checkpoint_every_s=0.0)
    again.loop.resume()
    again.run()
    assert counts(tmp_path / "run", repeatable=True) == counts(tmp_path / "whole", repeatable=True)
    assert sum(counts(tmp_path / "run").values()) > sum(counts(tmp_path / "whole").values())


def test_evaluations_and_only_private_exchanges_are_counted(tmp_path: Path) -> None:
    f = made(tmp_path, cohort=3)
    f.run()
    evaluations = len(RunFolder(tmp_path).lines("metrics.jsonl"))
    assert evaluations == 2
    assert counts(tmp_path) == dict.fromkeys(f.loop.manifest.roster, 3 + evaluations)


def test_returning_to_an_earlier_checkpoint_keeps_the_count(tmp_path: Path) -> None:
    made(tmp_path, checkpoint_every_s=0.0).run()
    before = counts(tmp_path)
    last = max((tmp_path / "checkpoints").iterdir())
    last.unlink()
    again = made(tmp_path, checkpoint_every_s=0.0)
    again.loop.resume()
    assert counts(tmp_path) == before
    again.run()
    assert sum(counts(tmp_path).values()) > sum(before.values())


def test_missing_lines_are_detected(tmp_path: Path) -> None:
    made(tmp_path, checkpoint_every_s=0.0).run()
    path = tmp_path / RELEASES
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    with pytest.raises(DataError, match=RELEASES):
        made(tmp_path).loop.resume()


def test_a_truncated_line_released_nothing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    Releases(folder, PROMISED).tell(KEY, 0, ["a", "b", "a"])
    whole = (tmp_path / RELEASES).read_bytes()
    (tmp_path / RELEASES).write_bytes(whole + whole[:30])
    Releases(folder, PROMISED).tell(KEY, 0, ["a"])
    assert counts(tmp_path) == {"a": 3, "b": 1}
    assert counts(tmp_path, repeatable=True) == {"a": 2, "b": 1}


def test_each_answer_counts_with_the_noise_it_had(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for z in (2.5, 1.0):
        Releases(folder, Privacy(("Descriptor",), 0.7, z, 1e-5)).tell(KEY, 0, ["a", "a"])
    found = count_releases(folder, repeatable=False)
    assert found.is_known
    assert found.times == {"a": {2.5: 2, 1.0: 2}}
    assert _multiplier(found.times["a"]) == pytest.approx(compose([2.5, 2.5, 1.0, 1.0]))
    assert _multiplier({2.5: 4}) == 2.5 / 2
    assert _multiplier({2.5: 1, 0.0: 1}) == 0.0


@pytest.mark.parametrize("promises", [(None, PROMISED), (PROMISED, None, PROMISED)])
def test_rounds_without_noise_are_remembered(tmp_path: Path, promises: tuple[Privacy | None, ...]) -> None:
    """An open federation may change its settings on resume."""
    folder = RunFolder(tmp_path)
    for i, promised in enumerate(promises):
        if promised is not None or folder.has(RELEASES):
            releases = Releases(folder, promised)
            if promised is not None:
                releases.tell(KEY, 0, ["a"])
        folder.append("journal.jsonl", {"round": i + 1})
    assert not count_releases(folder, repeatable=False).is_known


SUM = sampled("poisson", 900, 45, 2.0)


def test_noisy_sums_are_counted_and_bounded(tmp_path: Path) -> None:
    """Beside private answers, over several aggregators, whether the cohort answered or not."""
    folder = RunFolder(tmp_path)
    limit = epsilon_of({SUM: 3}, 1e-5)
    first = Releases(folder, PROMISED, training=Tally(1e-5, limit))
    first.tell(KEY, 0, ["a"])
    first.tell_sum(KEY, SUM, ("a", "b", "c"))
    first.tell_sum(KEY, SUM, ("a", "b", "c"))
    second = Releases(folder, PROMISED, training=Tally(1e-5, limit))
    second.tell_sum(KEY, SUM, ("a", "b", "c"))
    before = (tmp_path / RELEASES).read_bytes()
    with pytest.raises(BudgetSpent):
        second.tell_sum(KEY, SUM, ("a", "b", "c"))
    assert (tmp_path / RELEASES).read_bytes() == before
    found = count_training_releases(folder)
    assert (found.counts, found.is_known) == ({EVERYONE: Counter({SUM: 3})}, True)
    assert count_training_releases(folder, repeatable=True).counts == {EVERYONE: Counter({SUM: 1})}
    assert counts(tmp_path) == {"a": 1}
    assert second.training.epsilon == limit


def test_noisy_steps_are_counted_per_client(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    a, b = sampled("poisson", 500, 32, 4.0), sampled("poisson", 90, 32, 4.0)
    releases = Releases(folder, None, training=Tally(1e-5))
    releases.tell_steps(KEY, 0, {"a": {a: 15}, "b": {b: 3}})
    releases.tell_steps(replace(KEY, round=4), 0, {"a": {a: 15}})
    found = count_training_releases(folder)
    assert found.counts == {"a": Counter({a: 30}), "b": Counter({b: 3})}
    assert count_releases(folder, repeatable=False).times == {}
    with pytest.raises(RuntimeError, match=r"federation\.privacy"):
        Releases(folder, PROMISED).tell_sum(KEY, SUM, ("a", "b", "c"))


def test_private_answers_compose_with_noisy_steps_on_the_same_examples(tmp_path: Path) -> None:
    """A client's descriptors and its training have one ε over several aggregators, and none for sums over clients."""
    folder = RunFolder(tmp_path)
    a = sampled("poisson", 500, 32, 4.0)
    releases = Releases(folder, PROMISED, training=Tally(1e-5, unit="examples"))
    releases.tell_steps(KEY, 0, {"a": {a: 15}})
    releases.tell(KEY, 1, ["a", "b"])
    both = Counter({a: 15, gaussian_release(2.5): 1})
    assert releases.training.most() == both
    again = Releases(folder, PROMISED, training=Tally(1e-5, unit="examples")).training
    assert again.counts == {"a": both, "b": Counter({gaussian_release(2.5): 1})}
    assert again.epsilon == epsilon_of(both, 1e-5) > epsilon_of({a: 15}, 1e-5)
    of_clients = Releases(folder, PROMISED, training=Tally(1e-5)).training
    assert of_clients.counts == {"a": Counter({a: 15})}


def test_steps_repeated_by_a_restarted_worker_count_beyond_the_budget(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    a = sampled("poisson", 500, 32, 4.0)
    releases = Releases(folder, None, training=Tally(1e-5, epsilon_of({a: 15}, 1e-5), "examples"))
    releases.tell_steps(KEY, 0, {"a": {a: 15}})
    with pytest.raises(BudgetSpent):
        releases.tell_steps(replace(KEY, round=4), 0, {"a": {a: 15}})
    releases.tell_steps(KEY, 0, {"a": {a: 15}}, again=True)
    assert count_training_releases(folder).counts == {"a": Counter({a: 30})}


@pytest.mark.parametrize("private", [(False, True), (True, False, True)])
def test_training_rounds_without_noise_are_remembered(tmp_path: Path, private: tuple[bool, ...]) -> None:
    folder = RunFolder(tmp_path)
    for i, is_private in enumerate(private):
        if is_private or folder.has(RELEASES):
            releases = Releases(folder, None, training=Tally(1e-5, 100.0) if is_private else None)
            if is_private and i == 0:
                releases.tell_sum(KEY, SUM, ("a", "b", "c"))
        folder.append("journal.jsonl", {"round": i + 1})
    assert not count_training_releases(folder).is_known
    assert releases.training is not None
    with pytest.raises(BudgetSpent):
        releases.tell_sum(KEY, SUM, ("a", "b", "c"))


def test_training_without_private_answers_gives_no_guarantee(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    Releases(folder, None, training=Tally(1e-5)).tell_sum(KEY, SUM, ("a", "b", "c"))
    folder.append("journal.jsonl", {"round": 1})
    Releases(folder, PROMISED, training=Tally(1e-5)).tell(KEY, 0, ["a"])
    assert not count_releases(folder, repeatable=False).is_known
    assert count_training_releases(folder).is_known


@pytest.mark.parametrize("reported", [{"units": ["a"]}, {"units": ["a"], "rate": 0.0, "times": 1}, 3])
def test_foreign_lines_are_rejected(tmp_path: Path, reported: Any) -> None:
    folder = RunFolder(tmp_path)
    Releases(folder, None, training=Tally(1e-5))
    folder.append(RELEASES, {"about": "training", "purpose": "train", "releases": [reported]})
    with pytest.raises(DataError, match=RELEASES):
        count_training_releases(folder)


def test_another_aggregator_counts_unpublished_releases(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    one = RunFolder(tmp_path / "a")
    one.make()
    a = aggregator(tmp_path / "a", store, "a")
    releases = Releases(one, PROMISED, a.keep_release)
    releases.tell(KEY, 0, ["c0"])
    run_folder(tmp_path / "a", 4)
    assert len(list(store.entries("releases/"))) == 2  # the start of the count is recorded, too
    a.publish(4)
    assert list(store.entries("releases/")) == []
    releases.tell(KEY, 0, ["c0", "c1"])  # then the machine is lost
    b = aggregator(tmp_path / "b", store, "b")
    assert b.restore()
    assert counts(tmp_path / "b") == {"c0": 2, "c1": 1}
    b.gather_releases()
    assert counts(tmp_path / "b") == {"c0": 2, "c1": 1}
    releases.tell(KEY, 0, ["c2"])  # by an aggregator that has not detected its replacement yet
    b.publish(5)
    b.gather_releases()
    assert counts(tmp_path / "b") == {"c0": 2, "c1": 1, "c2": 1}
    b.publish(6)
    assert list(store.entries("releases/")) == []
    assert aggregator(tmp_path / "c", store, "c").restore()
    assert counts(tmp_path / "c") == {"c0": 2, "c1": 1, "c2": 1}
