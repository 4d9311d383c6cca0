"""Placeholders of a command where hosts have unequally many devices."""

from __future__ import annotations

from pathlib import Path

from hpcsched.core.model import Device
from hpcsched.launch.base import LaunchPlan
from hpcsched.launch.placeholders import fill_placeholders
from hpcsched.launch.remote.workers import part_launches, plan_from_message


class Somewhere:
    """A rendezvous whose port is not to be asked for."""

    address = "n1"

    @property
    def port(self) -> int:
        raise AssertionError("nobody needs it")


def test_each_host_is_told_its_own_devices_and_all_ranks() -> None:
    devices = tuple(
        Device(index=i, host=host, kind="cpu", handle=str(i)) for i, host in enumerate(["a", "b", "b", "b"])
    )
    plan = LaunchPlan(
        job_id=1,
        attempt=1,
        argv=("train", "{gpus} of {world_size}"),
        cwd=Path("/"),
        folder=Path("/"),
        output=Path("/out"),
        devices=devices,
    )
    orders = part_launches(plan, [("a", [0]), ("b", [0, 1, 2])], first_host="a", address="n1", first_part=1)
    assert [(order.first_rank, order.world_size, order.node_rank) for order in orders] == [
        (0, 4, 0),
        (1, 4, 1),
    ]
    told = []
    for order, host in zip(orders, "ab", strict=True):
        its, placement = plan_from_message(order, [d for d in devices if d.host == host], host)
        (_, word), _ = fill_placeholders(its, placement, Somewhere())
        told.append(word)
    assert told == ["1 of 4", "3 of 4"]
