"""Time, memory and modules of jobs, in real runs."""

from __future__ import annotations

import sys

from livebench import Bench, job

SAVES = """
import json, os, signal, sys, time
folder, attempt = os.environ["HPCSCHED_JOB_DIR"], int(os.environ["HPCSCHED_ATTEMPT"])
state = os.path.join(folder, "STATE.json")
step = json.load(open(state))["step"] if os.environ["HPCSCHED_RESUME"] == "1" else 0
def leave(*_):
    with open(state, "w") as file:
        json.dump({"step": step, "attempt": attempt}, file)
    sys.exit(75)
signal.signal(signal.SIGTSTP, leave)
open(os.path.join(folder, f"ready.{attempt}"), "w").close()
print("from", step, flush=True)
while True:
    time.sleep(0.01)
    step += 1
    if attempt > 1:
        sys.exit(0)
"""
GROWS = """
import os, sys, time
print("begins", flush=True)
if os.fork() == 0:
    kept = []
    while True:
        kept.append(bytearray(os.urandom(2**20)) * 8)
        time.sleep(0.01)
os.wait()
time.sleep(60)
"""
TOOL = """
module() {
  [ "$2" = tool/1.0 ] || { echo "Unable to locate a modulefile for '$2'" >&2; return 1; }
  export LOADEDMODULES=tool/1.0 TOOL=one PATH=/opt/tool/bin:$PATH
}
"""


def program(name: str, script: str, **keys: object) -> str:
    return job(name, command=[sys.executable, "-S", "-c", script], **keys)


def test_jobs_end_by_their_limits_and_say_so(bench: Bench) -> None:
    home = bench.folder / "modules"
    (home / "init").mkdir(parents=True)
    (home / "init/bash").write_text(TOOL)
    shows = ["sh", "-c", "echo $TOOL ${PATH%%:*} $MINE"]
    jobs = [
        program("long", SAVES, time="1s"),
        program("large", GROWS, memory="200M"),
        job("modules", command=shows, modules=["tool/1.0"], env={"MINE": "kept"}),
        job("no-module", command=["true"], modules=["other"]),
        program("next", "print(1)", after=["long"]),
    ]
    bench.env["MODULESHOME"] = str(home)
    done = bench("run", bench.set_of(*jobs), "--devices", "cpu:4")
    assert done.returncode == 1, done.stderr
    assert bench.states() == {
        "long": "TIMEOUT",
        "large": "OUT_OF_MEMORY",
        "modules": "COMPLETED",
        "no-module": "FAILED",
        "next": "CANCELLED",
    }
    assert "its time limit of 1s is over: saved at step" in bench("explain", "long").stdout
    assert "needs: at most 1s of running time\n" in bench("explain", "long").stdout
    assert "job 1 (long) ended: its time limit of 1s is over: saved at step" in done.stdout + done.stderr
    assert "of the 200M that it may have" in bench("explain", "large").stdout
    assert "modules = [other]: cannot be loaded: Unable to locate" in bench("explain", "no-module").stdout
    assert bench("logs", "modules").stdout == "one /opt/tool/bin kept\n"
    table = bench("status", "-t", "all").stdout
    assert " TO " in table
    assert " OOM " in table
    # What it has saved is not lost: it goes on from there.
    assert bench("retry", "long").returncode == 0
    assert bench("run", "--resume").returncode == 1
    first, second = bench("logs", "long").stdout.splitlines()[::2]
    assert first == "from 0"
    assert int(second.split()[1]) > 0
    assert bench.states()["long"] == "COMPLETED"
