"""JSON files of LEAF (Caldas et al. 2018), which users create with LEAF's own scripts, and FEMNIST in them.

A file holds several users: ``{"users": [name], "num_samples": [n], "user_data": {name: {"x": [...], "y": [...]}}}``.
LEAF writes all users to ``all_data/``, in several files; its ``-s niid -t sample`` splits each user's examples between
``train/`` and ``test/``.

FEMNIST is handwritten digits and letters by writer, from NIST's Special Database 19. LEAF's script downloads and
converts the data; there are no official files. Pixels are as in LEAF: dark on white (1).

Shakespeare: predict the next character of a role's text; an owner is a role. There are two editions. The *plays* are 37
texts of Project Gutenberg, cut into roles as LEAF does with another edition: results are "LEAF-style", not LEAF's.
*LEAF's* edition is the output of its own scripts, supplied by the user.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from fedloom.data.datasets.base import Owners, OwnFiles, Pool, RawDataset
from fedloom.data.folders import text_fault
from fedloom.errors import DataError

Encode: TypeAlias = Callable[[list[Any], list[Any], str], tuple[NDArray[np.uint8], NDArray[np.int64]]]
"""Maps one user's x, y, and name in errors to inputs ``[n, *input_shape]`` and labels ``[n]``."""

DIVIDED = ("train", "test")
WHOLE = ("all_data",)

SIDE, CLASSES = 28, 62
"""Sides of FEMNIST's images, and number of its classes."""
TOLERANCE = 1e-4
"""Deviation of a value from k/255 that is taken for rounding."""


@dataclass(frozen=True)
class _Examples:
    """Examples of one user."""

    x: list[Any]
    y: list[Any]


@dataclass(frozen=True)
class _File:
    """Content of a file."""

    users: list[str]
    num_samples: list[int]
    user_data: dict[str, _Examples]


_FILE = TypeAdapter(_File)


def leaf_files(folder: Path) -> tuple[str, ...]:
    """Return LEAF's files in ``train/`` and ``test/`` of a folder, else in ``all_data/``, if any.

    Raise DataError if only one of ``train/`` and ``test/`` has files.
    """
    for parts in (DIVIDED, WHOLE):
        names = {part: sorted(path.name for path in (folder / part).glob("[!.]*.json")) for part in parts}
        empty = [part for part in parts if not names[part]]
        if not empty:
            return tuple(f"{part}/{name}" for part in parts for name in names[part])
        if len(empty) < len(parts):
            raise DataError(f"{folder / empty[0]} holds no .json file; train/ and test/ must each have at least one")
    return ()


OWN_FILES = OwnFiles("LEAF's train/*.json and test/*.json, or its all_data/*.json", leaf_files)


def read_leaf(contents: Mapping[str, bytes], encode: Encode, overlap: int = 0) -> RawDataset:
    """Return the content of LEAF's files, with one file in memory at a time; its users are the owners.

    Raise DataError if a file is not LEAF's JSON or is truncated; if a user has no examples, occurs twice or only in
    test; or if examples differ from the stated number or are invalid. Names the file and, where relevant, the user.

    Parameters
    ----------
    contents
        By file name: ``train/...`` and ``test/...``; or ``all_data/...``, which makes the train pool, not split.
    encode
        Checks and converts the examples of one user.
    overlap
        See :class:`~fedloom.data.datasets.base.Owners`.
    """
    divided = any(name.startswith("train/") for name in contents)
    index: dict[str, int] = {}
    pools = [_pool(contents, part, encode, index) for part in (DIVIDED if divided else WHOLE)]
    if not divided:
        train = pools[0]
        pools.append(Pool(np.asarray(train.inputs)[:0], train.labels[:0], np.empty(0, dtype=np.int64)))
    return RawDataset(pools[0], pools[1], Owners(tuple(index), divided, overlap))


def _pool(contents: Mapping[str, bytes], part: str, encode: Encode, index: dict[str, int]) -> Pool:
    """Return the examples of a part; add users of train to the index, and require that it has the users of test."""
    inputs, labels, owners = [], [], []
    files: dict[str, str] = {}
    for name in sorted(name for name in contents if name.startswith(f"{part}/")):
        for user, x, y in _users(contents[name], name):
            location = f"{name}, user {user!r}"
            if user in files:
                raise DataError(f"{location}: this user is also in {files[user]}; every user must be in one file")
            if part == "test" and user not in index:
                raise DataError(
                    f"{location}: this user is in test, but not in train; divide the examples of every user (LEAF's -t "
                    "sample)"
                )
            files[user] = name
            user_inputs, user_labels = encode(x, y, location)
            inputs.append(user_inputs)
            labels.append(user_labels)
            owners.append(np.full(len(y), index.setdefault(user, len(index)), dtype=np.int64))
    if not inputs:
        raise DataError(f"the files of {part}/ hold no users")
    return Pool(np.concatenate(inputs), np.concatenate(labels), np.concatenate(owners))


def _users(content: bytes, name: str) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Yield name, x and y of each user in a file; x and y have the stated length, at least one."""
    try:
        file = _FILE.validate_json(content)
    except ValidationError as error:
        raise DataError(f"{name} is not JSON in LEAF's format: {text_fault(error)}") from error
    if len(file.users) != len(file.num_samples) or sorted(file.users) != sorted(file.user_data):
        raise DataError(
            f"{name} contradicts itself: {len(file.users)} users, {len(file.num_samples)} num_samples and user_data of "
            f"{len(file.user_data)}; all three must list the same users, each once"
        )
    for user, count in zip(file.users, file.num_samples, strict=True):
        examples = file.user_data.pop(user)
        if not 0 < len(examples.x) == len(examples.y) == count:
            raise DataError(
                f"{name}, user {user!r}: it has {len(examples.x)} x and {len(examples.y)} y, and num_samples is "
                f"{count}; they must be equal, and at least 1"
            )
        yield user, examples.x, examples.y


def read_femnist(contents: Mapping[str, bytes]) -> RawDataset:
    """Return the content of FEMNIST's files."""
    return read_leaf(contents, _encoded_images)


def _encoded_images(x: list[Any], y: list[Any], location: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return a user's images ``[n, 1, 28, 28]`` and classes ``[n]``; a value k/255, to 1e-4, becomes k."""
    for position, image in enumerate(x):
        if not isinstance(image, list) or len(image) != SIDE * SIDE:
            fault = f"has {len(image)} values" if isinstance(image, list) else "is not a list"
            raise DataError(f"{location}: image {position} {fault}; it must have {SIDE * SIDE}, {SIDE} x {SIDE} pixels")
    try:
        values = np.array(x, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{location}: an image has a value that is not a number: {error}") from error
    pixels = np.rint(values * 255)
    right = (np.abs(values - pixels / 255) <= TOLERANCE) & (pixels >= 0) & (pixels <= 255)
    if not right.all():
        image, position = np.argwhere(~right)[0]
        raise DataError(
            f"{location}: image {image} has the value {values[image, position]} at {position}; it must be k/255, k a "
            "whole number from 0 to 255"
        )
    for position, label in enumerate(y):
        if type(label) is not int or not 0 <= label < CLASSES:
            raise DataError(f"{location}: label {position} is {label!r}; it must be 0 to {CLASSES - 1}")
    return pixels.astype(np.uint8).reshape(-1, 1, SIDE, SIDE), np.array(y, dtype=np.int64)


WINDOW = 80
"""Number of characters from which the next one is predicted (LEAF)."""

TRAIN_SHARE = 0.8
"""Training fraction of each role's text, in the order of the play."""

VOCABULARY = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}/@_{"
"""Classes, as in ``datasets.toml``: LEAF's 80 characters in LEAF's order, then those that only the plays have."""

CODES = np.full(128, -1, dtype=np.int16)
CODES[[ord(character) for character in VOCABULARY]] = range(len(VOCABULARY))


def character_codes(text: str, location: str) -> NDArray[np.uint8]:
    """Return the position of each character in the vocabulary, ``[length]``.

    Raise DataError if a character is not in the vocabulary; names it.
    """
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    codes: NDArray[np.int16] = CODES[np.minimum(points, 127)]
    wrong = np.flatnonzero((codes < 0) | (points > 127))
    if len(wrong):
        raise DataError(
            f"{location}: the character {text[int(wrong[0])]!r} is not in the vocabulary of "
            f"{len(VOCABULARY)} characters: {VOCABULARY!r}"
        )
    return codes.astype(np.uint8)


def _encode_user(x: list[Any], y: list[Any], location: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the windows ``[n, 80]`` and next characters ``[n]`` of a LEAF user."""
    for key, texts, length in (("x", x, WINDOW), ("y", y, 1)):
        for position, text in enumerate(texts):
            if not isinstance(text, str) or len(text) != length:
                description = f"{len(text)} characters" if isinstance(text, str) else f"{text!r:.40}"
                raise DataError(f"{location}: {key} {position} is {description}; it must be a text of {length}")
    inputs = character_codes("".join(x), location).reshape(-1, WINDOW)
    return inputs, character_codes("".join(y), location).astype(np.int64)


HEADING = re.compile(r"(ACT|SCENE|(THE )?PROLOGUE|EPILOGUE|INDUCTION|THE END|FINIS)\b.{0,50}", re.IGNORECASE)
BEGINNING = re.compile(r"(ACT|(THE )?PROLOGUE|INDUCTION)\b.{0,50}", re.IGNORECASE)
DIRECTION = re.compile(r"[\[{][^\]}]*([\]}]|$)")
"""Stage direction; one that is never closed ends with its paragraph."""
LABEL = re.compile(r"(?![IVX]+\.?$)([A-Z][A-Za-z0-9'\-,.& ]{0,38}?)([.:]?)")
"""Name alone on its line; a Roman numeral numbers a verse instead."""
SEVERAL = re.compile(r"(ALL|BOTH|OMNES)\b|.*( AND |&|,)")
"""Labels of speeches that are not spoken by a single role."""


def roles(play: str) -> dict[str, str]:
    """Return the text of each role of a play with at least two speeches, in the order of their first speeches.

    A line that is only a name begins a speech, which ends at the next such line or the heading of an act or scene. A
    name is in capitals (``BRUTUS.``, ``THESEUS``) or ends in a full stop (``Ham.``), and must begin a paragraph
    somewhere. A name not in capitals must do so at least twice, so that a short line of verse is not taken for a name.
    The text before the first act, prologue or induction lists the cast. Stage directions, in brackets, are left out,
    and white space becomes one space.
    """
    paragraphs = list(_paragraphs(play))
    cast = next((i for i, lines in enumerate(paragraphs) if BEGINNING.fullmatch(lines[0])), len(paragraphs))
    paragraphs = paragraphs[cast:]
    labels = Counter(name for lines in paragraphs if len(lines) > 1 and (name := _label(lines[0])))
    names = {name for name, count in labels.items() if name.isupper() or count > 1}
    return {
        name: " ".join(line for speech in spoken for line in speech)
        for name, spoken in _speeches(paragraphs, names).items()
        if len(spoken) > 1 and not SEVERAL.match(name)
    }


def _speeches(paragraphs: list[list[str]], names: Set[str]) -> dict[str, list[list[str]]]:
    speeches: dict[str, list[list[str]]] = {}
    speech: list[str] = []
    for lines in paragraphs:
        if HEADING.fullmatch(lines[0]):
            speech = []
            continue
        for line in lines:
            name = _label(line)
            if name is not None and name in names:
                speech = []
                speeches.setdefault(name.upper(), []).append(speech)
            else:
                speech.append(line)
    return speeches


def _paragraphs(play: str) -> Iterator[list[str]]:
    """Yield the lines of each paragraph, without stage directions."""
    for paragraph in re.split(r"\n[ \t]*\n", play.replace("\r", "")):
        lines = [" ".join(line.split()) for line in DIRECTION.sub(" ", paragraph).split("\n")]
        if any(lines):
            yield [line for line in lines if line]


def _label(line: str) -> str | None:
    match = LABEL.fullmatch(line)
    if match is None or len(line.split()) > 5 or HEADING.fullmatch(line):
        return None
    name = match[1].replace(" and ", " AND ")
    return name if match[2] or name.isupper() else None


def read_shakespeare(contents: Mapping[str, bytes]) -> RawDataset:
    """Return LEAF's windows if the user supplied LEAF's files, else those of the plays."""
    if any(name.endswith(".json") for name in contents):
        return read_leaf(contents, _encode_user, overlap=WINDOW)
    texts: dict[str, NDArray[np.uint8]] = {}
    for name in contents:
        play = name.removesuffix("_gut.txt")
        try:
            text = contents[name].decode("ascii")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{name} is not ASCII text: byte {error.start} is {contents[name][error.start]:#x}"
            ) from error
        texts |= {f"{play}/{role}": character_codes(lines, f"{name}, {role}") for role, lines in roles(text).items()}
    return windows(texts)


def windows(texts: Mapping[str, NDArray[np.uint8]]) -> RawDataset:
    """Return every window of 80 characters of each owner's text, with the character after it.

    A window and its next character lie in the first 80 % of the text (train) or in the rest (test). The 80 windows
    across the cut are left out, so that test shares no text with train. An owner with too little text has none.
    """
    corpus = np.concatenate([np.empty(0, dtype=np.uint8), *texts.values()])
    starts: dict[str, list[NDArray[np.int64]]] = {"train": [], "test": []}
    owners: dict[str, list[NDArray[np.int64]]] = {"train": [], "test": []}
    first = 0
    for owner, text in enumerate(texts.values()):
        boundary, end = first + int(TRAIN_SHARE * len(text)), first + len(text)
        for part, begin, stop in (("train", first, boundary), ("test", boundary, end)):
            starts[part].append(np.arange(begin, max(begin, stop - WINDOW), dtype=np.int64))
            owners[part].append(np.full(len(starts[part][-1]), owner, dtype=np.int64))
        first = end
    every_window = sliding_window_view(corpus, WINDOW)
    train, test = (
        Pool(every_window[selection], corpus[selection + WINDOW].astype(np.int64), np.concatenate(owners[part]))
        for part in ("train", "test")
        for selection in [np.concatenate(starts[part])]
    )
    return RawDataset(train, test, Owners(tuple(texts), divided=True, overlap=WINDOW))
