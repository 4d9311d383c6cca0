"""How exit codes are said."""

from __future__ import annotations

import pytest

from hpcsched.core.exits import exit_pair, said_exit


@pytest.mark.parametrize(
    ("code", "sentence", "column"),
    [
        (0, "exit code 0", "0:0"),
        (1, "exit code 1", "1:0"),
        (128, "exit code 128", "128:0"),
        (137, "signal 9 (SIGKILL)", "0:9"),
        (-15, "signal 15 (SIGTERM)", "0:15"),
        (-40, "signal 40", "0:40"),
        (128 + 40, "exit code 168", "168:0"),
        (255, "exit code 255", "255:0"),  # as of ssh, or of sys.exit(-1)
    ],
)
def test_a_code_is_said_in_one_form(code: int, sentence: str, column: str) -> None:
    assert (said_exit(code), exit_pair(code)) == (sentence, column)
