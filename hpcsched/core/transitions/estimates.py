"""How fast jobs are and what changes cost them: by profiles, and by what this run has seen."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from hpcsched.core.jobs import Costs, Job, Target
from hpcsched.core.learning import Key, SeenThroughput, contradicts, differs
from hpcsched.core.model import Kind
from hpcsched.core.processes import Because, ProcessLayout, Program, program_of, shape_of
from hpcsched.core.profile import Profile, cost_at
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.resources.ledger import Ledger
from hpcsched.core.run import Run
from hpcsched.core.transitions.outcome import Outcome

DEFAULT_SUSPEND_S, DEFAULT_START_S, DEFAULT_RESIZE_S = 5.0, 10.0, 0.1
"""Seconds assumed where neither the profile nor this run has measured them (chosen)."""

MIN_RESIZE_LIMIT_S = 60.0
"""Seconds that any resize in place may take (chosen)."""


class Estimates:
    """Speeds by GPU count and costs of transitions, of models and jobs.

    A profile that was loaded is corrected by what jobs do while they run (`learning`); a job that says itself
    how fast it will be is believed.
    """

    def __init__(self, run: Run, out: Outcome, ledger: Ledger) -> None:
        self._run, self._out, self._ledger = run, out, ledger
        self.profiles: dict[Key, Profile] = {}
        """The profiles that were loaded."""
        self.parallel: set[Program] = set()
        """Programs that have said that they are parallel, in this run or an earlier one."""
        self.observed = SeenThroughput()
        self.costs: dict[str, Costs] = {}
        """What transitions took in this run, by model."""
        self.said: dict[int, Profile] = {}
        """By job the speeds that it expects of itself."""

    # --- speeds -----------------------------------------------------------------------------

    def profile(self, job: Job, gpu_type: str | None = None) -> Profile | None:
        """What the job has said of its next epoch; else what is known of its model: the profile loaded,
        corrected by what this run has seen, or just what it has seen. None where profiles say nothing, as on
        CPU cores.

        `gpu_type`: on such GPUs; None: on those that it has, or those of the run's own type.
        """
        if not self._ledger.waits_by(job).profiled:
            return None
        return self.said.get(job.id) or self._of_model(job, self.observed.beliefs, gpu_type)

    def curve(self, job: Job, gpu_type: str | None = None) -> Profile | None:
        """The same, where counts that nobody has measured are estimated from those that were seen."""
        return self.said.get(job.id) or self._of_model(job, self.observed.curves, gpu_type)

    def loaded(self, job: Job) -> Profile | None:
        """The profile of the job's model that was loaded, whatever was seen since."""
        return self._of_model(job, {})

    def _of_model(
        self, job: Job, first: Mapping[Key, Profile], gpu_type: str | None = None
    ) -> Profile | None:
        if gpu_type is None:
            gpu_type = self._ledger.type_of(job.gpus)
        for key in _keys(job.spec.model, job.spec.nodes, gpu_type):
            if found := first.get(key) or self.profiles.get(key):
                return found
        return None

    def shape(self, job: Job) -> ProcessLayout:
        """How many processes the job's next attempt is started as, and why."""
        loaded, before_4 = self.loaded(job), self._run.rules < 4
        return shape_of(job.spec, loaded, self.parallel, believes_all=before_4)

    def say(self, job: Job, profile: Profile) -> None:
        """Believe what a job says of its own speed."""
        self.said[job.id] = profile

    def forget(self, job: Job) -> None:
        """Forget what a job has said: it is over."""
        self.said.pop(job.id, None)

    # --- costs ------------------------------------------------------------------------------

    def costs_of(self, job: Job) -> Costs:
        """What transitions of the job's model took, to be added to."""
        return self.costs.setdefault(self._ledger.holds_by(job).costs_key(job), Costs())

    def known_costs(self, job: Job) -> Costs:
        """What transitions of the job's model took so far."""
        return self.costs.get(self._ledger.holds_by(job).costs_key(job)) or Costs()

    def in_place(self, job: Job, gpus: int, hosts: Collection[str] | None = None) -> bool:
        """Whether a resize to `gpus` GPUs on each of these hosts would go in place.

        That takes the host of the first rank to be one of them; without `hosts` it is taken to be.
        """
        if not job.in_place or gpus == job.width:
            return False
        return hosts is None or next(iter(self._ledger.hosts_of(job)), None) in hosts

    def switch_s(self, job: Job, gpus: int, hosts: Collection[str] | None = None) -> float:
        """Seconds without training that it costs to bring `job` from where it runs to `gpus` GPUs on each
        of its hosts (`hosts`, as far as they are known): in place, or by a suspend, with the work that it
        loses, and a resume."""
        if self.in_place(job, gpus, hosts):
            return self.stand_s(job, job.width, gpus)
        return self.save_s(job) + self.launch_s(job, gpus, first=False) + self.unsaved_s(job)

    def unsaved_s(self, job: Job, *, handles: bool | None = None, now: float | None = None) -> float:
        """Seconds of work that a running job loses if it is suspended now: those since its newest checkpoint,
        unless it saves when it is asked to (`handles`; default: as seen). `now`: the time, where that is not
        the time of the last event."""
        restart, saves = job.spec.restart, job.traits.saves
        if restart is None or not job.saves_by_itself or not job.attempts or not job.state.active:
            return 0.0
        seen = bool(restart.suspend_command) or (saves.handles and not saves.in_vain)
        if seen if handles is None else handles:
            return 0.0
        attempt = job.current
        began = attempt.start_s if attempt.ready_s is None else attempt.ready_s
        saved = began if saves.at is None else max(saves.at, began)
        ends = (self._run.now if now is None else now) if attempt.signalled_s is None else attempt.signalled_s
        return max(0.0, ends - saved)

    def worth_changing(self, job: Job, gpus: int) -> bool:
        """Whether going on with `gpus` GPUs (0: to wait) can gain a running job, or others, what it loses of
        its own work for that: GPU seconds lost against those given or taken for the rest of its time. One
        whose work is not known is taken to be half-way."""
        unsaved_s = self.unsaved_s(job)
        if not unsaved_s or self.in_place(job, gpus):
            return True
        curve = self.curve(job)
        rate = curve.rate(job.width) if curve else job.rate
        if rate and job.remaining is not None:
            left_s = job.remaining / rate
        else:
            left_s = sum((a.end_s or self._run.now) - a.start_s for a in job.attempts)
        return unsaved_s * job.width < abs(job.width - gpus) * left_s

    def stand_s(self, job: Job, old: int, gpus: int) -> float:
        """Seconds that training stands still for a resize in place: as measured, else by the profile."""
        profile, costs, grows = self.profile(job), self.known_costs(job), gpus >= old
        measured, cost = costs.grows if grows else costs.shrinks, None
        if profile:
            cost = profile.grow_s if grows else profile.shrink_s
        return _first(measured.median, cost_at(cost, gpus), DEFAULT_RESIZE_S)

    def built_s(self, job: Job, gpus: int) -> float:
        """Seconds until ranks that are to join the job have started, while those it has train on."""
        return _first(self.known_costs(job).builds.median, self.launch_s(job, gpus, first=False))

    def resize_left_s(self, job: Job) -> float:
        """Seconds until a resize in place that is under way is expected to be done."""
        new = job.becoming
        if new is None:
            return 0.0
        gpus = len(new.gpus) // job.spec.nodes
        built_s = self.built_s(job, gpus) if set(new.gpus) - set(job.current.gpus) else 0.0
        return max(0.0, new.since + built_s + self.stand_s(job, job.width, gpus) - self._run.now)

    def resize_limit_s(self, job: Job, gpus: int) -> float:
        """Seconds that a resize in place may take: ample, as training goes on meanwhile."""
        profile, usage = self.profile(job), job.current.usage
        rate = usage.rate if usage else profile.rate(job.width) if profile else None
        step_s = 1 / rate if rate else 0.0
        return max(MIN_RESIZE_LIMIT_S, 3 * (self.launch_s(job, gpus, first=False) + step_s))

    def save_s(self, job: Job) -> float:
        """Seconds until the job has left when its devices are wanted: as measured, else by its profile."""
        costs = self.known_costs(job)
        return _first(
            costs.quick_saves.median, self._suspend_s(job), costs.durable_saves.median, DEFAULT_SUSPEND_S
        )

    def longest_save_s(self, job: Job) -> float:
        """Seconds of the longest save that is durable when the job has left: quick ones say nothing of it.

        0 for a program that nothing says can save: it is ended when the others save.
        """
        if self._run.rules >= 4 and job.cannot_save:
            return 0.0
        costs = self.known_costs(job)
        durable_s = _first(costs.durable_saves.median, self._suspend_s(job), DEFAULT_SUSPEND_S)
        return max(durable_s, costs.longest_suspend_s)

    def _suspend_s(self, job: Job) -> float | None:
        """What saving and leaving takes the job by its profile, else as last seen in this run."""
        profile = self.profile(job)
        known = cost_at(profile.suspend_s, job.width if job.attempts else 1) if profile else None
        return self.known_costs(job).suspend_s if known is None else known

    def launch_s(self, job: Job, gpus: int, *, first: bool) -> float:
        """Seconds from a launch on `gpus` GPUs to the first step: as measured, else by the profile, else as
        last seen."""
        profile, costs = self.profile(job), self.known_costs(job)
        known = profile.launch_s(gpus, first=first) if profile else None
        return _first(costs.starts.median, known, costs.start_s, DEFAULT_START_S)

    def start_left_s(self, job: Job) -> float:
        """Seconds until the job's attempt has paid its start or resume cost."""
        profile, measured = self.profile(job), self.known_costs(job).starts.median
        if job.current.in_place or (measured is not None and job.ready):
            return 0.0
        known = profile.launch_s(job.width, first=job.attempt == 1) if profile else None
        return max(0.0, job.current.start_s + _first(measured, known, 0.0) - self._run.now)

    def first_checkpoint_s(self, job: Job) -> float:
        """Seconds that a job needs from its launch until it has done a step that can be saved."""
        least, profile = job.least, self.profile(job)
        step_s = 1 / profile.rate(least) if profile else 0.0
        return self.launch_s(job, least, first=job.attempt == 0) + step_s

    # --- what the run teaches ---------------------------------------------------------------

    def load(
        self, profiles: Iterable[Profile], parallel: Iterable[Program] = (), *, gpu_type: str = ""
    ) -> None:
        """Go by these profiles on GPUs of this type, and take these programs to be parallel."""
        self.parallel.update(parallel)
        loaded = {(p.model, p.nodes, gpu_type): p for p in profiles}
        self.profiles.update(loaded)
        # What an earlier run has learnt has the counts that were seen there.
        learned = [key for key, profile in loaded.items() if profile.source == "learned"]
        for key in dict.fromkeys([*learned, *self.observed.seen]):
            known = (found for each in _keys(*key) if (found := self.profiles.get(each)))
            self.observed.believe(key, next(known, None))
        self.size_up(self._run.jobs.left())

    def size_up(self, jobs: Iterable[Job]) -> None:
        """Note how many GPUs the programs of these jobs can use, by what is known now."""
        for job in jobs:
            command = job.spec.kind is Kind.COMMAND
            if not job.state.final and (command or job.traits.usable is not None):
                job.has(usable=self.shape(job).most if command else None)

    def is_parallel(self, job: Job) -> None:
        """Note that the job's program has said that it can be one of several ranks."""
        program = program_of(job.spec)
        if program in self.parallel:
            return
        self.parallel.add(program)
        if self.shape(job).because is Because.SAID:
            self._out.note(job, Reason(Why.SAYS_PARALLEL, {"model": job.spec.model}))
        self.size_up(other for other in self._run.jobs.left() if other.spec.model == job.spec.model)

    def learn_start(self, job: Job, took_s: float | None) -> None:
        """Note what the launch of a job that is ready took."""
        costs = self.costs_of(job)
        costs.start_s = self._run.now - job.current.start_s
        costs.starts.add(took_s)

    def learn_suspend(self, job: Job, took_s: float | None) -> None:
        """Note what saving and leaving took: a save that need not be durable says nothing of others."""
        signalled = job.current.signalled_s
        if signalled is None:
            return
        costs = self.costs_of(job)
        quick = job.current.quick and took_s is not None
        if not quick:
            costs.suspend_s = self._run.now - signalled
        costs.longest_suspend_s = max(costs.longest_suspend_s, self._run.now - signalled)
        (costs.quick_saves if quick else costs.durable_saves).add(took_s)

    def learn_resize(self, job: Job, new: Target, stopped_s: float | None, built_s: float | None) -> None:
        """Note what a resize in place took."""
        costs, old = self.costs_of(job), job.current
        grows = len(new.gpus) >= len(old.gpus) and len(new.seats) >= len(old.seats)
        (costs.grows if grows else costs.shrinks).add(stopped_s)
        if set(new.gpus) - set(old.gpus) or len(new.seats) > len(old.seats):
            costs.builds.add(built_s)

    def disturb(self, job: Job, gpus: Iterable[int]) -> None:
        """Have no sample go across now: `job` has changed on these GPUs, and others go faster or slower."""
        disturbed = self._ledger.holds_by(job).disturbed(job, gpus)
        if disturbed is None:
            self.observed.disturb(self._ledger.hosts_with(gpus), self._run.now)
        else:
            for other in disturbed:
                self.observed.gone(other.id)

    def over(self, job: Job) -> None:
        """End the sample of a job whose attempt is over."""
        self.observed.gone(job.id)

    def learn(self, job: Job, step: int, at: float) -> bool:
        """The job had done `step` steps at `at`: whether that says something new of its model.

        What it does while it shares its GPU does not, nor what jobs do whose speed their GPUs alone do not
        say, nor what jobs do that say it themselves.
        """
        if step < job.current.from_step or not self._ledger.holds_by(job).teaches:
            return False  # in the first case it has not yet said where it goes on
        if job.width > 1 and not job.traits.per_gpu and self.shape(job).because is Because.UNKNOWN:
            return False  # it sees several GPUs: nobody knows how many it uses
        if not all(alone(job, step, at) for alone in self._ledger.hooks("alone")) or job.id in self.said:
            return False
        gpu_type, gpus = self._ledger.type_of(job.gpus), job.width
        key = job.spec.model, job.spec.nodes, gpu_type
        hosts = self._ledger.hosts_of(job)
        seen = self.observed.observe(job.id, job.attempt, key, gpus, hosts, step=step, at=at)
        if seen is None or not seen.enough:
            return False
        loaded, believed = self.loaded(job), self.profile(job)
        if not loaded and believed and gpus not in believed.throughput:
            believed = None  # beyond what was seen a profile of that alone says nothing
        if key in self.observed.beliefs and seen.told:
            new = differs(seen)  # noise is no news for ever
        else:
            new = believed is None or contradicts(believed, gpus, seen)
        if not new:
            return False
        self.observed.believe(key, loaded)
        self._run.count_news()
        before = f"{believed.source} profile: {believed.rate(gpus):.4g}" if believed else "not known before"
        facts = {
            "model": job.spec.model,
            "gpus": gpus,
            "rate": seen.rate,
            "spread": seen.spread,
            "samples": len(seen.rates),
            "steps": seen.steps,
            "before": before,
        }
        if not self._ledger.one_type:
            facts["of"] = f" of type {self._ledger.said_type(gpu_type)}"
        self._out.note(job, Reason(Why.LEARNED, facts))
        return True


def _first(*values: float | None) -> float:
    """The first one that is known; the last is."""
    return next(value for value in values if value is not None)


def _keys(model: str, nodes: int, gpu_type: str) -> Iterator[Key]:
    # How a model scales within a host says most of how it does on several with the same count each, and how
    # it does so on the run's own GPUs most of how on others that nobody has measured.
    for each in dict.fromkeys((gpu_type, "")):
        yield model, nodes, each
        yield model, 1, each
