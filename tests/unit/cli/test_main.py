"""The entry point: whatever a command was given, people read one line."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rundirs import a_home

from hpcsched.cli import main as entry


def said(monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[object, str, str]:
    """Exit code, output and errors of a command, on streams as Python makes them."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", on) for on in ("strict", "backslashreplace"))
    monkeypatch.setattr(sys, "argv", ["hpcsched", *words])
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with pytest.raises(SystemExit) as left:
        entry.main()
    texts = []
    for stream in (out, err):
        stream.flush()
        assert isinstance(stream.buffer, io.BytesIO)
        texts.append(stream.buffer.getvalue().decode())
    return left.value.code, *texts  # type: ignore[return-value]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return a_home(tmp_path, monkeypatch)


def test_a_path_that_no_system_takes_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, errors = said(monkeypatch, "--config", "A" * 5000, "status")
    assert code == 2 and errors.count("\n") == 1 and len(errors) < 500
    assert errors.startswith("hpcsched: AAA") and "A: File name too long; accepted: " in errors


def test_a_folder_that_no_system_takes_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, errors = said(monkeypatch, "--dir", "A" * 5000, "status")
    assert code == 1 and errors.count("\n") == 1 and len(errors) < 1000


def test_a_file_that_cannot_be_reached_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "/a/file")

    monkeypatch.setattr(entry.config, "load", refused)
    assert said(monkeypatch, "status") == (1, "", "hpcsched: /a/file: Permission denied\n")


def test_long_words_are_not_said_again_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, errors = said(monkeypatch, "status" * 2000)
    assert code == 2 and "No such command" in errors and len(errors) < 3000


def test_what_is_no_utf8_is_shown_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCSCHED_DEVICE_TYPE", "caf\udce9")
    code, shown, _ = said(monkeypatch, "config", "show")
    assert code == 0 and "caf\\udce9" in shown
