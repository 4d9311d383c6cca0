"""What one input does, in a child of this process: within bounds of time and memory, in one folder."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import io
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcsched.cli import main as command_line
from hpcsched.errors import HpcschedError
from hpcsched.printing import printable

from .lines import Lines

CPU_S, WALL_S = 30.0, 300.0
"""The most that one input may take (chosen): seconds of a core, and of a clock that waiting counts for."""
MOST_MEMORY = 2**30
"""Bytes of memory that one input may add to what the imports take (chosen)."""
LONGEST_LINE = 2100
"""Characters of an error."""
MOST_NOTES = 4
"""Lines beside the error of a command that refuses (chosen): files of settings that are passed over, and the
like."""
MOST_OUTPUT = 64 * 2**20

CODES = (0, 1, 2, 3, 4)
"""Exit codes of commands: right, it did not work, bad input, no such run, no such job."""
CTRL_C = 130


class Wrong(AssertionError):
    """What came of an input is not what may come of bad input."""


class NotPlayed(Exception):
    """An input is not for this target, which says why; it counts apart."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one input: `why` it is wrong, empty if it is not; `trace`: where. `said`: the command's
    answer. `skipped`: why it was not played. `lines`: those of hpcsched that it reached first."""

    why: str = ""
    trace: str = ""
    said: str = ""
    skipped: str = ""
    lines: frozenset[tuple[str, int]] = field(default_factory=frozenset)


def check_line(text: str) -> None:
    """Raises Wrong unless an error is one printable line of bounded length."""
    if not text.strip():
        raise Wrong("an error without a word")
    if len(text) > LONGEST_LINE:
        raise Wrong(f"an error of {len(text)} characters: {text[:300]}...")
    if printable(text) != text:
        raise Wrong(f"an error that is not one printable line: {text[:500]!r}")


def command(folder: Path, *words: str, codes: Sequence[int] = CODES) -> str:
    """Run a command as `hpcsched WORDS` does. Raises Wrong."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", on) for on in ("strict", "backslashreplace"))
    before = sys.argv, sys.stdout, sys.stderr
    sys.argv, sys.stdout, sys.stderr = ["hpcsched", *words], out, err
    try:
        command_line.main()
        code: object = 0
    except SystemExit as left:
        code = left.code
    finally:
        sys.argv, sys.stdout, sys.stderr = before
    out.flush(), err.flush()
    answer = out.buffer.getvalue().decode()  # type: ignore[attr-defined] # what is no UTF-8 raises
    errors = err.buffer.getvalue().decode("utf-8", "replace")  # type: ignore[attr-defined]
    if not isinstance(code, int) or code not in codes:
        raise Wrong(f"exit code {code}, with: {errors[:500]}")
    check_said(code, answer, errors.rstrip("\n"), silent="wait" in words)  # its exit code is its answer
    return f"exit code {code}: {errors[:1000]}"


def check_said(code: int, answer: str, errors: str, *, silent: bool) -> None:
    """Raises Wrong unless what is on stderr fits the exit code: one error, and notes; or for some of the jobs
    that were named (exit code 1) a line each. `silent`: exit code 1 may come without a word."""
    if "Traceback (most recent call last)" in errors:
        raise Wrong(f"a traceback, and exit code {code}: {errors[-500:]}")
    lines = errors.split("\n") if errors else []
    if code == 2:
        usage = [line for line in lines if line.startswith("Error: ")]
        if usage:  # click's: "Usage: ...", "Try ...", an empty line and the error
            lines = lines[lines.index(usage[0]) :]
        elif any(line.startswith("Usage: ") for line in lines):
            lines = lines[:1]  # the help of a group of commands
    begin = ("hpcsched: ", "job ") if code == 1 else "hpcsched: "
    if code and any(not line.startswith(begin) for line in lines[1:]):
        raise Wrong(f"more than a line of errors, and exit code {code}: {errors[:500]!r}")
    if code in (2, 3, 4) and len(lines) > 1 + MOST_NOTES:
        raise Wrong(f"{len(lines)} lines, and exit code {code}: {errors[:500]!r}")
    for line in lines:
        check_line(line)
    enough = {1: silent or bool(answer.strip()), 2: False, 3: bool(answer.strip()), 4: False}
    if not lines and not enough.get(code, True):
        raise Wrong(f"exit code {code} without a word")


def refused(what: Callable[[], object], *errors: type[Exception]) -> str:
    """Call what reads an input; an error on purpose (HpcschedError, or `errors`) is told in a line."""
    try:
        what()
    except (HpcschedError, *errors) as error:
        check_line(str(error))
        return str(error)
    return ""


# -- bounds ------------------------------------------------------------------------------------------------


def _within(folder: Path) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook that keeps what is written below `folder`, and starts nothing."""
    inside = (f"{folder}/", "/dev/null", "/dev/shm/", "/proc/self/")
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
    changing = {
        *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.chown", "os.link", "os.symlink"),
        *("os.truncate", "os.utime", "shutil.rmtree", "shutil.move", "os.setxattr", "os.mkfifo", "os.mknod"),
    }
    starting = {
        "subprocess.Popen",
        "os.exec",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.system",
        "os.spawn",
    }

    def outside(path: Any) -> bool:
        if not isinstance(path, (str, bytes, os.PathLike)):
            return False  # a descriptor
        full = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - links are not followed
        return full != str(folder) and not full.startswith(inside)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            flags = args[2] if isinstance(args[2], int) else 0
            if flags & writing and outside(args[0]):
                raise PermissionError(13, "Permission denied", args[0])
        elif event in changing:
            in_a_folder = any(
                isinstance(each, int) and each >= 0 for each in args[-2:]
            )  # given by a descriptor
            for path in () if in_a_folder and event != "os.mkdir" else args[:2]:
                if isinstance(path, (str, bytes, os.PathLike)) and outside(path):
                    raise PermissionError(13, "Permission denied", path)
        elif event == "sqlite3.connect" and outside(args[0]) and args[0] != ":memory:":
            raise PermissionError(13, "Permission denied", args[0])
        elif event in starting:
            raise FileNotFoundError(2, "No such file or directory", "a program")
        elif event in ("socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostbyname"):
            raise ConnectionRefusedError(111, "Connection refused")
        elif event in ("os.kill", "os.killpg", "signal.pthread_kill") and args[1] != 0:
            raise PermissionError(1, "Operation not permitted")

    return hook


_ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "COLUMNS": "120",
    "TZ": "UTC",
    "PATH": "/nowhere",
    "USER": "me",
}


def _enter(folder: Path) -> None:
    os.environ.clear()
    os.environ.update(_ENVIRONMENT, HOME=str(folder), HPCSCHED_SITE_CONFIG=str(folder / "no-site.toml"))
    for kind in ("STATE", "DATA", "CONFIG", "CACHE"):
        os.environ[f"XDG_{kind}_HOME"] = str(folder / f"xdg-{kind.lower()}")
    os.environ["HPCSCHED_DATABASE"] = str(folder / "hpcsched.db")
    (folder / "tmp").mkdir()
    os.environ["TMPDIR"], tempfile.tempdir = str(folder / "tmp"), None
    os.chdir(folder)


def _bound(traces: io.FileIO) -> None:
    """Memory, files and descriptors; time is set for each input."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for what, most in ((resource.RLIMIT_AS, size + MOST_MEMORY), (resource.RLIMIT_FSIZE, MOST_OUTPUT)):
        resource.setrlimit(what, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
        faulthandler.register(number, traces, all_threads=False, chain=True)


def _one(act: Callable[[Path, bytes], str | None], folder: Path, data: bytes, lines: Lines | None) -> Outcome:
    folder.mkdir()
    _enter(folder)
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    signal.setitimer(signal.ITIMER_REAL, WALL_S)
    why = trace = said = skipped = ""
    try:
        with lines or contextlib.nullcontext():
            said = act(folder, data) or ""
    except NotPlayed as error:
        skipped = str(error)
    except Wrong as error:
        why = str(error)
    except BaseException as error:
        why = f"{type(error).__name__}: {str(error)[:300]}"
        trace = "".join(traceback.format_exception(error, limit=-12))[-6000:]
    finally:
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
        os.chdir("/")
        shutil.rmtree(folder)
    return Outcome(why, trace, said, skipped, frozenset(lines.taken()) if lines else frozenset())


def played(
    act: Callable[[Path, bytes], str | None], inputs: Sequence[bytes], lines: Lines | None = None
) -> list[Outcome]:
    """What comes of each input, in their order; of the first that is wrong no more are tried, as the process
    may not be what it was."""
    with tempfile.TemporaryDirectory(prefix="hpcsched-fuzz-") as place:
        root = Path(place).resolve()
        with (root / "traces").open("wb", buffering=0) as traces:
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(reader)
                _child(act, inputs, lines, root, traces, writer)
            os.close(writer)
            outcomes = []
            with os.fdopen(reader, "rb") as results:
                for line in results:
                    *texts, new = json.loads(line)
                    outcomes.append(Outcome(*texts, frozenset((name, at) for name, at in new)))
            _, status = os.waitpid(pid, 0)
        if len(outcomes) < len(inputs) and not (outcomes and outcomes[-1].why):
            where = (root / "traces").read_text(errors="replace")[-6000:]
            outcomes.append(Outcome(_ended(status), where))
    return outcomes


def warm(act: Callable[[Path, bytes], str | None], inputs: Sequence[bytes]) -> None:
    """Import here what these inputs have a child import: each child would, again."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        with (
            tempfile.TemporaryDirectory(prefix="hpcsched-fuzz-") as place,
            contextlib.suppress(BaseException),
        ):
            sys.addaudithook(_within(Path(place).resolve()))
            for i, data in enumerate(inputs):
                _one(act, Path(place).resolve() / str(i), data, None)
        names = [*sys.modules]
        with os.fdopen(writer, "w") as told:
            json.dump(names, told)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        names = json.load(told)
    os.waitpid(pid, 0)
    for name in names:
        if name not in sys.modules and not name.startswith("__"):
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def _child(
    act: Callable[[Path, bytes], str | None],
    inputs: Sequence[bytes],
    lines: Lines | None,
    root: Path,
    traces: io.FileIO,
    writer: int,
) -> None:
    code = 1
    try:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        _bound(traces)
        folder = root / "here"
        sys.addaudithook(_within(folder))
        for data in inputs:
            outcome = _one(act, folder, data, lines)
            page = [outcome.why, outcome.trace, outcome.said, outcome.skipped, [*outcome.lines]]
            os.write(writer, json.dumps(page).encode() + b"\n")
            if outcome.why:
                break
        code = 0
    finally:
        os._exit(code)


def _ended(status: int) -> str:
    match -os.waitstatus_to_exitcode(status):
        case signal.SIGPROF:
            return f"more than {CPU_S:g} s of a core"
        case signal.SIGALRM:
            return f"no end within {WALL_S:g} s"
        case signal.SIGXFSZ:
            return f"a file of more than {MOST_OUTPUT} bytes"
        case number if number > 0:
            return f"ended by signal {number}"
    return f"the process ended with exit code {os.waitstatus_to_exitcode(status)}"
