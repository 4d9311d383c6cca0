"""What a job file says of a program that saves by itself, read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from hpcsched import dialects
from hpcsched.core.model import Restart
from hpcsched.decoding import is_utf8
from hpcsched.errors import BadInput
from hpcsched.jobfile.keys import NONE, Job

KEYS = (
    "speaks",
    "suspend_signal",
    "checkpoints",
    "resume_args",
    "accumulation",
    "saved_exit_codes",
    "batch",
    "suspend_command",
    "resume_command",
)
"""Each of them makes a command `restartable`."""

MOST_PATTERNS = 16
"""Patterns of checkpoints, at most: all are looked for again and again."""

_Refuse = Callable[..., NoReturn]

_TEXTS = "texts in UTF-8, without NUL characters"


def restart_of(job: Job, workdir: Path, refuse: _Refuse) -> Restart | None:
    """How the job's program is asked to save, and told to go on; None: only the contract says that.

    `workdir` is where it runs. `refuse(key, got, accepted)` raises ConfigError.
    """
    said = {key: value for key in KEYS if (value := getattr(job, key)) not in (None, ())}
    if not job.command:
        for key in ("restartable", *said):
            if getattr(job, key) not in (None, False, ()):
                refuse(key, getattr(job, key), "a job with a command: a trainer is saved by hpcsched")
        return None
    if said.keys() - {"speaks"} and job.restartable is False:
        refuse("restartable", False, f"true, or no {min(said.keys() - {'speaks'})}")
    if job.restartable is False:
        return None
    words = tuple(job.command)
    if job.speaks is None:
        spoken = dialects.recognise(words, workdir, job.env)
    else:
        spoken = None if job.speaks == NONE else dialects.restart_of(job.speaks, words, workdir, job.env)
    if spoken is None and not (said.keys() - {"speaks"} or job.restartable):
        return None
    restart = _with(spoken or Restart(), job)
    _check(job, restart, refuse)
    return _shared(restart)


def progress_pattern_of(job: Job, refuse: _Refuse) -> str:
    """What finds the steps in the output of the job's program; "" for nothing of its own."""
    pattern = job.progress_pattern
    if pattern is None:
        return ""
    if not job.command:
        refuse("progress_pattern", pattern, "a job with a command: others tell their steps")
    try:
        dialects.step_pattern(pattern)
    except BadInput as error:
        refuse("progress_pattern", pattern, str(error))
    if "\0" in pattern or not is_utf8(pattern):
        refuse("progress_pattern", pattern, _TEXTS)
    return pattern


def _with(restart: Restart, job: Job) -> Restart:
    """What the job file says, put over what its dialect does."""
    known: dict[str, Any] = {}
    if job.suspend_signal is not None:
        name = job.suspend_signal.upper().removeprefix("SIG")
        known["signal"] = "" if name == NONE.upper() else f"SIG{name}"
    for key, name in (
        ("resume_args", "resume_args"),
        ("saved_exit_codes", "saved_codes"),
        ("suspend_command", "suspend_command"),
        ("resume_command", "resume_command"),
    ):
        if value := getattr(job, key):
            known[name] = tuple(value)
    if job.checkpoints:
        patterns = (job.checkpoints,) if isinstance(job.checkpoints, str) else job.checkpoints
        known["checkpoints"] = tuple(patterns)
        if known["checkpoints"] != restart.checkpoints:
            known["complete"] = ""
    if job.accumulation is not None:
        known["accumulation"] = job.accumulation
    told = any("{accumulation}" in word for word in known.get("resume_args", restart.resume_args))
    known["batch"] = job.batch or ("kept" if told else restart.batch if restart.batch != "kept" else "fixed")
    return replace(restart, **known)


def _check(job: Job, restart: Restart, refuse: _Refuse) -> None:
    if len(restart.checkpoints) > MOST_PATTERNS:
        refuse("checkpoints", f"{len(restart.checkpoints)} patterns", f"at most {MOST_PATTERNS}")
    for pattern in restart.checkpoints:
        path = PurePosixPath(pattern)
        first = path.parts[1:2] if path.is_absolute() else path.parts[:1]
        everywhere = path.is_absolute() and any(sign in "".join(first) for sign in "*?[")
        if not first or everywhere or ".." in path.parts:
            refuse("checkpoints", pattern, "patterns such as out/checkpoint-* or /scratch/me/*, without ..")
    lists: Mapping[str, Sequence[str]] = {
        "checkpoints": restart.checkpoints,
        "resume_args": restart.resume_args,
        "suspend_command": restart.suspend_command,
        "resume_command": restart.resume_command,
    }
    for key, words in lists.items():
        for word in words:
            if "\0" in word or not is_utf8(word):
                refuse(key, word, _TEXTS)
    if any("{checkpoint}" in word for word in restart.resume_args) and not restart.checkpoints:
        refuse("resume_args", list(restart.resume_args), "{checkpoint} only with `checkpoints`")
    for key, other in (("suspend_command", "resume_command"), ("resume_command", "suspend_command")):
        if getattr(restart, key) and not getattr(restart, other):
            refuse(key, list(getattr(restart, key)), f"both, or neither: there is no `{other}`")


@lru_cache(maxsize=256)
def _shared(restart: Restart) -> Restart:
    """One object for all jobs of which the same is so."""
    return restart


def as_keys(restart: Restart | None) -> dict[str, Any]:
    """The keys that say the same; of None that there is nothing to be recognised."""
    if restart is None:
        return {"speaks": NONE}
    return {
        "restartable": True,
        "speaks": restart.speaks or NONE,
        "suspend_signal": restart.signal or NONE,
        "checkpoints": list(restart.checkpoints),
        "resume_args": list(restart.resume_args),
        "accumulation": restart.accumulation,
        "saved_exit_codes": list(restart.saved_codes),
        "batch": None if restart.batch == "kept" else restart.batch,
        "suspend_command": list(restart.suspend_command),
        "resume_command": list(restart.resume_command),
    }


def as_sent(found: Restart | None, sent: Restart | None) -> Restart | None:
    """What was read from the keys of a restart that was sent, with what no key says of it.

    Raises ValueError for what no dialect says.
    """
    if found is None or sent is None:
        return found
    if "/" in sent.complete or not sent.complete.isprintable() or not sent.recognised.isprintable():
        raise ValueError(f"{sent.complete!r}: {sent.recognised[:80]!r}")
    return _shared(replace(found, complete=sent.complete, recognised=sent.recognised))
