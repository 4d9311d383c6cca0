"""What a forecast of batch sizes promises: bounds, the choice by back-test, and what bad input says."""

from __future__ import annotations

import subprocess
import sys


def test_libraries_are_imported_only_when_used():
    code = (
        "import sys\n"
        "from hpcsched.planning.vsw.forecast import forecast\n"
        "forecast([256.0] * 60, 20, low=128, high=8192, methods=('last', 'damped'))\n"
        "forecast([256.0] * 30, 20, low=128, high=8192)\n"
        "assert not {'sklearn', 'statsmodels', 'pandas', 'scipy'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
