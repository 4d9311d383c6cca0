"""The state of a run without a living agent: its batch system is asked, once and not for long."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from hpcsched.store import run_folders
from hpcsched.store.status import RunStatus, is_followed, is_silent

ANSWER_WITHIN_S = 5.0
"""Longest wait of `status` for the batch system."""

NEVER_STARTS = ("DependencyNeverSatisfied", "PartitionTimeLimit", "PartitionNodeLimit", "BadConstraints")
"""Slurm's reasons that do not pass."""

ADMINS = ("JobHeldAdmin", "JobHoldMaxRequeue", "launch failed requeued held")
"""Slurm's reasons to hold a job that came from an operator or from a node's fault."""


def needs_asking(run: RunStatus) -> bool:
    """Whether only the batch system can say what is to come: no sign of life, or stopped inside a job.

    A living agent that is silent may be one that its batch system has suspended.
    """
    return (run.stale or run.state == "STOPPED" or is_silent(run)) and _job(run) is not None


def ask(run: RunStatus) -> None:
    """Put the batch system's word on the run's job into `run.allocation["life"]`, where it is needed."""
    job = _job(run)
    if job is None or not needs_asking(run):
        return
    kind, job_id = job
    answers: list[tuple[str, str]] = []
    cluster = run.allocation.get("cluster")

    def question() -> None:
        from hpcsched.batch import batch_of

        # Of a package that is not installed here, or is at fault: nothing can be said.
        with contextlib.suppress(Exception):
            batch = batch_of(kind, cluster=cluster)
            state = str(batch.job_state(job_id))
            answers.append((state, batch.why_waiting(job_id) if state in ("PENDING", "HELD") else ""))

    # The command it starts has a deadline of its own, longer than people wait for `status`.
    thread = threading.Thread(target=question, daemon=True)
    thread.start()
    thread.join(ANSWER_WITHIN_S)
    run.allocation["life"], run.allocation["why_waiting"] = answers[0] if answers else ("UNKNOWN", "")


def sentence(run: RunStatus, age: str) -> str | None:
    """One line on a stale or stopped run and how it goes on; `age` is the snapshot's. None: all is well."""
    job = _job(run)
    if run.agent is None or (not run.stale and run.state != "STOPPED"):
        if job and run.allocation.get("life") == "SUSPENDED":
            return f"{job[0]} job {job[1]} is suspended for {age}: all stands still until it is resumed"
        return None
    go_on = f"go on with `{run_folders.go_on(Path(run.dir))}`"
    agent = f"the agent on {run.agent.host} (pid {run.agent.pid})"
    if is_followed(run):
        # What the batch system says of that agent's job is not what comes next.
        by = "an allocation that has joined takes the run over; if none does within a minute"
        return f"{agent} is gone; last seen {age} ago; {by}, {go_on}"
    if job is None:
        if run.stale:
            return f"{agent} is gone; last seen {age} ago. {go_on[0].upper()}{go_on[1:]}"
        return f"stopped with work left; {go_on}"
    kind, name, cluster = job[0], f"job {job[1]}", run.allocation.get("cluster")
    # On this host its process was looked for; of another, only the age of what it wrote is known.
    gone = run.agent.host == os.uname().nodename
    seen = f"{agent} is gone" if gone else f"no sign of {agent} for {age}"
    start = f"{seen}; " if run.stale else "stopped with work left; "
    why = run.allocation.get("why_waiting", "")
    match run.allocation.get("life"):
        case "RUNNING" if not run.stale:
            return f"{start}its {name} still runs on {kind}: it is about to end"
        case "RUNNING" if gone:
            return f"{start}its {name} still runs on {kind}: it is about to end, or no longer runs hpcsched"
        case "RUNNING":
            return f"{start}its {name} still runs on {kind}: the agent may hang or the shared filesystem lag"
        case "SUSPENDED":
            return f"{start}its {name} is suspended on {kind}: it goes on when that does"
        case "PENDING" if why in NEVER_STARTS:
            return f"{start}{name} waits in the queue of {kind} ({why}), and never starts: {go_on}"
        case "PENDING":
            return (
                f"{start}{name} waits in the queue of {kind}{f' ({why})' * bool(why)}: it goes on by itself"
            )
        case "HELD":
            release = f"`scontrol release {job[1]}`" if kind == "slurm" else "release it there"
            by = f" ({why})" if why else ""
            whose = "an operator may have to: " if why in ADMINS else ""
            return f"{start}{name} is held in the queue of {kind}{by}: {whose}{release}, and it goes on"
        case "ENDED":
            return f"{start}{name} has ended: {go_on}, or submit its batch script again"
        case _ if cluster:
            # A controller that is silent may be this cluster's, or not be asked about another's jobs.
            ask = f"if that is not the cluster here, ask there; if the job has ended, {go_on}"
            return f"{start}{kind} does not answer here about {name} of cluster {cluster}: {ask}"
        case _:
            return f"{start}{kind} does not answer about {name}; if it has ended, {go_on}"


def _job(run: RunStatus) -> tuple[str, str] | None:
    """(kind, id) of the run's batch job: of its follow-up, where one has been submitted; None: not in one."""
    kind, job_id = run.allocation.get("kind"), run.allocation.get("next") or run.allocation.get("id")
    return (kind, job_id) if kind and job_id and kind != "none" else None
