"""Does a training that was suspended end as if it had not been? Digits, float64, on CPU slots (gloo).

    python benchmarks/resume_equality.py [--json] [--quick]

Compared with the uninterrupted training: suspended twice and resumed at the same world size (the final
state must be equal to the last bit), and moved from 1 rank to 2 and back (the loss of every step and the
final parameters may differ by rounding). The worker gets the environment that the agent gives it; its
signal comes in a known step.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import Report, main

STEPS, QUICK_STEPS = 300, 12
BATCH = 64
GOAL = 1e-5
DEADLINE_S = 120.0

# Importing torch takes seconds: done once, then every rank is forked from there.
_SERVER = multiprocessing.get_context("forkserver")


def measure(options: argparse.Namespace) -> Report:
    steps = QUICK_STEPS if options.quick else STEPS
    _SERVER.set_forkserver_preload(
        ["torch", "torch._dynamo", "torch.distributed", "sklearn.datasets", "hpcsched.worker.ddp.strategy"]
    )
    report = Report()
    with tempfile.TemporaryDirectory(prefix="hpcsched-bench-") as folder:
        root = Path(folder)
        plain = _Training(root / "plain", steps, [1])
        for world in (1,) if options.quick else (1, 2):
            whole = plain if world == 1 else _Training(root / "plain2", steps, [world])
            again = _Training(root / f"same{world}", steps, [world] * 3)
            equal = _same(whole.final, again.final) and whole.losses == again.losses
            report.results[f"same_world_{world}_equal"] = [float(equal)]
            report.row(
                f"suspended twice, resumed at the same world size ({world})",
                "every bit equal" if equal else "differs",
                goal="bitwise equal: model, optimizer, losses, RNG",
                ok=equal,
            )
        moved = _Training(root / "moved", steps, [1, 2, 1])
        curve = [abs(a - b) / abs(a) for a, b in zip(plain.losses, moved.losses, strict=True)]
        parameters = _relative(plain.final["model"], moved.final["model"])
        report.results["loss_relative_difference"] = curve
        report.results["parameter_relative_difference"] = parameters
        report.row(
            f"moved 1 -> 2 -> 1 ranks over {steps} steps: losses, final parameters",
            f"at most {max(curve):.1e}, {max(parameters):.1e} relative",
            goal="at most 1e-5 relative",
            ok=max(*curve, *parameters) <= GOAL,
        )
        report.results["plain_loss"] = plain.losses
    return report


class _Training:
    """A whole training in as many attempts as there are world sizes; all but the last get suspended."""

    def __init__(self, folder: Path, steps: int, worlds: Sequence[int]) -> None:
        self.folder, self.steps = folder, steps
        self.job = folder / "jobs" / "1"
        self.job.mkdir(parents=True)
        self.losses: list[float] = []
        for attempt, world in enumerate(worlds, 1):
            last = attempt == len(worlds)
            args = {} if last else {"stop_at": steps // len(worlds) - 1}
            codes = self._attempt(attempt, world, args)
            if codes != [0 if last else 75] * world:
                said = (folder / "output").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"attempt {attempt}: exit codes {codes}; {said}")
            self.losses += self._losses(attempt, world)
        if len(self.losses) != steps:
            raise RuntimeError(f"{len(self.losses)} steps were done instead of {steps}")
        from hpcsched.worker import load_checkpoint

        self.final = load_checkpoint(self.job / "checkpoint")

    def _attempt(self, attempt: int, world: int, args: dict[str, Any]) -> list[int | None]:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        environments = [self._environment(attempt, world, rank, port, args) for rank in range(world)]
        folder = str(self.folder)
        ranks = [_SERVER.Process(target=_be_rank, args=(folder, env), daemon=True) for env in environments]
        for rank in ranks:
            rank.start()
        end = time.monotonic() + DEADLINE_S
        for rank in ranks:
            rank.join(max(0.0, end - time.monotonic()))
            if rank.is_alive():
                rank.kill()
                rank.join()
        return [rank.exitcode for rank in ranks]

    def _environment(
        self, attempt: int, world: int, rank: int, port: int, args: dict[str, Any]
    ) -> dict[str, str]:
        ours = {
            "JOB_ID": 1,
            "ATTEMPT": attempt,
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": world,
            "RUN_DIR": self.folder,
            "JOB_DIR": self.job,
            "CHECKPOINT_DIR": self.job / "checkpoint",
            "RESUME": int(attempt > 1),
            "NOTIFY_PID": os.getpid(),
            "STEPS": self.steps,
            "TRAINER": "exact_digits:ExactDigits",
            "ARGS": json.dumps({"batch": BATCH, **args}),
        }
        env = {f"HPCSCHED_{name}": str(value) for name, value in ours.items()}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return env | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

    def _losses(self, attempt: int, world: int) -> list[float]:
        """The mean loss over the global batch of each step of an attempt."""
        logs = [(self.job / f"losses.{attempt}.{rank}").read_text().split() for rank in range(world)]
        return [sum(map(float, parts)) / BATCH for parts in zip(*logs, strict=True)]


def _be_rank(folder: str, env: dict[str, str]) -> None:
    """What a rank's process does: the agent's environment, then the worker's own main."""
    os.chdir(folder)
    output = os.open("output", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for name in [name for name in os.environ if name.startswith("HPCSCHED_")]:
        del os.environ[name]
    os.environ.update(env)
    sys.path.insert(0, str(Path(__file__).parent))
    import torch

    torch.set_num_threads(1)
    from hpcsched.worker.__main__ import main as worker

    sys.exit(worker())


def _same(a: Any, b: Any) -> bool:
    """Whether two states are equal to the last bit."""
    import torch

    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def _relative(a: dict[str, Any], b: dict[str, Any]) -> list[float]:
    """Of each tensor, the largest difference over the largest value."""
    return [((a[name] - b[name]).abs().max() / a[name].abs().max()).item() for name in a]


if __name__ == "__main__":
    main("resumed trainings against an uninterrupted one", measure)
