"""`python -m hpcsched.worker.vsw`: what the workers of the trainer that the environment names take here.

The environment has the request as JSON (see `VswProbeRequest`). After each point the file `result` is
replaced by {"profile": all that is known so far, "global_batch": the trainer's own}; after sums over several
ranks by {"line": {"per_byte_s": ..., "latency_s": ...}}.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from hpcsched.compat import dataclass
from hpcsched.contract import variables
from hpcsched.contract.environment import Reader
from hpcsched.errors import ConfigError, HpcschedError
from hpcsched.worker.load import load_trainer
from hpcsched.worker.process.contract import JobEnv, say, write_atomically
from hpcsched.worker.process.startup import fewer_collections, run_to_the_end

if TYPE_CHECKING:
    import torch

    from hpcsched.worker.session.trainer import Parts
    from hpcsched.worker.vsw.probe import VswTimes

SIGN_S = 0.5
"""Between two signs of life."""

LINES = 9
"""So often are sums of all lengths timed: one slow message bends a line."""


@dataclass(frozen=True, kw_only=True)
class VswProbeRequest:
    """What to measure, and the file for what is found.

    Of workers: local batches in a range (None: from 1 to the trainer's global batch), at most `at_once`
    (None: as many as gain something), each point for `seconds`; with room for the two `halves` of a gradient.
    `model`, `device` and `note` go into the profile. Or, by several ranks, sums of up to `sum_bytes`.
    """

    result: str
    model: str = ""
    device: str = ""
    note: str = ""
    local_batch: list[int] | None = None
    at_once: int | None = None
    seconds: float = 1.0
    halves: bool = False
    sum_bytes: int = 0


def main() -> int:
    """Measure; returns the exit code. Errors in the user's own code keep their traceback."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        env, asked = JobEnv.from_environ(), Reader(os.environ).table(variables.VSW)
        if env is None or not asked:
            raise ConfigError(
                where="environment",
                key=variables.VSW,
                got="not set",
                accepted="a start by `hpcsched profile vsw`, which sets it",
            )
        request = VswProbeRequest(**asked)
        with fewer_collections():
            import torch

            from hpcsched.worker.ranks.process_group import own_device
        device = own_device(env)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if request.sum_bytes:
            _sums(env, request, device)
        else:
            _workers(env, request, device)
    except HpcschedError as error:
        say(str(error))
        return error.exit_code
    return 0


def _sums(env: JobEnv, request: VswProbeRequest, device: torch.device) -> None:
    from hpcsched.worker.ranks.process_group import Peers
    from hpcsched.worker.vsw.allreduce_cost import measure_line

    peers = Peers.join(env, device)
    lines = [measure_line(peers, device, request.sum_bytes) for _ in range(LINES)]
    if env.rank == 0:
        line = {
            "per_byte_s": median(line.per_byte_s for line in lines),
            "latency_s": median(line.latency_s for line in lines),
        }
        write_atomically(Path(request.result), json.dumps({"line": line}).encode())
    peers.close()


def _workers(env: JobEnv, request: VswProbeRequest, device: torch.device) -> None:
    from hpcsched.worker.session.trainer import build
    from hpcsched.worker.vsw.probe import MOST_AT_ONCE, VswProbe

    parts = build(load_trainer(env.trainer), env.args)
    sizes = _local_batches(request, parts)
    signs = _Signs(env)
    probe = VswProbe(parts, device, halves=request.halves, seconds=request.seconds, alive=signs.alive)
    told, found = 0, None
    most = 1 if device.type == "cpu" else request.at_once or MOST_AT_ONCE
    for found in probe.run(sizes, most):
        if len(found.points) == told:
            continue
        told, point = len(found.points), found.points[-1]
        _write(request, found, probe.buckets, parts, device)
        signs.tell(**{**asdict(point), "samples_s": point.samples_s})
    if found is None:
        return
    _write(request, found, probe.buckets, parts, device)  # with what did not fit
    _say_ends(found, device)


def _local_batches(request: VswProbeRequest, parts: Parts) -> list[int]:
    from hpcsched.worker.vsw.probe import doubled

    low, high = request.local_batch or (1, parts.global_batch)
    if low > parts.size:
        accepted = f"1 to {parts.size}, as many as the dataset has"
        raise ConfigError(where="local batch", got=f"{low} samples", accepted=accepted)
    if high > parts.size:
        say(f"no local batch is larger than the dataset, which has {parts.size} samples")
    return doubled(low, min(high, parts.size))


def _say_ends(found: VswTimes, device: torch.device) -> None:
    from hpcsched.worker.vsw.measurements import GAIN

    if device.type == "cpu":
        say("one worker at once: on a CPU they take turns")
    if found.single:
        say(f"one worker at once: {found.single}")
    for local, most in found.most.items():
        say(f"local batch {local}: no room for more than {most} at once")
    if found.too_large is not None:
        say(f"local batch {found.too_large} does not fit: {found.why}")
    if found.flat:
        last = found.points[-1].local_batch
        say(f"local batches end with {last}: the last two gained less than {GAIN:.0%} each")


def _write(
    request: VswProbeRequest, found: VswTimes, buckets: list[int], parts: Parts, device: torch.device
) -> None:
    """Replace the result by all that is known."""
    from hpcsched.planning.vsw.costs import AllReduceCosts, VswCosts
    from hpcsched.planning.vsw.profile import VswProfile
    from hpcsched.worker.vsw.control import GUESSED

    profile = VswProfile(
        model=request.model,
        costs=VswCosts(
            gpus={request.device: found.costs},
            buckets=tuple(buckets),
            network=AllReduceCosts(within=GUESSED, between=GUESSED),
        ),
        note=f"{request.note}; {_about(found, device)}",
    )
    answer = {"profile": profile.to_table(), "global_batch": parts.global_batch}
    write_atomically(Path(request.result), json.dumps(answer).encode())


def _about(found: VswTimes, device: torch.device) -> str:
    """What the times depend on."""
    import torch

    if device.type == "cpu":
        return f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    peak_mib = max(point.memory_mib or 0.0 for point in found.points)
    return f"torch {torch.__version__}, at most {peak_mib:.0f} MiB"


class _Signs:
    """Tells whoever started us that we live, and leaves when that is gone."""

    def __init__(self, env: JobEnv) -> None:
        self._env = env
        self._next = 0.0

    def alive(self) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + SIGN_S
        if self._env.notify_pid is not None and os.getppid() != self._env.notify_pid:
            raise SystemExit("hpcsched: whoever wanted this profile is gone")
        self.tell()

    def tell(self, **facts: Any) -> None:
        if self._env.progress_fd is not None:
            with contextlib.suppress(OSError):
                os.write(self._env.progress_fd, json.dumps(facts).encode() + b"\n")


if __name__ == "__main__":
    run_to_the_end(main)
