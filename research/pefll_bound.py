"""Right-hand side of the bound in papers/001, Theorem 3.2, for a finished PeFLL run.

    python research/pefll_bound.py RUN [--checkpoint last|best|N] [--draws 5] [--delta 0.05]

For variances α_h = α_v and α_θ, and then at the best of them for subsets of the seen clients: every term, whether the
bound is non-vacuous, and the loss of the same drawn models on unseen clients' test data. docs/theory.md, "PeFLL".
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from bounds.pefll import Networks, Variances, bound, observed

from fedloom import experiment as experiments
from fedloom.algorithms.pefll import PeFLLServer
from fedloom.data.federated import FederatedDataset
from fedloom.engine import assemble, run_data
from fedloom.federation.randomness import generator
from fedloom.runs.checkpoint import Checkpoints
from fedloom.runs.folder import RunFolder

ALPHAS = (1e-4, 1e-3, 1e-2, 1e-1)
THETA_ALPHAS = (1e-3, 1e-2, 1e-1, 1.0)


def networks(run: Path, which: str | int) -> tuple[Networks, FederatedDataset]:
    """Return a trained PeFLL and its training partition."""
    e = experiments.load_experiment(run / "experiment.yaml")
    dataset = run_data.make_partition(e)
    parts = assemble.make_parts(e, dataset.manifest)
    server = parts.server_algorithm()
    if not isinstance(server, PeFLLServer):
        raise SystemExit(f"{run} must be a run of pefll (got {e.algorithm.name})")
    server.load(Checkpoints(RunFolder(run).checkpoints).load(which).state)
    shift, scale, _ = server.state["standard"].tolist()
    eta_v = server.embedding.layout.split(server.state["eta_v"])
    found = Networks(
        server.embedding, server.hypernetwork, parts.setup.model, eta_v, server.eta_h, lambda v: (v - shift) / scale
    )
    return found, dataset


def main() -> None:
    """Print one line for each α and n."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--checkpoint", default="last")
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--delta", type=float, default=0.05)
    given = parser.parse_args()
    torch.set_num_threads(1)
    which = int(given.checkpoint) if given.checkpoint.isdecimal() else given.checkpoint
    trained, dataset = networks(given.run, which)
    seen = [dataset.client(client).train for client in dataset.manifest.roster]
    unseen = [(client.train, client.test) for client in map(dataset.client, dataset.manifest.unseen)]
    size_h, size_v = (sum(float(p.square().sum()) for p in eta.values()) for eta in (trained.eta_h, trained.eta_v))
    plain = observed(trained, unseen, None, generator(0, "bound"))
    print(f"‖η_h‖² = {size_h:.1f}, ‖η_v‖² = {size_v:.1f}; 0-1 loss of the mean models on unseen clients: {plain:.3f}\n")
    print("| α_h = α_v | α_θ | n | m | empirical | term of η | term of θ | bound | unseen clients |\n|" + "---|" * 9)

    def line(variances: Variances, n: int) -> float:
        key = f"{variances}/{n}"
        b = bound(trained, seen[:n], variances, generator(0, f"bound/{key}"), delta=given.delta, draws=given.draws)
        there = observed(trained, unseen, variances, generator(0, f"observed/{key}"), given.draws)
        print(
            f"| {variances.h:g} | {variances.theta:g} | {b.clients} | {b.examples} "
            f"| {b.empirical:.3f} ± {b.empirical_error:.3f} | {b.meta:.3f} | {b.client:.3f} "
            f"| {b.total:.3f}{', vacuous' if b.vacuous else ''} | {there:.3f} |"
        )
        return b.total

    grid = [Variances(alpha, alpha, theta) for alpha in ALPHAS for theta in THETA_ALPHAS]
    best = min(grid, key=lambda variances: line(variances, len(seen)))
    for n in (len(seen) // 8, len(seen) // 4, len(seen) // 2):
        line(best, n)


if __name__ == "__main__":
    main()
