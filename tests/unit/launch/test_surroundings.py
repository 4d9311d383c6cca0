"""What a job's needs mean for its launches."""

from __future__ import annotations

from pathlib import Path

from hpcsched.core.model import Device
from hpcsched.core.needs import Needs
from hpcsched.launch.base import LaunchPlan
from hpcsched.launch.modules import Loaded
from hpcsched.launch.surroundings import Surroundings, shown
from hpcsched.launch.workers import LocalWorkers

NEEDS = Needs(cpus_per_gpu=2, modules=("gcc",))


def a_plan(kind="NVIDIA A100", *, gpus=2, needs=NEEDS, **rest):
    devices = tuple(Device(index=i, host="n1", kind=kind, handle=str(i)) for i in range(gpus))
    paths = {name: Path("/none") for name in ("cwd", "folder", "output")}
    return LaunchPlan(job_id=1, attempt=1, devices=devices, needs=needs, **paths, **rest)


def cores(surroundings, plan):
    groups = [(device,) for device in plan.devices] if plan.per_rank else [plan.devices]
    return surroundings.cores(plan, groups, lambda devices: frozenset({9}), LocalWorkers())


def test_each_rank_has_cores_of_its_own():
    surroundings = Surroundings({}, range(8))
    assert cores(surroundings, a_plan()) == [{0, 1}, {2, 3}]
    assert cores(surroundings, a_plan(per_rank=False)) == [{4, 5, 6, 7}]
    assert surroundings.with_threads(a_plan(), {"OMP_NUM_THREADS": "8"}) == {"OMP_NUM_THREADS": "2"}
    assert surroundings.with_threads(a_plan(), {}) == {}  # set by the user: it is as it is


def test_threads_that_are_set_go_first_on_gpus():
    told = {"CUDA_VISIBLE_DEVICES": "a", "OMP_NUM_THREADS": "8"}
    for kind, inherited, expected in (
        ("A100", {"OMP_NUM_THREADS": "3"}, {"CUDA_VISIBLE_DEVICES": "a"}),
        ("A100", {"CUDA_VISIBLE_DEVICES": "b"}, told),
        ("cpu", {"OMP_NUM_THREADS": "3"}, told),
    ):
        assert shown(a_plan(kind).devices, told, inherited) == expected


def test_slots_and_jobs_that_say_nothing_keep_what_they_have():
    surroundings = Surroundings({}, range(8))
    for plan in (a_plan("cpu"), a_plan("cores"), a_plan(needs=None), a_plan(needs=Needs(time_s=1.0))):
        assert cores(surroundings, plan) == [{9}, {9}]
        assert surroundings.with_threads(plan, {"OMP_NUM_THREADS": "8"}) == {"OMP_NUM_THREADS": "8"}
    assert cores(Surroundings({}, ()), a_plan()) == [{9}, {9}]


def test_ranks_that_join_have_the_modules_of_their_job():
    surroundings = Surroundings({"A": "1"}, ())
    asked = []

    class Loads:
        def ready(self, names, who, marks):
            return False

        def loaded(self, names, who, marks):
            asked.append(who)
            return Loaded({"CC": "/opt/gcc", "A": None}, b"a warning")

    surroundings._modules = Loads()
    assert surroundings.environ(a_plan(needs=None)) == {"A": "1"}
    joining = a_plan(joins="127.0.0.1:1")
    assert not surroundings.ready_for(joining)
    assert surroundings.environ(a_plan()) == surroundings.environ(joining) == {"CC": "/opt/gcc"}
    assert asked == [(1, 1)]
    assert (surroundings.said(a_plan()), surroundings.said(joining)) == (b"a warning\n", b"")
    assert surroundings.ready_for(joining)
    surroundings.forget(1)
    assert not surroundings.ready_for(joining)
