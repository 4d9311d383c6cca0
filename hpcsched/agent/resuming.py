"""How a job that saves by itself is started again: its newest checkpoint is found, its command told of it."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpcsched.agent.attempts import WatchedAttempt
from hpcsched.agent.followed import Followed
from hpcsched.agent.launch_plans import Site
from hpcsched.agent.own_checkpoints import OwnCheckpoints
from hpcsched.agent.self_saving import SelfSaving
from hpcsched.agent.shared_checkpoints import Places, in_the_way, sharing
from hpcsched.contract.environment import Environment
from hpcsched.core.actions import Launch
from hpcsched.core.jobs import Job
from hpcsched.core.model import Restart
from hpcsched.core.nouns import GPU, noun
from hpcsched.core.processes import launcher_of
from hpcsched.dialects import Reader, progress_of
from hpcsched.errors import LaunchError
from hpcsched.launch.base import LaunchPlan, Workers
from hpcsched.patience import passes

_PLACEHOLDER = re.compile(r"\{(checkpoint|checkpoint_dir|accumulation|job_id)\}")

Others = Callable[[float], Iterable[Job]]
"""The jobs that were not over at a time of the run's clock."""

SEARCH_WITHIN_S = 30.0
"""Time in which the checkpoints have to be found (chosen): a file system that hangs is tried again later."""

AT_ONCE_S = 0.05
"""Time that the agent's loop waits for them (chosen); after that it comes back for them."""


class Search:
    """A look for a job's checkpoints before its launch, in a thread. `anew`: none is its own yet."""

    def __init__(
        self, checkpoints: OwnCheckpoints, look: Callable[[], object], *, anew: bool = False
    ) -> None:
        self.checkpoints, self.anew, self._look = checkpoints, anew, look
        self._until = time.monotonic() + SEARCH_WITHIN_S
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="find checkpoints", daemon=True)
        self._thread.start()
        self._thread.join(AT_ONCE_S)

    def _run(self) -> None:
        try:
            self._look()
        except Exception as error:  # told where the launch is
            self._error = error

    def done(self, where: Path) -> bool:
        """Whether it is over. Raises LaunchError if it has failed, or has taken too long."""
        if isinstance(self._error, LaunchError):
            raise self._error
        if self._error is not None:
            error = f"its checkpoints cannot be found: {self._error}"
            raise LaunchError(error, transient=passes(self._error))
        if self._thread.is_alive() and time.monotonic() > self._until:
            error = f"its checkpoints in {where} cannot be found: no answer within {SEARCH_WITHIN_S:g} s"
            raise LaunchError(error, transient=True)
        return not self._thread.is_alive()

    def wait(self) -> bool:
        """Wait for its end; False if it takes too long, or has failed."""
        self._thread.join(SEARCH_WITHIN_S)
        return not self._thread.is_alive() and self._error is None


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a command is told at its start. `counts`: GPUs of the first attempt, and of this one; `noun`: what
    people call them."""

    checkpoint: Path
    checkpoint_dir: Path
    job_id: int
    counts: tuple[int, int]
    noun: str = GPU

    def values(self, restart: Restart) -> Mapping[str, str]:
        """What stands for each placeholder. Raises ValueError if no accumulation keeps the global batch."""
        values = {
            "checkpoint": str(self.checkpoint),
            "checkpoint_dir": str(self.checkpoint_dir),
            "job_id": str(self.job_id),
        }
        words = (*restart.resume_args, *restart.resume_command)
        if any("{accumulation}" in word for word in words):
            first, now = self.counts
            whole, rest = divmod(restart.accumulation * first, now)
            if rest or not whole:
                raise ValueError(
                    f"its global batch cannot be kept on {now} {self.noun}s: {restart.accumulation} "
                    f"micro-batches on each of {first} are not a multiple of that"
                )
            values["accumulation"] = str(whole)
        return values


def resumed(plan: LaunchPlan, restart: Restart, start: Start) -> LaunchPlan:
    """The plan of an attempt that goes on from a checkpoint: its command is told, or another one is run.

    Raises ValueError (see `Start.values`).
    """
    values = start.values(restart)
    words = filled(restart.resume_command or restart.resume_args, values)
    argv = words if restart.resume_command else (*plan.argv, *words)
    return replace(plan, argv=argv, env={**plan.env, **Environment(resume=True).to_environ()})


def filled(words: Sequence[str], values: Mapping[str, str]) -> tuple[str, ...]:
    """A command with placeholders replaced; all other braces stay as they are."""
    return tuple(_PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), word) for word in words)


class Resuming:
    """Starts and watches the attempts of jobs that save by themselves."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._searches: dict[int, tuple[int, Search]] = {}
        """By job: the attempt that waits for its checkpoints, and the look for them."""
        self._progress: dict[int, Reader] = {}
        """By job: what tells the steps of the attempt that is about to start."""

    def planned(self, job: Job, action: Launch, plan: LaunchPlan, others: Others) -> LaunchPlan | None:
        """The plan, told of the newest checkpoint if there is one; None while that is being looked for.

        Raises LaunchError if it cannot be found or may be another job's, ValueError if the command cannot be
        told, BadInput if its steps cannot be found.
        """
        restart = job.spec.restart
        if self._site.stand_ins:
            return plan
        if restart is None:
            self._look_for_steps(job, plan)
            return plan
        attempt, search = self._searches.get(job.id, (0, None))
        if search is None or attempt != action.attempt:
            begins = action.anew or action.attempt == 1
            if search is not None:  # of an attempt that has never had processes
                search.checkpoints.given_up = True
                begins |= search.anew
            search = self._search(job, restart, others, anew=begins)
            self._searches[job.id] = action.attempt, search
        if not search.done(plan.cwd):
            return None
        self._look_for_steps(job, plan)
        checkpoints, folder = search.checkpoints, self._site.checkpoints_of(job.id)
        found = checkpoints.newest.path if checkpoints.newest else None
        if found is None and not checkpoints.outside:
            anew = Environment(resume=False).to_environ() if job.saves_by_itself else {}
            return replace(plan, env={**plan.env, **anew})
        first, now = (max(1, len(gpus)) for gpus in (job.attempts[0].gpus, action.gpus))
        start = Start(
            checkpoint=found or folder,
            checkpoint_dir=folder,
            job_id=job.id,
            counts=(first, now),
            noun=noun(device.kind for device in plan.devices),
        )
        return resumed(plan, restart, start)

    def _search(self, job: Job, restart: Restart, others: Others, *, anew: bool) -> Search:
        folder = self._site.rundir.job(job.id)
        checkpoints, now_s = own_checkpoints(job, restart, folder), job.current.start_s
        anew = anew or not checkpoints.known
        began_s = now_s if anew else checkpoints.began_s
        own, rivals = Places.of(job), in_the_way(job, others(began_s), began_s=began_s)

        def look() -> None:
            if shared := sharing(own, rivals):
                raise LaunchError(_cannot_tell_apart(restart, *shared), transient=False)
            checkpoints.begin(anew=anew, at_s=now_s)

        return Search(checkpoints, look, anew=anew)

    def _look_for_steps(self, job: Job, plan: LaunchPlan) -> None:
        self._progress.pop(job.id, None)  # of an attempt that has never had processes
        if reader := progress_of(job.spec, plan.cwd, plan.output, since=time.time()):
            self._progress[job.id] = reader

    def followed(self, job: Job) -> Followed | None:
        """Follow the steps of an attempt that was launched and is not watched; None: nothing tells them."""
        reader = self._progress.pop(job.id, None)
        return Followed(reader) if reader else None

    def runs_on(self, job: Job, attempt: WatchedAttempt, cwd: Path) -> None:
        """Watch an attempt that runs on from another agent as far as its job is watched from outside."""
        began = time.time() - (time.monotonic() - attempt.began)
        reader, restart = progress_of(job.spec, cwd, attempt.output, since=began), job.spec.restart
        if restart is None:
            attempt.followed = Followed(reader) if reader else None
            return
        checkpoints = own_checkpoints(job, restart, self._site.rundir.job(job.id))
        checkpoints.runs_on()
        attempt.self_saving = self._watched(job, restart, checkpoints, attempt.workers, reader)

    def _watched(
        self,
        job: Job,
        restart: Restart,
        checkpoints: OwnCheckpoints,
        workers: Workers,
        progress: Reader | None,
        *,
        gone: bool = False,
    ) -> SelfSaving:
        values = {"checkpoint_dir": str(self._site.checkpoints_of(job.id)), "job_id": str(job.id)}
        restart = replace(restart, suspend_command=filled(restart.suspend_command, values))
        launcher = launcher_of(job.spec.command) is not None
        return SelfSaving(restart, checkpoints, workers, progress, launcher=launcher, gone=gone)

    def watch(self, job: Job, workers: Workers) -> SelfSaving | None:
        """Watch an attempt that was launched; None for one that keeps to the contract alone."""
        _, search = self._searches.pop(job.id, (0, None))
        restart = job.spec.restart
        if restart is None or search is None:
            return None
        gone = job.saves_by_itself and job.saved_step is not None
        gone = gone and not (search.checkpoints.newest or search.checkpoints.outside)
        progress = self._progress.pop(job.id, None)
        return self._watched(job, restart, search.checkpoints, workers, progress, gone=gone)


def _cannot_tell_apart(restart: Restart, other: Places, pattern: str) -> str:
    ways = f'give each a folder of its own, or `after = ["{other.name}"]`'
    ways += ", or `restartable = false`" * bool(restart.recognised)
    theirs = f"those of job {other.job_id} ({other.name})"
    return f"its checkpoints {pattern} could not be told from {theirs}: {ways}"


def own_checkpoints(job: Job, restart: Restart, folder: Path) -> OwnCheckpoints:
    """The checkpoints of a job whose folder in the run directory is `folder`."""
    return OwnCheckpoints(restart, folder=folder, workdir=Path(job.spec.workdir), steps=job.spec.steps)
