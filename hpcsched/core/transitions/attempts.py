"""Attempts: how they begin, change in place, are asked to save or to end, and are over.

Which event leads to which of these is for the other files of this folder to say.
"""

from __future__ import annotations

from typing import Any

from hpcsched.core.actions import Launch, Resize, Suspend, Terminate
from hpcsched.core.jobs import Job, Target
from hpcsched.core.model import NOTHING, Attempt, Ended, JobState
from hpcsched.core.needs import said_time
from hpcsched.core.processes import Because
from hpcsched.core.profile import cost_at
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.resources.ledger import Ledger
from hpcsched.core.run import Run
from hpcsched.core.transitions.deadline import Deadline
from hpcsched.core.transitions.estimates import Estimates
from hpcsched.core.transitions.host_ends import HostEnds
from hpcsched.core.transitions.outcome import Outcome
from hpcsched.core.transitions.waiting import Waiting

MOST_GRACES = 20
"""Grace times after which an attempt that is still writing a checkpoint is ended all the same (chosen): ten
minutes where the grace time is the usual half."""

TIME = "time"
"""What is wanted of a job whose time limit is over; the kind of the timer, too."""


def time_limit(job: Job, how: str = "") -> Reason:
    """That the time limit of a job is over."""
    assert job.spec.needs and job.spec.needs.time_s is not None
    return Reason(Why.TIME_LIMIT, {"limit": said_time(job.spec.needs.time_s), "how": how})


class Attempts:
    """The stretches in which jobs run, from launch to end."""

    def __init__(
        self,
        run: Run,
        out: Outcome,
        ledger: Ledger,
        *,
        estimates: Estimates,
        waiting: Waiting,
        deadline: Deadline,
        ends: HostEnds,
    ) -> None:
        self._run, self._out, self._ledger = run, out, ledger
        self._estimates, self._waiting, self._deadline = estimates, waiting, deadline
        self._ends = ends

    # --- launches ---------------------------------------------------------------------------

    def launch(self, job: Job, target: Target) -> None:
        """Start a job's next attempt on `target`. Raises InvalidTransition if that cannot be had."""
        self._ledger.hold(job, target)
        self._waiting.dequeue(job)
        job.attempt += 1
        self._run.count_attempt()
        job.role, job.target, job.ready, job.in_place, job.wanted = target.role, None, False, False, ""
        job.processes, job.rate, job.timers = (), None, NOTHING
        if job.spec.restart is not None:
            job.has_saved(handles=False, asked=-1)
        if job.started_s is None:
            job.started_s = self._run.now
        self._begin(job, target, job.step)
        self._choose_processes(job)
        if not job.same_batch(job.width):
            first = job.traits.saves.width
            self._out.note(job, Reason(Why.OTHER_COUNT, {"gpus": job.width, "first": first}))
            job.has_saved(width=job.width)
        self._out.set_state(job, JobState.STARTING)
        self._run.enter(job)
        self._met(job)
        self._estimates.disturb(job, target.gpus)
        self._list(job)
        resume = job.saved_step is not None
        how = {"per_gpu": job.traits.per_gpu, "seats": target.seats, "anew": job.traits.anew}
        self._out.do(Launch, job, gpus=target.gpus, role=target.role, resume=resume, **how)
        self._limit_time(job)

    def _begin(self, job: Job, target: Target, step: int) -> Attempt:
        """The job's next attempt, from this step on."""
        begun: dict[str, Any] = {"number": job.attempt, "role": target.role, "start_s": self._run.now}
        begun |= {"gpus": target.gpus, "from_step": step}
        attempt = self._ledger.by_role(target.role).began(job, begun, target)
        job.attempts = (*job.attempts, attempt)
        return attempt

    def _choose_processes(self, job: Job) -> None:
        """Choose how many processes the attempt is started as; say so where that leaves GPUs to a program
        that may not use them."""
        shape = self._estimates.shape(job)
        job.has(per_gpu=shape.per_gpu)
        job.reason = None
        if shape.because is Because.UNKNOWN and len(job.current.gpus) > 1:
            self._out.note(job, Reason(Why.ONE_PROCESS, {"gpus": len(job.current.gpus)}))

    def _met(self, job: Job) -> None:
        for met in self._ledger.hooks("met"):
            met(job)

    def _list(self, job: Job) -> None:
        assert job.role is not None
        if self._ledger.by_role(job.role).listed:
            self._run.list_running(job)

    def _unlist(self, job: Job) -> None:
        assert job.role is not None
        if self._ledger.by_role(job.role).listed:
            self._run.unlist_running(job)

    def _limit_time(self, job: Job) -> None:
        """Watch that the job's attempt ends when the job's time is up."""
        left_s = job.time_left_s(self._run.now)
        if left_s is not None:
            self._out.timer(TIME, job, max(0.0, left_s))

    def waited(self, job: Job, seconds: float) -> None:
        """So much of the job's attempt does not count as time that it has run."""
        job.has(unstarted_s=job.traits.unstarted_s + seconds)
        self._limit_time(job)

    def go_on(self, job: Job) -> None:
        """Have a running attempt go on as it is, under another agent: that knows of no timer yet."""
        self._out.note(job, Reason(Why.ADOPTED, {"attempt": job.attempt}))
        self._estimates.disturb(job, job.gpus)
        for kind, due in job.timers.items():
            self._out.set_timer((kind, job.id, job.attempt), max(due, self._run.now))

    # --- leaving ----------------------------------------------------------------------------

    def leave(self, job: Job, wanted: str) -> None:
        """Have a running job save and leave; one that has not said that it can is told to end."""
        job.wanted = wanted
        if job.ready:
            self.suspend(job)
        else:
            self.terminate(job)

    def time_is_up(self, job: Job) -> None:
        """Have a job whose time limit is over save and leave for good; one that is leaving goes on with that,
        and one that is to end for another reason does so."""
        if job.wanted not in ("", "suspend", "drain"):
            return
        leaves = job.state is JobState.SUSPENDING or job.wanted == "drain"
        job.wanted = TIME
        self._out.note(job, time_limit(job))
        if job.target:
            self.drop_target(job)
        if not leaves:
            self.leave(job, TIME)

    def suspend(self, job: Job) -> None:
        """Have a job save and leave."""
        self._out.set_state(job, JobState.SUSPENDING)
        self.ask_to_save(job)

    def ask_to_save(self, job: Job) -> None:
        """Ask the job's attempt to save and leave, and watch that it does within its grace time."""
        attempt = job.current
        attempt.signalled_s, attempt.quick = self._run.now, not self._leaves_for_good(job)
        if job.saves_by_itself:
            job.has_saved(asked=-1 if job.saved_step is None else job.saved_step)
        self._estimates.disturb(job, attempt.gpus)
        self._out.do(Suspend, job, quick=attempt.quick)
        self._out.timer("grace", job, self.grace_s(job))

    def terminate(self, job: Job) -> None:
        """Tell the job's attempt to end, and watch that it does."""
        self._out.do(Terminate, job)
        self._out.timer("term", job, min(self.grace_s(job) / 2, self._kill_in_s(job)))

    def still_saves(self, job: Job) -> None:
        """A job that was asked to leave is still writing: its grace time counts from now, within limits."""
        since = job.current.signalled_s
        kind = "term" if "term" in job.timers else "grace"
        if since is None or kind not in job.timers:
            return
        grace_s = self.grace_s(job)
        left_s = min(since + MOST_GRACES * grace_s - self._run.now, self._kill_in_s(job))
        due_s = min(grace_s / 2 if kind == "term" else grace_s, left_s)
        if self._run.now + due_s > job.timers[kind]:
            self._out.timer(kind, job, due_s)

    def _kill_in_s(self, job: Job) -> float:
        return min(self._deadline.kill_in_s(), self._ends.kill_in_s(job))

    def _leaves_for_good(self, job: Job) -> bool:
        """Whether the memory of its hosts will not be there when the job goes on, if it does."""
        over = self._run.rules >= 4 and job.wanted == TIME
        return over or self._deadline.draining or self._ends.leaves(job)

    def grace_s(self, job: Job) -> float:
        """Seconds a worker has to save: thrice the longest save known of its model, at least the run's
        grace time; more where its mechanism gives it little of a device."""
        profile = self._estimates.profile(job)
        known = (profile and cost_at(profile.suspend_s, job.width)) or 0.0
        longest = self._estimates.known_costs(job).longest_suspend_s
        return max(self._run.grace_s, 3 * known, 3 * longest) * self._ledger.holds_by(job).patience(job)

    # --- changes in place -------------------------------------------------------------------

    def resize(self, job: Job, target: Target, keep: tuple[int, ...] = ()) -> None:
        """Have a job go on with another lease without a restart; until it does, it holds both.

        `keep` are the ranks that stay, where their GPUs do not say that.
        """
        job.target = job.becoming = target
        self._ledger.change(job, target)
        self._met(job)
        self._estimates.disturb(job, job.gpus)
        self._out.do(Resize, job, gpus=target.gpus, role=target.role, seats=target.seats, keep=keep)
        gpus = len(target.gpus) // job.spec.nodes
        self._out.timer("resize", job, self._estimates.resize_limit_s(job, gpus))

    def restart(self, job: Job, target: Target) -> None:
        """Have a job save, leave, and start again on another lease; until it has left, it holds both."""
        job.target = target
        self._ledger.change(job, target)
        self.suspend(job)

    def resized(self, job: Job, new: Target, step: int, stopped_s: float | None) -> None:
        """Have a job that has gone over to another lease in place begin a new attempt, without a gap."""
        old, gpus = job.current, len(new.gpus) // job.spec.nodes
        self._estimates.disturb(job, job.gpus)
        old.end_s, old.ended, old.to_step = self._run.now, Ended.RESIZED, step
        old.stopped_s = self._estimates.stand_s(job, job.width, gpus) if stopped_s is None else stopped_s
        job.becoming = None
        why, facts = self._ledger.holds_by(job).changed_to(job, new)
        self._out.note(job, Reason(why, {"step": step, "stopped_s": stopped_s, **facts}))
        self._ledger.settle(job, new)
        self._unlist(job)
        job.role, job.rate, job.timers = new.role, None, NOTHING
        self._list(job)
        job.attempt += 1
        self._run.count_attempt()
        attempt = self._begin(job, new, step)
        attempt.ready_s, attempt.in_place, attempt.guests = self._run.now, True, old.guests
        self._limit_time(job)

    def stays(self, job: Job, error: str, *, in_place: bool) -> None:
        """Have a job go on as it is: its resize came to nothing. `in_place`: another one may do better."""
        job.becoming, job.in_place = None, in_place
        self._out.note(job, Reason(Why.RESIZE_FAILED, {"error": error}))
        self._run.count_news()
        if job.target is None:
            self.drop_target(job)

    def drop_target(self, job: Job) -> None:
        """Give up what a job was to change to, unless ranks that were to join it may live there."""
        job.target = None
        if job.resizing:
            self._run.touch(job.id)
        else:
            self._ledger.keep(job)

    # --- ends -------------------------------------------------------------------------------

    def end(self, job: Job, ended: Ended, keep: Target | None = None) -> None:
        """End the job's attempt; of what it holds it keeps `keep` alone."""
        attempt = job.current
        attempt.end_s, attempt.ended, attempt.to_step = self._run.now, ended, job.step
        self._estimates.disturb(job, attempt.gpus)
        self._estimates.over(job)
        for over in self._ledger.hooks("over"):
            over(job)
        job.target, job.becoming, job.wanted = None, None, ""
        self._unlist(job)
        if keep:
            self._ledger.settle(job, keep)
        else:
            self._ledger.release(job)
        self._run.leave(job)
