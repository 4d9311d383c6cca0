"""`hpcsched doctor --bundle`: what a ticket needs, in one archive.

Bounded, without secrets as far as they can be told by their names, and without the user's programs and data.
"""

from __future__ import annotations

import glob
import importlib.metadata
import io
import json
import os
import platform
import shutil
import sys
import tarfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import hpcsched
from hpcsched.accounts import user_name
from hpcsched.batch.hostlist import expand
from hpcsched.decoding import opened
from hpcsched.errors import BadInput, BatchError, ConfigError
from hpcsched.redaction import REMOVED, document_without_secrets, is_secret, renamed, without_secrets
from hpcsched.store.rundir import ENDED

MOST_OF_A_FILE = 2**20
MOST_IN_ALL = 16 * 2**20
"""Bytes, before compression."""
MOST_OF_AN_OUTPUT = 2**16
NEWEST_JOBS = 100
"""The newest jobs, whose outputs are taken where they are asked for."""

USUAL = "hpcsched-bundle.tar.gz"

_VARIABLES = (
    "HPCSCHED_",
    "SLURM_",
    "LSB_",
    "LS_",
    "SGE_",
    "PE_HOSTFILE",
    "NSLOTS",
    "JOB_ID",
    "RESTARTED",
    "CUDA_",
    "NVIDIA_",
    "NCCL_",
    "GLOO_",
    "OMP_",
    "MKL_",
    "TORCH",
)
_MORE_VARIABLES = (
    "PATH",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "LANG",
    "TERM",
    "TMPDIR",
)
_OPTIONAL = (
    *("torch", "numpy", "matplotlib", "jinja2", "scipy"),
    *("pyslurm", "optuna", "scikit-learn", "statsmodels"),
)
_GPUS = (("nvidia-smi", "-L"), ("nvidia-smi",), ("nvidia-smi", "topo", "-m"))
_BATCH = (("sinfo", "--version"), ("lsid",))
_README = """\
What `hpcsched doctor --bundle` found, for a ticket.

Look through it before you send it. The values of variables and keys whose names look like secrets are
replaced by {removed}; a secret under another name is still here. Of each file of the run directory the last
{most} KiB are here; checkpoints, programs and data are not{logs}.

"""
_DOCUMENTS = (".json", ".jsonl")

_USER = ("USER", "LOGNAME", "SLURM_JOB_USER", "LSFUSER")
_HOST = ("SLURM_SUBMIT_HOST", "SLURMD_NODENAME", "SLURM_TOPOLOGY_ADDR", "LSB_SUB_HOST", "HOSTNAME")
_HOSTS = ("SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_STEP_NODELIST", "LSB_HOSTS", "LSB_MCPU_HOSTS")
_TELL_WHERE = ("SLURM_JOB_ACCOUNT", "SLURM_CLUSTER_NAME", "LSB_PROJECT_NAME", "LSF_CLUSTER_NAME")
"""Variables with names that `--anonymise` takes out wherever they stand."""
_TOLD = {"host": "HOST", "user": "USER", "cluster": "CLUSTER"}
"""Keys in status.json that hold such names."""
_OF_A_RUN = ("run.json", "status.json", "journal.jsonl")

Said = tuple[str, str]
"""The name of a file in the bundle, and its text."""


def write(
    to: Path,
    *,
    root: Path,
    findings: str,
    settings: str,
    environ: Mapping[str, str],
    with_logs: bool,
    anonymise: bool,
) -> list[str]:
    """Write the archive, mode 0600; the names of the files in it, each with its length, and what is missing.

    `root` is the run directory (there may be none). Raises ConfigError where `to` is there already or cannot
    be written.
    """
    status = _status(root)
    names = _names(environ, status) if anonymise else {}

    def fit(text: str, name: str = "") -> bytes:
        clean = document_without_secrets if name.endswith(_DOCUMENTS) else without_secrets
        return renamed(clean(text), names).encode(errors="replace")

    said = [
        ("doctor.txt", findings),
        ("versions.txt", _versions()),
        ("settings.txt", settings),
        ("environment.txt", _environment(environ)),
        ("gpus.txt", _answers(_GPUS, environ)),
        ("batch.txt", _answers(_BATCH, environ)),
    ]
    files: list[tuple[str, bytes]] = []
    missing = [fit(line).decode() for line in _missing(root)]
    room = MOST_IN_ALL
    for name, text in _chain(said, _of_run(root), _outputs(root, status) if with_logs else ()):
        data, shown = fit(text, name), fit(name).decode()
        if len(data) > room:
            missing.append(f"no {shown}: {len(data)} bytes more than the {MOST_IN_ALL} that a bundle holds")
            if room < MOST_OF_AN_OUTPUT:
                missing.append("nor what comes after it")
                break  # what is left may be thousands of outputs, each read for nothing
            continue
        room -= len(data)
        files.append((shown, data))
    listed = [*(f"{name} ({len(data)} bytes)" for name, data in files), *missing]
    logs = "" if with_logs else ", nor are the outputs of jobs (`--with-logs`)"
    readme = (
        _README.format(removed=REMOVED, most=MOST_OF_A_FILE // 1024, logs=logs) + "\n".join(listed) + "\n"
    )
    _archive(to, [("README.txt", readme.encode()), *files])
    return listed


def _chain(*parts: Iterable[Said]) -> Iterator[Said]:
    for part in parts:
        yield from part


def _archive(to: Path, files: Sequence[tuple[str, bytes]]) -> None:
    folder = to.name.removesuffix(".tar.gz").removesuffix(".tgz")
    try:
        with os.fdopen(os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            try:
                _pack(file, folder, files)
            except BaseException:
                to.unlink(missing_ok=True)  # a part of one would only be in the way of the next
                raise
    except FileExistsError:
        raise ConfigError(where="--bundle", got=f"{to} is there already", accepted="a new file") from None
    except OSError as error:
        got = f"{to} cannot be written ({error.strerror})"
        raise ConfigError(
            where="--bundle", got=got, accepted="a file in a folder that you can write"
        ) from error


def _pack(file: IO[bytes], folder: str, files: Sequence[tuple[str, bytes]]) -> None:
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, data in files:
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size, entry.mode, entry.mtime = len(data), 0o600, int(time.time())
            archive.addfile(entry, io.BytesIO(data))
    file.flush()


def _versions() -> str:
    lines = [
        f"hpcsched {hpcsched.__version__}",
        f"Python {sys.version} ({sys.executable})",
        f"{platform.platform()}, {os.cpu_count()} CPUs",
    ]
    required = (
        need.split(";")[0] for need in importlib.metadata.requires("hpcsched") or () if "extra" not in need
    )
    for word in (*required, *_OPTIONAL):
        name = word.strip().partition(">")[0].partition("=")[0].strip()
        try:
            lines.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{name}: not installed")
    return "\n".join(lines) + "\n"


def _environment(environ: Mapping[str, str]) -> str:
    taken = (n for n in sorted(environ) if n.startswith(_VARIABLES) or n in _MORE_VARIABLES)
    return "".join(f"{name}={REMOVED if is_secret(name) else ascii(environ[name])}\n" for name in taken)


def _answers(commands: Iterable[Sequence[str]], environ: Mapping[str, str]) -> str:
    """Outputs of commands that show versions and devices, each within its time."""
    from hpcsched.batch.command import run_command

    said = []
    for argv in commands:
        if shutil.which(argv[0], path=environ.get("PATH")) is None:
            said.append(f"$ {' '.join(argv)}\nnot installed\n")
            continue
        try:
            told = run_command(tuple(argv), environ=environ)
            answer = told.out or told.err
        except BatchError as error:
            answer = f"{error}\n"
        said.append(f"$ {' '.join(argv)}\n{answer[:MOST_OF_AN_OUTPUT]}")
    return "\n".join(said)


def _missing(root: Path) -> list[str]:
    """Lines on the parts of a run that are not here."""
    if not root.is_dir():
        return [f"no run: {root} is not there (--dir)"]
    return [f"no run/{name}: it is not there" for name in _OF_A_RUN if not os.path.lexists(root / name)]


def _of_run(root: Path) -> Iterator[Said]:
    more = (path for pattern in (ENDED, "*.log") for path in sorted(root.glob(pattern)))
    for path in (*(root / name for name in _OF_A_RUN), *more):
        if path.exists() or path.is_symlink():
            yield f"run/{path.name}", _tail(path, root, MOST_OF_A_FILE)


def _outputs(root: Path, status: Any) -> Iterator[Said]:
    """The ends of what the newest jobs have written, each host's."""
    named = _named_outputs(status)
    folders = [path for path in root.glob("jobs/*") if path.name.isdecimal() and len(path.name) < 10]
    for folder in sorted(folders, key=lambda path: int(path.name), reverse=True)[:NEWEST_JOBS]:
        found = {path for ways in ("*.out", "*.out.*", "*.log") for path in folder.glob(ways)}
        for output in named.get(folder.name, ()):
            if os.path.realpath(output.parent) == os.path.realpath(folder):
                found |= {folder / output.name, *folder.glob(f"{glob.escape(output.name)}.*")}
            else:
                yield (
                    f"run/jobs/{folder.name}/elsewhere.txt",
                    f"left out: {output} is not in the job's folder\n",
                )
        for path in sorted(path for path in found if path.exists() or path.is_symlink()):
            yield f"run/jobs/{folder.name}/{path.name}", _tail(path, root, MOST_OF_AN_OUTPUT)


def _status(root: Path) -> Any:
    """The run's snapshot, with those rows of jobs that are over that the bundle has; None where there is none
    that can be read."""
    document = _decoded(_tail(root / "status.json", root, MOST_IN_ALL))
    if isinstance(document, dict) and isinstance(document.get("jobs"), list):
        tails = (_tail(path, root, MOST_OF_A_FILE) for path in sorted(root.glob(ENDED)))
        rows = (_decoded(line) for tail in tails for line in tail.splitlines())
        document["jobs"] += [row for row in rows if isinstance(row, dict)]
    return document


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _named_outputs(status: Any) -> dict[str, list[Path]]:
    """By the number of a job, the output that status.json names."""
    named: dict[str, list[Path]] = {}
    try:
        for job in status["jobs"]:
            if job["output"] and "\0" not in job["output"]:
                named.setdefault(str(job["id"]), []).append(Path(str(job["output"])))
    except (TypeError, KeyError):
        pass  # outputs of the usual names are found without it
    return named


def _tail(path: Path, root: Path, most: int) -> str:
    """The end of a file of the run: whole lines, never through a link, or why there is nothing."""
    try:
        if path.parent.resolve() != root.resolve() / path.parent.relative_to(root):
            return "left out: it lies behind a link\n"
        with opened(path, follow=False) as (file, about):
            cut = about.st_size > most
            file.seek(max(0, about.st_size - most))
            text = file.read(most).decode(errors="replace")
    except (OSError, BadInput) as error:
        why = "it is a link" if path.is_symlink() else getattr(error, "strerror", None) or str(error)
        return f"left out: {why}\n"
    # What is cut within a line could have lost the name that says that its value is a secret.
    if not cut:
        return text
    return f"... the last {most // 1024} KiB\n{text.partition(chr(10))[2] or 'left out: it is one line'}"


def _hosts(text: str) -> set[str]:
    """The hosts of a list as Slurm writes it, and the list; or LSF's words, some of which are numbers."""
    try:
        return {text, *expand(text.replace(" ", ","))}
    except ValueError:
        return {text, *text.split()}


def _told(document: Any) -> dict[str, str]:
    """Names in a document of the run, of any depth, each with what stands for it."""
    names: dict[str, str] = {}
    left: list[tuple[str, Any]] = [("", document)]
    while left:
        key, value = left.pop()
        if isinstance(value, dict):
            left += value.items()
        elif isinstance(value, list):
            left += [("", one) for one in value]
        elif isinstance(value, str) and key in _TOLD:
            names[value] = _TOLD[key]
    return names


def _names(environ: Mapping[str, str], status: Any) -> dict[str, str]:
    """Names of people and places, each with what stands for it."""
    told = _told(status)
    names = told | {environ[name]: name for name in _TELL_WHERE if environ.get(name)}
    hosts = {platform.node(), *(environ.get(name, "") for name in _HOST)}
    hosts |= {name for name, shown in told.items() if shown == "HOST"}
    for name in _HOSTS:
        hosts |= _hosts(environ.get(name, ""))
    hosts |= {host.partition(".")[0] for host in hosts}
    names |= dict.fromkeys(sorted(hosts - {"localhost"}), "HOST")
    names.pop("localhost", None)
    names |= {environ[name]: "USER" for name in _USER if environ.get(name)}
    names |= {user_name(): "USER", str(Path.home()): "~"}
    return {name: shown for name, shown in names.items() if len(name) > 1 and not name.isdecimal()}
