"""What a command speaks: as its job file says, or as it is recognised where that is sure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from hpcsched.core.model import JobSpec, Restart
from hpcsched.dialects import lightning, others, script, transformers
from hpcsched.dialects.command import Call, NotSure, call_of
from hpcsched.dialects.known import KNOWN, NAMES

__all__ = ["NAMES", "recognise", "restart_of", "what_was_recognised", "why_not"]

_BY_SCRIPT = (transformers.speaks, lightning.speaks, *others.BY_SCRIPT)


def restart_of(speaks: str, command: Sequence[str], workdir: Path, env: Mapping[str, str]) -> Restart:
    """How a command that speaks this dialect is suspended and told to go on.

    What its script and its arguments do not show is as the dialect has it for all programs. `checkpoints` is
    empty where nothing says where it saves: then the job file has to. Raises KeyError for a name that is not
    in `NAMES`; never waits, and reads at most the script.
    """
    known = KNOWN[speaks]
    try:
        found = _spoken(command, workdir, env)
    except NotSure:
        found = None
    return found[0] if found and found[0].speaks == speaks else known


def recognise(command: Sequence[str], workdir: Path, env: Mapping[str, str]) -> Restart | None:
    """What a command speaks where that is sure, with the reason in `recognised`; None where it is not.

    Those of its `checkpoints` that are in `workdir` are relative to it. Never raises: what cannot be read or
    understood is not recognised.
    """
    try:
        return _recognised(command, workdir, env)
    except NotSure:
        return None


def what_was_recognised(specs: Iterable[JobSpec]) -> list[str]:
    """What people are told of jobs that were recognised: a line for each script and the like."""
    names: dict[tuple[str, str], list[str]] = {}
    for spec in specs:
        if spec.restart is not None and spec.restart.recognised:
            names.setdefault((spec.restart.speaks, spec.restart.recognised), []).append(spec.name)
    return [
        f"{', '.join(jobs[:3])}{f' and {len(jobs) - 3} more' if len(jobs) > 3 else ''}:"
        f" recognised to speak {speaks}: {why} (`speaks` in the job file says otherwise)"
        for (speaks, why), jobs in names.items()
    ]


def why_not(command: Sequence[str], workdir: Path, env: Mapping[str, str]) -> str:
    """Why nothing is recognised, in a few words for people; "" if something is."""
    try:
        found = _recognised(command, workdir, env)
    except NotSure as why:
        return str(why)
    return "" if found else "no framework that is known is seen in it"


def _recognised(command: Sequence[str], workdir: Path, env: Mapping[str, str]) -> Restart | None:
    found = _spoken(command, workdir, env)
    if found is None:
        return None
    restart, why = found
    if not all(word.isprintable() for word in (why, *restart.checkpoints)):
        raise NotSure("its names are not printable")
    return replace(restart, recognised=why, checkpoints=tuple(_within(workdir, restart.checkpoints)))


def _within(workdir: Path, patterns: Sequence[str]) -> Iterator[str]:
    for pattern in patterns:
        path = PurePosixPath(pattern)
        if path.is_absolute() and path.is_relative_to(workdir):
            path = path.relative_to(workdir)
        if ".." in path.parts:
            raise NotSure("its checkpoints are beside the folder where it runs")
        yield str(path)


def _spoken(command: Sequence[str], workdir: Path, env: Mapping[str, str]) -> tuple[Restart, str] | None:
    call = call_of(command, workdir)
    if call.script is None:
        return others.submitit(call, env)
    found = list(_by_script(script.read(call.script), call))
    if len(found) > 1:
        raise NotSure("it may speak several dialects")
    return found[0] if found else None


def _by_script(read: script.Script, call: Call) -> Iterator[tuple[Restart, str]]:
    if "hpcsched" in read.packages:
        raise NotSure("it keeps the contract itself")
    call = replace(call, options=read.flags)
    for speaks in _BY_SCRIPT:
        if found := speaks(read, call):
            yield found
