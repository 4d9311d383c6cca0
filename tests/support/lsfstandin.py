"""A stand-in of LSF: mbatchd, sbatchd and RES of one or two hosts, which are all this machine.

Made after IBM's documents of LSF 10.1 and after what OpenLava 2.2 did. What matters to whoever runs under it:

- A job is a tree of processes of several sessions and hosts. A signal goes to *every process group* in it.
- `bkill`, and the run limit when its SIGUSR2 was not enough, send SIGINT, SIGTERM, SIGKILL at intervals.
- `blaunch` is a process of the job that dies of signals, and what it has started on the other host with it.
- The exit code decides whether a job goes back into its queue, where it keeps its number.
- `bjobs` speaks JSON, or only `-o` with a delimiter, or only `-l`.

As a program it is the commands: `standin.py SOCKET bjobs ...` asks the cluster that a test has made.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMMANDS = ("bsub", "bjobs", "bkill", "bhist", "bparams", "blaunch", "lsid")
UNKNOWN_OPTION = 255, "", "bjobs: illegal option -- {}\nUsage: bjobs [-h] [-V] [-l] [-a] [jobId ...]\n"
ENDED = ("DONE", "EXIT")


@dataclass
class Job:
    """A batch job; `plan` is what is to be sent to it, and when, by the monotonic clock."""

    id: str
    script: str
    options: dict[str, str]
    env: dict[str, str]
    cwd: str
    stat: str = "PEND"
    lives: int = 0
    started: float = 0.0
    limit: float | None = None
    plan: list[tuple[float, signal.Signals]] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None
    codes: list[int] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    sent: list[tuple[signal.Signals, int]] = field(default_factory=list)
    """Signals, and how many process groups each has gone to."""

    def note(self, what: str) -> None:
        self.events.append(f"{time.strftime('%a %b %e %H:%M:%S')}: {what};")

    def goes_back(self, code: int) -> bool:
        words = self.options.get("Q", "").lower().split()
        return f"~{code}" not in words and ("all" in words or str(code) in words)


class Cluster:
    """The hosts `hosts` (the first one is where scripts run), and the jobs.

    `speaks`: the newest that bjobs understands: "json", "o" or "l". `minute_s`: a minute of -W and -wt.
    `interval_s`: JOB_TERMINATE_INTERVAL. `linger_s`: from the SIGUSR2 of the run limit to the SIGINT.
    """

    def __init__(self, folder: Path, hosts: tuple[str, ...], **settings: Any) -> None:
        self.folder, self.hosts = folder, hosts
        self.speaks, self.minute_s, self.interval_s, self.linger_s = "json", 60.0, 10.0, 600.0
        vars(self).update(settings)
        self.jobs: dict[str, Job] = {}
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name in COMMANDS:
            (self.bin / name).write_text(
                f'#!/bin/sh\nexec {sys.executable} -IS {__file__} {folder}/socket {name} "$@"\n'
            )
            (self.bin / name).chmod(0o755)
        self._lock, self._over = threading.RLock(), threading.Event()
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(str(folder / "socket"))
        self._door.listen(64)
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._serve, self._turn)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End all, and whatever is left of the jobs."""
        self._over.set()
        self._threads[1].join(10)
        for job in self.jobs.values():
            self.signal(job, signal.SIGKILL)
        self._door.close()

    # -- what a batch system does by itself --------------------------------------------------------------

    def signal(self, job: Job, number: signal.Signals) -> int:
        """To every process group of the job; how many there were."""
        groups = {group for _, group in self.processes(job)}
        for group in groups - {os.getpgrp()}:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, number)
        return len(groups)

    def processes(self, job: Job) -> set[tuple[int, int]]:
        """(pid, process group) of all that live, on all hosts: found by the job's environment."""
        marks = {f"LSF_ENVDIR={self.folder}".encode(), f"LSB_JOBID={job.id}".encode()}
        found = set()
        for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()):
            with contextlib.suppress(OSError):
                if marks <= set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")):
                    found.add((pid, os.getpgid(pid)))
        return found

    def _turn(self) -> None:
        while not self._over.wait(0.02):
            with self._lock:
                for job in list(self.jobs.values()):
                    if job.stat == "PEND" and self._may_start(job):
                        self._start(job)
                    elif job.stat == "RUN":
                        self._look(job)

    def _may_start(self, job: Job) -> bool:
        wanted = re.fullmatch(r"ended\((\d+)\)", job.options.get("w", "ended(0)"))
        before = self.jobs.get(wanted[1]) if wanted else None
        return before is None or before.stat in ENDED

    def _start(self, job: Job) -> None:
        slots = int(job.options.get("n", "1")) // len(self.hosts)
        env = {
            **job.env,
            "LSF_ENVDIR": str(self.folder),
            "LSB_JOBID": job.id,
            "LSB_JOBINDEX": "0",
            "LSB_MCPU_HOSTS": " ".join(f"{host} {slots}" for host in self.hosts),
            "LSB_EXIT_REQUEUE": job.options.get("Q", ""),
            **({"LSB_RESTART": "Y"} if job.lives else {}),
        }
        out = job.options.get("o", "%J.out").replace("%J", job.id)
        with (Path(job.cwd) / out).open("ab") as output:
            job.process = subprocess.Popen(
                ["bash", "-c", job.script, f"{job.id}.sh"],
                cwd=job.cwd,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        job.stat, job.started, job.lives = "RUN", time.time(), job.lives + 1
        job.note(f"Started on {len(self.hosts)} Hosts/Processors <{'> <'.join(self.hosts)}>")
        if "W" in job.options:
            limit_s, now = float(job.options["W"]) * self.minute_s, time.monotonic()
            job.limit = job.started + limit_s
            job.plan = [(now + limit_s, signal.SIGUSR2), *self._terminate(now + limit_s + self.linger_s)]
            if "wa" in job.options:
                early_s = float(job.options["wt"]) * self.minute_s
                job.plan.insert(0, (now + limit_s - early_s, signal.Signals[f"SIG{job.options['wa']}"]))

    def _terminate(self, at: float) -> list[tuple[float, signal.Signals]]:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
        return [(at + i * self.interval_s, number) for i, number in enumerate(numbers)]

    def _look(self, job: Job) -> None:
        assert job.process is not None
        if (code := job.process.poll()) is None:
            while job.plan and time.monotonic() >= job.plan[0][0]:
                _, number = job.plan.pop(0)
                job.sent.append((number, self.signal(job, number)))
            return
        job.plan.clear()
        self.signal(job, signal.SIGKILL)
        job.codes.append(code)
        if code >= 0 and job.goes_back(code):
            job.note(f"Pending: Requeued job is waiting for rescheduling;(exit code {code})")
            job.stat = "PEND"
        else:
            job.note(f"Exited with exit code {code}")
            job.stat = "EXIT" if code else "DONE"

    # -- what it is asked --------------------------------------------------------------------------------

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                asker, _ = self._door.accept()
                threading.Thread(target=self._answer, args=(asker,), daemon=True).start()

    def _answer(self, asker: socket.socket) -> None:
        with asker, contextlib.suppress(OSError):
            data, descriptors, _, _ = socket.recv_fds(asker, 1 << 20, 2)
            while not data.endswith(b"\n"):
                data += asker.recv(1 << 20)
            name, argv, asked = json.loads(data)
            try:
                if name == "blaunch":
                    answer = self._blaunch(argv, asked, descriptors, asker)
                else:
                    with self._lock:
                        answer = getattr(self, f"_{name}")(argv, asked)
            except KeyError as error:
                answer = 255, "", f"Job <{error.args[0]}> is not found\n"
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            asker.sendall(json.dumps(answer).encode() + b"\n")

    def _bsub(self, argv: list[str], asked: dict[str, Any]) -> tuple[int, str, str]:
        words = [word for line in asked["stdin"].splitlines() if line.startswith("#BSUB ")
                 for word in shlex.split(line[6:])]  # fmt: skip
        options: dict[str, str] = {}
        rest = iter([*words, *argv])
        for word in rest:
            options[word.lstrip("-")] = "" if word in ("-r", "-x", "-N") else next(rest)
        number = str(len(self.jobs) + 1)
        self.jobs[number] = Job(number, asked["stdin"], options, asked["env"], asked["cwd"])
        return 0, f"Job <{number}> is submitted to default queue <normal>.\n", ""

    def _bkill(self, argv: list[str], asked: dict[str, Any]) -> tuple[int, str, str]:
        job = self.jobs[argv[-1]]
        name = argv[argv.index("-s") + 1] if "-s" in argv else "KILL"
        job.note(f"Signal <{name}> requested by user or administrator <{asked['env'].get('USER', 'me')}>")
        now = time.monotonic()
        if "-s" in argv:
            job.plan.insert(0, (now, signal.Signals[f"SIG{name}"]))
        else:
            job.plan = self._terminate(now)
        return 0, f"Job <{job.id}> is being terminated\n", ""

    def _bjobs(self, argv: list[str], asked: dict[str, Any]) -> tuple[int, str, str]:
        for option, least in (("-json", ("json",)), ("-o", ("json", "o"))):
            if option in argv and self.speaks not in least:
                return UNKNOWN_OPTION[0], "", UNKNOWN_OPTION[2].format(option[1])
        job = self.jobs[argv[-1]]
        end = time.strftime("%b %e %H:%M:%S %Y L", time.localtime(job.limit)) if job.limit else "-"
        known = {"jobid": job.id, "stat": job.stat, "finish_time": end}
        if "-l" in argv:
            return 0, self._long(job), ""
        fields = [word for word in argv[argv.index("-o") + 1].split() if not word.startswith("delimiter=")]
        if unknown := [name for name in fields if name not in known]:
            return 255, "", f"{unknown[0]}: Bad field name\n"
        values = {name.upper(): known[name] for name in fields}
        if "-json" in argv:
            return 0, json.dumps({"COMMAND": "bjobs", "JOBS": 1, "RECORDS": [values]}), ""
        return 0, "|".join(values.values()) + "\n", ""

    def _long(self, job: Job) -> str:
        head = f"Job <{job.id}>, User <me>, Project <default>, Status <{job.stat}>, Queue <normal>, Command <"
        lines = [head + job.script.replace("\n", ";") + ">", *job.events]
        folded = ["\n".join(_folded(line)) for line in lines]
        limit = f"\n RUNLIMIT                \n {float(job.options['W']) * self.minute_s / 60:.1f} min\n"
        return "\n" + "\n".join(folded) + "\n" + (limit if "W" in job.options else "")

    def _bhist(self, argv: list[str], asked: dict[str, Any]) -> tuple[int, str, str]:
        return 0, self._long(self.jobs[argv[-1]]), ""

    def _bparams(self, argv: list[str], asked: dict[str, Any]) -> tuple[int, str, str]:
        return 0, f"The interval to terminate a job:\n    JOB_TERMINATE_INTERVAL = {self.interval_s:g} \n", ""

    def _lsid(self, argv: list[str], asked: dict[str, Any]) -> tuple[int, str, str]:
        return 0, "", "A stand-in of IBM Spectrum LSF 10.1.0.0\n"

    def _blaunch(
        self, argv: list[str], asked: dict[str, Any], streams: list[int], asker: socket.socket
    ) -> tuple[int, str, str]:
        """RES: a task on that host, in a session of its own, for as long as blaunch lives."""
        assert argv[0] == "-n" and argv[1] in self.hosts and argv[2] == "-no-shell"
        task = subprocess.Popen(
            argv[3:], cwd=asked["cwd"], env=asked["env"], stdin=subprocess.DEVNULL,
            stdout=streams[0], stderr=streams[1], start_new_session=True,
        )  # fmt: skip
        asker.settimeout(0.05)
        while task.poll() is None:
            try:
                if not asker.recv(1):
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(task.pid, signal.SIGKILL)
                    task.wait()
            except TimeoutError:
                continue
        return task.returncode if task.returncode >= 0 else 128 - task.returncode, "", ""


def _folded(line: str) -> list[str]:
    """As LSF folds it: after 79 characters, wherever that is, and then by 58, 21 further in."""
    return [line[:79], *(" " * 21 + line[i : i + 58] for i in range(79, len(line), 58))]


def main(path: str, name: str, *argv: str) -> int:
    """One of the commands. A signal ends it, as long as whoever started it does not have it ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    stdin = sys.stdin.read() if name == "bsub" else ""
    asked = {"env": dict(os.environ), "cwd": str(Path.cwd()), "stdin": stdin}
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(path)
        data = json.dumps([name, argv, asked]).encode() + b"\n"
        sent = line.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [1, 2]))])
        if rest := data[sent:]:
            line.sendall(rest)
        answer = b""
        while not answer.endswith(b"\n"):
            answer += line.recv(1 << 16) or os._exit(1)  # type: ignore[func-returns-value]
    code, out, err = json.loads(answer)
    sys.stdout.write(out)
    sys.stderr.write(err)
    return int(code)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
