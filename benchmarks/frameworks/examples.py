"""The programs of examples/: where they are, what they need, and what is asked of each."""

from __future__ import annotations

import difflib
import importlib.metadata
import json
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROBE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Example:
    """A folder of examples/.

    `packages`: the distributions that it needs, and whose versions the table names; one of those that stand
    together. `environment`: which one of
    packaging/framework_envs.sh has them. `most_changed`: lines that elastic.py may have changed of train.py.
    `never_wider`: why it is not promoted ("": it is); `wider_since`: nor before this version of its first
    package, and why. `begins_on`: slots that it begins on; promoted it has
    twice as many.
    """

    name: str
    title: str
    packages: tuple[str, ...]
    environment: str
    most_changed: int
    never_wider: str = ""
    wider_since: tuple[int, str] | None = None
    begins_on: int = 1

    @property
    def folder(self) -> Path:
        """Where it is."""
        return ROOT / "examples" / self.name

    @property
    def distributions(self) -> tuple[str, ...]:
        """All that `packages` names."""
        return tuple(name for choice in self.packages for name in choice.split())

    def stays(self, versions: Mapping[str, str]) -> str:
        """Why it is not promoted, with these versions; "": it is."""
        first = versions.get(self.packages[0], "")
        if self.wider_since and first and int(first.partition(".")[0]) < self.wider_since[0]:
            return self.wider_since[1]
        return self.never_wider

    @property
    def changed(self) -> int | None:
        """Lines of elastic.py that train.py does not have; None without an elastic.py.

        Comments, blank lines and the text at the top do not count.
        """
        before, after = (self._code(name) for name in ("train.py", "elastic.py"))
        if before is None or after is None:
            return None
        return sum(line.startswith("+ ") for line in difflib.ndiff(before, after))

    def _code(self, name: str) -> list[str] | None:
        file = self.folder / name
        if not file.exists():
            return None
        text = file.read_text()
        if text.startswith('"""'):
            text = text[text.index('"""', 3) + 3 :]
        lines = (line.split("  #")[0].rstrip() for line in text.splitlines())
        return [line for line in lines if line and not line.lstrip().startswith("#")]

    def job(self, program: str) -> dict[str, Any] | None:
        """The job of its jobs.toml that runs `program`, with the file's defaults; None: there is none."""
        table = tomllib.loads((self.folder / "jobs.toml").read_text())
        for job in table["job"]:
            if any(program in word for word in job.get("command", ())):
                return {**table.get("defaults", {}), **job}
        return None


EXAMPLES = (
    Example(
        name="transformers",
        title="Transformers `Trainer`",
        packages=("transformers", "accelerate", "torch"),
        environment="transformers",
        most_changed=2,
        wider_since=(5, "Transformers 4 cannot resume on several CPU ranks"),
    ),
    Example(
        name="trl-lora",
        title="TRL `SFTTrainer`, PEFT LoRA",
        packages=("trl", "peft", "transformers"),
        environment="transformers",
        most_changed=2,
        wider_since=(1, "Transformers 4 cannot resume on several CPU ranks"),
    ),
    Example(
        name="accelerate",
        title="Accelerate",
        packages=("accelerate", "torch"),
        environment="accelerate",
        most_changed=2,
    ),
    Example(
        name="lightning",
        title="Lightning",
        packages=("lightning", "torch"),
        environment="lightning",
        most_changed=2,
    ),
    Example(
        name="ddp",
        title="DDP with snapshots, under torchrun",
        packages=("torch",),
        environment="",
        most_changed=5,
    ),
    Example(
        name="ddp-basic",
        title="DDP without checkpoints",
        packages=("torch",),
        environment="",
        most_changed=5,
    ),
    Example(
        name="gpt",
        title="GPT in a single file",
        packages=("torch",),
        environment="",
        most_changed=5,
    ),
    Example(
        name="xgboost",
        title="XGBoost",
        packages=("xgboost xgboost-cpu",),
        environment="boosting",
        most_changed=2,
        never_wider="one process: more GPUs do not make it faster",
    ),
    Example(
        name="lightgbm",
        title="LightGBM",
        packages=("lightgbm",),
        environment="boosting",
        most_changed=2,
        never_wider="one process, on CPU cores",
    ),
    Example(
        name="jax",
        title="JAX, Orbax",
        packages=("jax", "orbax-checkpoint"),
        environment="jax",
        most_changed=5,
    ),
    Example(
        name="keras",
        title="Keras",
        packages=("keras",),
        environment="keras",
        most_changed=2,
        never_wider="one process: `fit` on several is its backend's own",
    ),
    Example(
        name="mpi",
        title="MPI (mpi4py)",
        packages=("mpi4py", "numpy"),
        environment="mpi",
        most_changed=10,
    ),
    Example(
        name="fsdp",
        title="FSDP2, checkpoints by DCP",
        packages=("torch",),
        environment="",
        most_changed=5,
        begins_on=2,
    ),
)


@cache
def versions(python: str, packages: tuple[str, ...]) -> Mapping[str, str]:
    """The versions of these distributions in an interpreter's environment, of those that are there."""
    if python == sys.executable:
        found = {}
        for name in packages:
            try:
                found[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        return found
    text = (
        "import importlib.metadata as m, json, sys\n"
        "def version(name):\n"
        "    try:\n"
        "        return m.version(name)\n"
        "    except m.PackageNotFoundError:\n"
        "        return None\n"
        "print(json.dumps({name: version(name) for name in sys.argv[1:]}))\n"
    )
    ended = subprocess.run(
        (python, "-c", text, *packages), capture_output=True, text=True, timeout=PROBE_S, check=True
    )
    return {name: version for name, version in json.loads(ended.stdout).items() if version}


def python_of(example: Example, environments: Path) -> str:
    """The interpreter that has what an example needs: of its own environment, else this one; "": none has."""
    own = environments / example.environment / "bin" / "python"
    for python in [str(own)] if example.environment and own.exists() else [sys.executable]:
        found = versions(python, example.distributions)
        if all(any(name in found for name in choice.split()) for choice in example.packages):
            return python
    return ""
