"""Anything may happen, in any order, late news of dead attempts too: the invariants hold, all jobs
can be brought to an end, and the journal tells the same story again."""

from __future__ import annotations

from budget import examples
from histories import COMMANDS, MODELS, PROFILES, AnythingGoes, _Run, attempts_off, some_job
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from hpcsched.core import events as ev
from hpcsched.core.actions import Suspend
from hpcsched.core.mechanisms.cpu.mechanism import Cpu
from hpcsched.core.mechanisms.packing.mechanism import Packing
from hpcsched.core.model import JobState, Kind
from hpcsched.policy.cpu.configurations import Rules
from hpcsched.testing.builders import Driver, a_core_job, a_job, a_program


class ChangesInPlace(_Run):
    """Jobs that can be resized in place, under policies that resize whenever they can."""

    @initialize(
        policy=st.sampled_from([("marble", {"promote": "always"}), ("equal", {"resize": "always"})]),
        gpus=st.integers(2, 4),
        hosts=st.sampled_from([1, 1, 2]),
        models=st.lists(st.sampled_from(MODELS[:3]), min_size=2, max_size=4),
        nodes=st.sampled_from([1, 1, 2]),
    )
    def begin(self, policy, gpus, hosts, models, nodes):
        name, options = policy
        self.driver = Driver(gpus=gpus, hosts=hosts, policy=name, profiles=PROFILES, **options)
        self.final = {}
        for model in models:
            self.arrives(model, min(nodes, hosts))
        self.all_run()

    def pick_resizing(self, number):
        """A job that is being resized, if there is one."""
        active = list(self.machine.run.active.values())
        of = [job for job in active if job.resizing] or active
        return of[number % len(of)]

    @rule(model=st.sampled_from(MODELS[:3]), nodes=st.sampled_from([1, 1, 1, 2]))
    def arrives(self, model, nodes):
        self.driver.submit(a_job(f"j{len(self.machine.run.jobs) + 1}", model, nodes=nodes))

    @rule()
    def all_run(self):
        for job in list(self.machine.run.active.values()):
            if not job.ready and job.state.active:
                self.driver.runs(job.id, in_place=True)

    @rule(seconds=st.sampled_from([0.1, 40.0]))
    def time_passes(self, seconds):
        self.driver.now += seconds

    @precondition(lambda self: self.machine.run.active)
    @rule(number=some_job, steps=st.integers(-9, 9), seconds=st.sampled_from([None, 0.05]))
    def resized(self, number, steps, seconds):
        """Also when nobody asked for it, and when something else is wanted by now."""
        job = self.pick_resizing(number)
        self.driver.resized(job.id, max(0, job.step + steps), stopped_s=seconds, built_s=seconds)

    @precondition(lambda self: self.machine.run.active)
    @rule(number=some_job, off=attempts_off)
    def stays(self, number, off):
        job = self.pick_resizing(number)
        self.driver.tell(ev.ResizeFailed, job.id, attempt=job.attempt + off, error="no memory")

    @precondition(lambda self: self.machine.run.active)
    @rule(number=some_job, steps=st.integers(0, 9))
    def reports(self, number, steps):
        job = self.pick_resizing(number)
        self.driver.reports(job.id, job.step + steps)

    @precondition(lambda self: self.machine.run.active)
    @rule(number=some_job, back=st.integers(0, 20))
    def saves(self, number, back):
        job = self.pick_resizing(number)
        self.driver.saves(job.id, max(0, job.step - back))

    @precondition(lambda self: self.machine.run.active)
    @rule(number=some_job, code=st.sampled_from([0, 0, 75, 75, 1]))
    def exits(self, number, code):
        job = self.pick_resizing(number)
        self.driver.exits(job.id, code, job.step, job.step if code == 75 else job.saved_step)

    @precondition(lambda self: self.machine.run.active)
    @rule(number=some_job)
    def another_is_done(self, number):
        job = sorted(self.machine.run.active.values(), key=lambda job: job.resizing)[0]
        self.driver.exits(job.id, 0, job.spec.steps, job.spec.steps)

    @precondition(lambda self: self.machine.run.active)
    @rule(number=some_job, command=st.sampled_from([*COMMANDS, ev.SuspendRequested, ev.ResumeRequested]))
    def command(self, number, command):
        self.driver.tell(command, self.pick_resizing(number).id)

    @precondition(lambda self: self.machine.run.active)
    @rule(number=some_job, kind=st.sampled_from(["resize", "resize", "grace", "term"]))
    def timer(self, number, kind):
        job = self.pick_resizing(number)
        if kind in job.timers:
            self.driver.ring(kind, job.id)

    @precondition(lambda self: self.machine.run.active and len(self.machine.ledger.devices) > 2)
    @rule(number=some_job)
    def device_lost(self, number):
        """Of a job that is being resized: one that it has, or is to have."""
        gpus = self.pick_resizing(number).gpus
        self.driver.lose(gpus[number % len(gpus)])

    @precondition(lambda self: self.machine.ledger.lost)
    @rule(number=some_job)
    def device_found(self, number):
        lost = sorted(self.machine.ledger.lost)
        self.driver.find(lost[number % len(lost)])

    @precondition(lambda self: any(job.resizing for job in self.machine.run.active.values()))
    @rule(again=st.booleans(), saved=st.booleans())
    def drain_or_crash(self, again, saved):
        if not again:
            self.driver.drain()
            return
        steps = {job.id: job.step for job in self.machine.run.active.values()} if saved else {}
        self.driver.start_agent(4, steps)
        self.all_run()


class ComingAndGoing(_Run):
    """Jobs that ride on the GPUs of others, and leave when GPUs stay free."""

    @initialize(
        policy=st.sampled_from(["marble", "marble", "equal", "exclusive"]),
        gpus=st.integers(1, 4),
        deadline=st.sampled_from([None, None, 900.0]),
        steps=st.lists(st.sampled_from([None, 100, 5000]), min_size=1, max_size=8),
    )
    def begin(self, policy, gpus, deadline, steps):
        self.driver = Driver(gpus=gpus, policy=policy, profiles=PROFILES, deadline=deadline, reserve_s=20)
        self.final = {}
        for count in steps:
            self.arrives("unknown", count, None)
        self.all_run()

    @rule(
        model=st.sampled_from(["six", "unknown"]),
        steps=st.sampled_from([None, 100, 5000]),
        mode=st.sampled_from([None, "loop"]),
    )
    def arrives(self, model, steps, mode):
        strategy = {"kind": "packed", "most": 3, **({"mode": mode} if mode else {})}
        more = {"gpus": 1, "kind": Kind.TRAINER, "trainer": "m:T", "strategy": strategy}
        self.driver.submit(a_job(f"j{len(self.machine.run.jobs) + 1}", model, steps, **more))

    @rule(gpus=st.sampled_from([1, 2]))
    def one_that_is_not_packed_arrives(self, gpus):
        self.driver.submit(a_job(f"j{len(self.machine.run.jobs) + 1}", "three", gpus=gpus))

    @rule()
    def all_run(self):
        for job in list(self.machine.run.active.values()):
            if not job.ready:
                self.driver.runs(job.id)

    @rule(seconds=st.sampled_from([1.0, 40.0]), looks=st.booleans())
    def time_passes(self, seconds, looks):
        self.driver.now += seconds
        if looks:
            self.driver.tell(ev.TimerFired, key=("packs", 0, 0))

    @precondition(lambda self: self.machine.run.active)
    @rule(number=some_job, code=st.sampled_from([0, 0, 0, 75, 75, 1]))
    def exits(self, number, code):
        job = self.driver.job(self.pick_active(number))
        self.driver.exits(job.id, code, job.step + 5, job.step + 5)

    @precondition(
        lambda self: any(job.state is JobState.SUSPENDING for job in self.machine.run.active.values())
    )
    @rule()
    def all_have_saved(self):
        for job in list(self.machine.run.active.values()):
            if job.state is JobState.SUSPENDING:
                self.driver.exits(job.id, 75, job.step, job.step)

    @precondition(lambda self: self.machine.run.active)
    @rule(number=some_job, command=st.sampled_from(COMMANDS))
    def command(self, number, command):
        self.driver.tell(command, self.pick(number))

    @rule(gpus=st.integers(1, 4), again=st.booleans())
    def the_agent_ends(self, gpus, again):
        if not again:
            self.driver.drain()
            return
        self.driver.start_agent(gpus, {job.id: job.step for job in self.machine.run.active.values()})

    @invariant()
    def no_more_leave_for_free_gpus_than_there_are(self):
        if hasattr(self, "driver") and isinstance(self.driver.events[-1], ev.TimerFired):
            leaves = [action for action in self.driver.actions if isinstance(action, Suspend)]
            now = [action for action in leaves if action.at == self.driver.now]
            moved = [
                action for action in now if action.job_id in self.machine.mechanism(Packing).packs.parted
            ]
            assert len(moved) <= len(self.machine.ledger.free)


class OnCores(_Run):
    """Jobs on CPU cores that are measured, changed and ended at any time, beside jobs that want CPU slots."""

    @initialize(
        policy=st.sampled_from(["marble", "marble", "equal", "exclusive"]),
        slots=st.integers(1, 4),
        kind=st.sampled_from(["cpu", "test"]),
        cores=st.sampled_from([0, 2, 5]),
        hosts=st.sampled_from([1, 1, 2]),
        deadline=st.sampled_from([None, None, 900.0]),
        budgets=st.lists(st.sampled_from([0.3, 1, 2.5, 8]), min_size=1, max_size=4),
    )
    def begin(self, policy, slots, kind, cores, hosts, deadline, budgets):
        self.driver = Driver(
            gpus=slots,
            hosts=hosts,
            policy=policy,
            profiles=PROFILES,
            deadline=deadline,
            reserve_s=20,
            kind=kind,
            cores=range(10, 10 + max(cores, 2 if kind == "test" else 0)),
        )
        self.final = {}
        for budget in budgets:
            self.arrives(budget, 0.15, None)
        self.all_run()

    def pick_on_cores(self, number):
        jobs = [job for job in self.machine.run.active.values() if job.spec.cpus is not None]
        return jobs[number % len(jobs)] if jobs else None

    @rule(
        budget=st.sampled_from([0.3, 1, 2.5, 8]),
        start=st.sampled_from([0.1, 0.15]),
        servers=st.sampled_from([None, None, 1, 2]),
    )
    def arrives(self, budget, start, servers):
        options = {"servers": servers} if servers and budget > 1 else {}
        self.driver.submit(a_core_job(f"j{len(self.machine.run.jobs) + 1}", budget, start=start, **options))

    @rule(cpus=st.sampled_from([0.1, 1, 1.3, 2]))
    def program_arrives(self, cpus):
        self.driver.submit(a_program(f"j{len(self.machine.run.jobs) + 1}", cpus))

    @rule(gpus=st.sampled_from([1, 2]))
    def one_for_slots_arrives(self, gpus):
        if gpus <= self.machine.ledger.capacity().most(1):
            self.driver.submit(a_job(f"j{len(self.machine.run.jobs) + 1}", "three", gpus=gpus))

    @rule(in_place=st.sampled_from([True, True, True, False]))
    def all_run(self, in_place=True):
        for job in list(self.machine.run.active.values()):
            if not job.ready and job.state.active:
                self.driver.runs(job.id, in_place=in_place)

    @precondition(lambda self: self.machine.run.active)
    @rule(
        number=some_job,
        rate=st.floats(0.1, 10.0),
        shares=st.lists(st.floats(0.0, 1.1), min_size=1, max_size=8),
        full=st.sampled_from([0.0, 0.0, 0.2, 1.0]),
        off=attempts_off,
    )
    def is_measured(self, number, rate, shares, full, off):
        if (job := self.pick_on_cores(number)) is not None:
            each = [shares[i % len(shares)] for i in range(len(job.current.seats))]
            self.driver.uses(job.id, rate, each, full=full, attempt=job.attempt + off)

    @precondition(lambda self: any(job.resizing for job in self.machine.run.active.values()))
    @rule(number=some_job, failed=st.booleans(), refused=st.booleans())
    def answers(self, number, failed, refused):
        resizing = [job for job in self.machine.run.active.values() if job.resizing]
        job = resizing[number % len(resizing)]
        if failed:
            self.driver.stays(job.id, refused=refused)
        else:
            self.driver.resized(job.id, job.step + 3, stopped_s=0.05, built_s=1.0)

    @precondition(lambda self: self.machine.run.active)
    @rule(number=some_job, code=st.sampled_from([0, 75, 75, 1, 137]))
    def exits(self, number, code):
        job = self.driver.job(self.pick_active(number))
        self.driver.exits(job.id, code, job.step + 5, job.step + 5)

    @precondition(lambda self: self.machine.run.jobs)
    @rule(number=some_job, command=st.sampled_from(COMMANDS))
    def command(self, number, command):
        self.driver.tell(command, self.pick(number))

    @precondition(lambda self: self.machine.run.active)
    @rule(number=some_job, kind=st.sampled_from(["resize", "grace", "term"]))
    def timer(self, number, kind):
        job = self.driver.job(self.pick_active(number))
        if kind in job.timers:
            self.driver.ring(kind, job.id)

    @rule(seconds=st.sampled_from([1.0, 40.0]))
    def time_passes(self, seconds):
        self.driver.now += seconds

    @precondition(lambda self: len(self.machine.ledger.devices) > 1)
    @rule(gpu=st.integers(0, 7))
    def slot_lost(self, gpu):
        self.driver.lose(gpu)

    @precondition(lambda self: self.machine.ledger.lost)
    @rule(number=some_job)
    def slot_found(self, number):
        lost = sorted(self.machine.ledger.lost)
        self.driver.find(lost[number % len(lost)])

    @precondition(lambda self: len(self.machine.mechanism(Cpu).cores.hosts) > 1)
    @rule()
    def host_lost(self):
        host = list(self.machine.mechanism(Cpu).cores.hosts)[-1]
        for gpu in [d.index for d in self.machine.ledger.devices.values() if d.host == host]:
            self.driver.lose(gpu)
        self.driver.tell(ev.CoresLost, host=host, why="no word")

    @rule(again=st.booleans(), slots=st.integers(1, 4))
    def the_agent_ends(self, again, slots):
        if not again:
            self.driver.drain()
            return
        self.driver.start_agent(slots, {job.id: job.step for job in self.machine.run.active.values()})
        self.all_run()

    @invariant()
    def first_come_first_served(self):
        """Nobody who came later starts while one waits that could have had those cores."""
        if not hasattr(self, "driver") or self.machine.deadline.draining:
            return
        first = self.machine.mechanism(Cpu).queue.first()
        if first is None or self.machine.deadline.at is not None:
            return
        job = self.machine.run.jobs[first]
        room = max(
            (
                sum(self.machine.mechanism(Cpu).room(host, lent=True).values())
                for host in self.machine.mechanism(Cpu).cores.hosts
            ),
            default=0,
        )
        assert room < Rules.of(job.spec.strategy).first().cores, f"job {first} waits beside {room}"


TestAnythingGoes = AnythingGoes.TestCase
TestAnythingGoes.settings = settings(max_examples=examples(300), stateful_step_count=50)
TestChangesInPlace = ChangesInPlace.TestCase
TestChangesInPlace.settings = settings(max_examples=examples(300), stateful_step_count=40)
TestComingAndGoing = ComingAndGoing.TestCase
TestComingAndGoing.settings = settings(max_examples=examples(150), stateful_step_count=40)
TestOnCores = OnCores.TestCase
TestOnCores.settings = settings(max_examples=examples(200), stateful_step_count=40)
