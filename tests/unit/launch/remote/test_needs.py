"""A job's needs go to its hosts, and that memory ran out there comes back."""

from __future__ import annotations

import msgspec

from hpcsched.core.needs import Needs
from hpcsched.launch.remote import protocol


def test_needs_and_what_became_of_them_are_in_the_messages():
    needs = Needs(cpus_per_gpu=4, memory_mib=1024.5, modules=("cuda/12.4",))
    order = protocol.Launch(
        part=1,
        job_id=1,
        attempt=1,
        argv=("x",),
        env={},
        cwd="/",
        folder="/",
        output="/o",
        devices=(0,),
        per_rank=True,
        first_rank=0,
        world_size=1,
        address="a",
        port=None,
        needs=needs,
    )
    data = msgspec.msgpack.encode((1, 0, order))
    assert protocol.read_to_node(data).body == order
    ended = protocol.Exited(1, 137, oom="it used 2G of the 1G that it may have", over_limit=True)
    assert protocol.read_to_head(msgspec.msgpack.encode((1, 0, ended))).body == ended
