"""What a run learns of its models while jobs run: what transitions cost, how fast they go."""

from __future__ import annotations

from collections.abc import Iterable

from hpcsched.core.jobs import Job, Target
from hpcsched.core.learning import contradicts, differs
from hpcsched.core.model import Kind
from hpcsched.core.processes import Because, Program, program_of
from hpcsched.core.profile import Profile
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.transitions.story import Noting


class Teaching(Noting):
    """A run's state that what is seen of its jobs teaches."""

    def _size_up(self, jobs: Iterable[Job]) -> None:
        """What these jobs' programs can use of GPUs, by what is known now."""
        for job in jobs:
            command = job.spec.kind is Kind.COMMAND
            if not job.state.final and (command or job.traits.usable is not None):
                job.has(usable=self.shape(job).most if command else None)

    def _is_parallel(self, job: Job) -> None:
        """Its program has said that it can be one of several ranks."""
        program = program_of(job.spec)
        if program in self.parallel:
            return
        self.parallel.add(program)
        if self.shape(job).because is Because.SAID:
            self._note(job, Reason(Why.SAYS_PARALLEL, {"model": job.spec.model}))
        self._size_up(other for other in self.jobs.values() if other.spec.model == job.spec.model)

    def _load(self, profiles: Iterable[Profile], parallel: Iterable[Program] = ()) -> None:
        self.parallel.update(parallel)
        loaded = {(p.model, p.nodes): p for p in profiles}
        self.profiles.update(loaded)
        # What an earlier run has learnt has the counts that were seen there.
        learned = [key for key, profile in loaded.items() if profile.source == "learned"]
        for model, nodes in dict.fromkeys([*learned, *self.lessons.seen]):
            known = self.profiles.get((model, nodes)) or self.profiles.get((model, 1))
            self.lessons.believe((model, nodes), known)
        self._size_up(self.jobs.values())

    def _learn_suspend(self, job: Job, took_s: float | None) -> None:
        """What saving and leaving took: a save that need not be durable at once says nothing of others."""
        signalled = job.current.signalled_s
        if signalled is None:
            return
        costs = self._costs(job)
        quick = job.current.quick and took_s is not None
        if not quick:
            costs.suspend_s = self.now - signalled
        costs.longest_suspend_s = max(costs.longest_suspend_s, self.now - signalled)
        (costs.quick_saves if quick else costs.durable_saves).add(took_s)

    def _learn_resize(self, job: Job, new: Target, stopped_s: float | None, built_s: float | None) -> None:
        costs, old = self._costs(job), job.current
        grows = len(new.gpus) >= len(old.gpus) and len(new.seats) >= len(old.seats)
        (costs.grows if grows else costs.shrinks).add(stopped_s)
        if set(new.gpus) - set(old.gpus) or len(new.seats) > len(old.seats):
            costs.builds.add(built_s)

    def _disturb(self, job: Job, gpus: Iterable[int]) -> None:
        """Others go faster or slower from now on, as `job` has changed on these GPUs: what they did so far is
        one sample at most. Of a job in the background only those it shares a GPU with do."""
        if job.spec.background:
            for host in {self.holder[gpu] for gpu in gpus if gpu in self.holder}:
                self.lanes.disturb(host, self.now)
                self.lessons.gone(host)
            return
        self.lessons.disturb({self.devices[gpu].host for gpu in gpus if gpu in self.devices}, self.now)

    def _learn(self, job: Job, step: int, at: float) -> bool:
        """The job had done `step` steps at `at`: whether that says something new of its model.

        What it does while others use what it leaves of its GPUs does not, nor what those do, nor what jobs do
        that are packed, or on CPU cores, or whose speed changes with their batches: these say themselves what
        it will be.
        """
        if step < job.current.from_step or job.spec.background or job.spec.cpus is not None:
            return False  # it has not yet said where it goes on
        if self.packs.shared(job):
            return False
        if job.width > 1 and not job.traits.per_gpu and self.shape(job).because is Because.UNKNOWN:
            return False  # it sees several GPUs: who knows how many it uses?
        self.lanes.observe(job, step, at)
        if self.lanes.shared(job) or job.id in self.proposals.of:
            return False
        key, gpus = (job.spec.model, job.spec.nodes), job.width
        seen = self.lessons.observe(job.id, job.attempt, key, gpus, self.hosts_of(job), step=step, at=at)
        if seen is None or not seen.enough:
            return False
        loaded, believed = self.loaded(job), self.profile(job)
        if not loaded and believed and gpus not in believed.throughput:
            believed = None  # beyond what was seen a profile of that alone says nothing
        if key in self.lessons.beliefs and seen.told:
            new = differs(seen)  # noise is no news for ever
        else:
            new = believed is None or contradicts(believed, gpus, seen)
        if not new:
            return False
        self.lessons.believe(key, loaded)
        self.news += 1
        facts = {
            "model": job.spec.model,
            "gpus": gpus,
            "rate": seen.rate,
            "spread": seen.spread,
            "samples": len(seen.rates),
            "steps": seen.steps,
            "before": f"{believed.source} profile: {believed.rate(gpus):.4g}"
            if believed
            else "not known before",
        }
        self._note(job, Reason(Why.LEARNED, facts))
        return True
