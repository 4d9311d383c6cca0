"""Faults put into a copy of hpcsched on purpose, one at a time: how long until a schedule finds each.

    python -m tests.chaos.planted [--seconds 300] [--only NAME] [--json FILE]

Exit code 1 where one is not found within the time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from machine import machine

ROOT = Path(__file__).resolve().parents[2]


_FOUND = re.compile(r"seed \d+: .")
_BROKEN = re.compile(r": (the player ended|(ImportError|ModuleNotFoundError|SyntaxError|NameError): )")


@dataclass(frozen=True)
class Fault:
    """A fault: in a file of hpcsched, `right` stands once, and becomes `wrong`. `flavour`: of the real
    schedules that are to find it."""

    name: str
    file: str
    right: str
    wrong: str
    flavour: str = ""

    def planted(self, text: str) -> str:
        """The text of the file with the fault in it. Raises ValueError where the code has changed."""
        if (found := text.count(self.right)) != 1:
            raise ValueError(f"{self.name}: what it changes stands {found} times in {self.file}")
        return text.replace(self.right, self.wrong)

    def copy(self, folder: Path) -> None:
        """Make a copy of the package with it, and links to what stands beside that. Raises ValueError."""
        shutil.copytree(ROOT / "hpcsched", folder / "hpcsched", ignore=shutil.ignore_patterns("__pycache__"))
        for path in ROOT.iterdir():
            if path.name not in ("hpcsched", ".git"):
                (folder / path.name).symlink_to(path)
        place = folder / "hpcsched" / self.file
        place.write_text(self.planted(place.read_text()))


FAULTS = (
    Fault(
        "processes of the agent before are left",
        "agent/recovery.py",
        "end_processes(orphans, grace_s, killed=killed) if orphans else []",
        "[]",
    ),
    Fault(
        "what is answered is not on disk",
        "agent/recorder.py",
        "self._journal.append(events, sync=durable)",
        "self._journal.append(events, sync=False)",
    ),
    Fault(
        "nothing of the journal is put on disk while a run goes on",
        "store/journal.py",
        "            if sync:\n                os.fdatasync(self._descriptor)\n",
        "",
    ),
    Fault(
        "files are not replaced atomically",
        "store/files.py",
        "        temporary.replace(path)\n",
        "        path.write_bytes(data)\n",
    ),
    Fault(
        "a torn record stays",
        "store/files.py",
        "        os.ftruncate(descriptor, length)\n        os.lseek(descriptor, length, os.SEEK_SET)\n",
        "        os.lseek(descriptor, 0, os.SEEK_END)\n",
    ),
    Fault(
        "commands are carried out again",
        "agent/inbox.py",
        "            (self._new / name).unlink(missing_ok=True)\n        except",
        "            pass\n        except",
    ),
    Fault(
        "a command done before a crash is done anew",
        "agent/loop.py",
        "        if name in self._done_commands:",
        "        if False:",
    ),
    Fault(
        "who sent what is no command hears nothing",
        "agent/loop.py",
        "            self._r.inbox.answer(name, answer)",
        "            answer.error or self._r.inbox.answer(name, answer)",
    ),
    Fault(
        "checkpoints of other attempts are not found",
        "agent/attempts.py",
        "        return max(found, key=lambda record: (record.attempt or 0, record.step), default=None)",
        "        return None",
    ),
    Fault(
        "a crash loses a step that was saved",
        "agent/recovery.py",
        "                steps[job.id] = record.step if record else 0\n        elif",
        "                steps[job.id] = max(0, record.step - 1) if record else 0\n        elif",
    ),
    Fault(
        "time in which all was stopped counts",
        "agent/clock.py",
        "        self._since += seconds",
        "        pass",
    ),
    Fault(
        "the agent ends while states are in memory alone",
        "agent/loop.py",
        "self._r.ending.awaits_why and self._durability.done()",
        "self._r.ending.awaits_why",
    ),
    Fault(
        "records go where nobody finds them when the journal is compacted",
        "store/compaction.py",
        "    writer.begin_anew([*contents.archived, found.mark], place)",
        "    writer.begin_anew([found.mark], place)",
    ),
    Fault(
        "saving begins at the end of the allocation",
        "core/transitions/deadline.py",
        "        return self.reserve_s + sum(self._estimates.longest_save_s(job) for job in saving)",
        "        return 0.0 * sum(self._estimates.longest_save_s(job) for job in saving)",
    ),
    Fault(
        "a full disk is a job's fault",
        "core/transitions/reports.py",
        '        if event.no_room and job.wanted != "cancel":',
        "        if False:",
    ),
    Fault(
        "a hiccup of the file system ends the agent",
        "patience.py",
        "            if not passes(error) or time.monotonic() > until:",
        "            if True:",
    ),
    Fault(
        "a record that cannot be read for a moment is none",
        "agent/attempts.py",
        "        if passes(error):\n            raise\n        return None",
        "        return None",
    ),
    Fault(
        "one retry too few",
        "core/transitions/endings.py",
        "        if job.failures > job.spec.retries or refused:",
        "        if job.failures >= job.spec.retries or refused:",
    ),
    Fault(
        "an attempt counts as over when one of its processes is",
        "agent/attempts.py",
        "        over = len(self._codes) == len(members)",
        "        over = bool(self._codes)",
    ),
    Fault(
        "steps that are done again are not counted",
        "core/transitions/endings.py",
        "        self._run.count_news(self._ledger.waits_by(job).foreground)\n"
        "        self.back_to_checkpoint(job)",
        "        self._run.count_news(self._ledger.waits_by(job).foreground)",
    ),
    Fault(
        "a cancel is forgotten in a crash",
        "core/transitions/endings.py",
        '        if job.wanted == "cancel":\n            self.cancelled(job)\n            return\n',
        "",
    ),
    Fault(
        "what was suspended goes on after a crash",
        "core/transitions/endings.py",
        "        if job.held and job.state is JobState.PENDING:\n"
        "            job.held = False\n"
        "            self._out.set_state(job, JobState.HELD)\n",
        "        job.held = False\n",
    ),
    Fault(
        "who comes back does not begin",
        "core/transitions/submissions.py",
        "        self._run_again(event.job_ids, from_scratch=event.from_scratch)",
        "        pass",
    ),
    Fault(
        "who has failed was cancelled",
        "core/transitions/endings.py",
        "or refused:\n            self.finish(job, JobState.FAILED,",
        "or refused:\n            self.finish(job, JobState.CANCELLED,",
    ),
    Fault(
        "what is in memory alone is forgotten",
        "agent/effects.py",
        "            if action.anew:\n                self._launcher.forget(job.id)\n",
        "            self._launcher.forget(job.id)\n            if action.anew:\n",
    ),
    Fault(
        "the snapshot does not say why the first one waits",
        "store/snapshot.py",
        "        changed |= {i for i in (self._head, head) if i is not None}\n",
        "",
    ),
    Fault(
        "what was sent stays where it was written",
        "agent/inbox.py",
        "patiently(lambda: temporary.rename(new / name))",
        "patiently(lambda: os.link(temporary, new / name))",
    ),
    Fault(
        "a command is waited for for ever",
        "core/transitions/commands.py",
        "        self._waiting.dequeue(job)\n        job.held = True",
        "        while True:\n            pass",
    ),
)


def seconds_until_found(fault: Fault, seconds: float) -> tuple[float | None, str]:
    """How long it takes to find a fault (None: it was not found), and what it violated."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        fault.copy(Path(folder))
        command = [
            sys.executable,
            "-m",
            "tests.chaos",
            "--seconds",
            str(seconds),
            "--most-bad",
            "1",
            "--as-is",
        ]
        environment = {**os.environ, "PYTHONPATH": folder}
        began = time.monotonic()
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        took_s = time.monotonic() - began
    said = found_in(done.stdout)
    return (took_s if said else None), said or (done.stdout + done.stderr)[-500:]


def found_in(text: str) -> str:
    """The line of a harness that tells what it has found; empty where it has found nothing but that the copy,
    or itself, is broken."""
    lines = [line for line in text.splitlines() if _FOUND.match(line)]
    return lines[0] if lines and not any(_BROKEN.search(line) for line in lines) else ""


def told(seconds: float, rows: Sequence[Mapping[str, object]]) -> str:
    """The page of `--json`."""
    return json.dumps({"machine": machine(), "seconds_each": seconds, "faults": rows}, indent=1) + "\n"


def main(words: Sequence[str]) -> int:
    """Plant one fault after the other; the exit code."""
    parser = argparse.ArgumentParser(prog="planted", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=300.0, help="for each")
    parser.add_argument("--only", metavar="NAME", help="the faults in whose names this stands")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(words)
    rows = []
    for fault in FAULTS:
        if args.only and args.only not in fault.name:
            continue
        took_s, said = seconds_until_found(fault, args.seconds)
        found = "not found" if took_s is None else f"{took_s:.0f} s"
        print(f"{fault.name} ({fault.file}): {found}; {said[:200]}", flush=True)
        rows.append({"fault": fault.name, "file": fault.file, "found_s": took_s, "violated": said})
    if args.json:
        args.json.write_text(told(args.seconds, rows))
    return any(row["found_s"] is None for row in rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
