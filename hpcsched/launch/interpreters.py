"""The Python interpreter of a trainer: found by the environment that its job names, and checked once.

Where a job names none, it is the first `python3` (or `python`) in PATH if it has hpcsched-worker and torch;
else the scheduler's own. All is looked up on the host where the job starts.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

import hpcsched
from hpcsched.contract.codec import SMALL_BYTES
from hpcsched.contract.version import VERSION, Version, fits
from hpcsched.core.model import JobSpec, Kind, PythonEnvironment
from hpcsched.decoding import decode
from hpcsched.errors import BadEnvironment, BadInput
from hpcsched.launch import probe
from hpcsched.launch.bounded_run import Stopped, run_bounded
from hpcsched.launch.containers.choose import check_image
from hpcsched.patience import settle
from hpcsched.printing import printable
from hpcsched.threads import started

PROBE_TIMEOUT_S = 60.0
"""Time that an interpreter may take to answer (chosen): it starts slowly on a busy shared filesystem."""

CLOSED_WITHIN_S = 6.0
"""Time that the end of interpreters that are still asked may take (chosen)."""

PROBE_FRESH_S = 5.0
"""Time that an answer holds without a check of the files it depends on, and that an error holds (chosen)."""

MIN_PYTHON, MIN_TORCH = (3, 9), (2, 4)
"""The oldest versions that run trainers."""

_Version = Annotated[str, msgspec.Meta(max_length=100)]
_Path = Annotated[str, msgspec.Meta(max_length=4096, pattern="^[^\x00]*$")]

_OWN = ""
"""What stands for our own interpreter among those that were asked."""

_PACKAGE = "hpcsched-worker"
_NAMES = ("python3", "python")
_MAX_ERROR_CHARS = 200


class InterpreterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The versions that an interpreter has (`probe.found`); None: it is not there."""

    executable: _Path
    prefix: _Path
    python: _Version
    worker: _Version | None = None
    contract: _Version | None = None
    torch: _Version | None = None
    watched: dict[_Path, int] = {}
    """The mtime in ns of each folder that it imports from."""

    @property
    def trains(self) -> bool:
        """Whether it has the packages that a trainer needs, of whatever version."""
        return self.worker is not None and self.torch is not None

    def why_not(self, python: str) -> str:
        """The reason why this `python` cannot run trainers, and a remedy, in one line; "" if it can."""
        return printable(self._why_not(python))

    def _why_not(self, python: str) -> str:
        pip = f"{shlex.quote(python)} -m pip install"
        if _numbers(self.python) < MIN_PYTHON:
            return f"{python} is Python {self.python}; trainers need {_said(MIN_PYTHON)} or later"
        if self.worker is None:
            return f"{python} (Python {self.python}) has no {_PACKAGE}: {pip} '{_PACKAGE}[torch]'"
        if why := _why_apart(self.contract):
            there = f"{python} has {_PACKAGE} {self.worker}, but {why}"
            return f"{there}: {pip} {_PACKAGE}=={hpcsched.__version__}"
        if self.torch is None or _numbers(self.torch) < MIN_TORCH:
            there = "no torch" if self.torch is None else f"torch {self.torch}"
            least = _said(MIN_TORCH)
            return f"{python} has {there}; trainers need {least} or later: {pip} 'torch>={least}'"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """The Python of a job: `python` is its file, `folder` the one with the environment's programs.

    `named`: the job has named it, so its programs come first in PATH. `stamp` changes with the packages that
    it imports, so that no zygote that has imported old ones is used.
    """

    python: str
    folder: str
    named: bool = True
    stamp: int = 0

    def activated(self, env: Mapping[str, str]) -> dict[str, str]:
        """`env` as after the environment's activation; no shell line of it is run."""
        if not self.named:
            return dict(env)
        unset = ("VIRTUAL_ENV", "VIRTUAL_ENV_PROMPT", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "PYTHONHOME")
        found = {name: value for name, value in env.items() if name not in unset}
        prefix = Path(self.folder).parent
        if os.path.isfile(prefix / "pyvenv.cfg"):  # noqa: PTH113 - it raises nothing
            found["VIRTUAL_ENV"] = str(prefix)
        elif os.path.isdir(prefix / "conda-meta"):  # noqa: PTH112
            found |= {"CONDA_PREFIX": str(prefix), "CONDA_DEFAULT_ENV": prefix.name}
        found["PATH"] = os.pathsep.join([self.folder, *filter(None, [env.get("PATH", os.defpath)])])
        return found


class Interpreters:
    """The interpreters of jobs on this host; each is asked once, and again when it has changed.

    `environ`: the variables that workers inherit; its PATH and those of conda count. `clock` is monotonic, in
    seconds.
    """

    def __init__(self, environ: Mapping[str, str], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._environ, self._clock = environ, clock
        self._known: dict[str, _Answer] = {}
        self._asking: dict[str, _Asking] = {}
        self._first: tuple[str | None, float] | None = None
        """The first in PATH (None: there is none but our own), and when that was looked up."""
        self._stop = threading.Event()

    def ready(self, environment: PythonEnvironment | None, who: Hashable = None) -> bool:
        """Whether `trainers` would answer at once; if not, its interpreter is asked from now on, in a thread.

        Each `who` that has waited takes the answer. An error counts for nobody else: a filesystem that was
        busy for a minute does not fail all jobs of an environment.
        """
        try:
            python = self._to_ask(environment)
        except BadEnvironment:
            return True
        if python is None:
            return True
        if isinstance(self._answer(python, look=True), InterpreterInfo):
            return True
        asking = self._asking.get(python)
        if asking is not None and asking.thread.is_alive():
            asking.waiting.add(who)
            return False
        if asking is not None and who in asking.waiting and self._answer(python) is not None:
            return True
        self._asking[python] = _Asking(started(self._ask, "interpreter", python), {who})
        return False

    def close(self) -> None:
        """Ask none any more, and end those that are asked."""
        self._stop.set()
        until = time.monotonic() + CLOSED_WITHIN_S
        for asking in self._asking.values():
            asking.thread.join(max(0.0, until - time.monotonic()))

    def trainers(self, environment: PythonEnvironment | None) -> Interpreter:
        """The interpreter that runs a trainer of this environment; may wait for it. Raises BadEnvironment."""
        python = self._to_ask(environment)
        has = self._has(python) if python is not None else None
        if environment is not None:
            assert python is not None
            return self._good(python, has, folder=str(Path(python).parent))
        if isinstance(has, InterpreterInfo) and python is not None and has.trains:
            return self._good(python, has, named=False)
        if why := self._own().why_not(sys.executable):
            first = f"{printable(python or '')} is first in PATH, but {has}" if isinstance(has, str) else ""
            if isinstance(has, InterpreterInfo) and python is not None:
                first = has.why_not(python)
            either = f"; or {first}" if first else ""
            name = "name the environment of the trainings (python, venv or conda)"
            raise BadEnvironment(f"{why}{either}; or {name}", transient=isinstance(has, str))
        return Interpreter(python=sys.executable, folder="", named=False)

    def programs(self, environment: PythonEnvironment | None) -> Interpreter | None:
        """The interpreter whose programs come first in PATH for a command; None without an environment.

        It is not asked for its versions. Raises BadEnvironment.
        """
        if environment is None:
            return None
        python = self._find(environment)
        return Interpreter(python=python, folder=str(Path(python).parent))

    def unlike(self, specs: Iterable[JobSpec], default: PythonEnvironment | None = None) -> list[JobSpec]:
        """The first job of each kind, environment and container: `check` says the same of the others.

        Their interpreters are asked from now on, all at once.
        """
        found: dict[object, JobSpec] = {}
        for spec in specs:
            environment = spec.environment or default
            if spec.container:
                found.setdefault((spec.container, bool(spec.after)), spec)
            elif found.setdefault((spec.kind, environment), spec) is spec and spec.kind is Kind.TRAINER:
                self.ready(environment)
        return list(found.values())

    def check(self, spec: JobSpec, default: PythonEnvironment | None = None) -> None:
        """Raise BadEnvironment, with the job's name, if it could not start. `default`: if it names none.

        A container has a Python of its own; jobs that this one waits for may make its image.
        """
        try:
            if spec.container:
                if not spec.after:
                    check_image(spec.container)
            elif spec.kind is Kind.TRAINER:
                self.trainers(spec.environment or default)
            elif spec.kind is Kind.COMMAND:
                self.programs(spec.environment or default)
        except BadEnvironment as error:
            raise BadEnvironment(f"job {spec.name}: {error}", transient=error.transient) from None

    def candidates(
        self, environment: PythonEnvironment | None
    ) -> Iterator[tuple[str, InterpreterInfo | str]]:
        """The interpreter that the environment names, or those that may run a job without one; each with its
        versions, or the reason why they are not known."""
        try:
            python = self._to_ask(environment)
        except BadEnvironment as error:
            yield environment.name if environment else "", str(error)
            return
        if python is not None:
            yield python, self._has(python)
        if environment is None:
            yield sys.executable, self._own()

    # -- where it is -----------------------------------------------------------------------------------

    def _to_ask(self, environment: PythonEnvironment | None) -> str | None:
        """The interpreter to be asked; None: there is none but our own, which needs not be."""
        if environment is not None:
            return self._find(environment)
        now = self._clock()
        if self._first is None or now - self._first[1] >= PROBE_FRESH_S:
            first = next(self._in_path(_NAMES), None)
            self._first = (None if first is None or _is_own(first) else first, now)
        return self._first[0]

    def _find(self, environment: PythonEnvironment) -> str:
        name = environment.name
        if environment.kind == "python":
            found = name if "/" in name else next(self._in_path([name]), "")
            if not found:
                path = self._environ.get("PATH", os.defpath)
                raise BadEnvironment(f"python = {name!r}: not found in PATH={printable(path)}")
        else:
            prefix = name if environment.kind == "venv" or "/" in name else self._conda(name)
            found = os.path.join(prefix, "bin", "python")  # noqa: PTH118 - as it is written
        if not found.startswith("/"):
            raise BadEnvironment(f"{environment.kind} = {name!r}: not an absolute path")
        settle(Path(found))
        if not (os.path.isfile(found) and os.access(found, os.X_OK)):  # noqa: PTH113
            what = "not a program" if os.path.exists(found) else "no such file"  # noqa: PTH110
            raise BadEnvironment(f"{environment.kind} = {name!r}: {printable(found)}: {what}")
        return found

    def _in_path(self, names: list[str] | tuple[str, ...]) -> Iterator[str]:
        """The programs of one of these names in PATH, folder by folder."""
        for folder in self._environ.get("PATH", os.defpath).split(os.pathsep):
            for name in names if folder.startswith("/") else ():
                path = os.path.join(folder, name)  # noqa: PTH118
                if os.path.isfile(path) and os.access(path, os.X_OK):  # noqa: PTH113
                    yield path

    def _conda(self, name: str) -> str:
        """The folder of the conda environment of this name."""
        looked = list(dict.fromkeys(self._conda_folders()))
        for folder in looked if name not in (".", "..") else ():
            path = folder.parent if name == "base" and folder.name == "envs" else folder / name
            if os.path.isdir(path / "conda-meta"):  # noqa: PTH112 - it raises nothing
                return str(path)
        unset = "no conda is known here: CONDA_EXE and CONDA_ENVS_PATH are not set"
        where = printable(", ".join(map(str, looked))) or unset
        raise BadEnvironment(f"conda = {name!r}: no environment of this name ({where}); its folder will do")

    def _conda_folders(self) -> Iterator[Path]:
        """Where conda keeps environments by name: what is set, its installation, the user's own.

        A folder that is not an absolute path is that of nobody knows which working directory.
        """
        return (folder for folder in self._said_of_conda() if folder.is_absolute())

    def _said_of_conda(self) -> Iterator[Path]:
        environ = self._environ
        for variable in ("CONDA_ENVS_PATH", "CONDA_ENVS_DIRS"):
            yield from map(Path, environ.get(variable, "").split(os.pathsep))
        if root := environ.get("MAMBA_ROOT_PREFIX"):
            yield Path(root) / "envs"
        for program in filter(None, (environ.get("CONDA_EXE"), *self._in_path(["conda"]))):
            yield Path(program).parent.parent / "envs"
        if active := environ.get("CONDA_PREFIX"):
            prefix = Path(active)
            yield prefix.parent if prefix.parent.name == "envs" else prefix / "envs"
        if home := environ.get("HOME"):
            yield Path(home) / ".conda" / "envs"

    # -- what it has -----------------------------------------------------------------------------------

    def _own(self) -> InterpreterInfo:
        known = self._answer(_OWN)
        if not isinstance(known, InterpreterInfo):
            known = own_versions()
            self._known[_OWN] = _Answer(said=known, changed=known.watched, at=self._clock())
        return known

    def _has(self, python: str) -> InterpreterInfo | str:
        known, asking = self._answer(python), self._asking.get(python)
        if known is None and asking is not None:
            asking.thread.join()  # it has its own limit
            known = self._answer(python)
        return self._ask(python) if known is None else known

    def _answer(self, python: str, *, look: bool = False) -> InterpreterInfo | str | None:
        """What it said; None: never asked, changed since, or it told nothing and that was a while ago.

        `look`: whether it has changed is looked at in any case.
        """
        known, now = self._known.get(python), self._clock()
        if known is None:
            return None
        if now - known.at >= PROBE_FRESH_S or (look and isinstance(known.said, InterpreterInfo)):
            if isinstance(known.said, str) or not known.holds():
                return None
            known.at = now
        return known.said

    def _ask(self, python: str) -> InterpreterInfo | str:
        before = _changed(python)
        said = ask_interpreter(python, self._environ, stop=self._stop)
        watched = said.watched if isinstance(said, InterpreterInfo) else {}
        self._known[python] = _Answer(said=said, changed={**watched, python: before}, at=self._clock())
        return said

    def _good(
        self, python: str, has: InterpreterInfo | str | None, *, folder: str = "", named: bool = True
    ) -> Interpreter:
        """The file to start: a script in the place of an interpreter, such as a shim, only says which."""
        if not isinstance(has, InterpreterInfo):
            raise BadEnvironment(f"{printable(python)}: {has}", transient=True)
        if why := has.why_not(python):
            raise BadEnvironment(why)
        stamp = hash(tuple(sorted(has.watched.items())))
        return Interpreter(python=has.executable or python, folder=folder, named=named, stamp=stamp)


@dataclass(frozen=True, slots=True)
class _Asking:
    """An interpreter that is being asked, and the callers that wait for the answer."""

    thread: threading.Thread
    waiting: set[Hashable]


@dataclass(slots=True)
class _Answer:
    """The answer of an interpreter; `at`: the time at which it was last known to hold."""

    said: InterpreterInfo | str
    changed: Mapping[str, int | None]
    """The mtime in ns of each file and folder that it depends on (None: not there)."""
    at: float

    def holds(self) -> bool:
        """Whether no file that it depends on has changed."""
        return all(_changed(path) == at for path, at in self.changed.items())


def ask_interpreter(
    python: str,
    environ: Mapping[str, str],
    *,
    within_s: float = PROBE_TIMEOUT_S,
    stop: threading.Event | None = None,
) -> InterpreterInfo | str:
    """The versions that an interpreter has, or in one line why it does not answer within `within_s`."""
    try:
        program = Path(probe.__file__).read_text(encoding="utf-8")
        code, out, err = run_bounded([python, "-c", program], environ=environ, within_s=within_s, stop=stop)
    except Stopped:
        return "it was not asked to the end"
    except TimeoutError:
        return f"it has not said within {within_s:g} s what it has"
    except (OSError, ValueError) as error:
        return f"it cannot be started: {printable(getattr(error, 'strerror', None) or str(error))}"
    lines = out.strip().splitlines()
    if code == 0 and lines:
        with contextlib.suppress(BadInput):
            return decode(lines[-1], InterpreterInfo, most_bytes=SMALL_BYTES)
    last = (err.strip().splitlines() or [b"no word"])[-1].decode(errors="replace")
    shown = printable(last[:_MAX_ERROR_CHARS])
    return f"it cannot say what it has, as a Python 3 does (exit code {code}: {shown})"


def own_versions() -> InterpreterInfo:
    """The versions that this process's own interpreter has."""
    path = list(sys.path)
    try:
        return msgspec.convert(probe.found(), InterpreterInfo)
    finally:
        sys.path[:] = path


def _is_own(python: str) -> bool:
    """Whether a program is this interpreter in this environment, by whatever name."""
    with contextlib.suppress(OSError):
        here = os.path.realpath(os.path.dirname(sys.executable))  # noqa: PTH120
        return os.path.realpath(os.path.dirname(python)) == here and Path(python).samefile(sys.executable)  # noqa: PTH120
    return False


def _changed(path: str) -> int | None:
    try:
        return os.stat(path).st_mtime_ns  # noqa: PTH116 - on the path of every launch
    except OSError:
        return None


def _why_apart(contract: str | None) -> str | None:
    """Why a worker of this contract does not fit; None if it does."""
    if contract is None:
        return f"that is of before the contract had versions; {VERSION} is needed"
    try:
        return fits(Version.parse(contract))
    except BadInput as error:
        return str(error)


def _numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version; those that are missing count as 0."""
    return tuple(int(number) for number in (*re.findall(r"[0-9]+", version)[:2], "0", "0")[:2])


def _said(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
