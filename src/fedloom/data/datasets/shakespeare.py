"""Shakespeare: predict the next character of a role's text; an owner is a role.

There are two editions. The *plays* are 37 texts of Project Gutenberg, cut into roles as LEAF does with another
edition: results are "LEAF-style", not LEAF's. *LEAF's* edition is the output of its own scripts, supplied by the user.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from fedloom.data.datasets import leaf
from fedloom.data.datasets.base import Owners, Pool, RawDataset
from fedloom.errors import DataError

WINDOW = 80
"""Number of characters from which the next one is predicted (LEAF)."""

TRAIN_SHARE = 0.8
"""Training fraction of each role's text, in the order of the play."""

VOCABULARY = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}/@_{"
"""Classes, as in ``datasets.toml``: LEAF's 80 characters in LEAF's order, then those that only the plays have."""

CODES = np.full(128, -1, dtype=np.int16)
CODES[[ord(character) for character in VOCABULARY]] = range(len(VOCABULARY))


def character_codes(text: str, where: str) -> NDArray[np.uint8]:
    """Return the position of each character in the vocabulary, ``[length]``.

    Raise DataError if a character is not in the vocabulary; names it.
    """
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    codes: NDArray[np.int16] = CODES[np.minimum(points, 127)]
    wrong = np.flatnonzero((codes < 0) | (points > 127))
    if len(wrong):
        raise DataError(
            f"{where}: the character {text[int(wrong[0])]!r} is not in the vocabulary of {len(VOCABULARY)} characters: "
            f"{VOCABULARY!r}"
        )
    return codes.astype(np.uint8)


def _encoded(x: list[Any], y: list[Any], where: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the windows ``[n, 80]`` and next characters ``[n]`` of a LEAF user."""
    for key, texts, length in (("x", x, WINDOW), ("y", y, 1)):
        for position, text in enumerate(texts):
            if not isinstance(text, str) or len(text) != length:
                found = f"{len(text)} characters" if isinstance(text, str) else f"{text!r:.40}"
                raise DataError(f"{where}: {key} {position} is {found}; it must be a text of {length}")
    inputs = character_codes("".join(x), where).reshape(-1, WINDOW)
    return inputs, character_codes("".join(y), where).astype(np.int64)


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
    found = LABEL.fullmatch(line)
    if found is None or len(line.split()) > 5 or HEADING.fullmatch(line):
        return None
    name = found[1].replace(" and ", " AND ")
    return name if found[2] or name.isupper() else None


def read_shakespeare(contents: Mapping[str, bytes]) -> RawDataset:
    """Return LEAF's windows if the user supplied LEAF's files, else those of the plays."""
    if any(name.endswith(".json") for name in contents):
        return leaf.read_leaf(contents, _encoded, overlap=WINDOW)
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
    everything = np.concatenate([np.empty(0, dtype=np.uint8), *texts.values()])
    starts: dict[str, list[NDArray[np.int64]]] = {"train": [], "test": []}
    owners: dict[str, list[NDArray[np.int64]]] = {"train": [], "test": []}
    first = 0
    for owner, text in enumerate(texts.values()):
        cut, end = first + int(TRAIN_SHARE * len(text)), first + len(text)
        for part, begin, stop in (("train", first, cut), ("test", cut, end)):
            starts[part].append(np.arange(begin, max(begin, stop - WINDOW), dtype=np.int64))
            owners[part].append(np.full(len(starts[part][-1]), owner, dtype=np.int64))
        first = end
    every_window = sliding_window_view(everything, WINDOW)
    train, test = (
        Pool(every_window[chosen], everything[chosen + WINDOW].astype(np.int64), np.concatenate(owners[part]))
        for part in ("train", "test")
        for chosen in [np.concatenate(starts[part])]
    )
    return RawDataset(train, test, Owners(tuple(texts), divided=True, overlap=WINDOW))
