"""Jobs that share a GPU: who comes to whom, what is measured of them, and what becomes of their faults."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from hpcsched.agent.admission import Admission
from hpcsched.agent.inbox import Command
from hpcsched.cli.jobs import about_sharing
from hpcsched.cli.jobs.explain import what_is_next
from hpcsched.cli.profile.lookup import shared_uses
from hpcsched.cli.run.archive import archive
from hpcsched.core import events as ev
from hpcsched.core.actions import Launch, SetTimer, Suspend
from hpcsched.core.mechanisms.sharing.mechanism import MORE, TWICE, Sharing
from hpcsched.core.mechanisms.sharing.shares import GROWTH, RESERVE, Use
from hpcsched.core.model import ComputeMode, HostCores, JobState, Kind, Progress, Role
from hpcsched.core.needs import Needs
from hpcsched.core.packed import Jobs
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.shared_use import SharedUse
from hpcsched.policy.sharing import SETTLED_S, SILENT_S, why_waiting
from hpcsched.testing.builders import Driver, a_job, a_profile, some_devices

TOTAL = 10_000.0


def sharing(name, model="m", *, share=0.0, gpu_memory=None, memory=None, gpu_type="", **rest):
    needs = Needs(share=share, gpu_memory_mib=gpu_memory, memory_mib=memory, gpu_type=gpu_type)
    return a_job(name, model, rest.pop("steps", 100_000), gpus=1, needs=needs, **rest)


def on_gpus(*specs, gpus=1, mib=TOTAL, mode=ComputeMode.DEFAULT, profiles=(), policy="marble", kind="test"):
    run = Driver(gpus=gpus, profiles=profiles, policy=policy)
    devices = tuple(replace(one, memory_mib=mib, compute_mode=mode) for one in some_devices(gpus, kind=kind))
    run.tell(ev.AgentStarted, wall=1e9, devices=devices, policy=policy)
    run.submit(*specs)
    return run


def sharing_of(run):
    return run.machine.mechanism(Sharing)


def uses(run, name, mib=None, busy=None):
    return run.tell(ev.DeviceUseMeasured, name, memory_mib=mib, busy=busy)


def train(run, rates, seconds=60.0):
    """The jobs do so many steps a second for so long; timers ring, and jobs are looked at before they do."""
    exact, until, actions = {name: float(run.job(name).step) for name in rates}, run.now + seconds, []
    while run.now < until:
        run.now += 2.0
        news = []
        for name, rate in rates.items():
            exact[name] += 2.0 * rate
            job = run.job(name)
            if job.state is JobState.RUNNING:
                done_s = run.now - (exact[name] - int(exact[name])) / rate
                news.append(
                    Progress(job_id=job.id, attempt=job.attempt, step=int(exact[name]), done_s=done_s)
                )
        actions += run.tell(ev.ProgressObserved, progress=tuple(news))
        due = [one.due for one in run.actions if isinstance(one, SetTimer) and one.key == Sharing.timer]
        if due and due[-1] <= run.now:
            actions += run.tell(ev.TimerFired, key=Sharing.timer)
    return actions


def where(run):
    return {job.spec.name: job.gpus[0] if job.gpus else None for job in run.machine.run.jobs.values()}


@pytest.mark.parametrize("policy", ["marble", "equal"])
def test_shares_that_are_asked_for_fill_a_gpu_at_once(policy):
    run = on_gpus(*(sharing(f"j{i}", share=0.25) for i in range(9)), gpus=2, policy=policy)
    assert [where(run)[f"j{i}"] for i in range(9)] == [0, 1, 0, 1, 0, 1, 0, 1, None]
    assert [run.job(f"j{i}").role for i in (0, 2)] == [Role.PRIMARY, Role.SHARED]
    came = [str(note.reason) for note in run.job("j0").story if note.reason.why is Why.JOINED]
    assert came == [f"job {i + 1} (j{i}) comes to GPU 0, and shares it" for i in (2, 4, 6)]
    why = dict(why_waiting(sharing_of(run).view(), run.job("j8")))
    assert why == dict.fromkeys((0, 1), "with it 1.25 of the GPU would be asked for")


def test_without_a_share_one_comes_when_those_there_are_measured():
    run = on_gpus(sharing("a"), sharing("b"), sharing("c"))
    assert where(run) == {"a": 0, "b": None, "c": None}
    run.runs("a")
    uses(run, "a", 1000.0, 0.3)
    train(run, {"a": 10.0}, 10)
    assert where(run) == {"a": 0, "b": 0, "c": None}
    run.runs("b")
    assert train(run, {"a": 9.0, "b": 9.0}, 6) == []
    (launch,) = train(run, {"a": 9.0, "b": 9.0}, 10)
    assert isinstance(launch, Launch) and launch.role is Role.SHARED
    assert run.job("c").story[-1].reason.why is Why.SHARED
    beside = "it shares GPU 0 with job 2 (b), job 3 (c)"
    used = "it uses 1000M of memory and the device for 30% of the time"
    assert about_sharing.as_it_is(run.machine, run.job("a")) == [
        f"{beside}, at 0.90 of its speed alone",
        used,
    ]
    run.runs("c")
    assert about_sharing.as_it_is(run.machine, run.job("a")) == [f"{beside}, being measured", used]


def test_models_that_were_measured_together_come_at_once():
    run = on_gpus(sharing("a"), sharing("b"), sharing("c", submit_at=100.0))
    run.runs("a")
    uses(run, "a", 1000.0)
    train(run, {"a": 10.0}, 10)
    run.runs("b")
    train(run, {"a": 8.0, "b": 8.0}, 16)
    run.exits("a", 0)
    assert run.job("b").current.role is Role.SHARED and sharing_of(run).members(0) == (run.job("b"),)
    run.now = 101.0
    run.ring("arrival", "c")
    assert where(run)["c"] == 0
    assert "such jobs do 1.60 times" in str(run.job("c").story[-1].reason)


def test_those_that_are_slower_together_than_one_after_the_other_part():
    run = on_gpus(sharing("a", "x"), sharing("b", "y"))
    run.runs("a")
    uses(run, "a", 1000.0)
    train(run, {"a": 10.0}, 10)
    run.runs("b")
    sharing_of(run).shares.models["y"] = sharing_of(run).shares.models["x"]
    run.tell(ev.ProfilesLoaded, profiles=(a_profile("y", [10.0]),))
    (asked,) = train(run, {"a": 4.6, "b": 5.2}, 20)
    assert isinstance(asked, Suspend) and asked.job_id == run.job("b").id
    run.leaves("b", 50)
    train(run, {"a": 10.0}, 60)
    assert where(run) == {"a": 0, "b": None}
    (line,) = what_is_next(run.machine, run.job("b"))[1:]
    assert "less than one after the other; they share no GPU any more" in line
    run.exits("a", 0)
    assert run.job("b").role is Role.PRIMARY


def test_nobody_has_less_than_half_of_its_speed():
    run = on_gpus(sharing("a", "x"), sharing("b", "y"))
    run.runs("a")
    uses(run, "a", 1000.0)
    train(run, {"a": 10.0}, 10)
    run.runs("b")
    (asked,) = train(run, {"a": 4.0, "b": 10.0}, 20)
    assert isinstance(asked, Suspend) and asked.job_id == run.job("b").id
    assert "job 1 (a) has 40% of its speed alone" in str(run.job("a").story[-1].reason)


def test_those_whose_speed_alone_is_not_known_are_taken_to_do_no_better_than_the_others():
    run = on_gpus(sharing("a", "x"), sharing("b", "y"), sharing("c", "z"))
    run.runs("a")
    uses(run, "a", 1000.0)
    train(run, {"a": 10.0})
    assert where(run)["b"] == 0
    run.runs("b")
    uses(run, "b", 1000.0)
    train(run, {"a": 5.2, "b": 5.0})
    assert where(run)["c"] is None
    assert (
        "2 do 1.04 times what one does alone there"
        in dict(why_waiting(sharing_of(run).view(), run.job("c")))[0]
    )


def test_one_that_has_come_to_nothing_beside_another_is_not_waited_for_for_ever():
    run = on_gpus(sharing("a", "x"), sharing("b", "y"))
    run.runs("a")
    uses(run, "a", 1000.0)
    train(run, {"a": 10.0}, 10)
    run.runs("b")
    assert train(run, {"a": 0.001, "b": 10.0}, SILENT_S - 20) == []
    actions = train(run, {"a": 0.001, "b": 10.0}, 60)
    assert [type(action) for action in actions] == [Suspend]


def test_one_that_tells_nothing_of_its_progress_counts_as_measured_after_a_while():
    run = on_gpus(sharing("a"), sharing("b"))
    run.runs("a")
    uses(run, "a", 1000.0)
    run.now += SETTLED_S - 1
    run.tell(ev.TimerFired, key=Sharing.timer)
    assert where(run)["b"] is None
    run.now += 1
    run.tell(ev.TimerFired, key=Sharing.timer)
    assert where(run)["b"] == 0


@pytest.mark.parametrize(
    ("specs", "why"),
    [
        ([sharing("a", gpu_memory=6000.0), sharing("b", gpu_memory=3500.0)], ""),
        (
            [sharing("a", gpu_memory=6000.0), sharing("b", gpu_memory=3600.0)],
            "6000 of its 10000 MiB are needed there, and 3600 by this job",
        ),
        (
            [sharing("a", gpu_memory=6000.0), sharing("b", "unknown")],
            "6000 of its 10000 MiB are needed there, and 5000 by this job",
        ),
        ([sharing("a", gpu_memory=4000.0), sharing("b", "unknown")], ""),
        (
            [sharing("a", "unknown"), sharing("b", gpu_memory=100.0)],
            "how much memory those need who train there is not known yet",
        ),
        ([sharing("a", "known"), sharing("b", gpu_memory=6500.0)], ""),
        (
            [sharing("a", "known"), sharing("b", gpu_memory=6600.0)],
            "3000 of its 10000 MiB are needed there, and 6600 by this job",
        ),
        ([sharing("a", share=0.5), sharing("b", share=0.4)], ""),
    ],
)
def test_memory_as_it_is_asked_for_or_known(specs, why):
    known = replace(a_profile("known", [10.0]), memory_mib={1: 3000.0})
    run = on_gpus(*specs, profiles=(known,))
    run.runs("a")
    train(run, {"a": 10.0}, 12)
    assert where(run)["b"] == (None if why else 0)
    assert dict(why_waiting(sharing_of(run).view(), run.job("b"))).get(0) == (why or None) or not why


def test_what_was_measured_of_a_model_counts_for_all_its_jobs():
    run = on_gpus(sharing("a"), sharing("b"), sharing("c"))
    run.runs("a")
    uses(run, "a", 3000.0)
    uses(run, "a", 2000.0)
    train(run, {"a": 10.0}, 10)
    assert where(run)["b"] == 0
    assert run.machine.ledger.room_mib(run.job("b")) == pytest.approx(RESERVE * TOTAL - GROWTH * 3000)
    run.runs("b")
    uses(run, "b", 3200.0)
    train(run, {"a": 10.0, "b": 10.0}, 20)
    assert where(run)["c"] is None
    assert sharing_of(run).shares.models["m"].memory_mib == 3200.0


def the_next_run(run, database, *specs):
    """A run of these jobs, after this one; what it knows of the sharing of GPUs comes from the database."""
    record = SimpleNamespace(id="r", host="n1", policy="marble", allocation={})
    archive(SimpleNamespace(machine=run.machine, run=record, device_kind="test", speed=1.0), database, "dir")
    other = on_gpus()
    shared = partial(shared_uses, database, "test")
    admission = Admission(
        machine=other.machine, find_profiles=lambda models, gpu_type: (), stand_ins=False, find_shared=shared
    )
    jobs = [replace(spec, kind=Kind.COMMAND, command=("train",)) for spec in specs]
    for event in admission.events(jobs, at=other.now, gpus=1, where="jobs"):
        other.handle(event)
    return other


def test_what_was_seen_is_asked_for_once_for_each_model_without_a_look_at_all_jobs(monkeypatch):
    run = on_gpus(sharing("a", "x"))
    known = [SharedUse(models=models, together=1.0) for models in (("x", "y"), ("x", "z"), ("y", "z"))]
    shared = Mock(return_value=known)
    admission = Admission(
        machine=run.machine, find_profiles=lambda models, gpu_type: (), stand_ins=False, find_shared=shared
    )

    def submits(spec, *, update=False, looks=False):
        command = Command(
            command="submit", jobs=[replace(spec, kind=Kind.COMMAND, command=("train",))], update=update
        )
        with monkeypatch.context() as patch:
            if not looks:
                patch.setattr(Jobs, "_ids", Mock(side_effect=AssertionError("all of them")))
            events, _ = admission.submitted(command, at=run.now, gpus=1, cause="")
        for event in events:
            run.handle(event)
        return [use.models for event in events if isinstance(event, ev.SharedUsesKnown) for use in event.uses]

    assert submits(sharing("b", "y"), looks=True) == [("x", "y")]
    assert submits(a_job("c", "z", gpus=1)) == [] and shared.call_count == 1
    assert submits(sharing("c", "z"), update=True) == [], "of what is changed, as ever"
    assert submits(sharing("d", "y")) == [] and shared.call_count == 1
    shared.return_value = [*known, SharedUse(models=("v", "z"), together=1.0)]
    assert submits(sharing("e", "v")) == [("v", "z")]


def test_what_was_seen_is_known_to_the_next_run(tmp_path):
    run = on_gpus(sharing("a", "x"), sharing("b", "y"))
    run.runs("a")
    uses(run, "a", 3000.0, 0.4)
    train(run, {"a": 10.0}, 10)
    run.runs("b")
    uses(run, "b", 4000.0)
    run.tell(ev.ProfilesLoaded, profiles=(a_profile("y", [10.0]),))
    train(run, {"a": 8.0, "b": 8.0}, 20)
    assert sharing_of(run).shares.worth == {("x", "y"): pytest.approx(1.6)}
    again = the_next_run(run, tmp_path / "db", sharing("a", "x"), sharing("b", "y"), sharing("c", "x"))
    assert where(again) == {"a": 0, "b": 0, "c": None}, "they come at once"
    assert "such jobs do 1.60 times" in str(again.job("b").story[-1].reason)
    assert sharing_of(again).need_mib(again.job("c"), 0) == GROWTH * 3000.0
    again.runs("a", "b")
    uses(again, "a", 2000.0)
    assert sharing_of(again).need_mib(again.job("c"), 0) == GROWTH * 2000.0, "as measured now"
    only_x = the_next_run(run, tmp_path / "db", sharing("a", "x"))
    assert sharing_of(only_x).shares.worth == {}
    assert sharing_of(only_x).shares.before == {"x": Use(3000.0, 0.4)}


def test_that_they_were_slower_this_time_is_tried_again_in_the_next_run(tmp_path):
    run = on_gpus()
    sharing_of(run).shares.know([SharedUse(models=("x", "y"), together=1.6)])
    facts = {"guest": "y", "hosts": "x", "gpu": 0, "because": "less than one after the other"}
    sharing_of(run).shares.costly["x", "y"] = Reason(Why.SLOWER_TOGETHER, facts)
    again = the_next_run(run, tmp_path / "db", sharing("a", "x"), sharing("b", "y"))
    assert sharing_of(again).shares.worth == sharing_of(again).shares.costly == {}


def test_a_gpu_that_lets_one_process_in_is_shared_by_clients_of_mps_only():
    mps = {"HPCSCHED_LANE_MODE": "mps"}
    jobs = [sharing(name, share=0.1, env=env) for name, env in (("a", mps), ("b", {}), ("c", mps))]
    run = on_gpus(*jobs, mode=ComputeMode.EXCLUSIVE_PROCESS)
    assert where(run) == {"a": 0, "b": None, "c": 0}


def test_a_core_that_is_busy_takes_no_more():
    run = on_gpus(sharing("a"), sharing("b"), mib=None, kind="cpu")
    run.runs("a")
    uses(run, "a", 100.0, 0.6)
    train(run, {"a": 10.0}, 20)
    assert where(run)["b"] is None
    (line,) = about_sharing.why_not(run.machine, run.job("b"))
    assert line == "not on CPU slot 0: with it the device would be busy for 120% of the time"


def test_a_fault_costs_the_one_that_came_last():
    run = on_gpus(sharing("a", "x", share=0.5), sharing("b", "y", share=0.5), sharing("c", "y", share=0.5))
    run.runs("a", "b")
    uses(run, "b", 4000.0)
    run.saves("a", 10)
    run.exits("a", 1, detail="CUDA out of memory")
    a, b = run.job("a"), run.job("b")
    assert (a.failures, a.state) == (0, JobState.SUSPENDED), "it does not come back to the same one"
    assert Why.NOT_ITS_FAULT in [note.reason.why for note in a.story]
    assert Why.FAULT_TOGETHER in [note.reason.why for note in b.story]
    assert sharing_of(run).shares.models["y"].memory_mib == MORE * 4000.0
    assert where(run)["b"] == 0 and b.failures == 0


def test_the_one_that_came_last_pays_for_its_own_fault():
    run = on_gpus(sharing("a", "x", share=0.5), sharing("b", "y", share=0.5))
    run.runs("a", "b")
    run.exits("b", 1, detail="CUDA out of memory")
    b = run.job("b")
    assert (b.failures, b.state) == (1, JobState.PENDING)
    assert run.job("a").failures == 0
    (why,) = (why for _, why in why_waiting(sharing_of(run).view(), b))
    assert "there was a fault while y shared a GPU with job 1 (a, x)" in why


def test_other_failures_have_nothing_to_do_with_others():
    run = on_gpus(sharing("a", "x", share=0.5), sharing("b", "y", share=0.5))
    run.runs("a", "b")
    uses(run, "b", 3000.0)
    run.exits("a", 1, detail="ValueError: no such file")
    assert run.job("a").failures == 1
    assert sharing_of(run).shares.costly == {}
    assert sharing_of(run).shares.models["y"].memory_mib == 3000.0
    run.runs("a")
    run.exits("b", 0)
    run.now += 3600
    run.exits("a", 1, detail="CUDA out of memory")
    assert run.job("a").failures == 2, "who has left long ago is not to blame"


def test_what_was_needed_in_vain_grows_to_the_whole_gpu_at_most():
    run = on_gpus(sharing("a", "x", share=0.5), sharing("b", "y", share=0.5))
    run.runs("a", "b")
    uses(run, "b", 8000.0)
    for _ in range(4):
        sharing_of(run).separate(run.job("b"), run.job("a"))
    assert sharing_of(run).shares.need_mib(run.job("b").spec, on_gpu=True) == pytest.approx(RESERVE * TOTAL)


def kinds_of_gpus(*specs):
    run = Driver(gpus=2)
    devices = [replace(one, memory_mib=TOTAL) for one in some_devices(2)]
    devices = [replace(devices[0], kind="NVIDIA A100"), replace(devices[1], kind="NVIDIA V100")]
    run.tell(ev.AgentStarted, wall=1e9, devices=tuple(devices), policy="marble")
    run.submit(*specs)
    return run


def test_one_that_asks_for_a_kind_of_gpu_shares_no_other():
    jobs = [sharing(f"j{i}", share=0.25, gpu_type="a100" if i != 1 else "v100") for i in range(6)]
    assert where(kinds_of_gpus(*jobs)) == {"j0": 0, "j1": 1, "j2": 0, "j3": 0, "j4": 0, "j5": None}


def test_nor_does_it_move_to_one():
    run = kinds_of_gpus(sharing("a", gpu_type="a100"), sharing("b", gpu_type="a100"))
    run.runs("a")
    uses(run, "a", 1000.0)
    train(run, {"a": 10.0}, 12)
    assert where(run) == {"a": 0, "b": 0}
    run.runs("b")
    assert train(run, {"a": 7.0, "b": 7.0}, 60) == []


def test_the_main_memory_that_they_ask_for_is_there():
    run = Driver(gpus=1)
    devices = tuple(replace(one, memory_mib=TOTAL) for one in some_devices(1))
    cores = (HostCores(host="n1", memory_mib=10_000.0),)
    run.tell(ev.AgentStarted, wall=1e9, devices=devices, cores=cores, policy="marble")
    run.submit(*(sharing(name, share=0.2, memory=4000.0) for name in "abcd"))
    assert where(run) == {"a": 0, "b": 0, "c": None, "d": None}


def test_those_that_were_slower_together_do_not_meet_the_other_way_round_either():
    run = on_gpus(sharing("a", "x"), sharing("b", "y"), sharing("a2", "x", submit_at=200.0))
    facts = {"guest": "y", "hosts": "x", "gpu": 0, "because": "less than one after the other"}
    sharing_of(run).shares.costly["x", "y"] = Reason(Why.SLOWER_TOGETHER, facts)
    run.runs("a")
    run.exits("a", 0)
    run.runs("b")
    uses(run, "b", 1000.0)
    run.now = 201.0
    run.ring("arrival", "a2")
    train(run, {"b": 10.0}, 60)
    assert where(run) == {"a": None, "b": 0, "a2": None}


def test_of_other_devices_nothing_is_known():
    run = on_gpus(sharing("a", "x"))
    run.runs("a")
    uses(run, "a", 1000.0)
    run.start_agent(1)
    assert "x" in sharing_of(run).shares.models
    run.tell(ev.AgentStarted, wall=1e9, devices=some_devices(1, kind="cpu"), policy="marble")
    assert sharing_of(run).shares.models == {}


def on_slots(*specs, mib=8000.0, slots=2):
    run = Driver(gpus=slots)
    run.tell(
        ev.AgentStarted,
        wall=1e9,
        devices=some_devices(slots, kind="cpu"),
        cores=(HostCores(host="n1", memory_mib=mib),),
        policy="marble",
    )
    run.submit(*specs)
    return run


def test_a_job_on_a_slot_may_have_what_the_others_leave_and_more_the_next_time():
    run = on_slots(sharing("a", "x"), sharing("b", "y"), slots=1)
    run.runs("a")
    uses(run, "a", 2000.0, 0.2)
    assert run.machine.ledger.room_mib(run.job("a")) is None
    train(run, {"a": 10.0}, 12)
    room = RESERVE * 8000 - GROWTH * 2000
    assert run.machine.ledger.room_mib(run.job("b")) == pytest.approx(room)
    run.runs("b")
    run.exits("b", 137, oom="it used 6G of the 5.3G that it may have", over_limit=True)
    b = run.job("b")
    assert (b.state, b.failures) == (JobState.PENDING, 1)
    assert sharing_of(run).shares.need_mib(b.spec, on_gpu=False) == pytest.approx(RESERVE * 8000)
    assert "; `memory` in its job file says what it needs" in str(b.story[-1].reason)
    train(run, {"a": 10.0}, 30)
    assert where(run)["b"] is None


def test_a_share_of_a_slot_becomes_more_if_that_was_not_enough():
    run = on_slots(sharing("a", "x", share=0.25), slots=1)
    limits = []
    for _ in range(2):
        run.runs("a")
        limits.append(run.machine.ledger.room_mib(run.job("a")))
        run.exits("a", 137, oom="it used 3G of the 1.9G that it may have", over_limit=True)
    assert limits == [pytest.approx(1900.0), pytest.approx(1900.0 * TWICE)]


def test_the_others_shares_are_not_left_to_a_newcomer():
    run = on_slots(sharing("a", "x", share=0.4), sharing("b", "y"), slots=1)
    run.runs("a")
    uses(run, "a", None, 0.1)
    train(run, {"a": 10.0}, 12)
    assert where(run)["b"] == 0
    assert run.machine.ledger.room_mib(run.job("b")) == pytest.approx(0.6 * RESERVE * 8000)


def test_a_busy_core_takes_none_of_whom_nothing_is_known():
    run = on_slots(sharing("a", "x"), sharing("b", "y"), slots=1)
    run.runs("a")
    uses(run, "a", 100.0, 0.6)
    train(run, {"a": 10.0}, 60)
    assert where(run)["b"] is None


def test_it_is_looked_again_only_while_there_is_something_to_find_out():
    run = on_gpus(*(sharing(f"j{i}", share=0.25) for i in range(9)), gpus=2)
    run.runs(*(f"j{i}" for i in range(8)))
    before = len([one for one in run.actions if isinstance(one, SetTimer) and one.key == Sharing.timer])
    train(run, {f"j{i}": 5.0 for i in range(8)}, 600)
    rung = [one for one in run.actions if isinstance(one, SetTimer) and one.key == Sharing.timer]
    assert len(rung) - before < 30


def test_a_limit_that_a_job_has_asked_for_is_its_end():
    run = on_slots(sharing("a", memory=1000.0), slots=1)
    run.runs("a")
    assert run.machine.ledger.room_mib(run.job("a")) == 1000.0
    run.exits("a", 137, oom="it used 2G of the 1000M that it may have", over_limit=True)
    assert run.job("a").state is JobState.OUT_OF_MEMORY


def test_those_that_share_move_to_what_stays_free():
    run = on_gpus(sharing("a", "x", share=0.5), sharing("b", "x", share=0.5), a_job("c", "z", gpus=1), gpus=2)
    assert where(run) == {"a": 0, "b": 1, "c": None}
    run = on_gpus(a_job("c", "z", 1000, gpus=1), sharing("a", "x"), sharing("b", "x"), gpus=2)
    run.runs("c", "a")
    uses(run, "a", 1000.0)
    train(run, {"a": 10.0}, 10)
    assert where(run) == {"c": 0, "a": 1, "b": 1}
    run.runs("b")
    train(run, {"a": 7.0, "b": 7.0}, 20)
    run.exits("c", 0)
    (asked,) = train(run, {"a": 7.0, "b": 7.0}, 40)
    assert isinstance(asked, Suspend) and asked.job_id == run.job("b").id
    run.leaves("b", 300)
    assert where(run) == {"c": None, "a": 1, "b": 0}
    assert run.job("b").role is Role.PRIMARY


def test_when_the_allocation_ends_all_of_them_save():
    run = Driver(gpus=1, deadline=1000.0)
    run.submit(sharing("a", share=0.5), sharing("b", share=0.5))
    run.runs("a", "b")
    run.saves("a", 5)
    run.saves("b", 5)
    run.drain()
    assert run.states() == ["SUSPENDING", "SUSPENDING"]
    run.leaves("b", 7)
    run.leaves("a", 6)
    run.start_agent(1)
    assert where(run) == {"a": 0, "b": 0}


def test_a_lost_gpu_is_lost_for_all_of_them():
    run = on_gpus(sharing("a", share=0.5), sharing("b", share=0.5), gpus=1)
    run.runs("a", "b")
    run.lose(0)
    run.exits("a", 75, 3, 3)
    run.exits("b", 75, 3, 3)
    assert run.states() == ["SUSPENDED", "SUSPENDED"]
    run.find(0)
    assert where(run) == {"a": 0, "b": 0}


def test_background_jobs_are_not_beside_them():
    run = on_gpus(sharing("a", share=0.5), a_job("g", "m", gpus=1, background=True), mib=None)
    run.runs("a")
    assert where(run)["g"] is None
