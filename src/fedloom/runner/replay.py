"""Replay of an open federation from its journal, with all clients' data in this process."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

from fedloom import experiment as experiments
from fedloom.data.manifest import Manifest
from fedloom.experiment import Experiment
from fedloom.federation.roster import ReplayedRoster
from fedloom.runner import assemble
from fedloom.runner.assemble import RunContext
from fedloom.runner.engine import Engine, RunResult
from fedloom.runs.journal import Replay


@dataclass(frozen=True)
class ReplaySegment:
    """Segment of a replayed run with one experiment: it ends with round ``upto``, evaluated if ``measured``."""

    parts: RunContext
    upto: int
    measured: bool = True


def run_replay(engine: Engine, replay: Replay) -> RunResult:
    """Repeat the rounds with the clients that took part, in one segment for each set of settings."""
    assert engine.dataset is not None
    engine.make_folder()
    with engine.guarded():
        engine.stop_request.training = True
        segments = replay_segments(engine.experiment, replay, engine.parts.manifest)
        for number, segment in enumerate(segments):
            transport = assemble.in_process(segment.parts, engine.dataset, engine.folder)
            roster = ReplayedRoster(segment.parts.manifest, replay)
            loop = engine.loop(segment.parts, transport, roster, segment.upto, measure_last=segment.measured)
            if number:
                loop.resume()  # from the checkpoint of the previous segment
            else:
                engine.resume(loop)
            if number + 1 < len(segments):
                loop.advance()
        final = engine.train(loop)
    return engine.conclude(segments[-1].parts, loop, final)


def replay_segments(experiment: Experiment, replay: Replay, manifest: Manifest) -> list[ReplaySegment]:
    """Return the segments to replay, one per experiment that the federation has had."""
    segments = []
    for this, following in zip_longest(replay.experiments, replay.experiments[1:]):
        parts = assemble.make_parts(experiments.from_shared_json(this.text, runtime=experiment.runtime), manifest)
        if following is None:
            segments.append(ReplaySegment(parts, replay.rounds))
        elif following.is_evaluation:
            segments.append(ReplaySegment(parts, following.round, measured=False))
        else:  # it may have stopped before a due evaluation that the next experiment omits
            upto = following.round - 1
            segments.append(ReplaySegment(parts, upto, measured=replay.evaluation(upto) is not None))
    return segments
