"""What must hold after every event; checked in every test."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hpcsched.core.jobs import Job
from hpcsched.core.machine import Machine
from hpcsched.core.mechanisms.background.mechanism import Background
from hpcsched.core.mechanisms.cpu.cores import fits, total
from hpcsched.core.mechanisms.cpu.mechanism import Cpu
from hpcsched.core.mechanisms.packing.mechanism import Packing
from hpcsched.core.mechanisms.packing.packs import key_of
from hpcsched.core.mechanisms.sharing.mechanism import Sharing
from hpcsched.core.mechanisms.sharing.shares import shares_a_gpu
from hpcsched.core.model import Ended, JobState, Role
from hpcsched.core.reasons import Why


def check(machine: Machine) -> None:
    """Raise AssertionError naming the first invariant that does not hold."""
    held: dict[int, int] = {}
    _check_lanes(machine)
    _check_packs(machine)
    _check_shares(machine)
    _check_cores(machine)
    _check_arrays(machine)
    riders = machine.mechanism(Packing).packs.gpu_of | machine.mechanism(Sharing).shares.gpu_of
    others = riders.keys() | machine.mechanism(Cpu).cores.of.keys()
    ways = {job.id: machine.ledger.holds_by(job) for job in machine.run.active.values()}
    assert [i for i, way in ways.items() if not way.foreground] == [
        job.id for job in machine.run.active.values() if job.spec.background
    ], "jobs in the background hold by other mechanisms"
    foreground = [job for job in machine.run.active.values() if ways[job.id].listed]
    assert not others & {job.id for job in foreground}, "a job holds by two mechanisms"
    in_order = sorted(foreground, key=lambda job: (job.submit_s, job.id))
    assert machine.run.running == in_order, "the jobs that run are not in order"
    assert machine.run.secondaries == [job for job in in_order if job.role is Role.SECONDARY], "secondaries"
    for job in machine.run.active.values():
        assert job.state.active, f"job {job.id} is active in state {job.state}"
        assert bool(job.gpus) == ways[job.id].on_gpus, f"job {job.id} runs without a lease"
        moves = job.becoming is not None and job.target is job.becoming and job.state is JobState.RUNNING
        goes_on = job.becoming.gpus if moves and job.becoming else job.current.gpus
        leaves = bool(job.wanted) or (bool(machine.hosts.closing) and job.state is JobState.SUSPENDING)
        assert set(goes_on) <= set(machine.ledger.devices) or leaves, f"job {job.id} runs on a lost GPU"
        called_off = leaves or (job.resizing and (not job.target or bool(machine.hosts.closing)))
        assert set(job.gpus) <= set(machine.ledger.devices) or called_off, f"job {job.id} holds a lost GPU"
        assert set(job.current.gpus) <= set(job.gpus), f"job {job.id} runs on GPUs it does not hold"
        assert job.current.end_s is None, f"job {job.id} is active, its attempt is over"
        delay = machine.waiting.delays.get(job.id)
        assert delay is None or delay.until <= job.current.start_s, f"job {job.id} was to wait"
        assert not job.unmet, f"job {job.id} runs before what it waits for"
        if job.becoming:
            assert job.ready, f"job {job.id} is resized before it is ready"
        if job.becoming and job.gpus:
            union = {*job.current.gpus, *job.becoming.gpus}
            assert set(job.gpus) == union, f"job {job.id} is resized and holds {job.gpus}"
            first = [gpu for gpu in job.current.gpus if gpu in job.becoming.gpus]
            stay = list(job.becoming.gpus[: len(first)])
            assert stay == first and first[0] == job.current.gpus[0], f"job {job.id}: its ranks change places"
        for gpu in () if job.spec.background or job.id in riders else job.gpus:
            assert gpu not in held, f"GPU {gpu} leased to jobs {held[gpu]} and {job.id}"
            held[gpu] = job.id
    assert held == machine.own.holder, "leases and holders differ"
    idle = {gpu for left in machine.leftover.idle() for gpu in left.gpus}
    assert idle <= set(machine.ledger.free), "what is left over is not free"
    assert not machine.ledger.free & set(held), "a leased GPU is free"
    assert not machine.ledger.lost.keys() & machine.ledger.devices.keys(), "a lost GPU is used"
    hosts = {device.host: 0 for device in machine.ledger.devices.values()}
    for kept, counted in (
        (machine.ledger.free_by_host(), machine.ledger.free),
        (machine.ledger.capacity(), machine.ledger.devices),
    ):
        assert kept.by_host() == {**hosts, **machine.ledger.by_host(counted)}, (
            "the GPUs of a host are counted wrong"
        )
    given = set(held) | machine.mechanism(Cpu).cores.loans.keys()
    assert not machine.ledger.free & given, "a GPU that somebody has is free"
    assert machine.ledger.free | (given & set(machine.ledger.devices)) == set(machine.ledger.devices), (
        "a GPU is nobody's"
    )
    for job in machine.run.jobs.values():
        assert job.state.active == (job.id in machine.run.active), f"job {job.id}: {job.state}"
        if not job.state.active:
            assert not job.gpus, f"job {job.id} is {job.state} and holds GPUs"
            assert not job.wanted, f"job {job.id} is {job.state} and is to {job.wanted}"
            assert not job.resizing, f"job {job.id} is {job.state} and is resized"
            assert all(a.end_s is not None for a in job.attempts), f"job {job.id}: an attempt never ended"
        if job.state is JobState.COMPLETED and job.reports and job.spec.steps is not None:
            done = sum((a.to_step or 0) - a.from_step + a.again for a in job.attempts)
            assert done == job.step + job.repeated, f"job {job.id}: {done} steps done, {job.step} counted"
        for before, after in pairwise(job.attempts):
            assert after.number == before.number + 1, f"job {job.id}: attempt {before.number} has no next"
            gap = (before.end_s, before.to_step) != (after.start_s, after.from_step)
            assert before.ended is not Ended.RESIZED or not gap, f"job {job.id}: a gap after a resize"
            assert after.in_place == (before.ended is Ended.RESIZED), f"job {job.id}: {after} after {before}"
        for gpus in (job.current.gpus, *([job.target.gpus] if job.target else [])) if job.gpus else ():
            counts = Counter(
                machine.ledger.devices[gpu].host for gpu in gpus if gpu in machine.ledger.devices
            )
            whole = set(gpus) <= machine.ledger.devices.keys()
            even = len(counts) == job.spec.nodes and len(gpus) % job.spec.nodes == 0
            even &= len(set(counts.values())) == 1 or (job.spec.uneven and machine.ledger.spreads)
            assert even or not whole, f"job {job.id} has {dict(counts)} GPUs"
            gpu_type = machine.ledger.type_of(gpus)
            one = job.spec.mixes_types or gpu_type in machine.ledger.types
            assert one, f"job {job.id} has GPUs of several types: {gpu_type}"
        if job.target:
            resizes = job.state is JobState.RUNNING and job.target is job.becoming and not job.wanted
            changes = job.state is JobState.SUSPENDING or resizes
            assert changes, f"job {job.id} has a target while {job.state}"
            assert set(job.target.gpus) <= set(job.gpus), f"job {job.id}'s larger lease is not free"
        waits = job.state in (JobState.PENDING, JobState.SUSPENDED) and not job.held and not job.unmet
        waiting = machine.ledger.waits_by(job)
        for mechanism in machine.ledger.mechanisms:
            assert mechanism is waiting or job.id not in mechanism.queue, f"job {job.id}: wrong queue"
        late = job.id in machine.waiting.late
        assert waiting.foreground or not late, f"job {job.id} of the background is late"
        in_line = job.id in waiting.queue or late
        delay = machine.waiting.delays.get(job.id)
        due_s = max(job.submit_s, delay.until if delay else 0.0)
        outside = machine.waiting.arrays.outside(job)
        assert in_line == (waits and due_s <= machine.run.now and not outside), f"job {job.id} queue"
        assert not (job.id in waiting.queue and late), f"job {job.id} waits twice"
    policy = machine.decisions.policy
    if policy and policy.work_conserving and machine.decides and machine.ledger.free:
        fits, meets = machine.ledger.free_by_host().fits, machine.rooms.meets_now()
        idles = machine.own.queue.any_fits(fits, meets)
        if machine.hosts.some_end:  # there may be too little time there
            queued = [job for job in machine.run.jobs.values() if job.id in machine.own.queue]
            idles = any(map(machine.rooms.starts_now, queued))
        assert not idles, "a GPU idles while a job that fits waits"
    assert machine.run.unfinished == sum(not j.state.final for j in machine.run.jobs.values())


def _check_arrays(machine: Machine) -> None:
    """No more of an array are under way than may, and none waits where there is a place."""
    arrays: dict[str, list[Job]] = {}
    for job in machine.run.jobs.values():
        if job.spec.array and job.spec.array.at_once is not None:
            arrays.setdefault(job.spec.array.name, []).append(job)
    for name, jobs in arrays.items():
        most = max(job.spec.array.at_once or 0 for job in jobs if job.spec.array)
        under_way = sum(job.state.active for job in jobs)
        assert under_way <= most, f"{under_way} of array {name} run, {most} may"
        if outside := [job for job in jobs if machine.waiting.arrays.outside(job)]:
            # Who has begun has a place, whatever it waits for.
            inside = sum(machine.waiting.arrays.inside(job) for job in jobs)
            most = machine.waiting.arrays.limit_of(outside[0])
            assert inside >= most, f"jobs of array {name} wait for a place, and {inside} of {most} are taken"


def _check_cores(machine: Machine) -> None:
    """No core is given away twice, and no slot is on loan without need."""
    cores = machine.mechanism(Cpu).cores
    for host in {allotment.host for allotment in cores.of.values()}:
        stay = [
            i for i in cores.of if i in machine.run.active and machine.run.active[i].wanted in ("", "suspend")
        ]
        taken, there = total(cores.of[i].held for i in stay if cores.of[i].host == host), cores.there(host)
        assert fits(taken, there), f"of {host} {taken} is given away, there is {there}"
    for gpu, (host, lent) in cores.loans.items():
        assert gpu not in machine.own.holder, (
            f"slot {gpu} is on loan and held by job {machine.own.holder[gpu]}"
        )
        assert not fits(lent, cores.free(host)), f"slot {gpu} is on loan for nobody"
    for job_id, allotment in cores.of.items():
        job = machine.run.jobs[job_id]
        if not job.state.active:
            assert not allotment.held and not allotment.seats, f"job {job_id} holds cores while {job.state}"
            continue
        assert allotment.seats == job.current.seats, f"job {job_id} has other seats than its attempt"
        alone = len(job.current.seats) == 1
        assert alone or job.current.seats[0].server, f"job {job_id}: rank 0 is no server"
        needs = [(job.current.seats, allotment.grant)]
        if job.becoming and allotment.next_grant is not None:
            needs.append((job.becoming.seats, allotment.next_grant))
        for seats, grant in needs:
            wanted = round(100 * sum(seat.share for seat in seats))
            assert wanted <= sum(grant.values()), f"job {job_id} has {grant} for {wanted}"
            assert all(set(seat.cores) <= grant.keys() for seat in seats), f"job {job_id} is on others' cores"
        assert sum(allotment.held.values()) <= 200 * (job.spec.cpus or 0), f"job {job_id} is over its budget"


def _check_packs(machine: Machine) -> None:
    """Who rides does so with a job that holds the GPU and belongs to the same pack, and was not sent away."""
    packs = machine.mechanism(Packing).packs
    assert packs.gpu_of == {i: gpu for gpu, riders in packs.riders.items() for i in riders}, "riders"
    for job_id, gpu in packs.gpu_of.items():
        job, holder = machine.run.jobs[job_id], machine.run.jobs[machine.own.holder[gpu]]
        assert job.state.active and job.gpus == (gpu,), f"job {job_id} rides nowhere"
        assert job.role is Role.PACKED, f"job {job_id} rides as {job.role}"
        assert key_of(job.spec) == key_of(holder.spec), f"jobs {job_id} and {holder.id} are in one pack"
        assert not {job_id, holder.id} & packs.alone.keys(), f"a job that is to be alone is packed on {gpu}"
        assert gpu not in machine.mechanism(Background).lanes.holder or machine.deadline.draining, (
            f"a guest beside the pack on GPU {gpu}"
        )


def _check_shares(machine: Machine) -> None:
    """Who shares a GPU does so with a job that holds it and is content with a part too; no shares of it are
    asked for twice."""
    sharing = machine.mechanism(Sharing)
    shares = sharing.shares
    assert shares.gpu_of == {i: gpu for gpu, riders in shares.riders.items() for i in riders}, "sharers"
    for job_id, gpu in shares.gpu_of.items():
        job, members = machine.run.jobs[job_id], sharing.members(gpu)
        assert job.state.active and job.gpus == (gpu,), f"job {job_id} shares no GPU"
        assert job.role is Role.SHARED, f"job {job_id} shares a GPU as {job.role}"
        assert len(members) > 1 and all(shares_a_gpu(one.spec) for one in members), f"GPU {gpu} is not shared"
        asked = sum((one.spec.needs.share or 0.0) for one in members if one.spec.needs)
        assert asked <= 1 + 1e-9, f"of GPU {gpu} {asked} is asked for"
        assert gpu not in machine.mechanism(Background).lanes.holder or machine.deadline.draining, (
            f"a guest beside those who share GPU {gpu}"
        )


def _check_lanes(machine: Machine) -> None:
    """One lease on each background lane, and none of them idle without need."""
    lanes, guests = (
        machine.mechanism(Background).lanes,
        [job for job in machine.run.active.values() if job.spec.background],
    )
    held = {gpu: job.id for job in guests for gpu in job.gpus}
    assert len(held) == len(guests), "a background lane is leased twice, or a guest has none or two"
    assert held == lanes.holder, "background lanes and their holders differ"
    assert {i: guest.gpu for i, guest in lanes.guests.items()} == {i: gpu for gpu, i in held.items()}, (
        "guests"
    )
    for job in guests:
        assert job.role is Role.BACKGROUND, f"job {job.id} is {job.role}"
        assert job.target is None and not job.resizing, f"job {job.id} is to be resized"
        assert set(job.gpus) <= set(machine.ledger.devices) or job.wanted, (
            f"job {job.id} is beside a lost GPU"
        )
    for job in machine.run.running:
        assert job.role is not Role.BACKGROUND, f"job {job.id} is in the background"
        for guest in lanes.beside(job):
            other = machine.run.jobs[guest.job_id]
            leaving = other.state is JobState.SUSPENDING or other.wanted not in ("", "suspend")
            barred = other.id in lanes.quarantined or not job.spec.max_foreground_slowdown
            barred = barred or (job.spec.model, other.spec.model) in lanes.costly
            assert leaving or not barred or machine.deadline.draining, (
                f"job {other.id} shares a GPU with {job.id}"
            )
    assert lanes.speeds.keys() <= machine.run.active.keys(), "a speed of a job that does not run is kept"
    idle = machine.ledger.devices.keys() - machine.own.holder.keys() - lanes.holder.keys()
    if idle and machine.decisions.policy and machine.decides:
        waiting = (machine.run.jobs[i] for i in machine.mechanism(Background).queue.walk())
        late = (
            reason is not None and reason.why is Why.WALLTIME_TOO_SHORT
            for reason in map(machine.waiting_reason, waiting)
        )
        assert all(late), "a GPU idles while a background job waits"
