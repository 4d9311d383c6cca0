"""Whose processes these are."""

from __future__ import annotations

import getpass
import os

import pytest

from hpcsched.accounts import user_name


@pytest.mark.parametrize("error", [KeyError, OSError])
def test_a_user_without_a_name_has_a_number(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    def unknown() -> str:
        raise error("getpwuid(): uid not found: 12345")

    monkeypatch.setattr(getpass, "getuser", unknown)
    assert user_name() == str(os.getuid())
