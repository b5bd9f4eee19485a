"""Cost of a client's step in each method relative to FedAvg's, and the prediction from its number of gradients.

    .venv/bin/python research/benchmarks/client_steps.py [--repetitions 9] [--methods 'Ditto;SCAFFOLD'] [--json FILE]

One client's whole conversation of a round: LeNet on random images, batches of 32, in process, one thread, CPU
seconds. Visits of 10 and of 40 steps take turns with FedAvg's. Their difference over 30 is a step; what remains is
the rest of a visit: losses over all data, saved states, and so on. Ratios are medians over repetitions of
measurements taken next to each other. ``--methods`` selects rows of the table, separated by semicolons.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from common import describe, machine, spread, table, write_json

from fedloom.algorithms.base import Setup, find_algorithm
from fedloom.data.federated import ClientData, Split
from fedloom.evaluation.plan import EvaluationPlan
from fedloom.federation.client_side import ClientConfig, ClientSide, InProcess
from fedloom.federation.cohort import RoundConfig
from fedloom.federation.loop import vocabulary
from fedloom.federation.round_attempt import RoundAttempt
from fedloom.federation.states import States, Versions
from fedloom.federation.transport import Call, Lost
from fedloom.federation.validation import out_of_range
from fedloom.messages import Message, answer_shapes
from fedloom.models.flat import FlatModel
from fedloom.models.networks import MLP, LeNet
from fedloom.runs.journal import Attempt
from fedloom.storage import open_store

IMAGE, CLASSES, EXAMPLES = (1, 28, 28), 10, 512
SHORT, LONG = 10, 40
SGD = {"batch_size": 32, "lr": 1e-4}


@dataclass(frozen=True)
class Case:
    """Method with settings for any number of steps; ``gradients`` is the gradients per step, by docs/algorithms."""

    method: str
    gradients: float | None
    settings: Mapping[str, Any] | None = None  # None: SGD below `local`
    model: type[FlatModel] = LeNet

    def with_steps(self, steps: int) -> dict[str, Any]:
        """Return its settings for a visit with this many steps."""
        own = dict(self.settings or {})
        for key in own.pop("steps_in", ("local",)):
            if key is None:
                own |= {"steps": steps}
            else:
                own[key] = {**SGD, **own.get(key, {}), "steps": steps}
        return own


UNLIKE = {"momentum": 0.0}
CASES = {
    "FedAvg": Case("fedavg", 1),
    "FedProx": Case("fedprox", 1, {"mu": 0.1}),
    "SCAFFOLD": Case("scaffold", 1, {"local": UNLIKE}),
    "FedDyn": Case("feddyn", 1),
    "MOON": Case("moon", 5 / 3),
    "FedAvgM": Case("fedavgm", 1),
    "FedAdam": Case("fedadam", 1),
    "FedYogi": Case("fedyogi", 1),
    "q-FedAvg": Case("q-fedavg", 1),
    "DRFA": Case("drfa", 1),
    "AFL": Case("afl", 1),
    "kNN-Per": Case("knn-per", 1),
    "FedPer": Case("fedper", 1),
    "FedRep, body": Case("fedrep", 1, {"head": {"steps": 1, "batch_size": 32, "lr": 1e-4}}),
    "FedBABU": Case("fedbabu", 1),
    "FedALA": Case("fedala", 1),
    "FedProto": Case("fedproto", 1),
    "LG-FedAvg": Case("lg-fedavg", 1),
    "FedRoD": Case("fedrod", 1),
    "HeurFedAMP": Case("heurfedamp", 1),
    "pFedHN": Case("pfedhn", 1),
    "PeFLL": Case("pefll", 1, {"embedding": {"network": "mlp"}}),
    "ComFedL": Case("comfedl", 1),
    "Ditto": Case("ditto", 2, {"steps_in": ("local", "personal")}),
    "APFL": Case("apfl", 2),
    "Per-FedAvg, first order": Case("per-fedavg", 2),
    "TR-MAML, first order": Case("tr-maml", 2),
    "pFedMe, K = 3": Case("pfedme", 3, {"steps_in": (None,), "batch_size": 32, "inner_steps": 3}),
    "pFedMe, K = 5": Case("pfedme", 5, {"steps_in": (None,), "batch_size": 32, "inner_steps": 5}),
    "Per-FedAvg, HF by a finite difference": Case("per-fedavg", 4, {"hessian": "finite_difference"}),
    "Per-FedAvg, exact": Case("per-fedavg", 4, {"hessian": "exact"}),
    "TR-MAML, exact": Case("tr-maml", 4, {"hessian": "exact"}),
    "ComFedL-DAMAML, first order": Case("comfedl", 2, {"objective": "damaml", "first_order": True}),
    "ComFedL-DAMAML": Case("comfedl", 4, {"objective": "damaml"}),
    "pFedBayes": Case("pfedbayes", 1, {"steps_in": (None,), "batch_size": 32, "optimizer": "adam"}),
    "PFNM (MLP)": Case("pfnm", 1, {}, MLP),
}


class Timed(InProcess):
    """Transport that counts the client's CPU seconds."""

    seconds = 0.0

    def exchange(self, call: Call) -> Sequence[Message | Lost]:
        """Run one exchange."""
        started = time.process_time()
        answers = super().exchange(call)
        self.seconds += time.process_time() - started
        return answers


def visit(case: Case, steps: int) -> float:
    """Return the CPU seconds of the only client in its first round."""
    random = torch.Generator().manual_seed(1)
    split = Split(
        torch.randn(EXAMPLES, *IMAGE, generator=random), torch.randint(CLASSES, (EXAMPLES,), generator=random)
    )
    client = ClientData("client-0000", split, split, split, CLASSES)
    model = MLP(IMAGE, [100], CLASSES) if case.model is MLP else LeNet(IMAGE, CLASSES)
    setup = Setup(model, CLASSES, IMAGE, 1, roster=(client.id,))
    algorithm = find_algorithm(case.method)
    chosen = algorithm.settings.model_validate(case.with_steps(steps))
    server, half = algorithm.server(chosen, setup, torch.Generator().manual_seed(0)), algorithm.client(chosen, setup)
    with tempfile.TemporaryDirectory() as states, ThreadPoolExecutor(1) as helper:
        held = ClientSide(
            half,
            vocabulary(algorithm),
            lambda _: client,
            lambda predictors, group: EvaluationPlan.of_classes(CLASSES).nothing(len(group), len(half.predictors)),
            ClientConfig(1),
            states=States(open_store(states)) if half.stateful else None,
        )
        rules = RoundConfig(
            1, 1, 60.0, 1, answer_shapes(algorithm.messages, server.sizes), threading.Event(),
            lambda client, answer: out_of_range(answer, server.update_bounds(EXAMPLES)),
            (lambda ids: tuple(Versions(None, frozenset(), 0) for _ in ids)) if half.stateful else None,
        )  # fmt: skip
        carrier = Timed(held, torch.float32)
        session = RoundAttempt(Attempt(1, 1), "train", (client.id,), {client.id: EXAMPLES}, carrier, rules, helper)
        server.train_round(session)
        session.close()
    return carrier.seconds


def main() -> None:
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--methods", help="rows of the table, separated by semicolons; by default all")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    about = machine()
    print(describe(about), flush=True)
    wanted = options.methods.split(";") if options.methods else list(CASES)
    ratios: dict[str, list[float]] = {name: [] for name in wanted}
    rest: dict[str, list[float]] = {name: [] for name in wanted}
    bare: list[float] = []

    def step(case: Case) -> tuple[float, float]:
        short, long = visit(case, SHORT), visit(case, LONG)
        each = (long - short) / (LONG - SHORT)
        return each, short - SHORT * each

    for repetition in range(options.repetitions + 1):
        for name in wanted:
            case = CASES[name]
            beside = Case("fedavg", 1, model=case.model)
            before, (own, more), after = step(beside)[0], step(case), step(beside)[0]
            if repetition:  # the first one warms up
                reference = (before + after) / 2
                ratios[name].append(own / reference)
                rest[name].append(more / reference)
                bare.append(reference)
    rows = []
    for name in wanted:
        predicted, found = CASES[name].gradients, statistics.median(ratios[name])
        off = f"{100 * (found / predicted - 1):+.0f} %" if predicted else ""
        rows.append(
            (name, f"{predicted:g}" if predicted else "", spread(ratios[name]), off, spread(rest[name], "{:.1f}"))
        )
    print(f"a step of FedAvg: {1e3 * statistics.median(bare):.2f} ms of CPU")
    print(table(("a client's step of", "gradients", "of FedAvg's", "off by", "rest of a visit, steps of FedAvg"), rows))
    write_json(options.json, about, {"ratios": ratios, "rest": rest})


if __name__ == "__main__":
    main()
