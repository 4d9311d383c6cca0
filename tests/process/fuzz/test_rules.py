"""What a fuzzed command may say, by its exit code, and which lines are played."""

from __future__ import annotations

import json

import pytest

from tests.fuzz.arguments import called_by, lines_of_examples
from tests.fuzz.sandbox import CTRL_C, Wrong, check_said

NOTE, JOB, TRACE = "hpcsched: a", "job 1 (a): b", "Traceback (most recent call last)"


@pytest.mark.parametrize(
    ("code", "answer", "errors"),
    [
        (0, "", TRACE),
        (1, "", f"{NOTE}\n{TRACE}"),
        (1, "", f"{NOTE}\nmore"),
        (1, "", ""),
        (2, "", f"{NOTE}\nmore"),
        (2, "a table", ""),
        (3, "", f"{NOTE}\nmore"),
        (3, "", ""),
        (4, "", f"{NOTE}\n{JOB}"),
        (4, "a table", ""),
        (4, "", "\n".join([NOTE] * 6)),
    ],
)
def test_a_traceback_more_than_a_line_and_no_word_are_wrong(code: int, answer: str, errors: str) -> None:
    with pytest.raises(Wrong):
        check_said(code, answer, errors, silent=False)


@pytest.mark.parametrize(
    ("code", "answer", "errors"),
    [
        (0, "", ""),
        (0, "", "a question"),
        (1, "a table", ""),
        (1, "", f"{JOB}\n{JOB}\n{NOTE}"),
        (2, "", "Usage: hpcsched\nTry --help\n\nError: none"),
        (3, "a table", ""),
        (4, "", f"{NOTE}\n{NOTE}"),
        (CTRL_C, "", ""),
    ],
)
def test_one_error_with_its_notes_and_a_line_for_each_job_are_right(
    code: int, answer: str, errors: str
) -> None:
    check_said(code, answer, errors, silent=False)


@pytest.mark.parametrize(
    ("line", "path"),
    [
        ("--dir run status", ("status",)),
        ("--dir=a -h run x", ("run",)),
        ("-- pool start", ("pool", "start")),
        ("submit --dir run", ("submit",)),
        ("--dir run", ()),
        ("--no-such run", ()),
        ("profile nothing", ("profile",)),
    ],
)
def test_the_command_of_a_line_is_what_click_takes_for_it(line: str, path: tuple[str, ...]) -> None:
    assert called_by(line.split())[0] == path


def test_all_commands_are_among_the_lines_that_are_changed() -> None:
    called = {called_by(json.loads(data)) for data in lines_of_examples()}
    assert len([path for path, command in called if command]) > 45
