"""What keeps an attempt from being launched: what may pass is tried again."""

from __future__ import annotations

import errno
import os

import pytest

from hpcsched.agent.exits import not_launched
from hpcsched.errors import LaunchError


@pytest.mark.parametrize(
    ("number", "transient"),
    [(errno.ESTALE, True), (errno.EIO, True), (errno.EMFILE, True), (errno.EACCES, False)],
)
def test_an_error_of_the_system_may_pass(number: int, transient: bool) -> None:
    error = not_launched(OSError(number, os.strerror(number), "/run/jobs/1"))
    assert error.transient is transient
    assert os.strerror(number) in str(error) and "/run/jobs/1" in str(error)


def test_a_fault_of_ours_does_not_pass() -> None:
    assert str(not_launched(KeyError("x"))) == "KeyError('x')"
    assert not not_launched(ValueError("no such GPU")).transient
    told = LaunchError("the zygote is gone", transient=True)
    assert not_launched(told) is told
