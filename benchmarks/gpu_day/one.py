"""One part, in its own process: its exit code says how it went, its file what it found."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path

from common import Terminated, ending_on_sigterm

from gpu_day.found import Found, Refused
from hpcsched.store.files import write_atomically

FAILED, REFUSED = 1, 3
_PR_SET_PDEATHSIG = 1


def run_one(part: str, file: Path, *, cpu: bool, within_s: float, device: str) -> int:
    """Do a part; returns the exit code."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:
        return FAILED
    ending_on_sigterm()
    found = Found(file, cpu=cpu, within_s=within_s, device=device)
    try:
        importlib.import_module(f"gpu_day.parts.{part.replace('-', '_')}").run(found)
    except Refused as why:
        print(f"refused: {why}", flush=True)
        write_atomically(file, json.dumps({**found.page(), "why": str(why)}, default=str).encode())
        return REFUSED
    except Terminated:
        return 128 + signal.SIGTERM
    except Exception:
        traceback.print_exc()
        return FAILED
    finally:
        sys.stdout.flush()
    return 0
