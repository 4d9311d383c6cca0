"""Lines for terminals."""

from __future__ import annotations

import pytest

from hpcsched.printing import hanging

LINE = "[   0:10] job 1 (train) is asked to save: /a/path/that-nobody-copies-in-two-parts/is/whole its save"


def test_a_long_line_is_broken_between_words_and_hangs() -> None:
    lines = hanging(LINE, under=10, width=60).splitlines()
    assert lines == [
        "[   0:10] job 1 (train) is asked to save:",
        " " * 10 + "/a/path/that-nobody-copies-in-two-parts/is/whole",
        " " * 10 + "its save",
    ]


@pytest.mark.parametrize("width", [None, len(LINE) + 1, 39])
def test_one_that_fits_or_has_no_room_stays(width: int | None) -> None:
    assert hanging(LINE, under=10, width=width) == LINE
