"""Slurm's queue, by its own commands: `sinfo`, `sbatch --test-only`, `squeue --start`, `scontrol show`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hpcsched import durations
from hpcsched.batch.command import RunCommand, command_output, run_command
from hpcsched.batch.numbers import whole
from hpcsched.batch.queue import JobTimes, Partition, Pending, Planned, Shape
from hpcsched.batch.slurm_submit import submit_environ
from hpcsched.batch.slurm_text import job_fields, queue_environ, utc_time
from hpcsched.errors import BatchError

HOLD_S = 120.0
"""Slurm holds a requeued job back for so long, whatever the site (its sources; 22.05: 121 s were seen)."""

_MOST = 10**9
"""Nodes, or GPUs on each, beyond which an answer is none (chosen)."""

_SCRIPT = "#!/bin/sh\ntrue\n"
_UNUSABLE = ("down", "drain", "fail", "maint", "unknown", "no_respond", "not_respond", "inval", "power_down")
_ENDLESS = ("UNLIMITED", "INFINITE")


class SlurmQueue:
    """The queue of a Slurm cluster.

    Args:
        environ: the environment of this process; a user's SBATCH_ variables count, as for `sbatch`.
        run: runs a command.
    """

    kind = "slurm"
    hold_s = HOLD_S

    def __init__(self, environ: Mapping[str, str], *, run: RunCommand = run_command) -> None:
        self._environ = queue_environ(submit_environ(environ))
        self._run = run

    def partitions(self) -> tuple[Partition, ...]:
        rows = self._asked("sinfo", "--noheader", "--format=%P|%a|%l|%D|%G|%T")
        limits = self._asked("scontrol", "--oneliner", "show", "partition")
        return partitions_in(rows, limits)

    def planned(self, shape: Shape, options: Sequence[str] = ()) -> Planned:
        argv = ("sbatch", "--test-only", *_request(shape), *options)
        answer = self._run(argv, environ=self._environ, stdin=_SCRIPT)
        return planned_in(answer.out + answer.err, failed=answer.code != 0)

    def pending(self) -> tuple[Pending, ...]:
        text = self._asked(
            "squeue", "--noheader", "--me", "--states=PENDING", "--format=%A|%P|%D|%b|%l|%S|%r"
        )
        return tuple(pending_in(text))

    def times(self, job_id: str) -> JobTimes | None:
        return times_in(self._asked("scontrol", "--oneliner", "show", "job", job_id), job_id)

    def _asked(self, *argv: str) -> str:
        return command_output(self._run, argv, environ=self._environ)


def _request(shape: Shape) -> Iterator[str]:
    if shape.partition:
        yield f"--partition={shape.partition}"
    yield from (f"--nodes={shape.nodes}", "--ntasks-per-node=1", f"--time={durations.clock(shape.limit_s)}")
    if shape.gpus:
        yield f"--gres=gpu:{shape.gpus}"
    yield "--output=/dev/null"


@dataclass(slots=True)
class _Hosts:
    hosts: dict[int, int]
    types: dict[str, None]
    limit: str = ""
    default: bool = False


def partitions_in(rows: str, limits: str) -> tuple[Partition, ...]:
    """From `sinfo --format=%P|%a|%l|%D|%G|%T` and `scontrol --oneliner show partition`; those that are up."""
    found: defaultdict[str, _Hosts] = defaultdict(lambda: _Hosts({}, {}))
    for row in rows.splitlines():
        fields = [field.strip() for field in row.split("|")]
        if len(fields) != 6 or fields[1] != "up" or (nodes := whole(fields[3])) is None:
            continue
        name, _, limit, _, gres, state = fields
        one = found[name.rstrip("*")]
        one.limit, one.default = limit, name.endswith("*")
        if state.lower().rstrip("*~#!%$@+-^").startswith(_UNUSABLE):
            continue
        gpus = 0
        for kind, count in gpus_in(gres):
            gpus += count
            one.types[kind] = None
        one.hosts[gpus] = one.hosts.get(gpus, 0) + nodes
    more = {fields.get("PartitionName", ""): fields for fields in map(job_fields, limits.splitlines())}
    return tuple(
        Partition(
            name=name,
            hosts=dict(sorted(one.hosts.items())),
            limit_s=seconds(one.limit),
            most_nodes=whole(more.get(name, {}).get("MaxNodes", "")),
            default=one.default,
            preempted=bool({"REQUEUE", "CANCEL"} & set(more.get(name, {}).get("PreemptMode", "").split(","))),
            types=tuple(one.types),
        )
        for name, one in found.items()
        if one.hosts
    )


def gpus_in(gres: str) -> list[tuple[str, int]]:
    """[("a100", 4)] from `gpu:a100:4(S:0-1)`; without a type it is called "gpu"."""
    found = []
    for part in re.sub(r"\([^)]*\)", "", gres).split(","):
        words = re.split(r"[:/=]", part.strip().removeprefix("gres:").removeprefix("gres/"))
        if words[0] == "gpu" and (count := whole(words[-1])) is not None:
            found.append((words[1] if len(words) > 2 else "gpu", count))
        elif words == ["gpu"]:
            found.append(("gpu", 1))
    return found


def seconds(text: str) -> float | None:
    """Seconds of `1-00:00:00`, `2:00:00`, `30:00`; None of `infinite`, and of what is no time."""
    try:
        return None if text.upper() in _ENDLESS else durations.parse_duration(text)
    except (ValueError, OverflowError):
        return None


def planned_in(text: str, *, failed: bool) -> Planned:
    """What `sbatch --test-only` says. Raises BatchError for an answer of another form."""
    if found := re.search(r"to start at (\S+)", text):
        start = utc_time(found[1])
        if isinstance(start, float):
            return Planned(start=start)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = lines[-1].removeprefix("sbatch: ").removeprefix("error: ") if lines else "no answer"
    if failed and not re.search(r"contact|connect|timed? ?out|unavailable", said, re.IGNORECASE):
        return Planned(refused=said.removeprefix("allocation failure: ")[:200])
    raise BatchError(f"sbatch --test-only: {said[:200]}")


def pending_in(text: str) -> Iterator[Pending]:
    """From `squeue --format=%A|%P|%D|%b|%l|%S|%r`; lines of another form, and of arrays' limits, are left
    out."""
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) != 7 or (nodes := whole(fields[2])) is None:
            continue
        job_id, partition, _, gres, limit, start, _ = fields
        gpus = sum(count for _, count in gpus_in(gres))
        at = utc_time(start)
        shape = Shape(
            partition=partition.split(",")[0], nodes=nodes, gpus=gpus, limit_s=seconds(limit) or 0.0
        )
        yield Pending(job_id=job_id, shape=shape, start=at if isinstance(at, float) else None)


def times_in(text: str, job_id: str) -> JobTimes | None:
    """From `scontrol --oneliner show job`; None where something of it is missing."""
    fields = next((f for line in text.splitlines() if (f := job_fields(line)).get("JobId") == job_id), {})
    times = [utc_time(fields.get(key, "")) for key in ("SubmitTime", "EligibleTime", "StartTime")]
    limit_s = seconds(fields.get("TimeLimit", ""))
    nodes = whole(fields.get("NumNodes", "").partition("-")[0])
    asked = fields.get("TresPerNode", "")
    gpus = sum(count for _, count in gpus_in(asked))
    if not gpus and nodes:
        gpus = sum(count for _, count in gpus_in(fields.get("TresPerJob", ""))) // nodes
    if (
        limit_s is None
        or nodes is None
        or max(nodes, gpus) > _MOST
        or not all(isinstance(time, float) for time in times)
    ):
        return None
    submitted, eligible, started = (time for time in times if isinstance(time, float))
    shape = Shape(partition=fields.get("Partition", ""), nodes=nodes, gpus=gpus, limit_s=limit_s)
    return JobTimes(shape=shape, submitted=submitted, eligible=eligible, started=started)
