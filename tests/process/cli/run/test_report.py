"""`hpcsched report`: runs that are over, go on, or have lost their agent, as a page; what is refused."""

from __future__ import annotations

import subprocess
import sys


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; from hpcsched.cli.main import cli; cli(['report', '--help'], standalone_mode=False)\n"
        "print({'numpy', 'matplotlib', 'jinja2', 'sqlalchemy', 'rich'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "--figures FOLDER" in done.stdout and done.stdout.splitlines()[-1] == "set()"
