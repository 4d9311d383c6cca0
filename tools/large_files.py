"""Big files do not belong in the repository: fetched once, they stay in every clone. For pre-commit.

python tools/large_files.py FILE...    # exit code 1, and a line for each that is too big
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

MOST_BYTES = 512 * 1024
MEASURED = "benchmarks/results/"
"""Samples of measurements may be longer."""


def too_big(paths: Iterable[str]) -> list[str]:
    """Those of these files that are longer than may be."""
    files = (path for path in paths if not path.startswith(MEASURED))
    return [path for path in files if Path(path).is_file() and Path(path).stat().st_size > MOST_BYTES]


def main() -> int:
    found = too_big(sys.argv[1:])
    for path in found:
        sys.stderr.write(f"{path}: {Path(path).stat().st_size} bytes; accepted: at most {MOST_BYTES}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
