"""Random histories of a scheduler, as a rule-based state machine."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hpcsched.core import events as ev
from hpcsched.core.machine import Machine
from hpcsched.core.model import Array, JobState, Kind, Progress
from hpcsched.policy import make_policy
from hpcsched.store import journal
from hpcsched.testing.builders import Driver, a_job, a_profile, some_devices, state_of

PROFILES = (
    a_profile("three", [4.0, 6.0, 7.0, 6.5, 6.0, 5.5], start_s=5.0, suspend_s=5.0),
    a_profile("six", [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], start_s=5.0, suspend_s=5.0),
    a_profile("one", [3.0, 2.0], start_s=5.0, suspend_s=5.0),
)

MODELS = ["three", "six", "one", "unknown", "stranger"]

COMMANDS = [
    ev.CancelRequested,
    ev.HoldRequested,
    ev.ReleaseRequested,
    ev.SuspendRequested,
    ev.ResumeRequested,
]

PACKED = {"kind": Kind.TRAINER, "trainer": "m:T", "strategy": {"kind": "packed", "most": 3}}

VSW = {"kind": Kind.TRAINER, "trainer": "m:T", "strategy": {"kind": "vsw", "local_batch": 8}}

CODES = [0, 75, 1, 143, 137]

some_job = st.integers(0, 40)

gpu_ranges = st.sampled_from([(1, None), (1, None), (1, 1), (2, 4), (3, 3), (6, 6), (2, None)])

attempts_off = st.sampled_from([0, 0, 0, 0, -1, 1])


def as_it_is(job):
    """What does not change as another agent takes a job over, though it may decide on the job at once."""
    attempts = [(one.number, one.start_s, one.gpus, one.role, one.end_s) for one in job.attempts]
    return job.attempt, attempts, job.role, job.step, job.saved_step, job.ready, job.repeated, job.processes


class _Run(RuleBasedStateMachine):
    """The driver checks the invariants after every event."""

    @property
    def machine(self):
        return self.driver.machine

    def pick(self, number):
        return number % len(self.machine.run.jobs) + 1

    def pick_active(self, number):
        return sorted(self.machine.run.active)[number % len(self.machine.run.active)]

    @invariant()
    def final_states_never_change(self):
        if not hasattr(self, "driver"):
            return
        for job in self.machine.run.jobs.values():
            if job.state.final:
                assert self.final.setdefault(job.id, job.state) is job.state

    def teardown(self):
        if not hasattr(self, "driver"):
            return
        self.bring_all_to_an_end()
        self.events_tell_the_same_story_again()

    def bring_all_to_an_end(self):
        driver = self.driver
        driver.start_agent(6, hosts=3)
        driver.now += 100.0
        driver.tell(ev.TimerFired, key=("arrival", 1, 0))
        for job in self.machine.run.jobs.values():
            if job.state is JobState.HELD or job.held:
                driver.resume(job.id)
        for _ in range(len(self.machine.run.jobs)):
            for job in list(self.machine.run.active.values()):
                driver.exits(job.id, 0, job.spec.steps, job.spec.steps)
        assert self.machine.run.finished, self.machine.run.jobs.values()
        assert all(job.state.final for job in self.machine.run.jobs.values())

    def events_tell_the_same_story_again(self):
        again, actions = Machine(make_policy), []
        for seq, event in enumerate(self.driver.events, 1):
            number, read_back = journal.decode(journal.encode(seq, event))
            assert (number, read_back) == (seq, event)
            actions += again.handle(read_back)
        assert actions == self.driver.actions
        assert state_of(again) == state_of(self.machine)


class AnythingGoes(_Run):
    """News and commands of every kind, most of them at odd times."""

    @initialize(
        policy=st.sampled_from(["marble", "marble", "equal", "exclusive"]),
        promote=st.sampled_from(["always", "pays", "never"]),
        gpus=st.integers(1, 6),
        hosts=st.sampled_from([1, 1, 2, 3]),
        deadline=st.sampled_from([None, None, 50.0, 500.0]),
        joins=st.sampled_from([0, 0, 1, 4]),
    )
    def begin(self, policy, promote, gpus, hosts, deadline, joins):
        options = {"marble": {"promote": promote}, "equal": {"resize": "always"}}.get(policy, {})
        self.driver = Driver(
            gpus=gpus,
            hosts=hosts,
            policy=policy,
            profiles=PROFILES,
            deadline=deadline,
            reserve_s=20,
            **options,
        )
        self.final = {}
        self.another_joins(gpus * hosts, joins)

    def another_joins(self, there, gpus):
        """A host with so many GPUs, where there are so many already."""
        if gpus:
            more = some_devices(there + gpus)[there:]
            self.driver.tell(ev.HostsJoined, devices=tuple(replace(one, host="more") for one in more))

    @rule(
        models=st.lists(st.sampled_from(MODELS), min_size=1, max_size=3),
        gpus=gpu_ranges,
        wait_s=st.sampled_from([0.0, 0.0, 0.1, 7.3]),
        after=st.sampled_from([None, None, "next", 0, 1, 5]),
        retries=st.integers(0, 2),
        steps=st.sampled_from([None, 100]),
        nodes=st.sampled_from([1, 1, 1, 2, 3]),
        lane=st.sampled_from(["foreground", "uneven", "background", "packed"]),
        slowdown=st.sampled_from([0.0, 0.05, 0.05, 1.0]),
    )
    def submit(self, models, gpus, wait_s, after, retries, steps, nodes, lane, slowdown):
        wide = lane in ("foreground", "uneven")
        first = len(self.machine.run.jobs) + 1
        specs = []
        for i, model in enumerate(models):
            names = ()
            if after == "next" and i + 1 < len(models):
                names = (f"j{first + i + 1}",)
            elif isinstance(after, int) and first + i > 1:
                names = (f"j{after % (first + i - 1) + 1}",)
            specs.append(
                a_job(
                    f"j{first + i}",
                    model,
                    steps,
                    gpus=gpus if wide else 1,
                    nodes=nodes if wide else 1,
                    background=lane == "background",
                    **{"packed": PACKED, "uneven": VSW}.get(lane, {}),
                    max_foreground_slowdown=slowdown,
                    after=names,
                    array=Array(name="some", index=first + i, at_once=2) if retries == 0 else None,
                    priority=5 if retries == 2 else 0,
                    retries=retries,
                    submit_at=self.driver.now + wait_s if wait_s else 0.0,
                )
            )
        self.driver.submit(*specs)

    @rule(seconds=st.sampled_from([0.1, 0.2, 3.7, 40.0]))
    def time_passes(self, seconds):
        self.driver.now += seconds

    @precondition(lambda self: self.machine.run.jobs)
    @rule(number=some_job, command=st.sampled_from(COMMANDS))
    def command(self, number, command):
        self.driver.tell(command, self.pick(number))

    @precondition(lambda self: self.machine.run.jobs)
    @rule(numbers=st.lists(some_job, min_size=1, max_size=3), from_scratch=st.booleans())
    def retry(self, numbers, from_scratch):
        self.driver.retry(*map(self.pick, numbers), from_scratch=from_scratch)
        self.final = {i: state for i, state in self.final.items() if self.driver.job(i).state.final}

    @precondition(lambda self: self.machine.run.jobs)
    @rule(
        number=some_job,
        model=st.sampled_from(MODELS),
        gpus=gpu_ranges,
        nodes=st.sampled_from([1, 1, 2]),
        background=st.booleans(),
        after=st.none() | some_job,
        steps=st.sampled_from([None, 50, 100, 150]),
    )
    def defined_anew(self, number, model, gpus, nodes, background, after, steps):
        job = self.driver.job(self.pick(number))
        if job.state.active or job.spec.strategy["kind"] == "packed":
            return
        (least, most), nodes = ((1, 1), 1) if background else (gpus, nodes)
        earlier = () if after is None or job.id == 1 else (f"j{after % (job.id - 1) + 1}",)
        line = list(earlier)
        for name in line:
            line += self.driver.job(name).spec.after
        if job.spec.name in line:  # a circle is refused before it comes this far
            earlier = ()
        shape = {"gpus_min": least, "gpus_max": most, "nodes": nodes, "background": background}
        spec = replace(job.spec, model=model, steps=steps, after=earlier, **shape)
        self.driver.define(spec, again=[job.id] if job.state is JobState.FAILED else [])
        self.final = {i: state for i, state in self.final.items() if self.driver.job(i).state.final}

    @precondition(lambda self: self.machine.run.active)
    @rule(number=some_job, kind=st.sampled_from([ev.WorkersSpawned, ev.WorkersReady]), off=attempts_off)
    def lives(self, number, kind, off):
        job_id = self.pick_active(number)
        rest = {"processes": ((100, 1),)} if kind is ev.WorkersSpawned else {}
        self.driver.tell(kind, job_id, attempt=self.driver.job(job_id).attempt + off, **rest)

    @precondition(lambda self: self.machine.run.active)
    @rule(number=some_job, in_place=st.booleans())
    def runs(self, number, in_place):
        self.driver.runs(self.pick_active(number), in_place=in_place)

    @precondition(lambda self: any(job.resizing for job in self.machine.run.active.values()))
    @rule(
        number=some_job,
        failed=st.booleans(),
        steps=st.integers(-5, 5),
        seconds=st.sampled_from([None, 0.05]),
    )
    def answers_a_resize(self, number, failed, steps, seconds):
        """Also when something else is wanted of the job by now."""
        resizing = [job for job in self.machine.run.active.values() if job.resizing]
        job = resizing[number % len(resizing)]
        if failed:
            self.driver.stays(job.id)
        else:
            step = max(0, job.step + steps)
            self.driver.resized(job.id, step, stopped_s=seconds, built_s=seconds)

    @precondition(lambda self: self.machine.run.active)
    @rule(number=some_job, off=attempts_off, failed=st.booleans())
    def answers_what_nobody_asked(self, number, off, failed):
        job = self.driver.job(self.pick_active(number))
        if failed:
            self.driver.tell(ev.ResizeFailed, job.id, attempt=job.attempt + off, error="no memory")
        else:
            self.driver.tell(ev.WorkersResized, job.id, attempt=job.attempt + off, step=job.step)

    @precondition(lambda self: self.machine.run.active)
    @rule(
        number=some_job,
        steps=st.integers(0, 40),
        off=attempts_off,
        rate=st.sampled_from([None, 0.0, 2.5]),
        ago_s=st.sampled_from([None, 0.0, 0.5, 1e308]),
        back=st.sampled_from([0, 0, 15]),
    )
    def reports(self, number, steps, off, rate, ago_s, back):
        job = self.driver.job(self.pick_active(number))
        done_s = None if ago_s is None else self.driver.now - ago_s
        again, step = job.current.again, job.step + steps
        if back:  # the step it had reached before may never have been heard of
            again, step, done_s = again + min(back, step), max(0, step - back), None
        news = Progress(
            job_id=job.id, attempt=job.attempt + off, step=step, rate=rate, done_s=done_s, again=again
        )
        self.driver.handle(ev.ProgressObserved(at=self.driver.now, progress=(news,)))

    @precondition(lambda self: self.machine.run.active)
    @rule(number=some_job, rate=st.sampled_from([0.6, 2.5, 1e9]))
    def trains(self, number, rate):
        self.driver.trains(self.pick_active(number), rate)

    @precondition(lambda self: self.machine.run.active)
    @rule(number=some_job, off=attempts_off)
    def saves(self, number, off):
        job = self.driver.job(self.pick_active(number))
        self.driver.tell(ev.CheckpointSaved, job.id, step=job.step, attempt=job.attempt + off)

    @precondition(lambda self: self.machine.run.active)
    @rule(
        number=some_job,
        code=st.sampled_from(CODES),
        off=attempts_off,
        steps=st.sampled_from([None, 0, 10]),
        saved=st.booleans(),
        lasted_s=st.sampled_from([None, 0.1, 60.0]),
    )
    def exits(self, number, code, off, steps, saved, lasted_s):
        job = self.driver.job(self.pick_active(number))
        step = None if steps is None else job.step + steps
        saved_step = step if saved else job.saved_step
        attempt = job.attempt + off
        self.driver.exits(job.id, code, step, saved_step, attempt=attempt, lasted_s=lasted_s)

    @precondition(lambda self: self.machine.run.active)
    @rule(number=some_job, transient=st.booleans(), off=attempts_off)
    def cannot_be_launched(self, number, transient, off):
        job = self.driver.job(self.pick_active(number))
        self.driver.tell(
            ev.LaunchFailed, job.id, attempt=job.attempt + off, error="no memory", transient=transient
        )

    @precondition(lambda self: self.machine.run.jobs)
    @rule(
        number=some_job,
        kind=st.sampled_from(["grace", "term", "resize", "arrival"]),
        attempt=st.integers(0, 4),
    )
    def timer(self, number, kind, attempt):
        """Late, stale, and never asked for."""
        self.driver.tell(ev.TimerFired, key=(kind, self.pick(number), attempt))

    @rule(key=st.sampled_from([("drain", 0, 0), ("hurry", 0, 0), ("lanes", 0, 0), ("packs", 0, 0)]))
    def timer_of_the_run(self, key):
        self.driver.tell(ev.TimerFired, key=key)

    @rule(seconds=st.sampled_from([None, -5.0, 30.0, 1000.0]))
    def deadline_moves(self, seconds):
        self.driver.tell(ev.DeadlineMoved, deadline=None if seconds is None else self.driver.now + seconds)

    @rule(gpu=st.integers(0, 17))
    def device_lost(self, gpu):
        self.driver.lose(gpu)

    @rule(gpu=st.integers(0, 17))
    def device_found(self, gpu):
        self.driver.find(gpu)

    @rule()
    def drain(self):
        self.driver.drain()

    @rule(
        gpus=st.integers(1, 6),
        hosts=st.sampled_from([1, 2, 3]),
        saved=st.booleans(),
        seconds=st.sampled_from([None, 300.0]),
    )
    def new_agent(self, gpus, hosts, saved, seconds):
        steps = {job.id: job.step for job in self.machine.run.active.values()} if saved else {}
        deadline = None if seconds is None else self.driver.now + seconds
        self.driver.start_agent(gpus, steps, hosts=hosts, deadline=deadline)

    @precondition(lambda self: self.machine.run.active)
    @rule(
        kept=st.integers(0, 2**12 - 1),
        silent=st.integers(0, 2**12 - 1),
        saved=st.booleans(),
        wait_s=st.sampled_from([0.0, 2.0, 50.0]),
    )
    def taken_over(self, kept, silent, saved, wait_s):
        """On the same devices: some attempts go on, and hosts of others have not been heard of."""
        active, now = self.machine.run.active, self.driver.now
        adopted = [i for i in self.machine.adoptable() if kept >> i % 12 & 1]
        unsure = {i: now + wait_s for i in active if i not in adopted and silent >> i % 12 & 1}
        steps = {job.id: job.step for job in active.values()} if saved else {}
        before = {i: as_it_is(active[i]) for i in adopted}
        self.driver.take_over(*adopted, unsure=unsure, hosts=3, saved=steps)
        assert {i: as_it_is(self.driver.job(i)) for i in adopted} == before
