"""Models of what NEARCHUS measured (Tariq et al., sections III and V), and the files in this folder.

`python nearchus.py` writes the files. Tests and benchmarks import the models.

The paper's are: clusters A and B, numbers of parameters, cores that one process uses at most on each kind of
host (Figure 3), and the results by which the rest was chosen. It gives neither step times nor traffic.

Chosen, for all models: workers train asynchronously, each a batch of its own (not said, but usual with
TensorFlow); float32, so 4 bytes a parameter each way; links carry their nominal rate; SERIAL, by 37 of 59
cores for one worker (Figure 4); BYTE_CPU_S, as the server had one core or less of the 33 in DN-1G-64core
and no server is a bottleneck on cluster B; OVERLAP, as a worker had 36 cores on 64 with 10 Gbps, where one
alone has 37; UNEVEN, about the largest tensor of a CNN.

ResNet-50 in Figures 1 to 5 (`measured`). Chosen: CPU seconds of a batch, one number for each kind of host,
by what 1 Gbps takes from it there (17.7, 53.5 and 53.4 %, section III-B; here 18.2, 53.6 and 54.9 %). These
follow: a worker's 16 and 36 cores on a host of 64 (16.3 and 36.1); 46 and 57 cores with 2 and 10 workers
(45.9 and 56.7); and that one server on 1 Gbps serves no more than 9 workers of 3 cores (the paper sees it
begin at 8), ten servers more than 11.

The five CNNs of section V (`workload`). Chosen: CPU seconds of a batch, one number for each, by the
efficiency of Optimus on cluster A (82, 86, 63, 43, 21 %; here 82.2, 86.3, 62.9, 42.5, 21.2 %); on B as many
times more as ResNet-50 has on 64 cores. ResNet-50's number is not that of Figures 1 to 5: batches and data
sets of section V are not known. These follow: no link is full on B; and on A the best with free shares is
1.13 (MobileNet) and 1.20 (ResNet-50) times as fast as the best with equal ones. NEARCHUS was 1.183 and 1.199
times.

What to keep in mind:

- Optimus is so bad only if it never measures what one link can carry. The paper says that its profiles
  missed it, not which configurations they had: `optimus.sampled` has none with many workers for each server.
  Of 100 random choices of 20 among all 190, 31 miss it for ResNet-50 and 2 for Inception-V3; the mean
  efficiencies of all 100 are 82, 86, 73, 68 and 68 %.
- The best is 2.3 (ResNet-50) and 4.6 (Inception-V3) times as fast as Optimus. NEARCHUS was 1.71 and 2.29
  times: something that is not in this model held it back, or it stopped before.
- With MobileNet and DenseNet-201 the link is full too, at 19 workers; the paper sees that only with the
  others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from hpcsched.planning.ps.model import NetworkLink, PsModel
from hpcsched.planning.ps.training import PsTraining
from hpcsched.planning.ps.whatif.models_file import to_table

HERE = Path(__file__).parent
SOURCE = (
    "Tariq et al., NEARCHUS: number of parameters (Table II), network and hosts of cluster {name} (Table I), "
    "cores that one process uses at most (Figure 3)"
)
NOTE = (
    "Chosen, as the paper gives neither step times nor traffic: all else, such that the efficiencies of "
    "section III follow; profiles/ps/nearchus.py says how. The times of starts and changes are "
    "hpcsched's, not the paper's."
)

GBPS = 125e6
"""Bytes a second."""

FLOAT_BYTES = 4

MOST_CORES: Mapping[int, float] = MappingProxyType({20: 16.0, 32: 21.0, 64: 37.0})
"""By cores of the host: those that one process uses at most (Figure 3)."""

SERIAL = 0.01025
BYTE_CPU_S = 3e-9
OVERLAP = 0.9
UNEVEN = 0.05

RESNET_CPU_S: Mapping[int, float] = MappingProxyType({20: 19.0, 32: 14.0, 64: 24.0})
"""By cores of the host, which are of three generations: CPU seconds of a batch in Figures 3 to 5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`hosts` of `cores` cores each, the `budget` of cores of one training, and the link of a server."""

    hosts: int
    cores: int
    budget: float
    link: NetworkLink


CLUSTERS: Mapping[str, Cluster] = MappingProxyType(
    {
        "A": Cluster(hosts=9, cores=20, budget=100.0, link=NetworkLink(bytes_s=1 * GBPS)),
        "B": Cluster(hosts=9, cores=64, budget=300.0, link=NetworkLink(bytes_s=50 * GBPS)),
    }
)
"""Table I and section V."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model: its parameters, and CPU seconds of a batch on a host of cluster A."""

    parameters: float
    batch_cpu_s: float


WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        "MobileNet": Workload(parameters=4.2e6, batch_cpu_s=11.0),
        "DenseNet-201": Workload(parameters=20e6, batch_cpu_s=55.0),
        "NasNetLarge": Workload(parameters=84.9e6, batch_cpu_s=170.0),
        "ResNet-50": Workload(parameters=23e6, batch_cpu_s=31.0),
        "Inception-V3": Workload(parameters=24e6, batch_cpu_s=16.0),
    }
)
"""Parameters by Table II."""


def measured(cores: int) -> PsModel:
    """ResNet-50 as in Figures 1 to 5, on hosts of 20, 32 or 64 cores."""
    return _model(WORKLOADS["ResNet-50"].parameters, RESNET_CPU_S[cores], cores)


def workload(name: str, cluster: Cluster) -> PsModel:
    """One of the WORKLOADS as in section V, on a cluster with hosts as in one of CLUSTERS."""
    own = WORKLOADS[name]
    slower = RESNET_CPU_S[cluster.cores] / RESNET_CPU_S[CLUSTERS["A"].cores]
    return _model(own.parameters, own.batch_cpu_s * slower, cluster.cores)


def _model(parameters: float, batch_cpu_s: float, cores: int) -> PsModel:
    return PsModel(
        batch_cpu_s=batch_cpu_s,
        byte_cpu_s=BYTE_CPU_S,
        parameter_bytes=FLOAT_BYTES * parameters,
        uneven=UNEVEN,
        serial=SERIAL,
        most_cores=MOST_CORES[cores],
        overlap=OVERLAP,
        staleness=1,
        weak=True,
    )


def made() -> dict[str, str]:
    """The text of each file."""
    texts = {}
    for name, cluster in CLUSTERS.items():
        words = {"source": SOURCE.format(name=name), "note": NOTE}
        rows = [
            to_table(model, PsTraining(model=workload(model, cluster), link=cluster.link), **words)
            for model in WORKLOADS
        ]
        lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
        texts[f"nearchus-{name.lower()}.json"] = f'{{"schema": 1, "models": [\n{lines}\n]}}\n'
    return texts


if __name__ == "__main__":
    for file, text in made().items():
        (HERE / file).write_text(text, encoding="utf-8")
