"""A journal that is compacted in a run with real processes, whose agent is killed again and again."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time

import pytest
from budget import slow
from livebench import PATIENCE_S, Bench, job

from hpcsched.core.model import JobState
from hpcsched.policy import make_policy
from hpcsched.store import journal
from hpcsched.store.archive import part_path
from hpcsched.store.repair import check
from hpcsched.store.replay import replay, valid_events
from hpcsched.store.rundir import RunDir

SOON = """\
import sys
from hpcsched.agent import compacting
from hpcsched.store import compaction
compaction.COMPACTED_BYTES = compacting.COMPACTED_BYTES = 4000
from hpcsched.cli.main import main
sys.argv = ["hpcsched", *sys.argv[1:]]
main()
"""
"""`hpcsched` that compacts a journal of 4 kB."""


@pytest.mark.parametrize("kills", [0, slow(6)])
def test_a_run_whose_journal_is_compacted_goes_on_after_each_kill(bench: Bench, kills: int) -> None:
    jobs = [job(f"j{n}", "sleep 0.1", gpus=1, retries=9) for n in range(10 + 15 * kills)]
    waits = f"until head -c 99 {bench.dir}/journal.jsonl | grep -q Archived; do sleep 0.1; done"
    jobs.append(job("last", waits, gpus=1, retries=9))
    first = ["run", bench.set_of(*jobs), "--devices", "cpu:2", "-q"]
    again = ["run", "--resume", "--devices", "cpu:2", "-q"]
    draw = random.Random(1)
    for words in [first, *[again] * kills]:
        command = [sys.executable, "-c", SOON, *map(str, words)]
        agent = subprocess.Popen(command, env=bench.env, cwd=bench.folder)
        if words is not first or kills:
            bench.until(bench.dir.joinpath("status.json").exists, "a run", PATIENCE_S)
            time.sleep(draw.uniform(0.5, 4.0))  # anywhere in its work
            agent.send_signal(signal.SIGKILL)
        agent.wait(PATIENCE_S)
    if kills:
        command = [sys.executable, "-c", SOON, *again]
        assert subprocess.run(command, env=bench.env, cwd=bench.folder, timeout=PATIENCE_S).returncode == 0
    path = RunDir(bench.dir).journal
    archived = journal.Contents(path).archived
    assert archived and all(part_path(path, end).exists() for end in archived)
    assert not check(path, make_policy).wrong
    machine = replay(path, make_policy).machine
    assert machine.run.jobs.counts() == {JobState.COMPLETED: len(jobs)}
    whole = replay(path, make_policy, short_cut=False)
    assert whole.records == sum(1 for _ in valid_events(path)) and whole.machine.run.finished
    for words in (["explain", "j1"], ["history"], ["report", "-o", "r.html"], ["journal", "check"]):
        done = bench(*words)
        assert done.returncode == 0, done.stderr
