"""GPU time that nobody used, host by host, and how much of it while nothing was left to start."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from hpcsched.core.machine import Machine
from hpcsched.core.model import Device


class HostIdle(msgspec.Struct, frozen=True, kw_only=True):
    """A host: its GPUs, and GPU-hours in which no job had them; `left_over_gpu_hours` of them no job that
    waited could use, as at the end of a set, and `whole_gpu_hours` of these that was so of all of a host that
    could have been given back. `given_back_s`: when the batch system got it back (seconds of the run's
    clock); None: not in the last life. What came after that does not count."""

    gpus: int
    gpu_hours: float
    left_over_gpu_hours: float
    whole_gpu_hours: float
    given_back_s: float | None = None


class Idle(msgspec.Struct, frozen=True, kw_only=True):
    """The same of all hosts together, and by host. `given_back_gpu_hours`: how much time the GPUs of hosts
    that were given back would else have been in the run."""

    gpu_hours: float
    left_over_gpu_hours: float
    given_back_gpu_hours: float
    hosts: dict[str, HostIdle]


def idle_of(machine: Machine) -> Idle:
    """The idle GPU time of a run, until now or until its last job ended. Lost GPUs count as idle.

    It is all from the journal: which GPUs each life had, and which of them attempts had, in whatever role.
    """
    run, end_s = machine.run, last_end_s(machine)
    held = [dict[int, list[tuple[float, float]]]() for _ in run.lives]
    for job in run.jobs.values():
        for attempt in job.attempts:
            stretch = attempt.start_s, end_s if attempt.end_s is None else attempt.end_s
            for number in run.lives_of(*stretch):
                for gpu in attempt.gpus:
                    held[number].setdefault(gpu, []).append(stretch)
    idle_s: dict[str, float] = {}
    gpus: dict[str, int] = {}
    for (devices, there), used in zip(_there(machine, end_s), held, strict=True):
        for device in devices:
            free_s = _free_s(used.get(device.index, []), *there[device.host])
            idle_s[device.host] = idle_s.get(device.host, 0.0) + free_s
        gpus.update(Counter(device.host for device in devices))
    left_over, whole = machine.leftover.gpu_seconds(), machine.leftover.gpu_seconds(whole=True)
    last = {back.host: back.at for back in machine.hosts.gone}
    hosts = {
        host: HostIdle(
            gpus=count,
            gpu_hours=idle_s[host] / 3600,
            left_over_gpu_hours=min(left_over.get(host, 0.0), idle_s[host]) / 3600,
            whole_gpu_hours=min(whole.get(host, 0.0), idle_s[host]) / 3600,
            given_back_s=last.get(host),
        )
        for host, count in gpus.items()
    }
    return Idle(
        gpu_hours=sum(host.gpu_hours for host in hosts.values()),
        left_over_gpu_hours=sum(host.left_over_gpu_hours for host in hosts.values()),
        given_back_gpu_hours=away_gpu_s(machine, end_s) / 3600,
        hosts=hosts,
    )


def last_end_s(machine: Machine) -> float:
    """When the last job of a run that is over ended; else now."""
    run = machine.run
    return max((job.ended_s or 0.0 for job in run.jobs.values()), default=0.0) if run.finished else run.now


def _there(
    machine: Machine, end_s: float
) -> Iterator[tuple[tuple[Device, ...], dict[str, tuple[float, float]]]]:
    """Of each life its devices, and by host from when to when (at the latest `end_s`) it was in the run."""
    begins = [life.at for life in machine.run.lives]
    lives = zip(begins, [*begins[1:], math.inf], machine.hosts.devices, strict=True)
    for from_s, next_s, devices in lives:
        until_s = max(from_s, end_s if next_s == math.inf else next_s)
        came = {one.host: min(one.at, until_s) for one in machine.hosts.joined if from_s <= one.at <= next_s}
        left = [(one.host, one.left) for one in machine.hosts.joined if one.left is not None]
        left += [(one.host, one.at) for one in machine.hosts.given_back]
        gone = {host: at for host, at in left if from_s <= at <= until_s}
        hosts = dict.fromkeys(device.host for device in devices)
        yield devices, {host: (came.get(host, from_s), gone.get(host, until_s)) for host in hosts}


def there_gpu_s(machine: Machine, end_s: float) -> dict[str, float]:
    """By host GPU-seconds until `end_s` for which its GPUs were in the run, while an agent lived."""
    found: dict[str, float] = {}
    for devices, there in _there(machine, end_s):
        for device in devices:
            from_s, until_s = (min(at, end_s) for at in there[device.host])
            found[device.host] = found.get(device.host, 0.0) + until_s - from_s
    return found


def most_gpus(machine: Machine) -> int:
    """The most GPUs that were in the run at the same time, before its last job ended."""
    changes: list[tuple[float, int]] = []
    for devices, there in _there(machine, last_end_s(machine)):
        for device in devices:
            from_s, until_s = there[device.host]
            changes += [(from_s, 1), (until_s, -1)]
    most = now = 0
    for _, change in sorted(changes):  # those that go come first
        now += change
        most = max(most, now)
    return most


def away_gpu_s(machine: Machine, end_s: float) -> float:
    """GPU-seconds, of those until `end_s`, for which GPUs were not in the run as their hosts were given back:
    each until the end of the life in which that was."""
    begins = [life.at for life in machine.run.lives]
    total = 0.0
    for back in machine.hosts.given_back:
        later = bisect_right(begins, back.at)
        total += len(back.gpus) * max(0.0, (begins[later] if later < len(begins) else end_s) - back.at)
    return total


def _free_s(held: Sequence[tuple[float, float]], from_s: float, until_s: float) -> float:
    """Seconds of [from_s, until_s] that are in none of these stretches."""
    idle_s, reached = 0.0, from_s
    for start_s, end_s in [*sorted(held), (until_s, until_s)]:
        idle_s += max(0.0, min(start_s, until_s) - reached)
        reached = max(reached, end_s)
    return idle_s
