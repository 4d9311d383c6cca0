"""python benchmarks/gpu_day [--parts a,b] [--budget-s 500] [--out OUT] [--state .gpu_day] [--cpu]"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# In place of this folder, whose modules are the package's: the programs beside it, and hpcsched, uninstalled.
sys.path[:1] = [str(HERE.parent), str(HERE.parents[1])]

from gpu_day.day import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
