"""Two ranks on one GPU, over gloo: all of the code of several ranks but NCCL."""

from __future__ import annotations

from common import ROOT

from gpu_day.found import Found, Refused
from gpu_day.parts.gpu_tests import TWO_RANKS
from gpu_day.testing import run_tests


def run(found: Found) -> None:
    """Plain, then as clients of NVIDIA's multi-process service."""
    if not (ROOT / TWO_RANKS).exists():
        raise Refused(f"there is no {TWO_RANKS}")
    run_tests(found, "plain", [TWO_RANKS], within_s=found.left_s)
    if found.cpu:
        return
    from side_by_side import quit_mps, under_mps

    with found.trying("under MPS"):
        try:
            clients = under_mps()
            env = {name: value for name, value in clients.items() if name.startswith("CUDA_MPS_")}
            run_tests(found, "mps", [TWO_RANKS], within_s=found.left_s - 10, env=env)
        finally:
            quit_mps()
