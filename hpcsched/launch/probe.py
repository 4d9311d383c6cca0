"""The versions that an interpreter has, as JSON: run by that interpreter, from this text alone.

Standard library only, and no later syntax than Python 3.6. Nothing is imported that takes long, such as
torch: its version is read from its files.
"""

import contextlib
import importlib
import importlib.util
import json
import re
import sys
from pathlib import Path


def found() -> "dict[str, object]":
    """The versions (None: it is not there), their folders, and the mtimes of folders that pip changes."""
    sys.path[:] = [path for path in sys.path if path]  # not what happens to be in the working directory
    watched = {}
    for path in sys.path:
        with contextlib.suppress(OSError):
            if Path(path).name in ("site-packages", "dist-packages"):
                watched[path] = Path(path).stat().st_mtime_ns
    worker, contract = None, None
    try:
        if importlib.util.find_spec("hpcsched.worker") is not None:
            worker = getattr(importlib.import_module("hpcsched"), "__version__", "without a version")
            module = importlib.import_module("hpcsched.contract.version")
            contract = str(module.VERSION)
    except Exception:  # nosec B110 # see below
        pass  # what is there of hpcsched is of before the contract had a version, or of none that can be read
    return {
        "executable": sys.executable or "",
        "prefix": sys.prefix,
        "python": "{}.{}.{}".format(*sys.version_info[:3]),
        "worker": worker,
        "contract": contract,
        "torch": _torch(),
        "watched": watched,
    }


def _torch() -> "str | None":
    try:
        spec = importlib.util.find_spec("torch")
        if spec is None or not spec.origin:
            return None
        text = (Path(spec.origin).parent / "version.py").read_text()
        written = re.search(r"^__version__ = ['\"](.+)['\"]", text, re.MULTILINE)
        return written.group(1) if written else "without a version"
    except Exception:
        return None


if __name__ == "__main__":
    sys.stdout.write(json.dumps(found()) + "\n")
