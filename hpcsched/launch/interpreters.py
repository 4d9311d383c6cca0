"""Which Python runs a trainer: found from what its job names, asked once what it has, and judged.

Where a job names none, that is the first `python3` (or `python`) in PATH, if it has hpcsched-worker and
torch; else the scheduler's own. All is looked up on the host where the job starts.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

import hpcsched
from hpcsched.contract.codec import SMALL_BYTES
from hpcsched.contract.version import VERSION, Version, fits
from hpcsched.core.model import JobSpec, Kind, PythonEnvironment
from hpcsched.decoding import decode
from hpcsched.errors import BadEnvironment, BadInput
from hpcsched.launch import probe
from hpcsched.printing import printable

WITHIN_S = 60.0
"""How long an interpreter may take to say what it has: it starts slowly on a busy shared filesystem."""

PYTHON, TORCH = (3, 9), (2, 4)
"""The oldest ones that run trainers."""

_PACKAGE = "hpcsched-worker"
_NAMES = ("python3", "python")
_MOST_SAID = 200


class Has(msgspec.Struct, frozen=True, kw_only=True):
    """What an interpreter has (`probe.found`); None: it is not there."""

    executable: str
    prefix: str
    python: str
    worker: str | None = None
    contract: str | None = None
    torch: str | None = None
    watched: list[str] = []

    @property
    def trains(self) -> bool:
        """Whether there is what a trainer needs, of whatever version."""
        return self.worker is not None and self.torch is not None

    def why_not(self, python: str) -> str:
        """Why this `python` cannot run trainers, and what helps; "" if it can."""
        pip = f"{shlex.quote(python)} -m pip install"
        if _numbers(self.python) < PYTHON:
            return f"{python} is Python {self.python}; trainers need {_said(PYTHON)} or later"
        if self.worker is None:
            return f"{python} (Python {self.python}) has no {_PACKAGE}: {pip} {_PACKAGE}"
        if why := _why_apart(self.contract):
            there = f"{python} has {_PACKAGE} {self.worker}, but {why}"
            return f"{there}: {pip} {_PACKAGE}=={hpcsched.__version__}"
        if self.torch is None or _numbers(self.torch) < TORCH:
            there = "no torch" if self.torch is None else f"torch {self.torch}"
            least = _said(TORCH)
            return f"{python} has {there}; trainers need {least} or later: {pip} 'torch>={least}'"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """The Python of a job: `python` is its file, `folder` the one with the environment's programs.

    `named`: the job has named it, so its programs come first.
    """

    python: str
    folder: str
    named: bool = True

    def activated(self, env: Mapping[str, str]) -> dict[str, str]:
        """Variables as after the environment's activation, of which no shell line is run."""
        if not self.named:
            return dict(env)
        unset = ("VIRTUAL_ENV", "VIRTUAL_ENV_PROMPT", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "PYTHONHOME")
        found = {name: value for name, value in env.items() if name not in unset}
        prefix = Path(self.folder).parent
        if (prefix / "pyvenv.cfg").is_file():
            found["VIRTUAL_ENV"] = str(prefix)
        elif (prefix / "conda-meta").is_dir():
            found |= {"CONDA_PREFIX": str(prefix), "CONDA_DEFAULT_ENV": prefix.name}
        found["PATH"] = os.pathsep.join([self.folder, *filter(None, [env.get("PATH", os.defpath)])])
        return found


class Interpreters:
    """The interpreters of jobs on this host; each is asked once, and again when it has changed.

    `environ` is what workers inherit: its PATH counts, and what it says of conda.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._known: dict[str, tuple[_Stamp, Has | str]] = {}
        self._asking: dict[str, threading.Thread] = {}

    def ready(self, environment: PythonEnvironment | None) -> bool:
        """Whether `trainers` would answer at once; what it has to ask is being asked from now on."""
        try:
            python = self._to_ask(environment)
        except BadEnvironment:
            return True
        if python is None or self._answer(python) is not None:
            return True
        thread = self._asking.get(python)
        if thread is None or not thread.is_alive():
            thread = threading.Thread(target=self._ask, args=(python,), name="interpreter", daemon=True)
            self._asking[python] = thread
            thread.start()
        return False

    def trainers(self, environment: PythonEnvironment | None) -> Interpreter:
        """Who runs the trainer of a job; asks first if need be. Raises BadEnvironment."""
        python = self._to_ask(environment)
        has = self._has(python) if python is not None else None
        if environment is not None:
            assert python is not None
            folder = str(Path(python).parent)
            return Interpreter(python=self._good(python, has), folder=folder)
        first = f"{python} is first in PATH, but {has}" if isinstance(has, str) else ""
        if isinstance(has, Has) and python is not None:
            if has.trains:
                return Interpreter(python=self._good(python, has), folder="", named=False)
            first = has.why_not(python)
        own = own_versions()
        why = own.why_not(sys.executable)
        if why:
            either = f"; or {first}" if first else ""
            name = "name the environment of the trainings (python, venv or conda)"
            raise BadEnvironment(f"{why}{either}; or {name}")
        return Interpreter(python=sys.executable, folder="", named=False)

    def programs(self, environment: PythonEnvironment | None) -> Interpreter | None:
        """Whose programs come first for a job that is a command; None: nothing is said of that.

        Nobody is asked anything. Raises BadEnvironment.
        """
        if environment is None:
            return None
        python = self._find(environment)
        return Interpreter(python=python, folder=str(Path(python).parent))

    def check(self, spec: JobSpec, default: PythonEnvironment | None = None) -> None:
        """Raise BadEnvironment, with the job's name, if it could not. `default`: where it names none."""
        try:
            if spec.kind is Kind.TRAINER:
                self.trainers(spec.environment or default)
            elif spec.kind is Kind.COMMAND:
                self.programs(spec.environment or default)
        except BadEnvironment as error:
            raise BadEnvironment(f"job {spec.name}: {error}") from None

    def candidates(self, environment: PythonEnvironment | None) -> Iterator[tuple[str, Has | str]]:
        """The interpreter that the environment names, or else those that may be the one of a job that names
        none, each with what it has, or why that cannot be told."""
        try:
            python = self._to_ask(environment)
        except BadEnvironment as error:
            yield environment.name if environment else "", str(error)
            return
        if python is not None:
            yield python, self._has(python)
        if environment is None:
            yield sys.executable, own_versions()

    # -- where it is -----------------------------------------------------------------------------------

    def _to_ask(self, environment: PythonEnvironment | None) -> str | None:
        """The interpreter to be asked; None: there is none but our own, which needs not be."""
        if environment is not None:
            return self._find(environment)
        first = next(self._in_path(_NAMES), None)
        return None if first is None or _is_own(first) else first

    def _find(self, environment: PythonEnvironment) -> str:
        name = environment.name
        if environment.kind == "python":
            found = name if "/" in name else next(self._in_path([name]), "")
            if not found:
                path = self._environ.get("PATH", os.defpath)
                raise BadEnvironment(f"python = {name!r}: not found in PATH={path}")
        else:
            prefix = name if environment.kind == "venv" or "/" in name else self._conda(name)
            found = os.path.join(prefix, "bin", "python")  # noqa: PTH118 - as it is written
        if not found.startswith("/"):
            raise BadEnvironment(f"{environment.kind} = {name!r}: not an absolute path")
        if not (os.path.isfile(found) and os.access(found, os.X_OK)):  # noqa: PTH113
            what = "no such file" if not Path(found).exists() else "not a program"
            raise BadEnvironment(f"{environment.kind} = {name!r}: {found}: {what}")
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
        for folder in looked:
            path = folder.parent if name == "base" and folder.name == "envs" else folder / name
            if (path / "conda-meta").is_dir():
                return str(path)
        where = (
            ", ".join(map(str, looked)) or "no conda is known here: CONDA_EXE and CONDA_ENVS_PATH are not set"
        )
        raise BadEnvironment(f"conda = {name!r}: no environment of this name ({where}); its folder will do")

    def _conda_folders(self) -> Iterator[Path]:
        """Where conda keeps environments by name: what is set, its installation, the user's own."""
        environ = self._environ
        for variable in ("CONDA_ENVS_PATH", "CONDA_ENVS_DIRS"):
            yield from map(Path, filter(None, environ.get(variable, "").split(os.pathsep)))
        if root := environ.get("MAMBA_ROOT_PREFIX"):
            yield Path(root) / "envs"
        for program in filter(None, (environ.get("CONDA_EXE"), *self._in_path(["conda"]))):
            yield Path(program).parents[1] / "envs"
        if active := environ.get("CONDA_PREFIX"):
            prefix = Path(active)
            yield prefix.parent if prefix.parent.name == "envs" else prefix / "envs"
        if home := environ.get("HOME"):
            yield Path(home) / ".conda" / "envs"

    # -- what it has -----------------------------------------------------------------------------------

    def _has(self, python: str) -> Has | str:
        known = self._answer(python)
        return self._ask(python) if known is None else known

    def _answer(self, python: str) -> Has | str | None:
        """What it said, unless it has changed since, or was never asked."""
        stamp, said = self._known.get(python, (None, None))
        return said if stamp is not None and stamp.holds() else None

    def _ask(self, python: str) -> Has | str:
        said = ask(python, self._environ)
        watched = said.watched if isinstance(said, Has) else []
        self._known[python] = _Stamp.of([python, *watched]), said
        return said

    @staticmethod
    def _good(python: str, has: Has | str | None) -> str:
        """The file to start: a script in the place of an interpreter, such as a shim, only says which."""
        why = has.why_not(python) if isinstance(has, Has) else f"{python}: {has}"
        if why or not isinstance(has, Has):
            raise BadEnvironment(why)
        return has.executable or python


@dataclass(frozen=True, slots=True)
class _Stamp:
    """When some files and folders were changed last, in nanoseconds (None: they are not there)."""

    changed: Mapping[str, int | None]

    @classmethod
    def of(cls, paths: list[str]) -> _Stamp:
        return cls({path: _changed(path) for path in paths})

    def holds(self) -> bool:
        return all(_changed(path) == at for path, at in self.changed.items())


def ask(python: str, environ: Mapping[str, str], *, within_s: float = WITHIN_S) -> Has | str:
    """What an interpreter has, or why it does not say; takes so long at most."""
    program = Path(probe.__file__).read_text(encoding="utf-8")
    try:
        done = subprocess.run(
            [python, "-c", program],
            env=dict(environ),
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=within_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it has not said within {within_s:g} s what it has"
    except (OSError, ValueError) as error:
        return f"it cannot be started: {getattr(error, 'strerror', None) or error}"
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        with contextlib.suppress(BadInput):
            return decode(lines[-1], Has, most_bytes=SMALL_BYTES)
    last = (done.stderr.strip().splitlines() or [b"no word"])[-1].decode(errors="replace")
    return f"it cannot say what it has (exit code {done.returncode}: {printable(last[:_MOST_SAID])})"


def own_versions() -> Has:
    """What the interpreter has that runs this."""
    path = list(sys.path)
    try:
        return msgspec.convert(probe.found(), Has)
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
    return tuple(int(number) for number in (*re.findall(r"\d+", version)[:2], "0", "0")[:2])


def _said(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
