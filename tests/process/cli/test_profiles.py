"""`hpcsched profile` apart from measuring: import, list, show, export, and what it refuses."""

from __future__ import annotations

import subprocess
import sys


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; import hpcsched.cli.profile.group\n"
        "print([m for m in ('sqlalchemy', 'alembic', 'numpy', 'rich', 'psutil') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
