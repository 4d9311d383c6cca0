"""python benchmarks/frameworks [NAME ...] [--steps N] [--environments DIR] [--json FILE] [--page FILE]"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# In place of this folder, whose modules are the package's: the programs beside it, and hpcsched, uninstalled.
sys.path[:1] = [str(HERE.parent), str(HERE.parents[1])]

from frameworks.table import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
