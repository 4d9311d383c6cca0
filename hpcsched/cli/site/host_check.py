"""Checks of each host of an allocation for `hpcsched doctor`, and the verdict on their answers.

`python -m hpcsched.cli.site.host_check` is the part that runs over there: it prints one line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hpcsched
from hpcsched.batch.base import AllocatedHost, BatchSystem

ANSWER_WITHIN_S = 60.0
"""Job steps can take this long to start on a busy cluster."""

SEEN_WITHIN_S = 10.0
"""A shared filesystem that shows new files later than this makes living agents look dead."""

MOST_SKEW_S = 5.0
"""Clocks further apart than this make the age of a snapshot meaningless."""

_MARK = "hpcsched-hostcheck "


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict on one host, or on all together: whether a run can work there, and what was found."""

    what: str
    ok: bool
    found: str


def check_hosts(
    batch: BatchSystem,
    hosts: Sequence[AllocatedHost],
    base: Path,
    *,
    need_gpus: bool,
    within_s: float = ANSWER_WITHIN_S,
) -> list[Verdict]:
    """Start the check on all hosts and judge their answers; takes `within_s` and a few seconds at most.

    `base` is a directory that all should see: the run directory, or what there is of its path.
    """
    with tempfile.TemporaryDirectory(prefix=".hpcsched-doctor-", dir=base) as name:
        folder = Path(name)
        token = os.urandom(8).hex()
        (folder / "token").write_text(token)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            program = (sys.executable, "-P", "-m", "hpcsched.cli.site.host_check")
            words = (*program, "--dir", name, "--token", token)
            began = time.time()
            answers, complaint = _ask(batch.on_hosts(hosts, words), len(hosts), within_s)
        back = {path.name.removeprefix("answer.") for path in folder.glob("answer.*")}
    verdicts = []
    for host in hosts:
        mine = next((a for a in answers if a[1].get("host") == host.name), None)
        if mine is None:  # jsrun does not tell which host this is
            mine = next((a for a in answers if _same(a[1].get("hostname", ""), host.name)), None)
        if mine is None:
            why = complaint or f"no answer within {within_s:.0f} s"
            verdicts.append(Verdict(what=f"host {host.name}", ok=False, found=why))
        else:
            verdicts.append(_judge(host, *mine, began=began, back=back, need_gpus=need_gpus))
    return verdicts


def _ask(
    commands: Sequence[Sequence[str]], expected: int, within_s: float
) -> tuple[list[tuple[float, dict[str, Any]]], str]:
    """The answers with the time each came in, and the last line of complaint if there was any."""
    from hpcsched.launch.remote.starter import NOTHING_SAID

    answers: list[tuple[float, dict[str, Any]]] = []
    complaints: list[str] = []
    running = []

    def listen(stream: Any) -> None:
        with stream:
            for line in stream:
                if line.startswith(_MARK):
                    with contextlib.suppress(json.JSONDecodeError):
                        answers.append((time.time(), json.loads(line.removeprefix(_MARK))))
                elif line.strip() and not line.startswith(NOTHING_SAID):
                    complaints.append(line.strip())

    for argv in commands:
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            complaints.append(f"{argv[0]} cannot be started: {error.strerror}")
            continue
        thread = threading.Thread(target=listen, args=(process.stdout,), daemon=True)
        thread.start()
        running.append((process, thread))
    until = time.monotonic() + within_s
    for process, thread in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))
        if process.poll() is None:
            _end(process)
        thread.join(2)  # longer only if what it left behind holds its output open
    return answers, complaints[-1] if complaints and len(answers) < expected else ""


def _end(process: subprocess.Popen[str]) -> None:
    """SIGTERM, and SIGKILL two seconds later; srun and its like end what they started."""
    for sig in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sig)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2)
            return


def _same(one: str, other: str) -> bool:
    return one.partition(".")[0] == other.partition(".")[0]


def _judge(
    host: AllocatedHost, came: float, said: dict[str, Any], *, began: float, back: set[str], need_gpus: bool
) -> Verdict:
    wrong, notes = [], [f"Python {said['python']}, hpcsched {said['hpcsched']}"]
    if said["hpcsched"] != hpcsched.__version__:
        wrong.append(f"hpcsched here is {hpcsched.__version__}")
    # Its clock was read between our start and our hearing of it: only what is outside is surely skew.
    skew = min(0.0, said["time"] - began) + max(0.0, said["time"] - came)
    if abs(skew) > MOST_SKEW_S:
        wrong.append(f"its clock is {abs(skew):.0f} s or more {'ahead' if skew > 0 else 'behind'}")
    if said["lag_s"] is None:
        wrong.append("it does not see what was just written to the run directory")
    elif said["host"] not in back:
        wrong.append("what it writes to the run directory is not seen here")
    else:
        notes.append("sees the run directory")
    notes.append(
        "locks reach it" if said["locked"] else "locks do not reach it (signs of life are used instead)"
    )
    seen, granted = said["gpus"], None if host.gpus is None else len(host.gpus)
    if seen or need_gpus:
        notes.append(f"{seen} GPU{'' if seen == 1 else 's'}" + (f" ({said['why']})" if said["why"] else ""))
    if need_gpus and not seen:
        wrong.append("no GPU is seen there")
    elif seen and granted not in (None, seen):
        wrong.append(f"{granted} were granted")
    return Verdict(what=f"host {host.name}", ok=not wrong, found="; ".join([*wrong, ", ".join(notes)]))


# --- over there ------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    """Say what this host sees, as one line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--token", required=True)
    parser.add_argument("--name", default=socket.gethostname())
    given = parser.parse_args(argv)
    said: dict[str, Any] = {
        "host": given.name,
        "hostname": socket.gethostname(),
        "time": time.time(),
        "python": platform.python_version(),
        "hpcsched": hpcsched.__version__,
        "lag_s": _lag_s(given.dir / "token", given.token),
        "locked": _locked(given.dir / "lock"),
    }
    said["gpus"], said["why"] = _gpus()
    with contextlib.suppress(OSError):
        (given.dir / f"answer.{given.name}").touch()
    sys.stdout.write(_MARK + json.dumps(said) + "\n")


def _lag_s(path: Path, token: str) -> float | None:
    began = time.monotonic()
    while time.monotonic() < began + SEEN_WITHIN_S:
        with contextlib.suppress(OSError):
            if path.read_text() == token:
                return round(time.monotonic() - began, 3)
        time.sleep(0.2)
    return None


def _locked(path: Path) -> bool:
    """Whether the lock that `doctor` holds keeps this host out."""
    try:
        with path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def _gpus() -> tuple[int, str]:
    """How many GPUs NVML sees; else how many nvidia-smi lists; and why none."""
    from hpcsched.devices.nvml import NvmlDevices

    opened = NvmlDevices(socket.gethostname())
    try:
        if count := len(opened.inventory()):
            return count, ""
        why = opened.missing
    finally:
        opened.close()
    if shutil.which("nvidia-smi"):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(  # nosec B607 # of the user's own PATH
                ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=15, check=True
            )
            if listed := done.stdout.count("UUID: GPU-"):
                return 0, f"{why}, though nvidia-smi lists {listed}"
    return 0, why


if __name__ == "__main__":
    main()
