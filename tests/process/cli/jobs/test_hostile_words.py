"""What hostile programs and hostile run directories say: no command hands a terminal what it would obey."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
from pathlib import Path

import msgspec
import pytest
from livebench import COMMAND, PATIENCE_S, Bench, job
from rundirs import a_status

from hpcsched.core.model import JobState
from hpcsched.store.rundir import RunDir

EVIL = "\x1b[2J\x1b]0;t\x07\x1b]52;c;ZQ==\x07\x1b]8;;http://x\x1b\\link\x1b[5A\x08\u202etxt\x9b2J\u2028\x7f"
RAW = EVIL.encode() + b"\x9b2J\xff\r"
PROGRAM = """
import json, os, sys
out, folder = sys.stdout.buffer, os.environ["HPCSCHED_JOB_DIR"]
evil, raw, how = {evil!r}, {raw!r}, sys.argv[1]
out.write(b"\\x1b[31mred\\x1b[0m\\n" + raw + b"\\n")
if how == "long":
    out.write(raw * 20_000)
if how == "done":
    with open(folder + "/STATE.json", "w") as file:
        json.dump({{"step": 1, "attempt": 1, "metrics": {{evil: 1.0, "loss": 2.0}}}}, file)
if how == "unreadable":
    with open(folder + "/STATE.json", "w") as file:
        json.dump({{evil: evil, "step": evil}}, file)
out.write(raw)
out.flush()
sys.exit({{"done": 0, "unreadable": 75}}.get(how, 1))
"""
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
DRAWING = re.compile(r"\r?\x1b\[(?:\?\d+[hl]|H|1A|2K|[0-9;]*m)")
"""What rich needs for a table that is redrawn in place."""
OBEYED = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2028\u2066-\u2069]|\r(?!\r*\n)")
ALL_COLUMNS = "%i %j %u %t %T %M %b %m %p %s %e %B %W %y %k %n %R"


def obeyed(said: bytes, allowed: re.Pattern[str] | None = None) -> list[str]:
    """What a terminal would obey of these bytes, or be misled by."""
    text = said.decode()  # strict: no byte that is no UTF-8
    return OBEYED.findall(allowed.sub("", text) if allowed else text)


def on_terminal(bench: Bench, *words: object) -> bytes:
    """What a command writes, on a terminal, to the end of which it comes by itself."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [COMMAND, *map(str, words)],
        env={**bench.env, "TERM": "xterm-256color", "COLUMNS": "200", "LINES": "50"},
        cwd=bench.folder,
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    said = b""
    try:
        while piece := os.read(ours, 2**16):
            said += piece
    except OSError:  # it has ended
        pass
    finally:
        os.close(ours)
        process.wait(PATIENCE_S)
    return said


@pytest.mark.slow
def test_hostile_programs_reach_no_terminal_and_no_page(bench: Bench) -> None:
    program = bench.folder / "hostile.py"
    program.write_text(PROGRAM.format(evil=EVIL, raw=RAW))
    hows = ("fails", "long", "done", "unreadable")
    jobs = [job(how, f"exec python3 {program} {how}", gpus=1, retries=0) for how in hows]
    said = on_terminal(bench, "run", bench.set_of(*jobs), "--devices", "cpu:2", "--warm", "off")
    assert b"ended with exit code 1" in said and not obeyed(said, DRAWING)
    for words in (
        ("status", "-o", ALL_COLUMNS, "-t", "all"),
        ("status", "-t", "all", "-P"),
        ("status", "--json"),
        ("explain",),
        ("explain", "fails"),
        ("explain", "unreadable"),
        ("explain", "fails", "--json"),
        ("top", "-n", "1"),
        ("history",),
        ("history", "--json"),
        ("retry", "fails"),
    ):
        said = on_terminal(bench, *words)
        assert said and not obeyed(said, DRAWING if words[0] == "top" else None), (words, said)
    for how in ("fails", "long"):
        said = on_terminal(bench, "logs", how)
        assert b"\x1b[31mred\x1b[0m" in said and said.endswith(b"\x1b[0m")  # colours, and none is left on
        shown = said.translate(None, b"\r\b")  # with which a bar goes back
        assert not obeyed(shown, COLOUR) and rb"\x1b[2J" in shown and rb"\xff" in shown
        raw = subprocess.run(
            [COMMAND, "logs", how], env=bench.env, cwd=bench.folder, capture_output=True, check=True
        )
        assert RAW in raw.stdout  # into a pipe as it is
    page = bench.folder / "page.html"
    assert bench("report", "-o", page).returncode == 0
    assert not obeyed(page.read_bytes())


def test_a_hostile_run_directory_reaches_no_terminal(bench: Bench, tmp_path: Path) -> None:
    status = a_status(jobs=3)
    for one in status.jobs:
        one.name = one.user = one.model = one.array = one.reason = EVIL + "\n"
        one.hosts, one.kept = [EVIL], ["k" + EVIL]
    status.jobs[0].state, status.jobs[0].kept = JobState.FAILED, []
    status.jobs[0].updated = [EVIL]
    status.run.policy = status.run.dir = EVIL
    status.run.lost_gpus = {EVIL: EVIL}
    status.run.allocation = {"kind": EVIL, "id": EVIL, "deadline": None}
    for gpu in status.gpus:
        gpu.host = gpu.health = EVIL
    rundir = RunDir(bench.dir)
    rundir.make()
    rundir.status.write_bytes(msgspec.json.encode(status))
    for words in (
        ("status", "-o", ALL_COLUMNS, "-t", "all"),
        ("status", "-o", ALL_COLUMNS, "-r", "-P"),
        ("status", "--json"),
        ("status", "nobody"),
        ("top", "-n", "1"),
        ("cancel", EVIL),
    ):
        said = on_terminal(bench, *words)
        assert said and not obeyed(said, DRAWING if words[0] == "top" else None), (words, said)
    assert json.loads(bench("status", "--json").stdout)["run"]["policy"] == EVIL  # escapes, no other value
