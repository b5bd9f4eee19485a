"""Display of our errors in a notebook."""

from __future__ import annotations

import fedloom
from fedloom.errors import DataError


def shown(act: object) -> list[str]:
    try:
        act()  # type: ignore[operator]
    except DataError as error:
        return error._render_traceback_()
    raise AssertionError("nothing was raised")


def test_a_notebook_shows_the_message_and_the_users_line(tmp_path):
    def look() -> None:
        fedloom.load(tmp_path / "nowhere")

    led, output = shown(look)
    assert led.endswith('in look: fedloom.load(tmp_path / "nowhere")')
    assert output.startswith("DataError: ")
    assert "nowhere" in output
    assert len(output.splitlines()) == 2  # with the hint


def test_an_error_that_was_not_raised_is_shown_alone():
    assert DataError("found nothing")._render_traceback_() == ["DataError: found nothing"]
