"""Small scenes for the recorded journals, of what no other test tells a machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from random import Random

from impossible import WAYS, any_policy

from hpcsched.contract.exits import SUSPENDED
from hpcsched.core import events as ev
from hpcsched.core.machine import Machine
from hpcsched.core.model import JobSpec, Kind, PythonEnvironment, Training
from hpcsched.errors import InvalidTransition
from hpcsched.testing.builders import Driver, a_core_job, a_job, a_profile, a_program

COMMANDS = (
    "python train.py",
    "sh -c train",
    "torchrun train.py",
    "torchrun --nproc-per-node {gpus} train.py",
    "torchrun --nproc-per-node 2 train.py",
    "python -m torch.distributed.run train.py",
    "python3.11 -u -m torch.distributed.launch --nproc_per_node={world_size} train.py",
    "python -m mymodels.train",
    "python -u",
    "accelerate launch train.py",
    "accelerate config",
    "/opt/bin/deepspeed train.py",
    "deepspeed --include localhost:0 train.py",
    "deepspeed --num_gpus {gpus} train.py",
    "mpirun -n 2 train",
    "mpiexec.hydra -n ${gpus} train",
    "env A=1 B=2 srun train",
    "srun -n {gpus} train",
    "./train.sh --lr 0.1",
)


def a_command(name: str, command: str, **rest: object) -> JobSpec:
    """A job that runs a program, as a job file gives it."""
    rest = {"model": name, "gpus_min": 1, "steps": 100, "processes": "auto", "workdir": "/srv", **rest}
    return JobSpec(name=name, kind=Kind.COMMAND, command=tuple(command.split()), **rest)  # type: ignore[arg-type]


def programs(random: Random) -> None:
    """Commands of every kind, and what is known of how parallel they are."""
    for policy in ("marble", "equal", "exclusive"):
        chosen = random.sample(COMMANDS, 6)
        specs = []
        for number, command in enumerate(chosen):
            rest: dict[str, object] = {"processes": random.choice(["auto", "auto", "per-gpu", 1, 2])}
            if random.random() < 0.3:
                rest |= {"gpus_min": 2, "gpus_max": 2}
            if random.random() < 0.3:
                rest["args"] = {"n": ["--gpus", "{gpus}"], "more": {"x": "{world_size}", "y": 3}}
            if random.random() < 0.3:
                rest["env"] = {"N": "{gpus}"}
            specs.append(a_command(f"j{number}", command, **rest))
        known = [a_profile(f"j{i}", [1.0, 1.9, 2.5, 3.0]) for i in range(2)]
        driver = Driver(*specs, gpus=4, policy=policy, profiles=known)
        driver.tell(ev.ProfilesLoaded, profiles=tuple(known), parallel=(("j3", chosen[3].split()[0]),))
        until_over(driver, random)


def until_over(driver: Driver, random: Random, rounds: int = 60) -> None:
    """Jobs become ready, some parallel; they report, save, fail, leave and end."""
    for _ in range(rounds):
        driver.now += random.choice([0.5, 3.0, 11.0])
        active = list(driver.machine.run.active.values())
        if not active:
            return
        job = random.choice(active)
        what = random.random()
        if not job.processes:
            driver.tell(ev.WorkersSpawned, job.id, processes=((100, 1),), host=random.choice(["", "n1"]))
        elif not job.ready and what < 0.7:
            parallel = random.random() < 0.3
            driver.tell(
                ev.WorkersReady, job.id, in_place=random.random() < 0.3, parallel=parallel, took_s=2.0
            )
        elif job.becoming:
            if what < 0.6:
                driver.resized(job.id, job.step + 1, stopped_s=0.2, built_s=4.0)
            else:
                driver.stays(job.id, refused=what < 0.8)
        elif job.state == "SUSPENDING":
            driver.exits(job.id, SUSPENDED, job.step + 1, job.step + 1, took_s=1.5, held=what < 0.3)
        elif what < 0.4:
            driver.reports(job.id, job.step + 3, 1.5)
        elif what < 0.6:
            driver.saves(job.id, job.step)
        elif what < 0.7:
            driver.exits(job.id, 3, job.step, job.saved_step, detail="no data", lasted_s=what * 20)
        elif what < 0.8:
            driver.exits(job.id, 0, job.spec.steps, job.spec.steps)
        else:
            driver.tell(ev.WorkersApart, job.id, processes=2, seconds=60.0, met=what < 0.9)


def definitions(random: Random) -> None:
    """Jobs are defined otherwise, in each of the ways there are, waiting or over."""
    base = a_command("j", "python train.py", model="m", training=None)
    trainer = replace(base, kind=Kind.TRAINER, command=(), trainer="models:One", processes="per-gpu")
    venv = PythonEnvironment(kind="venv", name="/opt/venv")
    conda = PythonEnvironment(kind="conda", name="torch")
    others = [
        replace(base, args={"lr": 0.1}),
        replace(base, kind=Kind.REPLAY, command=()),
        replace(base, processes=2),
        replace(base, processes="one"),
        replace(base, processes=1),
        replace(base, workdir="/srv/below"),
        replace(base, gpus_min=2, gpus_max=3),
        replace(trainer, training=Training(epochs=3.0)),
        replace(trainer, training=Training(continues="other"), after=("other",)),
        replace(trainer, training=Training(continues="other"), after=("other", "third")),
        replace(trainer, environment=venv),
        replace(trainer, environment=conda),
        replace(trainer, strategy={"kind": "packed", "most": 2}),
        replace(base, submit_at=1e6),
        replace(base, background=True),
        replace(a_program("j", 1.0), model="m"),
    ]
    driver = Driver(a_command("blocker", "sleep 9"), gpus=1, cores=(0, 1))
    driver.submit(a_command("other", "true"), a_command("third", "true"), random.choice([base, trainer]))
    if random.random() < 0.5:
        driver.cancel("j")
    for _ in range(6):
        driver.now += 1.0
        new = random.choice(others)
        again = ("j",) if driver.job("j").state.final and random.random() < 0.5 else ()
        kept = {driver.job("other").id: ("command",)} if random.random() < 0.3 else {}
        updated = {} if driver.job("j").state.active else {driver.job("j").id: new}
        ids = tuple(driver.job(name).id for name in again)
        driver.tell(ev.DefinitionsCompared, updated=updated, kept=kept, again=ids if updated else ())
        if random.random() < 0.2:
            driver.hold("j")
        elif random.random() < 0.2:
            driver.release("j")
    until_over(driver, random, 30)


def options(random: Random) -> None:
    """Policies whose options are words, as the command line gives them."""
    driver = Driver(gpus=2)
    jobs = [a_job(f"j{i}", f"m{i % 2}") for i in range(4)]
    driver.submit(*jobs)
    ways = [
        ("planner", {"eps": "inf", "budget": "20", "seed": "3", "goal": "jct"}),
        ("planner", {"eps": 0.5, "budget": 20.0, "goal": "makespan"}),
        ("optimus", {"interval": "30"}),
        ("equal", {"resize": "pays"}),
        ("marble", {"promote": "always"}),
    ]
    for policy, given in random.sample(ways, 3):
        driver._policy, driver._options = policy, given
        driver.start_agent(random.choice([2, 3, 4]), deadline=driver.now + 500)
        driver.tell(
            ev.ProfilesLoaded, profiles=(a_profile("m0", [1, 1.9, 2.6, 3]), a_profile("m1", [1, 1.2]))
        )
        until_over(driver, random, 25)


def on_cores(random: Random) -> None:
    """Trainings on CPU cores whose measurements lead their search anywhere, on cores and on slots."""
    some = {"workers": 2}, {"servers": 1}, {"start": 0.9}, {"scale_up": 1.0}
    rules: list[dict[str, object]] = [{}, {}, {}, *some]
    slots = random.random() < 0.4
    driver = Driver(
        gpus=2 if slots else 0,
        kind="cpu" if slots else "test",
        hosts=random.choice([1, 1, 2]),
        cores=range(2, 2 + random.choice([4, 8, 16])),
        deadline=random.choice([None, None, 4000.0]),
    )
    for name in ("a", "b", "c")[: random.randint(1, 3)]:
        budget = random.choice([1.0, 3.0, 6.0, 12.0])
        driver.submit(a_core_job(name, budget, **random.choice(rules)))  # type: ignore[arg-type]
    base = random.uniform(1, 5)
    bent = random.choice([0.2, 0.6, 1.0])
    for _ in range(random.choice([40, 90])):
        driver.now += random.choice([1.0, 10.0, 60.0])
        what = random.random()
        if what < 0.02:
            driver.submit(a_program(f"p{len(driver.machine.run.jobs)}", random.choice([1.0, 2.0])))
        elif what < 0.03 and slots:
            driver.submit(a_job(f"g{len(driver.machine.run.jobs)}", gpus=1))
        elif what < 0.035:
            driver.tell(ev.CoresLost, host="n1", why="no answer")
        active = list(driver.machine.run.active.values())
        if not active:
            continue
        job = random.choice(active)
        if not job.ready:
            driver.runs(job.id, in_place=random.random() < 0.8)
        elif job.becoming:
            if random.random() < 0.85:
                driver.resized(job.id, job.step + 1)
            else:
                driver.stays(job.id)
        elif job.state == "SUSPENDING":
            driver.leaves(job.id, job.step)
        elif job.current.seats and random.random() < 0.95:
            cores = sum(seat.share for seat in job.current.seats)
            rate = base * cores**bent * random.choice([1.0, 1.0, 1.0, 1.02, 0.9, 0.5])
            shares = [random.choice([1.0, 0.95, 0.8, 0.4]) for _ in job.current.seats]
            driver.uses(job.id, rate, shares, full=random.choice([0.0, 0.0, 0.4, 0.95]))
        elif random.random() < 0.2:
            driver.exits(job.id, 1, detail="", lasted_s=50.0)


def packs(random: Random) -> None:
    """Trainings of several kinds on GPUs whose memory holds some of them."""
    policy = random.choice(["marble", "equal", "exclusive", "planner"])
    driver = Driver(gpus=random.choice([1, 2]), policy=policy)
    shared = {"steps": 500, "trainer": "models:One", "gpus": 1}
    profiles = tuple(
        replace(
            a_profile(model, [1.0]),
            packed_s=random.choice([None, {1: 1.0, 2: 1.1, 3: 1.3}, {1: 1.0, 2: 2.5}]),
            packed_mib=random.choice([None, {1: 300.0, 2: 500.0}]),
            memory_mib=random.choice([None, {1: 400.0}]),
        )
        for model in ("m", "k")
    )
    devices = tuple(replace(d, memory_mib=1000.0) for d in driver.machine.ledger.devices.values())
    driver.handle(replace(driver.events[0], devices=devices))  # type: ignore[call-arg]
    driver.tell(ev.ProfilesLoaded, profiles=profiles)
    for i in range(random.randint(3, 6)):
        driver.now += 1.0
        strategy = {"kind": "packed", **random.choice([{}, {"most": 2}, {"pack": "p"}])}
        if random.random() < 0.15:
            driver.submit(a_job(f"b{i}", "m", kind=Kind.TRAINER, background=True, **shared))
        else:
            driver.submit(a_job(f"j{i}", random.choice("mk"), kind=Kind.TRAINER, strategy=strategy, **shared))
        for job in list(driver.machine.run.active.values()):
            if not job.ready:
                driver.runs(job.id)
        if random.random() < 0.2 and driver.machine.run.active:
            job = random.choice(list(driver.machine.run.active.values()))
            driver.exits(job.id, SUSPENDED, job.step + 5, job.step + 5)
        elif random.random() < 0.1:
            driver.lose(0)
    until_over(driver, random, 40)


def promotions(random: Random) -> None:
    """A secondary could be promoted, and it is uncertain whether that is worth it before all has to end."""
    deadline = random.choice([None, 40.0, 80.0, 150.0, 400.0])
    specs = [a_job("a", "m", steps=random.choice([5, 60]), gpus=random.choice([1, 2]))]
    specs.append(a_job("b", "m", steps=random.choice([None, 40, 400, 4000])))
    driver = Driver(
        *specs,
        gpus=3,
        profiles=[a_profile("m", [1.0, 1.8, 2.5, 3.0], start_s=3.0, suspend_s=random.choice([1.0, 30.0]))],
        deadline=deadline,
        reserve_s=5.0,
        promote=random.choice(["pays", "pays", "always", "never"]),
    )
    ready = random.random() < 0.8
    driver.runs("a", *["b"] * ready, in_place=random.random() < 0.3)
    for _ in range(random.randint(0, 3)):
        driver.now += random.choice([1.0, 10.0, 20.0])
        for job in list(driver.machine.run.active.values()):
            driver.reports(job.id, job.step + 2, 1.0)
    driver.exits("a", 0, 5, 5)
    until_over(driver, random, 15)


def refusals(random: Random) -> None:
    """A policy asks for what cannot be."""
    what = random.choice(WAYS)
    driver = Driver(gpus=0)
    driver.machine = Machine(any_policy)
    driver._policy, driver._options = "impossible", {"what": what}
    driver._cores = (0, 1, 2, 3)
    packed = {"kind": Kind.TRAINER, "trainer": "models:One", "strategy": {"kind": "packed"}, "gpus": 1}
    jobs = {
        "a": a_job("a", "m", gpus=1),
        "b": a_job("b", "m", background=True),
        "c": a_job("c", "m", **packed),
        "d": a_job("d", "m", **packed),
        "e": a_core_job("e", 3.0),
        "f": a_job("f", "m", **packed),
    }
    kinds = "ab" if what in WAYS[:8] else "cdf" if what in WAYS[8:10] else "e"
    for step in ("agent", *kinds, "ready", "ready", "a", "end"):
        driver.now += 5.0
        with suppress(InvalidTransition):
            if step == "agent":
                driver.start_agent(random.choice([1, 2]))
            elif step in jobs and step not in driver.machine.run.by_name:
                driver.submit(jobs[step])
            for job in list(driver.machine.run.active.values()) if step == "ready" else ():
                driver.runs(job.id)
            for job in list(driver.machine.run.active.values()) if step == "end" else ():
                driver.exits(job.id, 0, 100, 100)


SCENES = {
    "programs": 12,
    "definitions": 30,
    "options": 6,
    "on_cores": 150,
    "packs": 40,
    "promotions": 80,
    "refusals": 90,
}
"""By scene, the number of different ones that are played."""


def play_all(flush: Callable[[str], None]) -> None:
    """Play all of them, `flush` what each left."""
    for name, count in SCENES.items():
        for seed in range(count):
            try:
                globals()[name](Random(seed))
            except Exception as error:
                sys.stdout.write(f"{name} {seed} ends early: {type(error).__name__} {str(error)[:200]}\n")
            flush(f"scenes/{name}")
