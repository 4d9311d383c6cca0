"""Lines of a training for people are lost where they cannot be written: that ends nothing."""

from __future__ import annotations

import errno
import io
import sys

import pytest

from hpcsched.worker.process.contract import say


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_what_is_said_on_a_full_disk_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Full())
    say("anything")
