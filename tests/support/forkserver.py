"""Processes of tests, forked from one that has loaded torch: seconds to load, milliseconds to fork."""

from __future__ import annotations

import multiprocessing

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.testing",
        "hpcsched.worker.checkpoint.shared_memory",
        "hpcsched.worker.checkpoint.sharded",
        "hpcsched.worker.burst.strategy",
        "hpcsched.worker.ddp.strategy",
    ]
)
