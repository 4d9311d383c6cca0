"""The entry point: whatever a command was given, people read one line."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rundirs import a_home, a_run

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
    assert code == 1 and errors.count("\n") == 1 and len(errors) < 3000


def test_a_folder_with_an_end_of_line_in_its_name_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, errors = said(monkeypatch, "--dir", "a\n\tb", "status")
    assert code == 3 and errors.count("\n") == 1 and "/a\\n\\tb; start one with" in errors


@pytest.mark.parametrize(
    "words", [("A" * 70_000,), ("--python", "A" * 3000, "--", "a"), ("--python", "\u202e" * 1900, "--", "a")]
)
def test_a_doubt_about_a_long_word_is_a_line_of_bounded_length(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    code, _, errors = said(monkeypatch, "submit", *words)
    assert code == 0 and "submitted all the same: " in errors and max(map(len, errors.split("\n"))) < 2100


def test_a_long_folder_that_clean_leaves_alone_is_a_line_of_bounded_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code, _, errors = said(monkeypatch, "clean", "A" * 70_000)
    assert code == 1 and errors.startswith("hpcsched: left alone: ") and "File name too long" in errors
    assert len(errors) < 2100


def test_a_file_that_cannot_be_reached_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "/a/file")

    monkeypatch.setattr(entry.config, "load", refused)
    assert said(monkeypatch, "status") == (1, "", "hpcsched: /a/file: Permission denied\n")


def test_long_words_are_not_said_again_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, errors = said(monkeypatch, "status" * 2000)
    assert code == 2 and "No such command" in errors and len(errors) < 3000


@pytest.mark.parametrize("words", [("status", "--dir", "\u202e" * 1900), ("explain", "1", "\u202e" * 1900)])
def test_escapes_count_for_the_length_of_a_line(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    code, _, errors = said(monkeypatch, *words)
    assert code in (1, 2) and "\\u202e" in errors and max(map(len, errors.split("\n"))) < 2100


def test_what_is_no_utf8_is_shown_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCSCHED_DEVICE_TYPE", "caf\udce9")
    code, shown, _ = said(monkeypatch, "config", "show")
    assert code == 0 and "caf\\udce9" in shown


def test_a_batch_script_has_the_bytes_of_a_path_that_is_no_utf8(
    monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    (home / "caf\udce9.toml").write_text('schema = 1\n[[job]]\nname = "a"\ncommand = ["a"]\n')
    words = ("--time", "1h", "--gpus-per-node", "1", "-o", "job.sbatch")
    code, _, errors = said(monkeypatch, "script", "slurm", "caf\udce9.toml", *words)
    assert code == 0, errors
    assert b"/caf\xe9.toml" in Path("job.sbatch").read_bytes()


def test_a_batch_script_with_orders_to_a_terminal_in_its_name_is_told_as_text(
    monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    (home / "jobs.toml").write_text('schema = 1\n[[job]]\nname = "a"\ncommand = ["a"]\n')
    words = ("jobs.toml", "--time", "1h", "--gpus-per-node", "1", "-o", "\x1b]0;x\x07")
    code, _, errors = said(monkeypatch, "script", "slurm", *words)
    assert (code, errors) == (0, "hpcsched: written; submit it with: sbatch '\\x1b]0;x\\x07'\n")


def test_what_click_refuses_is_one_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, errors = said(monkeypatch, "status", "--no\nsuch\x1b[m")
    assert code == 2 and "Error: No such option" in errors and "--no\\nsuch\\x1b[m" in errors


@pytest.mark.parametrize("columns", ["wide", "-3", "1", "9" * 4500])
def test_a_width_of_the_terminal_that_is_none_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, home: Path, columns: str
) -> None:
    a_run(home / "hpcsched-run")
    monkeypatch.setenv("COLUMNS", columns)
    code, shown, errors = said(monkeypatch, "top", "-n", "1")
    assert (code, errors) == (0, "") and shown


NINES = "9" * 4500
"""More digits than Python makes a number of."""


@pytest.mark.parametrize(
    "words",
    [
        ("submit", "--array", f"1-3%{NINES}", "--", "a"),
        ("submit", "--processes", NINES, "--", "a"),
        ("plan", "vsw", "resnet50-v100-p100", "--gpus", f"a={NINES}:V100"),
        ("plan", "vsw", "resnet50-v100-p100", "--local-batch", NINES),
        ("simulate", "jobs.toml", "--gpus-per-node", "999999999"),
        ("simulate", "jobs.toml", "--gpus-per-node", "4", "--nodes", "99999999"),
        ("profile", "layers", "a:B", "--batches", NINES),
        ("profile", "pack", "a:B", "--counts", NINES),
        ("run", "jobs.toml", "--warm", NINES),
    ],
    ids=lambda words: " ".join(words)[:30],
)
def test_numbers_beyond_all_measure_are_refused_in_a_line(
    monkeypatch: pytest.MonkeyPatch, home: Path, words: tuple[str, ...]
) -> None:
    (home / "jobs.toml").write_text(
        'schema = 1\n[[job]]\nname = "a"\nmodel = "ResNet-50"\ncommand = ["a"]\nsteps = 9\n'
    )
    code, _, errors = said(monkeypatch, *words)
    assert code == 2 and len(errors) < 1000 and errors.splitlines()[-1].startswith(("hpcsched: ", "Error: "))


@pytest.mark.parametrize("words", [("cancel", f"1-{NINES}"), ("status", "-j", NINES), ("explain", NINES)])
def test_no_job_has_a_number_beyond_all_measure(
    monkeypatch: pytest.MonkeyPatch, home: Path, words: tuple[str, ...]
) -> None:
    a_run(home / "hpcsched-run")
    code, _, errors = said(monkeypatch, *words)
    assert code in (1, 3, 4) and errors.count("\n") == 1 and len(errors) < 3000


def test_choices_that_are_missing_are_named_in_the_same_line(monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = said(monkeypatch, "script")
    assert code == 2
    assert err.splitlines()[-1].endswith("Choose from: slurm, lsf, sge")
