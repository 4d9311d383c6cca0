"""A strategy of an installed package, in one file: suspended and resumed, it ends as if undisturbed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rankjobs import Job, same

pytestmark = pytest.mark.torch

CLIPPED = '''
"""Data parallel with clipped gradients."""
from torch.nn.utils import clip_grad_norm_
from hpcsched.worker.session.data_parallel import DataParallel
from hpcsched.worker.session.session import train

class Clipped(DataParallel):
    def __init__(self, parts, norm):
        super().__init__(parts)
        self.norm = norm

    def update(self):
        clip_grad_norm_(self.training.model.parameters(), self.norm)
        super().update()

def run(trainer, env, options):
    train(trainer, env, lambda parts: Clipped(parts, options.norm))
'''

OPTIONS = """
from dataclasses import dataclass
from hpcsched.contract.schema import number, option
from hpcsched.contract.strategies import Strategy

@dataclass(frozen=True)
class Options(Strategy):
    about = "Data parallel with clipped gradients."
    module = "clipped_strategy"

    norm: float = option(number("a positive number", exclusiveMinimum=0), about="The largest norm.")
"""


def clipped(folder: Path, norm: float) -> Job:
    """A job of two ranks by the strategy that is installed in its folder."""
    table = json.dumps({"kind": "clipped", "norm": norm})
    job = Job(folder, trainer="training:Exact", env={"HPCSCHED_STRATEGY": table})
    (folder / "clipped_strategy.py").write_text(CLIPPED)
    (folder / "clipped_options.py").write_text(OPTIONS)
    info = folder / "clipped-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: clipped\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hpcsched.strategies]\nclipped = clipped_options:Options\n")
    return job


def test_an_added_strategy_is_suspended_and_goes_on(tmp_path: Path) -> None:
    whole, parted = (clipped(tmp_path / name, 0.05) for name in ("whole", "parted"))
    assert whole.run(2) == [0, 0]
    assert parted.run(2, at=5) == [75, 75]
    assert parted.state["step"] == 6
    assert parted.run(2) == [0, 0]
    assert same(whole.final(), parted.final())
    far = clipped(tmp_path / "far", 1e9)
    assert far.run(2) == [0, 0]
    assert not same(far.final()["model"], whole.final()["model"]), "gradients were clipped"
