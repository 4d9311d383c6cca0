"""What `run` prints at its end."""

from __future__ import annotations

from pathlib import Path

from hpcsched.cli.run.last_words import TAIL_LINES, last_lines
from hpcsched.contract.files import ATTEMPT_MARK


def test_the_last_lines_are_those_of_the_last_attempt(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.write_text(f"a\nthe error\n{ATTEMPT_MARK}2 ----\nb\n\x1b[31mthe error\x1b[0m\n")
    assert last_lines(output) == ["b", "the error"]
    output.write_text("".join(f"{n}\n" for n in range(99)))
    assert last_lines(output) == [str(n) for n in range(99 - TAIL_LINES, 99)]
    assert last_lines(tmp_path / "none") == []
