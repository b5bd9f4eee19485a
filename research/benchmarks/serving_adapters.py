"""Personal adapters from a model service: bytes, latency at a fixed rate, and the server's CPU time.

    .venv/bin/python research/benchmarks/serving_adapters.py [--rate 50] [--seconds 20] [--smallest] [--json FILE]

PeFLL over LoRA of rank 8 on a BERT of the size of MiniLM-L6 (22.6 million frozen parameters, random: nothing is
downloaded), with adapters in one layer and in all six. `fedloom serve` is one process; the load comes from another
one with clients that read the opening, send a descriptor, and read their adapter. Beside them a whole newcomer,
which computes its descriptor from 32 sentences of 16 tokens with its own copy of the frozen encoder; cold, it gets η_v,
too.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from common import describe, machine, table, write_json
from serving import PROGRAM, process, put_under
from torch import Tensor, nn

import fedloom
from fedloom.engine import assemble
from fedloom.runs.folder import RunFolder

FACTORY = "serving_adapters:sentences"
CLASSES, LENGTH, WORDS, WIDTH, EXAMPLES, DESCRIPTOR = 3, 16, 30_522, 384, 32, 16
LAYERS = {"one layer": [5], "all six layers": None}
SMALLEST = "SERVING_ADAPTERS_SMALLEST"  # environment variable: the encoder has one layer, also in other processes


class Sentences(nn.Module):
    """Encoder, the mean over the tokens, and a linear head."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(WIDTH, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the logits."""
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None].to(hidden.dtype)
        logits: Tensor = self.head((hidden * mask).sum(1) / mask.sum(1).clamp_min(1))
        return logits


def sentences() -> nn.Module:
    """Return a random encoder of the size of MiniLM-L6 with a head."""
    import transformers

    layers = 1 if SMALLEST in os.environ else 6
    sizes: dict[str, Any] = {"hidden_size": WIDTH, "num_hidden_layers": layers, "num_attention_heads": 12}
    config = transformers.BertConfig(vocab_size=WORDS, intermediate_size=1536, **sizes)
    return Sentences(transformers.BertModel(config, add_pooling_layer=False))


def examples(n: int = EXAMPLES) -> tuple[dict[str, Tensor], Tensor]:
    """Return random sentences and labels."""
    x = {"input_ids": torch.randint(WORDS, (n, LENGTH)), "attention_mask": torch.ones(n, LENGTH).long()}
    return x, torch.arange(n) % CLASSES


def make_run(folder: Path, layers: list[int] | None) -> int:
    """Make an untrained run; return the length of θ."""
    targets = ["query", "key", "value", "attention.output.dense"]
    run = fedloom.run(
        {
            "name": "serving-adapters",
            "data": fedloom.Federated.from_arrays({f"c{i}": examples() for i in range(4)}, root=folder / "data"),
            "model": {
                "name": "module",
                "factory": FACTORY,
                "lora": {"rank": 8, "targets": targets, "layers": layers, "train": ["head"]},
            },
            "algorithm": {
                "name": "pefll",
                "local": {"steps": 4},
                "descriptor": {"size": DESCRIPTOR, "evaluate": "all"},
                "embedding": {"network": "pretrained"},
                "hypernetwork": {"start": "model"},
            },
            "federation": {"rounds": 0, "clients_per_round": 1},
            "runtime": {"workers": 0},
        },
        out=folder / "run",
        report=False,
        progress=False,
    )
    return assemble.make_parts(run.experiment, RunFolder(run.folder).manifest()).setup.model.layout.size


def newcomer(address: str) -> dict[str, float]:
    """Return bytes and seconds of a whole newcomer; making the encoder is left out."""
    import asyncio

    from fedloom.federation.loop import vocabulary
    from fedloom.serving.personal import RequestingClient
    from fedloom.serving.personalization import PersonalizationRequest
    from fedloom.transport.newcomer import Models

    async def ask() -> dict[str, float]:
        models, found = Models(address), dict[str, float]()
        try:
            about = (await models.describe(120)).about
            client = RequestingClient.described(PersonalizationRequest(address, *examples()), about)
            for which in ("first", "whole"):  # the first one also imports and checks the module
                started = time.perf_counter()
                answered = await models.converse(about, client.id, vocabulary(client.parts.algorithm), client.speak)
                found |= {f"{which}_down": answered.down, f"{which}_up": answered.up}
                found[f"{which}_ms"] = 1e3 * (time.perf_counter() - started)
        finally:
            await models.close()
        return found

    return asyncio.run(ask())


def measure(seconds: float, rate: float) -> dict[str, dict[str, Any]]:
    """Return the figures of each model."""
    places = (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    os.environ["FEDLOOM_FACTORIES"] = FACTORY
    torch.set_num_threads(1)
    figures: dict[str, dict[str, Any]] = {}
    for name, layers in ({"one layer": [0]} if SMALLEST in os.environ else LAYERS).items():
        with tempfile.TemporaryDirectory() as scratch:
            d, size = make_run(Path(scratch), layers), DESCRIPTOR
            with process(*PROGRAM, "serve", Path(scratch) / "run", "--listen", "127.0.0.1:0") as (server, address):
                put_under([address], [server.pid], 2, size, rate=rate)  # the first request loads the round
                at_rate = put_under([address], [server.pid], seconds, size, rate=rate)
                figures[name] = {"d": d, "rate": at_rate, "newcomer": newcomer(address)}
    return figures


def rows(figures: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the figures as lines of a table."""
    found = list(figures.values())
    return [
        ("parameters d", *(f"{f['d']:,}" for f in found)),
        ("adapter on the wire, KB", *(_kb(f["rate"]["bytes"]) for f in found)),
        ("a second; refused", *(f"{f['rate']['per_s']:.0f}; {f['rate']['refused']}" for f in found)),
        ("p50 / p99, ms", *(f"{f['rate']['p50_ms']:.1f} / {f['rate']['p99_ms']:.1f}" for f in found)),
        ("ms of the server's CPU", *(f"{f['rate']['cpu_ms']:.1f}" for f in found)),
        ("whole newcomer: KB down / up; ms", *(_whole(f["newcomer"]) for f in found)),
    ]


def _kb(count: float) -> str:
    return f"{count / 1000:.0f}"


def _whole(found: dict[str, float]) -> str:
    down, up, ms = (found[f"whole_{what}"] for what in ("down", "up", "ms"))
    return f"{_kb(down)} / {up / 1000:.1f}; {ms:.0f}"


def main() -> None:
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of each load in seconds")
    parser.add_argument("--rate", type=float, default=50.0, help="requests per second")
    parser.add_argument("--smallest", action="store_true", help="an encoder of one layer, to try the benchmark itself")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if options.smallest:
        os.environ[SMALLEST] = "1"
    about = machine()
    print(describe(about), f"load {os.getloadavg()[0]:.1f}", sys.version.split()[0], flush=True)
    figures = measure(options.seconds, options.rate)
    print(table(("", *figures), rows(figures)), flush=True)
    write_json(options.json, about, {"serving_adapters": figures})


if __name__ == "__main__":
    main()
