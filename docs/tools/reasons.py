"""The tables of all reasons: the words and sentences of the code, and what a user can do about each."""

from __future__ import annotations

import re

from hpcsched.core.reasons import _WORDS, Why

_BY_ITSELF = "[Programs that save by themselves](elastic.md#programs-that-save-by-themselves)."
_BY_ITSELF = "[Programs that save by themselves](elastic.md#programs-that-save-by-themselves)."
_RETRY = "[`retry`](#running-again)"
_PROCESSES = "[one process or several](elastic.md#1-do-nothing)"
_CPU = "[Trainings on CPU cores](cpu-trainings.md)"

GROUPS: dict[str, dict[Why, str]] = {
    "Why a job waits": {
        Why.RESOURCES: "It is first in line; nothing to do.",
        Why.ONE_TYPE: "Enough GPUs are free, but of no one type. [GPUs of several "
        "types](several-hosts.md#gpus-of-several-types)",
        Why.PRIORITY: "Jobs before it wait for GPUs. [Policies](policies.md) say in which order jobs start.",
        Why.PLAN: "GPUs are free, but the planner has it start later. [Policies](policies.md)",
        Why.DEPENDENCY: "A job in its `after` has not completed.",
        Why.BEGIN_TIME: "Its `submit_at` has not come.",
        Why.ARRAY_LIMIT: "Its [`at_once`](sweeps.md#how-many-at-once) are under way.",
        Why.HELD: "`hpcsched release` lets it go on.",
        Why.USER_SUSPENDED: "`hpcsched resume` lets it go on.",
        Why.DRAINING: "`hpcsched run --resume` goes on, unless the run comes back by itself.",
        Why.WALLTIME_TOO_SHORT: "It starts in the next allocation, or when the end of this one moves. Ask "
        "for more time if there is never enough.",
        Why.NO_LANE: "`hpcsched explain` says GPU by GPU why not. [Two jobs on one GPU](lanes.md)",
        Why.NO_CORES: f"It is first in line for CPU cores. {_CPU}",
        Why.CORES_PRIORITY: f"Jobs before it wait for CPU cores. {_CPU}",
        Why.NO_SPACE: "A file system that it writes to (its folder, its checkpoints, its output) has no "
        "block or inode left, or is read-only. Make room. The attempt is *lost*, and not counted among "
        "`retries`. The job is tried again after 5 s, then after twice as long each time, at most "
        "5 minutes, and at once by the next `run --resume`.",
        Why.FAILED_AT_ONCE: "It has failed twice or more in a row, the last time within 10 s of its start "
        "or at its launch. What it lacks may be there soon, as a file system that answers again: it is tried "
        "again after 10 s, then after twice as long each time, at most 5 minutes, and at once by the next "
        "`run --resume`. Others have its GPUs meanwhile.",
        Why.HOST_SILENT: "The agent was gone, and a host of the job's attempt has not come to the next one. "
        "Nothing to do: its processes are ended by then, and the job goes on elsewhere.",
        Why.MODULES: "It is STARTING; its processes start when they are loaded, within 60 s. "
        "[Modules](resources.md#modules)",
        Why.NO_AGENT: "It was submitted where no agent runs. `hpcsched run` takes it (`run --resume` if a "
        "run has begun there), `hpcsched cancel` cancels it.",
    },
    "Why a job has this many GPUs, and these": {
        Why.ON_TYPE: "[GPUs of several types](several-hosts.md#gpus-of-several-types)",
        Why.UNEVEN: "[Several hosts](several-hosts.md#unequally-many-gpus)",
        Why.OPTIMAL: "Its fastest count by its [profile](profiles.md).",
        Why.LEFT_OVER: "It may be promoted when GPUs come free.",
        Why.NO_PROFILE: "[`profile run`](profiles.md) measures the model beforehand.",
        Why.FIXED: "`gpus` of the [job file](job-files.md).",
        Why.NOT_PARALLEL: f"Nothing says that its program is parallel: {_PROCESSES}.",
        Why.EXCLUSIVE: "Policy [`exclusive`](policies.md).",
        Why.EQUAL_SHARE: "Policy [`equal`](policies.md).",
        Why.MARGINAL_GAIN: "Policy [`optimus`](policies.md).",
        Why.PLANNED: "Policy [`planner`](policies.md); times are into the run, for all jobs it knew.",
        Why.IDLE_GPU: "[Two jobs on one GPU](lanes.md)",
        Why.BESIDE: "[Two jobs on one GPU](lanes.md)",
        Why.PACKED: "[Packing](packing.md)",
        Why.SHARED: "[Sharing a GPU](sharing.md)",
        Why.JOINED: "It shares its GPU from then on; `explain` of the one that came says why.",
    },
    "How many processes its command is started as": {
        Why.ONE_PROCESS: f"Set `processes` in the job file: {_PROCESSES}.",
        Why.SAYS_PARALLEL: f"Nothing to do, unless it is wrong: {_PROCESSES}.",
        Why.NOT_MET: f"Stands beside the host of a job that runs: {_PROCESSES}.",
    },
    "Why its GPUs were, or were not, changed": {
        Why.PROMOTED: "[What a resize costs](resizing.md)",
        Why.TOO_FEW_FREE: "It waits for more free GPUs.",
        Why.DOES_NOT_PAY: "[What a resize costs](resizing.md)",
        Why.WORK_UNKNOWN: "Give `steps` in the [job file](job-files.md).",
        Why.TIME_TOO_SHORT: "Nothing to do: it goes on in the next allocation.",
        Why.NOT_READY: "[Make the script elastic](elastic.md).",
        Why.NEVER_PROMOTE: "Option `promote` of the [policy](policies.md).",
        Why.RESIZED: "Policies [`equal` and `optimus`](policies.md).",
        Why.RESIZED_IN_PLACE: "[Resizing](resizing.md)",
        Why.RESIZE_FAILED: "It saves and starts again on the new count; its output tells more. "
        "[Resizing](resizing.md)",
        Why.PREEMPTED: "Policies [`equal` and `optimus`](policies.md): for earlier jobs; it waits again.",
        Why.GROWN: "Policy [`planner`](policies.md).",
        Why.SHRUNK: "Policy [`planner`](policies.md).",
        Why.PROPOSED: "[Adaptive batches](adaptive-batches.md)",
        Why.SCALED_UP: "[Adaptive batches](adaptive-batches.md)",
        Why.SCALED_DOWN: "[Adaptive batches](adaptive-batches.md)",
        Why.GIVEN_BACK: "[Adaptive batches](adaptive-batches.md)",
    },
    "In the background of a GPU": {
        Why.PACED: "[Two jobs on one GPU](lanes.md); the limit is `max_foreground_slowdown`.",
        Why.GIVES_WAY: "It waits for another GPU's background lane.",
        Why.TOO_COSTLY: "Told to both jobs; it holds for these models and for this run.",
        Why.QUARANTINED: "It gets only GPUs that no other job has.",
        Why.EXCUSED: "Does not count among `retries`.",
        Why.ENDS_SOON: "Nothing to do: it goes on in the next allocation.",
    },
    "On a shared GPU": {
        Why.SLOWER_TOGETHER: "Told to all of them; it holds for these models and for this run. "
        "[Sharing a GPU](sharing.md)",
        Why.FAULT_TOGETHER: "Out of memory, as a rule: `gpu_memory` in the [job file](job-files.md) says "
        "what it needs.",
        Why.NOT_ITS_FAULT: "Does not count among `retries`.",
        Why.MOVED_APART: "[Sharing a GPU](sharing.md)",
    },
    "In a pack": {
        Why.PARTED: "[Packing](packing.md)",
        Why.LEFT_PACK: "It left unasked (exit code 75), as where the memory runs out. It waits for a GPU of "
        "its own.",
    },
    "On CPU cores": {
        Why.SEATED: f"{_CPU}",
        Why.MORE_CORES: "It used nearly all it had.",
        Why.NETWORK_BOTTLENECK: "The link of a server was full.",
        Why.UTILISATION_BOTTLENECK: "Its processes do not use more cores each.",
        Why.MORE_SERVERS: "Tried, as nothing else helped or was free.",
        Why.MORE_WORKERS: "Tried, as nothing else helped or was free.",
        Why.FEWER_WORKERS: "Tried, as nothing else helped or was free.",
        Why.AT_ONCE: "One change alone did not help, or was not possible.",
        Why.BALANCED: "Cores move from processes that do not use theirs to those that do.",
        Why.TRIMMED: "Cores that it did not use are given back.",
        Why.BEST_SEEN: "Nothing to do.",
        Why.SETTLED: "The search is over.",
        Why.WANTS_CORES: "It takes them when other jobs end.",
        Why.RESEATED: "The change is made.",
    },
    "How a job begins, goes on and ends": {
        Why.SUBMITTED: "",
        Why.UPDATED: "The keys of its definition that were changed. [An edited job file](#running-again)",
        Why.RETRIED: "[Running again](#running-again)",
        Why.ADOPTED: "Nothing to do: its processes have run all the time.",
        Why.SAVED: "It goes on from there.",
        Why.NOT_SAVED: f"{_BY_ITSELF} It goes on from the one it has.",
        Why.NEVER_SAVED: f"{_BY_ITSELF} It needs checkpoints, or a handler that saves.",
        Why.OTHER_COUNT: f"{_BY_ITSELF} Give the count back that it began on if that is not meant.",
        Why.NOT_SAVED: f"{_BY_ITSELF} It goes on from the one it has.",
        Why.NEVER_SAVED: f"{_BY_ITSELF} It needs checkpoints, or a handler that saves.",
        Why.OTHER_COUNT: f"{_BY_ITSELF} Give the count back that it began on if that is not meant.",
        Why.COMPLETED: "",
        Why.CANCELLED: f"{_RETRY} runs it again.",
        Why.DEPENDENCY_NEVER_SATISFIED: f"{_RETRY} of the job it waited for runs both again.",
    },
    "What went wrong": {
        Why.EXITED: f"`hpcsched logs` shows its output; {_RETRY} runs it again.",
        Why.RETRY: "Nothing to do yet; `retries` in the [job file](job-files.md) is the limit.",
        Why.SAME_FAILURE: f"The same exit code and last line of output, each time within 10 s of its start, "
        f"and the last time after it had waited: "
        f"mend it, then {_RETRY}. (Ends by a signal, for want of room, and without a word are tried again "
        "all the same.)",
        Why.LOST: "No fault of the job's; it goes on by itself.",
        Why.FELL_BACK: "Its newest checkpoint is damaged or incomplete; it goes on from an older one.",
        Why.WENT_BACK: "The process that trained it has died: that of its pack, or of the foreground beside "
        "which it trained. Nothing to do.",
        Why.LAUNCH_FAILED: "The sentence says why, and so does the last line of the job's output. "
        "[When something goes wrong](troubleshooting.md)",
        Why.DEVICE_LOST: "The GPU is used no more in this life of the run, unless NVML finds it well again. "
        "[When something goes wrong](troubleshooting.md)",
        Why.DEVICE_FOUND: "It had been lost. Nothing to do.",
        Why.CORES_LOST: "The host is used no more in this life of the run.",
        Why.ESCALATED: "It was told to end (SIGTERM), or killed. Save faster, or give more "
        "time with `--grace`.",
        Why.TIME_LIMIT: "It has run for its `time` ([job file](resources.md#time)). Give it more, "
        f"and {_RETRY} has it go on from what it saved.",
        Why.OUT_OF_MEMORY: "It took more main memory than its `memory`, or the kernel's OOM killer ended "
        f"it. Give it more [memory](resources.md#memory), then {_RETRY}.",
        Why.TIME_IS_UP: "It was told to end, or killed. It goes on from its newest checkpoint.",
        Why.HOST_ENDS: "The allocation of a host that joined the run ends. [Hosts that come and go]"
        "(several-hosts.md#hosts-that-come-and-go)",
        Why.BAD_RECORD: "[The contract](contract.md#in-short)",
        Why.VOIDED: "[The journal](#the-journal)",
    },
    "What a package adds": {
        Why.ADDED: "Said by a [mechanism](glossary.md#gpus-and-the-jobs-that-have-them) of another package.",
    },
    "What was learnt of a model": {
        Why.LEARNED: "[Learning](profiles.md#learning)",
    },
}
"""Group to its reasons, and what a user can do about each or where to read on; each reason stands in one."""

_OPTIONAL = re.compile(r"(?<=[\w}%])\{\w+(?::[^}]*)?\}")
_NAMES = {"gpu": "N", "gpus": "N", "code": "exit code CODE"}
"""Of facts beside which their name stands already, and what else is clearer so."""
_FACT = re.compile(r"\{(\w+)(?::[^}]*)?\}")


def sentence(why: Why) -> str:
    """What `explain` says: facts by name, in capitals; without endings that are there only sometimes."""
    return _FACT.sub(lambda fact: _NAMES.get(fact[1], fact[1].upper()), _OPTIONAL.sub("", _WORDS[why]))


def tables() -> str:
    """A table for each group.

    Raises SystemExit for a reason that is in no group, or in two.
    """
    grouped = [why for group in GROUPS.values() for why in group]
    if sorted(grouped) != sorted(Why):
        twice = {why for why in grouped if grouped.count(why) > 1}
        raise SystemExit(f"reasons in no group or in two: {sorted(set(Why) - set(grouped) | twice)}")
    parts = []
    for title, group in GROUPS.items():
        rows = [f"| `{why}` | {sentence(why)} | {note} |" for why, note in group.items()]
        parts.append(
            "\n".join([f"### {title}", "", "| reason | says | to do, or to read |", "|---|---|---|", *rows])
        )
    return "\n\n".join(parts)
