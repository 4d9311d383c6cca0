"""`hpcsched plan pack`: what it prints, and what it refuses."""

import subprocess
import sys

from hpcsched.cli.plan import packing
from hpcsched.planning.packing.strategies import STRATEGIES


def test_help_names_all_strategies_and_imports_neither_the_planner_nor_numpy():
    assert set(packing.STRATEGIES) == {"auto", *STRATEGIES}
    script = (
        "import sys; from hpcsched.cli.main import cli;"
        "cli(['plan', 'pack', '--help'], standalone_mode=False);"
        "print([m for m in ('numpy', 'torch', 'hpcsched.planning.packing.planner') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("[]\n")


def test_planning_packs_needs_nothing_but_the_standard_library():
    script = (
        "import sys; import hpcsched.planning.packing.planner;"
        "print([m for m in ('numpy', 'msgspec', 'click') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n"
