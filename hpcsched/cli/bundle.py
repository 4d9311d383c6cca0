"""`hpcsched doctor --bundle`: what a ticket needs, in one archive.

Bounded, without secrets as far as they can be told by their names, and without the user's programs and data.
"""

from __future__ import annotations

import getpass
import importlib.metadata
import io
import os
import platform
import shutil
import sys
import tarfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import hpcsched
from hpcsched.decoding import opened
from hpcsched.errors import BadInput, BatchError, ConfigError
from hpcsched.redaction import REMOVED, is_secret, renamed, without_secrets

MOST_OF_A_FILE = 2**20
MOST_IN_ALL = 16 * 2**20
"""Bytes, before compression."""
MOST_OF_AN_OUTPUT = 2**16
NEWEST_JOBS = 100
"""Of so many jobs, the newest, outputs are taken, where they are asked for."""

USUAL = "hpcsched-bundle.tar.gz"

_VARIABLES = (
    "HPCSCHED_",
    "SLURM_",
    "LSB_",
    "LS_",
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
_OPTIONAL = ("torch", "numpy", "matplotlib", "scipy", "pyslurm", "optuna", "scikit-learn", "statsmodels")
_GPUS = (("nvidia-smi", "-L"), ("nvidia-smi",), ("nvidia-smi", "topo", "-m"))
_BATCH = (("sinfo", "--version"), ("lsid",))
_README = """\
What `hpcsched doctor --bundle` found, for a ticket.

Look through it before you send it. The values of variables and keys whose names look like secrets are
replaced by {removed}; a secret under another name is still here. Of each file of the run directory the last
{most} KiB are here; checkpoints, programs and data are not{logs}.

"""

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
    """Write the archive, mode 0600, and return the names of the files in it, each with its length.

    `root` is the run directory (there may be none). Raises ConfigError where `to` is there already or cannot
    be written.
    """
    names = _names(environ) if anonymise else {}

    def fit(text: str) -> bytes:
        return renamed(without_secrets(text), names).encode(errors="replace")

    said = [
        ("doctor.txt", findings),
        ("versions.txt", _versions()),
        ("settings.txt", settings),
        ("environment.txt", _environment(environ)),
        ("gpus.txt", _answers(_GPUS, environ)),
        ("batch.txt", _answers(_BATCH, environ)),
    ]
    files: list[tuple[str, bytes]] = []
    room = MOST_IN_ALL
    for name, text in _chain(said, _of_run(root), _outputs(root) if with_logs else ()):
        data = fit(text)
        if len(data) > room:
            break
        room -= len(data)
        files.append((fit(name).decode(), data))
    listed = [f"{name} ({len(data)} bytes)" for name, data in files]
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
        with (
            os.fdopen(os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file,
            tarfile.open(fileobj=file, mode="w:gz") as archive,
        ):
            for name, data in files:
                entry = tarfile.TarInfo(f"{folder}/{name}")
                entry.size, entry.mode, entry.mtime = len(data), 0o600, int(time.time())
                archive.addfile(entry, io.BytesIO(data))
    except FileExistsError:
        raise ConfigError(where="--bundle", got=f"{to} is there already", accepted="a new file") from None
    except OSError as error:
        got = f"{to} cannot be written ({error.strerror})"
        raise ConfigError(
            where="--bundle", got=got, accepted="a file in a folder that you can write"
        ) from error


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
    """What commands say that show versions and devices; those that are there, each within its time."""
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


def _of_run(root: Path) -> Iterator[Said]:
    for path in (
        root / "run.json",
        root / "status.json",
        root / "journal.jsonl",
        *sorted(root.glob("*.log")),
    ):
        if path.exists() or path.is_symlink():
            yield f"run/{path.name}", _tail(path, root, MOST_OF_A_FILE)


def _outputs(root: Path) -> Iterator[Said]:
    """The ends of what the newest jobs have written."""
    folders = [path for path in root.glob("jobs/*") if path.name.isdecimal() and len(path.name) < 10]
    for folder in sorted(folders, key=lambda path: int(path.name), reverse=True)[:NEWEST_JOBS]:
        for path in sorted((*folder.glob("*.out"), *folder.glob("*.log"))):
            yield f"run/jobs/{folder.name}/{path.name}", _tail(path, root, MOST_OF_AN_OUTPUT)


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


def _names(environ: Mapping[str, str]) -> dict[str, str]:
    """Names that tell who and where, each with what stands for it."""
    names = {str(Path.home()): "~", getpass.getuser(): "USER", platform.node(): "HOST"}
    names |= {platform.node().partition(".")[0]: "HOST"}
    names |= {
        environ[name]: name for name in ("SLURM_JOB_ACCOUNT", "SLURM_CLUSTER_NAME") if environ.get(name)
    }
    return {name: shown for name, shown in names.items() if len(name) > 1}
