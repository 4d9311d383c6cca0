"""Errors are one line, whatever the input was."""

from __future__ import annotations

from hpcsched.errors import MOST_SHOWN, ConfigError


def test_bad_input_is_told_in_a_line_of_bounded_length() -> None:
    error = ConfigError(where="p.json", key="a.\tk\n\x1b[m", got="9" * 5000, accepted="a number")
    line = str(error)
    assert line.startswith("p.json: a.\\tk\\n\\x1b[m: 999") and line.isprintable()
    assert "9~9" in line and line.endswith("9; accepted: a number") and len(line) < MOST_SHOWN + 100
