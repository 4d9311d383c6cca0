"""Jobs that are over as rows, in a run with real processes: an agent killed, rows lost, jobs run again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
from budget import slow
from livebench import PATIENCE_S, Bench, job

FEW = """\
import sys
from hpcsched.store.snapshot import SnapshotWriter
SnapshotWriter.__init__.__kwdefaults__["most_ended"] = 3
from hpcsched.cli.main import main
sys.argv = ["hpcsched", *sys.argv[1:]]
main()
"""
"""`hpcsched` with few jobs that are over in status.json."""


@pytest.mark.parametrize("lost", ["cut", slow("nothing"), slow("gone")])
def test_a_run_with_rows_goes_on_after_its_agent_was_killed(bench: Bench, lost: str) -> None:
    jobs = [job(f"good-{n}", "true", gpus=1) for n in range(8)]
    waits = "while ! test -e allowed; do sleep 0.02; done"
    jobs += [job("bad", "test -e allowed", gpus=1, retries=0), job("last", waits, gpus=1)]
    command = [sys.executable, "-c", FEW, "run", bench.set_of(*jobs), "--devices", "cpu:2", "-q"]
    words = {"env": bench.env, "cwd": bench.folder}
    agent = subprocess.Popen([*map(str, command)], **words)  # type: ignore[call-overload]
    try:
        bench.until(lambda: bench.status().get("ended"), "rows", PATIENCE_S)
        bench.until(lambda: all_of(bench).get("bad") == "FAILED", "all but the last", PATIENCE_S)
        before = all_of(bench)
        assert before == {**{f"good-{n}": "COMPLETED" for n in range(8)}, "bad": "FAILED", "last": "RUNNING"}
        said = bench("status").stdout
        assert "finished: 8 completed, 1 failed" in said and "good" not in said
        assert bench("logs", "good-0").returncode == 0
    finally:
        agent.send_signal(signal.SIGKILL)
        agent.wait()
    (rows,) = bench.dir.glob("ended.*.jsonl")
    if lost == "cut":
        rows.write_bytes(rows.read_bytes()[:-7])
    elif lost == "gone":
        rows.unlink()
    done = bench("status", "--json")
    if lost == "nothing":
        assert done.returncode == 3 and len(json.loads(done.stdout)["jobs"]) == 10
    else:
        assert done.returncode == 1 and "is damaged" in done.stderr and done.stderr.count("\n") == 1
    (bench.folder / "allowed").touch()
    done = subprocess.run(
        [sys.executable, "-c", FEW, "run", "--resume", "--retry", "--devices", "cpu:2", "-q"],
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
        **words,  # type: ignore[call-overload]
    )
    assert done.returncode == 0, done.stderr
    assert set(all_of(bench).values()) == {"COMPLETED"} and len(all_of(bench)) == 10
    assert len(list(bench.dir.glob("ended.*.jsonl"))) == 1 and not rows.exists()
    done = bench("clean", bench.dir, "--yes")
    assert done.returncode == 0, done.stderr
    assert not bench.dir.exists()


def all_of(bench: Bench) -> dict[str, str]:
    """By name the states that `status --json` tells."""
    done = bench("status", "--json")
    return {one["name"]: one["state"] for one in json.loads(done.stdout)["jobs"]} if done.stdout else {}
