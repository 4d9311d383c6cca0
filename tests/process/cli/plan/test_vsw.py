"""`hpcsched plan vsw`: what it prints, and what it refuses."""

import subprocess
import sys


def test_help_imports_no_numpy():
    code = "import sys; from hpcsched.cli.plan.vsw import vsw; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
