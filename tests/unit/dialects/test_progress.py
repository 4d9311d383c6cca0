"""Steps found in what programs print and write, whatever else is there."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import re
import time
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsched.agent.job_folder import mark_attempt
from hpcsched.core.model import JobSpec, Kind, Restart
from hpcsched.dialects import all_done, matching, number_pattern, progress_of, step_of, step_pattern
from hpcsched.dialects.pattern import MOST_LINE
from hpcsched.errors import BadInput

TRANSFORMERS = Restart(
    speaks="transformers", checkpoints=("out/checkpoint-*",), complete="trainer_state.json"
)
LIGHTNING = Restart(speaks="lightning", checkpoints=("out/*.ckpt",))


def _speaking(restart):
    return JobSpec(name="a", kind=Kind.COMMAND, model="a", command=("x",), restart=restart)


def _prints(pattern):
    return JobSpec(name="a", kind=Kind.COMMAND, model="a", command=("x",), progress_pattern=pattern)


# --- patterns -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "line", "step"),
    [
        (r"step (\d+)", "at step 12 loss 3", 12),
        (r"step (\d+)", "steps 12", None),
        (r"step (\d+)", "step 1 step 2", 1),
        (r"(\d+)/100", "3/100 of 5", 3),
        (r"^(\d+)$", "7", 7),
        (r"^(\d+)$", "7 ", None),
        (r"[Ii]ter:? *(\d+)\s", "Iter:   40 ok", 40),
        (r"[Ii]ter:? *(\d+)\s", "iter40 ok", 40),
        (r"\[[^\]]+\] it=(\d+)", "[a b] it=9", 9),
        (r"\[.*\] +\w+ (\d+)", "[[x]]  abc 9", 9),
        (r"step (\d+)", "step 1234567890123456789", None),
        (r"step (\d+)", "step -3", None),
        (r"a\.b(\d+)", "axb3", None),
        (r"step (\d+)", "step " + "9" * 5, 99999),
        (r"step (\d+)", "x" * MOST_LINE + "step 1", None),
        (r"(\d+)", "", None),
    ],
)
def test_a_pattern_finds_the_first_number_that_fits(pattern: str, line: str, step: int | None) -> None:
    assert step_pattern(pattern).find(line) == step


@pytest.mark.parametrize(
    "pattern",
    ["", "step", r"(\d+) (\d+)", r"(a+)+(\d+)", r"a|(\d+)", r"(\d+", r"a{2}(\d+)", r"(?i)s(\d+)", r"[(\d+)",
     r"\1(\d+)", "*" + r"(\d+)", "a" * 200 + r"(\d+)", r"[z-a](\d+)"],
)  # fmt: skip
def test_other_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(BadInput):
        step_pattern(pattern)


@given(
    parts=st.lists(st.sampled_from(["a", "b?", ".*", "[ab]+", r"\s*", r"\d", "x+"]), max_size=5),
    line=st.text("ab x123", max_size=12),
)
def test_it_finds_what_re_finds(parts: list[str], line: str) -> None:
    before, after = "".join(parts[:3]), "".join(parts[3:])
    whole_numbers = rf"{before}(?<![0-9])(\d+)(?![0-9]){after}"
    found = re.search(whole_numbers, line)
    mine = step_pattern(rf"{before}(\d+){after}").find(line)
    assert (mine is None) == (found is None)
    if mine is not None:
        assert any(
            re.fullmatch(rf".*{before}{n[0]}(?![0-9]){after}.*", line) for n in re.finditer(r"\d+", line)
        )


def test_no_pattern_takes_long() -> None:
    began = time.perf_counter()
    for line in ("a1" * (MOST_LINE // 2), "1" + "a" * (MOST_LINE - 1)):
        assert step_pattern(r".*.*.*.*.*a*a*a*a*[a1]*(\d+)z*z").find(line) is None
    assert time.perf_counter() - began < 1


@pytest.mark.parametrize(
    ("pattern", "line", "number"),
    [
        (r"accuracy[=:] *([0-9.eE+-]+)", "epoch 3: accuracy: 0.93, loss 2", 0.93),
        (r"loss (.+)", "loss 1 loss -2.5e-3", -0.0025),
        (r"loss-(\S+)", "loss-0.5", 0.5),
        (r"^\(val\) (\d+)%$", "(val) 93.5%", 93.5),
        (r"acc=(.*)$", "acc=1.", 1.0),
        (r"took (.+)\.", "took 3.", 3.0),
        (r"v(.)", "finance v1e3x", 1000.0),
        (r"v (.)", "v none, v nano", None),
        (r"v (.)", "v 1e999", math.inf),
        (r"v (.)", "v -inf", -math.inf),
        (r"x(.)", "no number", None),
        (r"x(.)", " " * MOST_LINE + "x1", None),
    ],
)
def test_a_pattern_for_any_number_finds_the_last_that_fits(
    pattern: str, line: str, number: float | None
) -> None:
    assert number_pattern(pattern).last(line) == number


def test_of_a_training_that_diverged_no_earlier_number_is_found() -> None:
    assert math.isnan(number_pattern("loss (.+)").last("loss 0.5 loss NaN") or 0.0)


@pytest.mark.parametrize(
    "pattern", ["", "loss", "(a)(b)", "(a|b)x+?", "(?i)loss (.)", "l{2}(.)", "()", "l(()"]
)
def test_patterns_without_one_place_for_a_number_are_refused(pattern: str) -> None:
    with pytest.raises(BadInput):
        number_pattern(pattern)


# --- output ---------------------------------------------------------------------------------------


def test_new_lines_are_read_once(tmp_path: Path) -> None:
    output = tmp_path / "o"
    output.write_text("step 99 of an earlier attempt\n")
    reader = progress_of(_prints(r"step (\d+)"), tmp_path, output, since=0.0)
    assert reader.read(1.0) is None
    with output.open("a") as file:
        file.write("step 3\nstep 4\nste")
        file.flush()
        assert reader.read(2.0) == (4, 2.0)
        file.write("p 5\rstep 6")
        file.flush()
        assert reader.read(3.0) == (5, 3.0)
        assert reader.read(4.0) is None
        file.write("\nstep 2\n")
        file.flush()
        assert reader.read(5.0) == (6, 5.0) or reader.read(5.0) is None
    output.write_text("step 7\n")  # begun anew
    assert reader.read(6.0) == (7, 6.0)


def test_the_mark_of_an_attempt_is_no_step(tmp_path: Path) -> None:
    output = tmp_path / "o"
    output.write_text("step 7\n")
    reader = progress_of(_prints(r"(\d+)"), tmp_path, output, since=0.0)
    mark_attempt(output, 2, where="GPU 0", resumed=True, step=5)
    assert reader.read(1.0) is None
    with output.open("a") as file:
        file.write("step 6\n")
    assert reader.read(2.0) == (6, 2.0)


def test_the_last_line_counts_without_an_end_once_the_program_has_ended(tmp_path: Path) -> None:
    output = tmp_path / "o"
    reader = progress_of(_prints(r"step (\d+)$"), tmp_path, output, since=0.0)
    output.write_text("step 1\rstep 2")
    assert reader.read(1.0) == (1, 1.0)
    assert reader.read(2.0, over=True) == (2, 2.0)


def test_output_that_floods_is_followed_at_its_end(tmp_path: Path) -> None:
    output = tmp_path / "o"
    reader = progress_of(_prints(r"step (\d+)"), tmp_path, output, since=0.0)
    assert reader.read(0.0) is None  # nothing there yet
    output.write_bytes(b"step 1\n" + b"\xff" * 2**20 + b"x" * 2**20 + b"\nstep 8\n" + b"y" * 100_000)
    assert reader.read(1.0) == (8, 1.0)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to(path)])
def test_what_is_no_file_tells_nothing(tmp_path: Path, make: object) -> None:
    make(tmp_path / "o")  # type: ignore[operator]
    reader = progress_of(_prints(r"(\d+)"), tmp_path, tmp_path / "o", since=0.0)
    assert reader.read(1.0) is None


def test_the_bar_of_a_trainer_is_told_from_others(tmp_path: Path) -> None:
    output = tmp_path / "o"
    reader = progress_of(_speaking(TRANSFORMERS), tmp_path, output, since=0.0)
    with output.open("w") as file:

        def seen(text: str) -> int | None:
            file.write(text)
            file.flush()
            report = reader.read(1.0)
            return report[0] if report else None

        assert seen("Map: 100%|####| 1000/1000 [00:00<00:00, 5 examples/s]\r\n") is None
        assert seen("\r  0%|          | 0/60 [00:00<?, ?it/s]\r") is None
        assert seen(" 12%|#2        | 7/60 [00:01<00:09,  9.5it/s]\r") == 7
        assert seen("{'loss': 3.1, 'epoch': 0.1}\n 50%|##   | 9/18 [00:00<00:00, 9it/s]\r") is None
        assert seen("loading 13%|#2        | 8/60 [00:01<00:09,  9.5it/s]\r") is None
        assert seen(" 15%|#2        | 9/60 [00:01<00:09,  9.5it/s]\r") == 9


# --- files ----------------------------------------------------------------------------------------


def test_checkpoints_tell_where_a_trainer_is(tmp_path: Path) -> None:
    reader = progress_of(_speaking(TRANSFORMERS), tmp_path, tmp_path / "o", since=100.0)
    for step, when in ((20, 90.0), (40, 110.0)):
        state = tmp_path / f"out/checkpoint-{step}/trainer_state.json"
        state.parent.mkdir(parents=True)
        state.write_text("{")
        os.utime(state, (when, when))
    (tmp_path / "out/checkpoint-60").mkdir()  # being written
    assert reader.read(200.0) == (40, 110.0)
    assert reader.read(201.0) is None


@pytest.mark.parametrize(
    ("rows", "step"),
    [
        ("epoch,loss,step\n0,1.5,4\n0,1.4,9\n", 10),
        ("epoch,loss,step\n0,1.5,4\n0,1.4,", 5),  # half a row
        ("epoch,loss,step\n0,1.5,4\n0,nan,9\n", 10),
        ("epoch,loss,step\n0,1.5,4\n0,1.4,NaN\n", 5),
        ("epoch,loss,step\n0,1.5,4\n0,1.4,-3\n", 5),
        ("epoch,loss,step\n0,1.5,4\n,9\n", 5),
        ('"a,b",step\n"1,2",7\n', 8),
        ("epoch,loss\n0,1.5\n", None),
        ("epoch,loss,step\n", None),
        ("step\n", None),
        ("", None),
        ("\0\0\0\n\0\n", None),
        ("step\n" + "9" * 400 + "\n", None),
        ("step\n" + "1\n" * 100_000 + "70\n", 71),
    ],
)
def test_the_rows_of_a_csv_logger(tmp_path: Path, rows: str, step: int | None) -> None:
    reader = progress_of(_speaking(LIGHTNING), tmp_path, tmp_path / "o", since=0.0)
    file = tmp_path / "out/lightning_logs/version_0/metrics.csv"
    file.parent.mkdir(parents=True)
    file.write_text(rows)
    found = reader.read(time.time() + 1)
    assert (found[0] if found else None) == step


def test_a_csv_that_is_not_text(tmp_path: Path) -> None:
    reader = progress_of(_speaking(LIGHTNING), tmp_path, tmp_path / "o", since=0.0)
    (tmp_path / "lightning_logs/version_0").mkdir(parents=True)
    file = tmp_path / "lightning_logs/version_0/metrics.csv"
    file.write_bytes(b"step\n\xff\xfe\n")
    assert reader.read(time.time() + 1) is None
    file.unlink()
    os.mkfifo(file)
    assert reader.read(time.time() + 1) is None


# --- checkpoints ----------------------------------------------------------------------------------


def saved(
    path: Path, state: object, name: str = "archive/data.pkl", compress: int = zipfile.ZIP_STORED
) -> Path:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", compress) as archive:
        archive.writestr(name, pickle.dumps(state, protocol=2))
    path.write_bytes(data.getvalue())
    return path


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("checkpoint-40", 40),
        ("step_40", 40),
        ("epoch_4", None),
        ("40", 40),
        ("epoch=3-step=200.ckpt", 200),
        ("megatron--val_loss=1.2-step=300-last.ckpt", 300),
        ("epoch=3-step=200-v1.ckpt", 200),
        ("last-v1.ckpt", None),
        ("1_submitted.pkl", None),
        ("ckpt.pt", None),
        ("checkpoint-", None),
        ("checkpoint-" + "9" * 40, None),
    ],
)
def test_names_tell_the_step(tmp_path: Path, name: str, step: int | None) -> None:
    assert step_of(tmp_path / name) == step


def test_a_checkpoint_of_lightning_says_it_inside(tmp_path: Path) -> None:
    for step in (0, 7, 300, 70_000, 2**40):
        state = {"epoch": 1, "global_step": step, "state_dict": {"w": [1.0] * 5000}}
        assert step_of(saved(tmp_path / "last.ckpt", state)) == step


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"global_step": "7"},
        {"global_step": None},
        {"global_step": -1},
        {"global_step": 2**70},
        ["global_step"],
    ],
)
def test_a_checkpoint_that_says_nothing(tmp_path: Path, state: object) -> None:
    assert step_of(saved(tmp_path / "last.ckpt", state)) is None


def test_hostile_checkpoints(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "exploded"),)

    assert step_of(saved(tmp_path / "a.ckpt", {"x": Bomb(), "global_step": 3})) in (3, None)
    assert not (tmp_path / "exploded").exists()
    assert step_of(saved(tmp_path / "b.ckpt", {"global_step": 3}, compress=zipfile.ZIP_DEFLATED)) is None
    assert step_of(saved(tmp_path / "c.ckpt", {"global_step": 3}, name="other")) is None
    for content in (b"", b"PK\x03\x04", b"PK\x03\x04" + b"\xff" * 5000, os.urandom(5000)):
        (tmp_path / "d.ckpt").write_bytes(content)
        assert step_of(tmp_path / "d.ckpt") is None
    os.mkfifo(tmp_path / "e.ckpt")
    assert step_of(tmp_path / "e.ckpt") is None
    assert step_of(tmp_path / "a\0.ckpt") is None


@pytest.mark.parametrize(
    ("state", "done"),
    [
        ({"global_step": 60, "max_steps": 60}, True),
        ({"global_step": 61, "max_steps": 60}, True),
        ({"global_step": 59, "max_steps": 60}, False),
        ({"global_step": 0, "max_steps": 0}, False),
        ({"global_step": 5, "max_steps": -1}, False),
        ({"global_step": "5", "max_steps": None}, False),
        ([], False),
        ("{", False),
        ("NaN", False),
    ],
)
def test_the_last_checkpoint_of_a_training_is_known(tmp_path: Path, state: object, done: bool) -> None:
    text = state if isinstance(state, str) else json.dumps(state)
    (tmp_path / "trainer_state.json").write_text(text)
    assert all_done(tmp_path) == done


def test_patterns_are_looked_for_where_the_job_runs(tmp_path: Path) -> None:
    for name in ("a-1", "a-2", "b"):
        (tmp_path / name).mkdir()
    assert {path.name for path in matching(("a-*", "c"), tmp_path)} == {"a-1", "a-2"}
    assert matching(("[", "a\0", "**/*" * 20), tmp_path) == []
