"""Programs as attempts of a job, without an agent: ranks are forked from a process that has loaded torch."""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forkserver import SERVER
from places import ROOT

from hpcsched.contract.progress import Line

DEADLINE_S = 120.0


@dataclass
class Attempt:
    """What an attempt came to: exit codes by rank, what it printed, and its lines `step N loss X` by step."""

    codes: list[int | None]
    output: str
    losses: dict[int, str] = field(default_factory=dict)


@dataclass
class Job:
    """A program's attempts, one after the other; `folder` is the job's."""

    program: Path
    folder: Path
    attempts: int = 0

    @property
    def totals(self) -> set[int]:
        """The steps of the whole work, as rank 0 has told them."""
        lines = (self.folder / "progress").read_bytes().splitlines(keepends=True)
        return {total for line in lines if (total := Line.decode(line).total) is not None}

    def run(self, *argv: str, ranks: int = 1, stop_at: int | None = None, **told: str) -> Attempt:
        """One attempt; told to save and leave once it has printed step `stop_at` (0: from the start)."""
        self.attempts += 1
        number, output = self.attempts, self.folder / f"output.{self.attempts}"
        self.folder.mkdir(parents=True, exist_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        started = []
        for rank in range(ranks):
            names = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank}
            environ = {
                **{name: str(value) for name, value in names.items()},
                **{f"HPCSCHED_{name}": str(value) for name, value in names.items()},
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "HPCSCHED_JOB_ID": "1",
                "HPCSCHED_ATTEMPT": str(number),
                "HPCSCHED_JOB_DIR": str(self.folder),
                "HPCSCHED_RUN_DIR": str(self.folder),
                "HPCSCHED_RESUME": str(int(number > 1)),
                **told,
            }
            one = SERVER.Process(target=_rank, args=(str(self.program), argv, environ, output, stop_at))
            one.start()
            started.append(one)
        deadline = time.monotonic() + DEADLINE_S
        try:
            while any(one.is_alive() for one in started) and time.monotonic() < deadline:
                started[0].join(0.01)
                if any(one.exitcode not in (None, 0, 75) for one in started):
                    break
        finally:
            for one in started:
                one.kill()
                one.join()
        text = _read(output)
        return Attempt([one.exitcode for one in started], text, dict(_lines(text)))


def example(name: str, program: str, folder: Path) -> Job:
    """A program of examples/, as a job."""
    return Job(ROOT / "examples" / name / program, folder)


def apart(ones: dict[int, str], others: dict[int, str]) -> float:
    """The greatest difference of the same step's losses."""
    assert ones.keys() == others.keys()
    return max(abs(float(ones[step]) - float(others[step])) for step in ones)


def _rank(
    program: str, argv: Sequence[str], environ: dict[str, str], output: Path, stop_at: int | None
) -> None:
    from hpcsched.worker.session.stopping import StopFlag

    def wanted(_: StopFlag) -> str | None:
        said = stop_at is not None and (stop_at == 0 or f"step {stop_at} " in _read(output))
        return "the test" if said else None

    StopFlag.wanted = property(wanted)  # type: ignore[assignment, method-assign]
    multiprocessing.set_start_method("fork", force=True)  # of a DataLoader's workers, as in any program
    os.environ.update(environ)
    os.chdir(environ["HPCSCHED_JOB_DIR"])
    if environ["RANK"] == "0" and environ["HPCSCHED_JOB_ID"]:
        progress = os.open("progress", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.environ["HPCSCHED_PROGRESS_FD"] = str(progress)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = [program, *argv]
    runpy.run_path(program, run_name="__main__")


def _read(output: Path) -> str:
    return output.read_text(errors="replace") if output.exists() else ""


def _lines(text: str) -> list[tuple[int, str]]:
    found = [(int(step), loss) for step, loss in re.findall(r"^step (\d+) loss (\S+)$", text, re.MULTILINE)]
    assert len({step for step, _ in found}) == len(found), "a step was made twice"
    return found
