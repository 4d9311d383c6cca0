"""Names of what lies in a job's folder, `jobs/<id>` of the run directory.

What is about one attempt has its number in the name: news of an attempt that is over must not be taken for
another's.
"""

from __future__ import annotations

JOBS = "jobs"
"""The folder in a run directory with a folder for each job, by its id."""

STATE = "STATE.json"
"""What the newest good checkpoint holds (`state.State`)."""

CHECKPOINT = "checkpoint"
"""The folder of a job's checkpoints, unless the run has another place for them."""

ADAPTER = "adapter"
"""The adapter of a job that trains one on a frozen model, in PEFT's own format, as it was saved last."""

BEST = "best.pt"
"""The best model by a metric, in the folder of a job's checkpoints."""

ATTEMPT_MARK = "hpcsched: ---- attempt "
"""The begin of the line in a job's output that says which attempt writes from there on."""

CALLS = "calls"
"""The folder in a run directory with the functions that Python has submitted, pickled, each in a file."""

TRIALS = "trials"
"""The folder in a run directory with a folder for each trial of a search that tries a program."""

METRICS = "metrics.jsonl"
"""What a program has measured by step: see `metrics.Point`."""

VERSIONS = "versions.json"
"""By what the newest attempt that became ready has trained (`words.Versions`); for people."""

LOGGED = "logged.json"
"""Which metrics the program logs itself, of those that its library would log: an object with their names."""

OUTCOME = "outcome.pickle"
"""What such a function has returned, or raised: see `hpcsched.worker.call`."""

READY = "ready"
REFUSED = "refused"
HELD = "held"
LEFT = "left"
STOP = "stop"
UNUSABLE = "unusable"

LAYERS = "layers.json"
"""What is known of the times of the layers of a job's model: from the agent, then corrected by the job."""

PLAN = "plan.json"
"""By which burst plan a job trains, and what its alternatives take; of people, and `explain`."""

NEVER_A_GUEST = "never-a-guest"
"""Its being there says that the job runs in nobody else's process any more, and why."""


def ready(attempt: int) -> str:
    """From now on the attempt can be suspended, and more (`words.Ready`)."""
    return f"{READY}.{attempt}"


def listening(attempt: int, rank: int) -> str:
    """This rank of a stand-in listens; rank 0 waits for all before it says that it is ready."""
    return f"{READY}.{attempt}.rank{rank}"


def refused(attempt: int) -> str:
    """The program will not become this attempt by a resize in place: why, as text."""
    return f"{REFUSED}.{attempt}"


def held(attempt: int) -> str:
    """A state is in shared memory, and not on disk yet (`words.Held`)."""
    return f"{HELD}.{attempt}"


def left(attempt: int) -> str:
    """The attempt is saved, whatever its launcher's exit code says. Empty."""
    return f"{LEFT}.{attempt}"


def stop(attempt: int) -> str:
    """The attempt is to save and leave (`words.Stop`); appears together with the signal."""
    return f"{STOP}.{attempt}"


def unusable(attempt: int) -> str:
    """The program could not use its GPU (`words.Unusable`)."""
    return f"{UNUSABLE}.{attempt}"


def metric(attempt: int | str) -> str:
    """What a search has read of the attempt, which has completed: its metric."""
    return f"metric.{attempt}.json"


def state_before(attempt: int) -> str:
    """The record of what a job had saved before this attempt began it once more; empty: nothing."""
    return f"STATE.before.{attempt}.json"


def checkpoint_before(name: str, attempt: int) -> str:
    """A folder of checkpoints, likewise."""
    return f"{name}.before.{attempt}"


def temporary(name: str, *by: object) -> str:
    """What a file is called until it is whole, and renamed; `by`: of whom, where several write it."""
    return ".".join(("", name, *map(str, by), "tmp"))
