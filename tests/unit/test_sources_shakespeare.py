"""Roles of plays, and the windows of their speech."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedloom.data import datasets
from fedloom.data.datasets.leaf import character_codes, roles, windows
from fedloom.errors import DataError

FIXTURES = Path(__file__).parents[1] / "fixtures"
SHAKESPEARE = datasets.find_dataset("shakespeare")


def test_the_roles_of_macbeths_first_scenes() -> None:
    found = roles((FIXTURES / "macbeth_excerpt.txt").read_text())
    # ALL is no role, LENNOX speaks once, LADY MACBETH is only in the cast; counted by hand in the file.
    assert list(found) == ["FIRST WITCH", "SECOND WITCH", "THIRD WITCH", "DUNCAN", "MALCOLM", "SOLDIER", "ROSS"]
    assert found["FIRST WITCH"] == (
        "When shall we three meet again? In thunder, lightning, or in rain? Where the place? I come, Graymalkin!"
    )
    assert found["THIRD WITCH"] == "That will be ere the set of sun. There to meet with Macbeth."
    assert found["DUNCAN"].startswith("What bloody man is that?")
    assert found["DUNCAN"].endswith("What he hath lost, noble Macbeth hath won.")
    assert not any(mark in text for text in found.values() for mark in "[]\n")


def test_names_in_capitals_without_a_full_stop() -> None:
    found = roles((FIXTURES / "midsummer_excerpt.txt").read_text())
    assert list(found) == ["THESEUS"]  # HIPPOLYTA speaks once
    assert found["THESEUS"].startswith("Now, fair Hippolyta, our nuptial hour Draws on apace;")
    # The speech continues after "[Exit PHILOSTRATE.]".
    assert "for our pomp. -- Hippolyta, I woo'd thee with my sword," in found["THESEUS"]


PLAY = """\
A PLAY

Persons Represented.

ANNE.
BEN.

ACT I.

SCENE I. A room.

[Enter ANNE
and Ben.]

ANNE.
First,
  she says.
BEN.
A line without a blank one before.

ANNE. [Aside.]
Second [to him] words. [Never closed

II
A verse with a number.

Amen.
So be it.

SONG.
Once only.

ANNE and BEN.
Together.

BEN.
What I say again
ACT II. THE COURT.

No one's words.

Cho.
Three.

{She waits.}

Cho.
Four.

ACT I.

SCENE II.

Nobody speaks.
"""


def test_lines_that_form_a_speech() -> None:
    assert roles(PLAY) == {
        "ANNE": "First, she says. Second words. II A verse with a number. Amen. So be it.",
        "BEN": "A line without a blank one before. What I say again ACT II. THE COURT. No one's words.",
        "CHO": "Three. Four.",
    }


def test_a_text_that_is_not_a_play_has_no_roles() -> None:
    assert roles("ANNE.\nOnly a name.\n\nANNE.\nAnd no act.\n") == {}


@pytest.mark.parametrize("length", [80, 81, 100, 101, 202, 404, 1000])
def test_every_window_lies_on_one_side_of_the_cut(length: int) -> None:
    text = np.arange(length, dtype=np.int64)  # each position is its own character, so that windows show their position
    official = windows({"before": text[:90], "role": text, "after": text[:200]})
    assert official.owners == datasets.Owners(("before", "role", "after"), divided=True, overlap=80)
    cut = int(0.8 * length)
    for pool, begin, end in ((official.train, 0, cut), (official.test, cut, length)):
        mine = pool.owners == 1
        starts = pool.inputs[mine][:, 0]
        assert starts.tolist() == list(range(begin, max(begin, end - 80)))
        assert np.array_equal(pool.inputs[mine], starts[:, None] + np.arange(80))
        assert np.array_equal(pool.labels[mine], starts + 80)


def test_the_vocabulary_begins_with_leafs() -> None:
    letters = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
    assert "".join(SHAKESPEARE.spec.class_names[:80]) == letters
    assert SHAKESPEARE.spec.classes == len(set(SHAKESPEARE.spec.class_names)) == 84
    assert character_codes(letters + "/@_{", "text").tolist() == list(range(84))


def test_a_play_with_a_character_of_another_alphabet() -> None:
    content = PLAY.replace("Three", "Thr\u0113\u0113").encode()
    with pytest.raises(DataError, match=r"hamlet_gut\.txt.*ASCII.*\d+.*0xc4"):
        SHAKESPEARE.read({"hamlet_gut.txt": content})
    with pytest.raises(DataError, match=r"hamlet_gut\.txt, CHO: .*'#'"):
        SHAKESPEARE.read({"hamlet_gut.txt": PLAY.replace("Three", "Thr#").encode()})


def test_owners_are_named_by_play_and_role() -> None:
    long = "ACT I.\n\n" + "".join(f"ANNE.\n{'so ' * 40}\n\n" for _ in range(5))
    official = SHAKESPEARE.read({"hamlet_gut.txt": long.encode(), "lear_gut.txt": long.encode()})
    assert official.owners.names == ("hamlet/ANNE", "lear/ANNE")
    assert official.train.inputs.dtype == np.uint8
    for pool in (official.train, official.test):
        assert pool.owners is not None
        assert np.bincount(pool.owners).tolist() == [len(pool) // 2] * 2
