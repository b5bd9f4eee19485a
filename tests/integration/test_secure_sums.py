"""Secure sums between real members: signed keys, members that join and leave, kills, and refusals of a member."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from facts import mentions
from run_processes import ended, fedloom, rounds, until
from test_open_federation import EXPERIMENT, GIVEN, OWN, Federation, equal_to_the_replay, kill, members

from fedloom.data.moments import pooled_normalization
from fedloom.data.own import OwnClients
from fedloom.runs.folder import RunFolder
from fedloom.sums.revealed_sums import RECORD

__all__ = ["members"]

SECURE = (
    EXPERIMENT.replace("clients_per_round: 3, min_clients: 2", "clients_per_round: 5, min_clients: 4")
    .replace("input_shape: [9],", f"input_shape: [9], normalization: {GIVEN},")
    .replace("checkpoint_every_s: 0}", "checkpoint_every_s: 0, secure_aggregation: {signatures: keys, examples: 1000}}")
    .replace("cohort: 2", "cohort: 5")
)


MEASURED = SECURE.replace(f" normalization: {GIVEN},", "").replace("rounds: null", "rounds: 3")

LARGE = SECURE.replace("clients_per_round: 5", "clients_per_round: 25")
"""A cohort with as many neighbours as members insist on."""


@pytest.fixture
def federation(tmp_path: Path, members: Path) -> Iterator[Federation]:
    with contextlib.ExitStack() as processes:
        yield Federation(tmp_path, members, processes, SECURE)


UNSIGNED = SECURE.replace("signatures: keys", "signatures: none")


@pytest.fixture
def unsigned(tmp_path: Path, members: Path) -> Iterator[Federation]:
    with contextlib.ExitStack() as processes:
        yield Federation(tmp_path, members, processes, UNSIGNED)


def credentials(folder: Path, *speakers: int) -> dict[int, Path]:
    """Create a signature key for each member, and give the register to all."""
    lines, folders = [], {}
    for i in speakers:
        folders[i] = folder / f"credentials-{i}"
        folders[i].mkdir()
        made = fedloom("token", "signing-key", f"speaker-{i}", "--out", folders[i] / "signing.key")
        lines += [line for line in made.splitlines() if line.startswith("speaker-")]
    for made_folder in folders.values():
        (made_folder / "signing-keys.txt").write_text("\n".join(lines) + "\n")
    return folders


@pytest.mark.slow
def test_members_verify_each_other_by_a_key_register(federation: Federation, tmp_path: Path) -> None:
    """One member is killed during the run, which continues; its journal's replay gives the same bits."""
    folders = credentials(tmp_path, *range(5))
    aggregator = federation.aggregator("--set", "federation.rounds=30")
    workers = [federation.worker(i, name=f"w{i}", more=("--credentials", folders[i], "--only-sums")) for i in range(5)]
    until(lambda: rounds(federation.run) >= 5, "five rounds")
    kill(workers[4])
    ended(aggregator, 0)
    assert len(federation.lines()) >= 30
    equal_to_the_replay(federation, tmp_path / "again")


@pytest.mark.slow
def test_the_run_survives_repeated_kills_of_the_aggregator(unsigned: Federation, tmp_path: Path) -> None:
    """Attempts during a kill are lost, members stay; results equal those of the journal's replay.

    The aggregator waits for all members: fewer would not help to reveal the sum of a round again.
    """
    everyone = ("--set", "federation.min_clients=5")
    aggregator = unsigned.aggregator(*everyone)
    workers = [unsigned.worker(i, name=f"w{i}") for i in range(5)]
    for _ in range(2):
        until(lambda: unsigned.lines(), "the first evaluation")
        unsigned.more_rounds(2)
        kill(aggregator)
        aggregator = unsigned.aggregator("--resume", *everyone)
    unsigned.more_rounds(1)
    aggregator.send_signal(signal.SIGTERM)
    ended(aggregator, 130)
    last = rounds(unsigned.run) + 5
    ended(unsigned.aggregator("--resume", *everyone, "--set", f"federation.rounds={last}"), 0)
    for worker in workers:
        ended(worker, 0)
    equal_to_the_replay(unsigned, tmp_path / "again")


@pytest.mark.parametrize(
    ("experiment", "facts"),
    [
        (EXPERIMENT, ()),
        (SECURE.replace("signatures: keys", "signatures: none"), ()),
        (LARGE.replace("signatures: keys", "signatures: keys, neighbours: 4"), ("neighbours", 4, 20)),
        (LARGE.replace("signatures: keys", "signatures: keys, neighbours: 20, threshold: 11"), ("threshold", 11, 14)),
    ],
)
def test_a_member_with_only_sums_rejects_other_experiments(
    tmp_path: Path, members: Path, experiment: str, facts: tuple[object, ...]
) -> None:
    with contextlib.ExitStack() as processes:
        federation = Federation(tmp_path, members, processes, experiment)
        federation.aggregator()
        worker = federation.worker(0, name="w0", more=("--only-sums",))
        assert mentions(ended(worker, 4), "--only-sums", *facts)


def test_a_member_without_a_signature_key_names_the_required_files(federation: Federation) -> None:
    federation.aggregator()
    assert mentions(ended(federation.worker(0, name="w0"), 2), "signing.key", "signing-keys.txt", "--credentials")


@pytest.mark.slow
def test_measured_normalization_covers_all_examples_and_survives_restarts(tmp_path: Path, members: Path) -> None:
    """Members with only sums reveal their inputs' sums over the same clients, and not over one client less."""
    folders = credentials(tmp_path, *range(5))
    with contextlib.ExitStack() as processes:

        def serve(run: str, speakers: range) -> tuple[Federation, subprocess.Popen[str], list[subprocess.Popen[str]]]:
            (tmp_path / run).mkdir()
            federation = Federation(tmp_path / run, members, processes, MEASURED)
            states = [
                ("--credentials", folders[i], "--only-sums", "--states", tmp_path / f"states-{i}") for i in speakers
            ]
            workers = [federation.worker(i, name=f"w{i}", more=more) for i, more in zip(speakers, states, strict=True)]
            everyone = ("--set", f"federation.min_clients={len(speakers)}")
            return federation, federation.aggregator(*everyone), workers

        first, aggregator, workers = serve("first", range(5))
        ended(aggregator, 0)
        for worker in workers:
            ended(worker, 0)
        cards = OwnClients.open([members / f"s{i}" for i in range(5)]).cards
        assert RunFolder(first.run).manifest().spec.normalization == pooled_normalization(
            OWN.spec.measured, [card.moments for card in cards.values()]
        )
        equal_to_the_replay(first, tmp_path / "again")

        fewer, aggregator, workers = serve("fewer", range(4))
        assert mentions(ended(aggregator, 5), "normalization", "mean", "std")
        for worker in workers:
            kill(worker)
        assert (
            not (fewer.run / "partition.json").exists() or not RunFolder(fewer.run).manifest().spec.normalization.mean
        )

        _, aggregator, workers = serve("same", range(5))
        ended(aggregator, 0)
        for worker in workers:
            ended(worker, 0)


def test_a_member_with_a_damaged_record_refuses_to_serve(tmp_path: Path, members: Path) -> None:
    with contextlib.ExitStack() as processes:
        federation = Federation(tmp_path, members, processes, UNSIGNED)
        federation.aggregator()
        (tmp_path / "states").mkdir()
        (tmp_path / "states" / RECORD).write_text('{"version": 1}\n')
        worker = federation.worker(0, name="w0", more=("--states", tmp_path / "states"))
        assert mentions(ended(worker, 3), RECORD, "remove")
        federation.worker(1, name="w1", more=("--set", f"log={tmp_path / 'log'}"))
        until(lambda: (tmp_path / "log").exists() and "--states" in (tmp_path / "log").read_text(), "a warning")
