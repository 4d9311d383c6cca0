"""benchmarks/gpu_day as a package that can be imported."""

from __future__ import annotations

import sys

from benchmark_programs import BENCHMARKS

if str(BENCHMARKS) not in sys.path:
    sys.path.append(str(BENCHMARKS))

import gpu_day.boxes as boxes
import gpu_day.day as day
import gpu_day.device as device
import gpu_day.found as found

__all__ = ["boxes", "day", "device", "found"]
