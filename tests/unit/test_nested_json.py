"""Untrusted JSON that is nested too deeply for Python, or has impossible values: rejected by one of our errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from facts import telling

from fedloom.cluster.settings import ClusterSettings
from fedloom.core.words import DEEPEST, parsed_json
from fedloom.data.manifest import Manifest
from fedloom.data.own import CARD, read_card
from fedloom.data.problem import LONGEST, Problem
from fedloom.engine.worker import _described
from fedloom.errors import DataError, FedloomError, RefusedError
from fedloom.experiment import from_shared_json
from fedloom.ledger.ledger import PrivacyAccountant
from fedloom.privacy.spent import PrivacyGuarantee
from fedloom.runs import checkpoint as tensor_file
from fedloom.runs.folder import RunFolder
from fedloom.security.access import read_identities
from fedloom.transport.newcomer import _parse_description
from fedloom.transport.wire import personalization_pb2 as personalization

DEEP = "[" * 100_000 + "]" * 100_000
OBJECTS = '{"a":' * 100_000 + "1" + "}" * 100_000
PROBLEM: dict[str, Any] = {
    "dataset": "photos",
    "spec": {
        "inputs": {"": {"kind": "pixels", "shape": [1, 4, 4], "normalization": {"mean": [0.5], "std": [0.5]}}},
        "class_names": ["a", "b"],
    },
    "clients": 3,
}


def _file(name: str, read: Callable[[Path], Any]) -> Callable[[str, Path], Any]:
    def reading(text: str, folder: Path) -> Any:
        (folder / name).write_text(text)
        return read(folder)

    return reading


def _card(text: str, folder: Path) -> Any:
    (folder / CARD).write_text(text)
    return read_card(folder)


def _run_file(name: str, read: Callable[[RunFolder], Any]) -> Callable[[str, Path], Any]:
    def reading(text: str, folder: Path) -> Any:
        (folder / "experiment.yaml").write_text("name: t\n")
        (folder / name).write_text(text)
        return read(RunFolder.open(folder))

    return reading


READERS: dict[str, Callable[[str, Path], Any]] = {
    "problem": lambda text, _: Problem.from_json(text),
    "what a server tells": lambda text, _: _parse_description(
        personalization.Described(problem=json.dumps(PROBLEM), experiment=text)
    ),
    "its problem": lambda text, _: _parse_description(personalization.Described(problem=text, experiment="{}")),
    "what an aggregator tells": lambda text, _: _described(text),
    "shared experiment": lambda text, _: from_shared_json(text),
    "manifest": lambda text, _: Manifest.from_json(text),
    "card": _card,
    "summary": _run_file("summary.json", lambda run: run.json("summary.json")),
    "cluster settings": lambda text, _: ClusterSettings.from_json(text),
    "identities": _file("identities.yaml", lambda folder: read_identities(folder / "identities.yaml")),
}


def test_nested_ledgers_and_incomplete_problems_are_named(tmp_path: Path) -> None:
    (tmp_path / "ledger").write_text(DEEP + "\n")
    with telling(DataError, "line 1"):
        PrivacyAccountant(tmp_path / "ledger", None).charge(PrivacyGuarantee(1.0, 1e-5, 1.0, 3.7, 10))
    for missing in PROBLEM:
        with telling(DataError, missing):
            Problem.from_json(json.dumps({key: value for key, value in PROBLEM.items() if key != missing}))


@pytest.mark.parametrize("text", [DEEP, OBJECTS, DEEP[:100_000]], ids=("lists", "objects", "cut"))
@pytest.mark.parametrize("reader", READERS)
def test_too_deeply_nested_json_is_rejected(reader: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(FedloomError):
        READERS[reader](text, tmp_path)


@pytest.mark.parametrize("end", ['\\", \\"b\\": ' + DEEP + '}"}}', '\\"}"}, "c": ' + DEEP + "}", '\\"}', "}" * 10])
def test_a_tensor_file_with_a_nested_header_is_rejected(end: str) -> None:
    whole = b"".join(tensor_file.tensor_parts({"a": torch.zeros(2)}, {"b": 1}))
    at = tensor_file._AT
    start = whole[8 : at.stop]  # of the header, with the position of the digest
    content = bytearray((len(start) + len(end)).to_bytes(8, "little") + start + end.encode() + bytes(8))
    content[at] = tensor_file._digest(bytes(content)).encode()
    with pytest.raises(ValueError, match=r"\S") as caught:
        tensor_file.decode_tensors(bytes(content))
    assert "written with" not in str(caught.value)


def test_the_depth_of_a_peers_json_is_bounded() -> None:
    def nested(depth: int) -> str:
        return "[" * depth + "]" * depth

    assert parsed_json(nested(DEEPEST), DEEPEST) is not None
    with pytest.raises(ValueError, match=str(DEEPEST)):
        parsed_json(nested(DEEPEST + 1), DEEPEST)


@pytest.mark.parametrize("text", ['{"experiment": "\\ud800"}', '{"\\uDFFF": "{}"}', '["\\ud83d", "\\ude00"]'])
def test_a_lone_surrogate_is_rejected_with_a_printable_message(text: str) -> None:
    assert parsed_json('["\\ud83d\\ude00"]', DEEPEST) == ["\U0001f600"]
    with pytest.raises(ValueError, match="surrogates"):
        parsed_json(text, DEEPEST)
    with pytest.raises(RefusedError) as caught:
        _described(text)
    assert str(caught.value).encode()


@pytest.mark.parametrize(
    "change",
    [
        {"spec": {"inputs": {}}},
        {"spec": {"inputs": {"": {"kind": "pixels", "shape": [0, 4, 4]}}}},
        {"spec": {"inputs": {"": {"kind": "pixels", "shape": "1"}}}},
        {"spec": {"inputs": {"": {"kind": "sounds", "shape": [1, 4, 4]}}}},
        {"spec": {"inputs": {"": {"kind": "pixels", "shape": [1, 4, 4]}}}},  # no normalization
        *(
            {"spec": {"inputs": {"": {"kind": "pixels", "shape": [1, 4, 4], "normalization": numbers}}}}
            for numbers in (
                {"mean": [0.5], "std": [0.0]},
                {"mean": [0.5, 0.5], "std": [0.5, 0.5]},
                {"mean": [float("nan")], "std": [0.5]},
                None,
            )
        ),
        {"spec": PROBLEM["spec"] | {"class_names": [1]}},
        {"spec": PROBLEM["spec"] | {"class_names": ["a", "a"]}},
        {"clients": -1},
        {"clients": None},
        {"dataset": "x" * LONGEST},
    ],
)
def test_an_invalid_problem_is_rejected(change: dict[str, Any]) -> None:
    assert Problem.from_json(json.dumps(PROBLEM)).clients == 3
    with pytest.raises(DataError):
        Problem.from_json(json.dumps(PROBLEM | change))
    reported = personalization.Described(problem=json.dumps(PROBLEM | change), experiment="{}")
    with pytest.raises(RefusedError):
        _parse_description(reported)
