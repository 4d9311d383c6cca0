"""Makes the models in this folder out of hpcsched's calibration to NEARCHUS: `python make.py`."""

from __future__ import annotations

import json
from pathlib import Path

from hpcsched.planning.ps.calibrated import CLUSTERS, WORKLOADS, workload
from hpcsched.planning.ps.profile import to_table
from hpcsched.planning.ps.training import Training

HERE = Path(__file__).parent
SOURCE = (
    "Tariq et al., NEARCHUS: number of parameters (Table II), network and hosts of cluster {name} (Table I), "
    "cores that one process uses at most (Figure 3)"
)
NOTE = (
    "Chosen, as the paper gives neither step times nor traffic: all else, such that the efficiencies of "
    "section III follow; hpcsched/planning/ps/calibrated.py says how. The times of starts and changes are "
    "hpcsched's, not the paper's."
)


def made() -> dict[str, str]:
    """The text of each file."""
    texts = {}
    for name, cluster in CLUSTERS.items():
        words = {"source": SOURCE.format(name=name), "note": NOTE}
        rows = [
            to_table(model, Training(model=workload(model, cluster), link=cluster.link), **words)
            for model in WORKLOADS
        ]
        lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
        texts[f"nearchus-{name.lower()}.json"] = f'{{"schema": 1, "models": [\n{lines}\n]}}\n'
    return texts


if __name__ == "__main__":
    for file, text in made().items():
        (HERE / file).write_text(text, encoding="utf-8")
