"""Bugs put in on purpose, one at a time, in a copy of the package: each has to be found.

    python -m tests.chaos.real.planted [--seconds 300] [--at-once 4] [--only WORD] [--json FILE]

Says which schedule has found each, by what, and after how long. Exit code 1: one was not found in time.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.planted import Fault, told

BUGS = (
    Fault(
        "orphans are not ended at resume",
        "agent/recovery.py",
        "stay = end_processes(orphans, grace_s, killed=killed) if orphans else []",
        "stay = list[Process]()",
        flavour="programs",
    ),
    Fault(
        "the journal is not durable before an answer",
        "store/journal.py",
        "            if sync:\n                os.fdatasync(self._descriptor)\n",
        "",
        flavour="programs",
    ),
    Fault(
        "a torn tail is not cut off",
        "store/files.py",
        "os.ftruncate(descriptor, length)\n        os.lseek(descriptor, length, os.SEEK_SET)",
        "os.lseek(descriptor, 0, os.SEEK_END)",
        flavour="programs",
    ),
    Fault(
        "a second agent is let in",
        "store/rundir.py",
        "fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)",
        flavour="programs",
    ),
    Fault(
        "steps repeated are not counted",
        "core/transitions/endings.py",
        "job.has(repeated=job.repeated + again)",
        "pass",
        flavour="workers",
    ),
    Fault(
        "what a program leaves in a session of its own is not ended",
        "launch/orphans.py",
        "    targets = _Targets(found)\n    try:\n        targets.send(signal.SIGKILL)",
        "    targets = _Targets(found)\n    try:\n        pass",
        flavour="workers",
    ),
    Fault(
        "what is held in memory is not let go",
        "worker/keeper.py",
        "(env.job_dir / files.held(env.attempt)).unlink(missing_ok=True)",
        "pass",
        flavour="memory",
    ),
    Fault(
        "nothing is saved before the time is up",
        "core/transitions/drain.py",
        "if self._deadline.timer_is_due:",
        "if False:",
        flavour="walltime",
    ),
    Fault(
        "a full disk counts as the job's failure",
        "agent/exits.py",
        "else disk_space.first_full_directory(attempt.written_folders)",
        'else ""',
        flavour="disks",
    ),
    Fault(
        "the processes of a node agent that was killed live on",
        "agent/node/guard.py",
        "end_processes(marked(find_orphans(run_id, []), [name_mark]), GRACE_S)",
        "pass",
        flavour="hosts",
    ),
    Fault(
        "a cancel is not carried out",
        "core/transitions/commands.py",
        '        if job.state.final or job.wanted == "cancel":\n            return\n',
        "        return\n",
        flavour="workers",
    ),
    Fault(
        "a run with failed jobs ends with 0",
        "agent/life.py",
        "        return int(failed)\n",
        "        return 0\n",
        flavour="programs",
    ),
    Fault(
        "a guest leaves while the run goes on",
        "agent/join.py",
        "            gone_s = self._connection.gone_s(now)\n",
        "            gone_s = self._connection.gone_s(now)\n"
        "            if now - began > 4.0:\n"
        "                return Parted.LEFT\n",
        flavour="join",
    ),
)


def found(bug: Fault, seconds: float, at_once: int) -> str:
    """The first schedule that finds it, and what it says; empty if none does in time."""
    with tempfile.TemporaryDirectory(prefix="planted-") as name:
        bug.copy(Path(name))
        words = [sys.executable, "-m", "tests.chaos.real", "--seconds", str(seconds), "--until-found"]
        words += ["--flavour", bug.flavour, "--at-once", str(at_once)]
        env = {**os.environ, "CHAOS_UNDER_TEST": name, "PYTHONPATH": name}  # what checks has the bug, too
        done = subprocess.run(words, env=env, cwd=name, capture_output=True, text=True, check=False)
    match = re.search(r"^seed (\d+) [^\n]*\n    !! ([^\n]*)", done.stdout, re.MULTILINE)
    return f"seed {match[1]}: {match[2][:160]}" if match else ""


def main(words: Sequence[str]) -> int:
    """Plant each; the exit code."""
    parser = argparse.ArgumentParser(prog="chaos.real.planted", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--at-once", type=int, default=4, metavar="N")
    parser.add_argument("--only", default="", metavar="WORD")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(words)
    rows = []
    for bug in BUGS:
        if args.only not in bug.name:
            continue
        began = time.monotonic()
        by = found(bug, args.seconds, args.at_once)
        took_s = time.monotonic() - began
        print(f"{bug.name}: {by or 'NOT FOUND'} ({took_s:.0f} s)", flush=True)
        rows.append({"fault": bug.name, "file": bug.file, "found_s": took_s if by else None, "violated": by})
    if args.json:
        args.json.write_text(told(args.seconds, rows))
    return any(row["found_s"] is None for row in rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
