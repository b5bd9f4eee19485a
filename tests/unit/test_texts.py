"""Columns of texts as tokens of a tokenizer: tables, DataFrames and packed clients, and a model trained on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import safetensors.torch
from facts import mentions, refusing
from lazy import lazy_or_skip
from typer.testing import CliRunner

import fedloom
from fedloom.cli.main import app
from fedloom.data.manifest import Manifest
from fedloom.data.newcomer import Newcomer
from fedloom.data.own import Own, OwnClients, own_manifest, read_card
from fedloom.data.pack import PackSettings, pack
from fedloom.data.pack.examples import Request, TextColumn, ValidationErrors
from fedloom.data.pack.texts import tokenize
from fedloom.data.problem import Problem
from fedloom.engine.run_data import make_data
from fedloom.errors import DataError, ExperimentError
from fedloom.experiment.sections import Data

tokenizers = lazy_or_skip("tokenizers")
transformers = lazy_or_skip("transformers")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "good", "bad", "film", "very"]
TEXTS = [f"very {word} film" + " very" * extra for extra in range(5) for word in ("good", "bad")] * 6
LABELS = ["up" if "good" in text else "down" for text in TEXTS]


def tokenizer_at(folder: Path, words: list[str] = WORDS, **settings: Any) -> str:
    """Save a tokenizer of whole words, and return its folder."""
    words_to_ids = {word: i for i, word in enumerate(words)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words_to_ids, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 2)])
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]"} | settings
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(str(folder))
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a tokenizer."""
    return tokenizer_at(tmp_path_factory.mktemp("tokenizer"))


def column(folder: str, **settings: Any) -> TextColumn:
    return TextColumn(**{"column": "review", "tokenizer": folder, "length": 5} | settings)


def frame() -> pandas.DataFrame:
    """Return texts of two owners, with a column that is no input."""
    owners = ["a" if i % 3 else "b" for i in range(len(TEXTS))]
    return pandas.DataFrame({"review": TEXTS, "label": LABELS, "owner": owners, "when": "today"})


def ids_of(texts: list[str], how: TextColumn) -> list[list[int]]:
    errors = ValidationErrors("the texts")
    x, _ = tokenize(texts, how, lambda i: f"row {i}", errors)
    errors.refuse()
    return x["input_ids" if how.mask else ""].tolist()


@pytest.mark.slow
def test_texts_are_padded_and_truncated_on_the_requested_side(folder: str) -> None:
    texts = ["good film", "very very very very bad", "odd"]
    assert ids_of(texts, column(folder)) == [[2, 3, 5, 0, 0], [2, 6, 6, 6, 6], [2, 1, 0, 0, 0]]
    left = column(folder, padding="left", truncation="left", mask=False)
    assert ids_of(texts, left) == [[0, 0, 2, 3, 5], [2, 6, 6, 6, 4], [0, 0, 0, 2, 1]]
    assert ids_of(texts[:1], column(folder, truncation="refuse")) == [[2, 3, 5, 0, 0]]
    with refusing(DataError, "5 tokens", "row 1", "6 tokens"):
        ids_of(texts, column(folder, truncation="refuse"))
    x, specs = tokenize(texts, column(folder), str, ValidationErrors("the texts"))
    assert x["attention_mask"].sum(1).tolist() == [3, 5, 2]
    assert (specs["input_ids"].high, specs["attention_mask"].high) == (len(WORDS), 2)


@pytest.mark.slow
def test_invalid_texts_and_tokenizers_are_rejected(folder: str, tmp_path: Path) -> None:
    with refusing(DataError, "row 1", "row 2", "row 3", "7"):
        ids_of(["good", None, " ", 7], column(folder))  # type: ignore[list-item]
    with refusing(DataError, "none"):
        ids_of(["good"], column(str(tmp_path / "none")))
    with refusing(DataError, str(tmp_path)):
        ids_of(["good"], column(str(tmp_path)))
    with refusing(DataError, "padding"):
        ids_of(["good"], column(tokenizer_at(tmp_path / "unpadded", pad_token=None)))


def test_the_digest_covers_everything_that_determines_ids(folder: str, tmp_path: Path) -> None:
    def digest(where: str, **settings: Any) -> str | None:
        how = column(where, **settings)
        return tokenize(["good"], how, str, ValidationErrors("the texts"))[1]["input_ids"].tokenizer

    same = digest(tokenizer_at(tmp_path / "again"))
    assert same == digest(folder) == digest(folder, length=3)
    others = [
        digest(tokenizer_at(tmp_path / "swapped", [*WORDS[:-2], "very", "film"])),
        digest(tokenizer_at(tmp_path / "more", [*WORDS, "odd"])),
        digest(folder, padding="left"),
    ]
    assert len({same, *others}) == 4


def data_of(path: Path, folder: str, root: Path, **text: Any) -> Any:
    source = {"path": str(path), "client": "owner", "text": column(folder, **text).model_dump()}
    section = {"dataset": "table", "source": source, "root": str(root), "held_out_fraction": 0.0}
    section["partition"] = {"scheme": "natural"}
    return make_data(Data.model_validate(section), 1)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_tables_with_a_text_column_give_named_integers(ending: str, folder: str, tmp_path: Path) -> None:
    path = tmp_path / f"t.{ending}"
    frame().to_csv(path, index=False) if ending == "csv" else frame().to_parquet(path, index=False)
    dataset = data_of(path, folder, tmp_path)
    manifest = dataset.manifest
    assert {name: (spec.kind, spec.shape, spec.high) for name, spec in manifest.spec.inputs.items()} == {
        "attention_mask": ("integers", (5,), 2),
        "input_ids": ("integers", (5,), len(WORDS)),
    }
    assert manifest.spec.class_names == ("down", "up")
    assert manifest.spec.inputs["input_ids"].tokenizer is not None
    assert Manifest.from_json(manifest.to_json()) == manifest
    train = dataset.client(manifest.roster[0]).train
    ids, y = train.x, train.y
    assert bool(((ids["input_ids"] == 3).any(1) == (y == 1)).all())
    single = data_of(path, folder, tmp_path, mask=False).manifest.spec.inputs[""]
    assert (single.kind, single.high, single.tokenizer) == ("integers", 7, manifest.spec.inputs["input_ids"].tokenizer)
    with refusing(DataError, "none", "review"):
        data_of(path, folder, tmp_path, column="none")


@pytest.mark.slow
def test_frames_with_a_text_column_train_a_transformer(folder: str, tmp_path: Path) -> None:
    text = {"column": "review", "tokenizer": folder, "length": 6}
    reported = {"label": "label", "client": "owner", "root": tmp_path / "data", "held_out_fraction": 0.0}
    data = fedloom.Federated.from_frame(frame(), text=text, **reported)
    sizes = {"vocab_size": len(WORDS), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**sizes, **rates, intermediate_size=16, num_labels=2, max_position_embeddings=6)
    experiment = {
        "name": "texts",
        "data": data,
        "algorithm": {"name": "fedavg", "local": {"steps": 10, "batch_size": 8, "lr": 0.01, "optimizer": "adam"}},
        "federation": {"rounds": 3, "clients_per_round": 2},
        "evaluation": {"every": 1},
    }
    model = transformers.BertForSequenceClassification(config)
    run = fedloom.run(experiment, model=model, out=tmp_path / "run", report=False, progress=False)
    assert run.summary["seen"]["accuracy_mean"] == 1  # two words determine the class
    card = run.models("a").card
    assert card.spec.inputs["input_ids"].tokenizer == data.open().manifest.spec.inputs["input_ids"].tokenizer
    with refusing(ExperimentError, "length"):
        fedloom.Federated.from_frame(frame(), text=text | {"length": 0}, **reported)


def own_texts(**changes: Any) -> Own:
    tokens = {"kind": "integers", "shape": [5], "high": 7}
    inputs = {"input_ids": tokens | changes, "attention_mask": tokens | {"high": 2}}
    return Own.model_validate({"kind": "named", "inputs": inputs, "classes": ["down", "up"]})


def test_packed_clients_record_the_digest_of_their_tokenizer(folder: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    frame()[["review", "label"]].to_csv(path, index=False)

    def packed(name: str, own: Own | None, **settings: Any) -> Path:
        needs = None if own is None else own.spec
        pack(path, tmp_path / name, PackSettings(name, Request(needs, text=column(**{"folder": folder} | settings))))
        return tmp_path / name

    plain = read_card(packed("plain", own_texts()))
    digest = plain.spec.inputs["input_ids"].tokenizer
    assert digest is not None
    assert plain.features is None
    needed = own_texts(tokenizer=digest)
    clients = OwnClients.open([packed("a", needed), tmp_path / "plain"])
    clients.check(needed)
    manifest = own_manifest(needed, clients.entries, 1, clients.measured(needed))
    assert Manifest.from_json(manifest.to_json()).spec.inputs["input_ids"].tokenizer == digest
    other = tokenizer_at(tmp_path / "other", [*WORDS[:-2], "very", "film"])
    with refusing(DataError, "tokenizer", digest):
        packed("b", needed, folder=other)
    with refusing(DataError, "tokenizer", digest):
        OwnClients.open([tmp_path / "plain", packed("c", own_texts(), folder=other)])
    with refusing(DataError, "5", "6"):
        packed("d", needed, length=6)
    with refusing(DataError, "7", "4"):
        packed("e", own_texts(high=4))
    with refusing(DataError, "attention_mask"):
        packed("f", needed, mask=False)
    wanted = Problem("own", manifest.spec, clients=1)
    assert Newcomer.from_folder(tmp_path / "plain", wanted).client_id == "plain"
    with refusing(DataError, "tokenizer", digest):
        Newcomer.from_folder(tmp_path / "c", wanted)


def test_ids_of_unknown_origin_are_rejected_if_a_tokenizer_is_required(folder: str, tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 7, (40, 5))
    np.savez(tmp_path / "t.npz", **{"x.input_ids": ids, "x.attention_mask": ids % 2, "y": ids[:, 0] % 2})
    pack(tmp_path / "t.npz", tmp_path / "ids", PackSettings(request=Request(own_texts().spec)))
    clients = OwnClients.open([tmp_path / "ids"])
    clients.check(own_texts())
    with refusing(DataError, "tokenizer", "0" * 64):
        clients.check(own_texts(tokenizer="0" * 64))
    with pytest.raises(ValueError, match="tokenizer"):
        own_texts(tokenizer="bert")


def test_the_command_packs_texts(folder: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    frame().to_csv(path, index=False)

    def command(*options: str) -> Any:
        return CliRunner().invoke(app, ["data", "pack", str(path), "--out", str(tmp_path / "out"), *options])

    for option, facts in (
        ("text.column=review", ("--set", "text.tokenizer", "text.length")),
        ("colour=1", ("--set", "colour")),
        ("label", ("--set label", "KEY=VALUE")),
    ):
        refused = command("--set", option)
        assert isinstance(refused.exception, ExperimentError)
        assert mentions(str(refused.exception), *facts), str(refused.exception)
    text = f"text={{column: review, tokenizer: '{folder}', length: 5}}"
    done = command("--set", text, "--set", "text.padding=left")
    assert done.exit_code == 0, done.output
    card = read_card(tmp_path / "out")
    assert mentions(done.output, card.spec.inputs["input_ids"].tokenizer, "owner", "when")
    ids = safetensors.torch.load_file(tmp_path / "out" / "shard.safetensors")["train_x.input_ids"]
    assert ids.shape == (card.train, 5)
    assert bool((ids[:, -1] > 0).all())
