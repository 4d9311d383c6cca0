"""One run for an hour, with hosts that come and go: what it costs at the end as at the beginning?

    python benchmarks/soak.py [--json] [--quick] [--minutes 60] [--groups 4] [--group-hosts 2]

An agent on three CPU slots takes jobs by its inbox: no-op jobs at --rate a second, one that keeps the
contract and is suspended and resumed by its user all the time, and one that writes 1 GB a minute to its
output, which its user removes. Meanwhile allocations join (`hpcsched join`, with --group-hosts node agents
each, on this machine) and leave: there are --groups of them, and one after the other is ended, every second
one by SIGKILL to all of its processes. `--groups 10 --group-hosts 10` has 100 node agents. Read every ten
seconds: the agent's RSS, descriptors, threads and processor time, and the size of its files.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import psutil
from common import Report, Scratch, hpcsched, main, median, spread, wait_for
from growth import cpu_s_of, rss_of, slope_of

from hpcsched.agent.inbox import Command, send
from hpcsched.core.model import JobSpec, JobState, Kind
from hpcsched.store.rundir import RunDir
from hpcsched.store.status import read_brief, read_status

READ_EVERY_S = 10.0
AHEAD = 50
"""No-op jobs that wait at most."""
NOISE_BYTES = 2**30 // 6
"""What is written to an output in ten seconds."""
STEERED_EVERY_S = 15.0
LEFT_WITHIN_S = 120.0
GOAL_BYTES = 512
"""Goal: memory for good of a job that is over."""
MORE = 1.25
"""Goal: no more than so many times what there was in the first quarter."""

_CONTRACT = """
cd "$HPCSCHED_JOB_DIR"; step=0; trap asked=1 TSTP TERM
[ "$HPCSCHED_RESUME" = 1 ] && step=$(sed 's/.*"step": *\\([0-9]*\\).*/\\1/' STATE.json)
: > ready.$HPCSCHED_ATTEMPT
while :; do
    sleep 0.2; step=$((step + 1))
    echo "{\\"step\\": $step, \\"t\\": $(date +%s.%N)}" >&$HPCSCHED_PROGRESS_FD
    [ "$asked" ] || continue
    printf '{"step": %d, "attempt": %d}' $step $HPCSCHED_ATTEMPT > STATE.new && mv STATE.new STATE.json
    exit 75
done
"""
_NOISE = f"yes 'step 1 loss 0.25 and what else is in a line' | head -c {NOISE_BYTES}; sleep 10"


@dataclass
class Read:
    """What was read at one time."""

    at: float
    over: float
    rss: float
    descriptors: float
    threads: float
    cpu_s: float
    file_bytes: float


@dataclass
class Soak:
    """The run, its users and its guests."""

    scratch: Scratch
    rundir: RunDir
    agent: subprocess.Popen[bytes]
    rate: float
    reads: list[Read] = field(default_factory=list)
    sent: int = 0
    noises: int = 0
    suspended: bool = False
    guests: deque[subprocess.Popen[bytes]] = field(default_factory=deque)
    leaving: list[subprocess.Popen[bytes]] = field(default_factory=list)
    joined: int = 0
    suspensions: int = 0

    def submit(self, name: str, script: str) -> None:
        spec = JobSpec(name=name, kind=Kind.COMMAND, model=name, command=("sh", "-c", script), workdir="/tmp")
        send(self.rundir, Command(command="submit", jobs=[spec], workdir="/tmp"))

    def no_ops(self, since: float) -> None:
        """Send as many as have become due, unless too many wait."""
        due = int((time.monotonic() - since) * self.rate)
        while self.sent < min(due, self.over() + AHEAD):
            self.sent += 1
            self.submit(f"job-{self.sent}", ":")

    def over(self) -> int:
        return read_brief(self.rundir).done

    def noise(self) -> None:
        """Another job that writes a lot, once the last one is over; what that has written is removed."""
        jobs = {job.name: job for job in read_status(self.rundir, [f"noise-{self.noises}"]).jobs}
        last = jobs.get(f"noise-{self.noises}")
        if self.noises and not (last and last.state.final):
            return
        if last and last.output:
            Path(last.output).unlink(missing_ok=True)
        self.noises += 1
        self.submit(f"noise-{self.noises}", _NOISE)

    def steer(self) -> None:
        """Suspend the job that keeps the contract, or have it go on."""
        ids = [job.id for job in read_status(self.rundir, ["steered"]).jobs if job.name == "steered"]
        self.suspended = not self.suspended
        send(self.rundir, Command(command="suspend" if self.suspended else "resume", targets=ids))

    def churn(self, groups: int, hosts: int) -> None:
        """End the oldest group of hosts, and have another one come."""
        if len(self.guests) >= groups:
            oldest = self.guests.popleft()
            if self.joined % 2:
                _end_of_job(oldest)
            else:
                oldest.terminate()
            self.leaving.append(oldest)
        self.leaving = [one for one in self.leaving if one.poll() is None]
        self.joined += 1
        names = ",".join(f"g{self.joined}-{i}" for i in range(hosts))
        words = ("join", "--dir", self.rundir.root, "--hosts", names, "--launcher", "local")
        self.guests.append(
            subprocess.Popen(
                hpcsched(*words, "--batch", "none", "--devices", "cpu:1"),
                cwd=self.scratch.folder,
                env=self.scratch.env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        )

    def check(self) -> None:
        """Raises RuntimeError where jobs have not done what they were to do."""
        jobs = read_status(self.rundir).jobs
        bad = [job.name for job in jobs if job.state.final and job.state is not JobState.COMPLETED]
        self.suspensions = next(job.suspensions for job in jobs if job.name == "steered")
        if bad or not self.suspensions or not self.over():
            raise RuntimeError(
                f"not completed: {bad[:5]}; {self.suspensions} suspensions; {self.over()} over"
            )

    def read(self) -> None:
        proc = Path(f"/proc/{self.agent.pid}")
        files = [path for path in self.rundir.root.iterdir() if path.is_file()]
        self.reads.append(
            Read(
                at=time.monotonic(),
                over=float(self.over()),
                rss=rss_of(self.agent.pid),
                descriptors=float(len([*proc.joinpath("fd").iterdir()])),
                threads=float(len([*proc.joinpath("task").iterdir()])),
                cpu_s=cpu_s_of(self.agent.pid),
                file_bytes=float(sum(path.stat().st_size for path in files if path.exists())),
            )
        )


def _end_of_job(guest: subprocess.Popen[bytes]) -> None:
    """Kill all of an allocation at once, as a batch system does."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in (*psutil.Process(guest.pid).children(recursive=True), psutil.Process(guest.pid)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def measure(options: argparse.Namespace) -> Report:
    seconds, every_s = (20.0, 1.0) if options.quick else (60 * options.minutes, READ_EVERY_S)
    life_s = seconds / 4 if options.quick else options.life_s
    with Scratch.make() as scratch:
        rundir = RunDir(scratch.folder / "run")
        words = ("--devices", "cpu:3", "--hosts", "home", "--launcher", "local", "--batch", "none")
        command = hpcsched("run", "--stay", "--joinable", "--dir", rundir.root, "--quiet", *words)
        with scratch.start(command) as agent:
            wait_for(lambda: agent.poll() is not None or rundir.status.exists(), "the run", deadline_s=60)
            soak = Soak(scratch, rundir, agent, options.rate)
            try:
                _soak(soak, seconds, every_s, life_s, options)
                soak.check()
                report = _report(soak, quick=options.quick)
            finally:
                for guest in soak.guests:
                    guest.terminate()
                for guest in (*soak.guests, *soak.leaving):
                    guest.wait(LEFT_WITHIN_S)
        wait_for(lambda: not _left(rundir.root), "the end of all node agents", deadline_s=LEFT_WITHIN_S)
    return report


def _left(root: Path) -> list[str]:
    """The processes that name a run directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if os.fsencode(root) in path.read_bytes():
                found.append(path.parent.name)
    return found


def _soak(soak: Soak, seconds: float, every_s: float, life_s: float, options: argparse.Namespace) -> None:
    soak.submit("steered", _CONTRACT)
    began = time.monotonic()
    turns: list[tuple[float, Callable[[], object]]] = [
        (0.2, lambda: soak.no_ops(began)),
        (every_s, soak.read),
        (1.0, soak.noise),
        (min(STEERED_EVERY_S, seconds / 4), soak.steer),
        (life_s / options.groups, lambda: soak.churn(options.groups, options.group_hosts)),
    ]
    due = [began + after for after, _ in turns]
    while time.monotonic() < began + seconds:
        if soak.agent.poll() is not None:
            raise RuntimeError(f"the agent ended: {soak.scratch.errors}")
        for number, (after, turn) in enumerate(turns):
            if time.monotonic() >= due[number]:
                due[number] = time.monotonic() + after
                turn()
        time.sleep(0.05)


def _report(soak: Soak, *, quick: bool) -> Report:
    report, reads = Report(), soak.reads
    for name in ("over", "rss", "descriptors", "threads", "cpu_s", "file_bytes"):
        report.results[name] = [getattr(read, name) for read in reads]
    report.results["at_s"] = [read.at - reads[0].at for read in reads]
    settled = reads[len(reads) // 4 :]
    bytes_a_job = max(0.0, slope_of([read.over for read in settled], [read.rss for read in settled]))
    report.row(
        f"{reads[-1].over:.0f} jobs, {soak.noises} of them wrote {NOISE_BYTES / 1e6:.0f} MB, {soak.joined} "
        f"allocations joined, {soak.suspensions} suspensions: the agent's memory for a job that is over",
        f"{bytes_a_job:.0f} bytes; RSS {reads[0].rss / 2**20:.1f} to {reads[-1].rss / 2**20:.1f} MiB",
        goal=f"at most {GOAL_BYTES} bytes",
        ok=None if quick else bytes_a_job <= GOAL_BYTES,
    )
    first, last = _quarters([read.descriptors for read in reads])
    report.row(
        "descriptors, second and last quarter", f"{first:.0f}, {last:.0f}", **_flat(first, last, quick)
    )
    first, last = _quarters([read.threads for read in reads])
    report.row("threads", f"{first:.0f}, {last:.0f}", **_flat(first, last, quick))
    first, last = _quarters([b.cpu_s - a.cpu_s for a, b in pairwise(reads)])
    report.row(
        "processor time between two readings",
        f"{first * 1e3:.0f} ms, {last * 1e3:.0f} ms",
        **_flat(first, last, quick),
    )
    largest = max(read.file_bytes for read in reads)
    report.row("files of the run directory, at most", f"{largest / 1e6:.1f} MB")
    report.row("jobs over in a second", spread(_rates(reads), "{:.1f}"))
    return report


def _quarters(values: list[float]) -> tuple[float, float]:
    """The medians of the second and of the last quarter: in the first it begins."""
    part = max(1, len(values) // 4)
    return median(values[part : 2 * part] or values), median(values[-part:])


def _flat(first: float, last: float, quick: bool) -> dict[str, object]:
    return {"goal": f"at most {MORE:g} times", "ok": None if quick else last <= MORE * first}


def _rates(reads: list[Read]) -> list[float]:
    return [(b.over - a.over) / (b.at - a.at) for a, b in pairwise(reads)]


def options_of(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=60.0, help="how long")
    parser.add_argument("--rate", type=float, default=5.0, help="no-op jobs in a second")
    parser.add_argument("--groups", type=int, default=4, help="allocations that have joined")
    parser.add_argument("--group-hosts", type=int, default=2, help="hosts of each")
    parser.add_argument("--life-s", type=float, default=120.0, help="how long each stays")


if __name__ == "__main__":
    main("a run for an hour, with hosts that come and go", measure, options_of=options_of)
