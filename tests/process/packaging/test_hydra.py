"""A sweep of Hydra as jobs of a real agent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("hydra", reason="the extra dev")

ROOT = Path(__file__).resolve().parents[3]
APP = '''
import os
from dataclasses import dataclass

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig


@dataclass
class Config:
    lr: float = 0.1


ConfigStore.instance().store(name="config", node=Config)


class Diverged(Exception):
    """Cannot be made of its text alone."""

    def __init__(self, lr: float, *, where: str) -> None:
        super().__init__(f"{lr} in {where}")


@hydra.main(version_base=None, config_name="config")
def main(cfg: Config) -> float:
    job = HydraConfig.get().job
    with open("where", "w") as file:
        print(os.getcwd(), job.num, job.id, os.environ["HPCSCHED_ARRAY_INDEX"], file=file)
    if cfg.lr == 0.2:
        raise Diverged(cfg.lr, where="main")
    if cfg.lr == 0.3:
        os._exit(9)
    return 2 * cfg.lr


if __name__ == "__main__":
    main()
'''
SWEEPER = '''
"""A sweeper that writes down what a launcher returns."""
import json

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore


class Telling(BasicSweeper):
    def sweep(self, arguments):
        results = self.launcher.launch([[one] for one in arguments], initial_job_idx=5)
        with open("told.json", "w") as file:
            json.dump([[r.status.name, r.overrides, r.cfg.lr, repr(r._return_value)] for r in results], file)
        return [r.return_value for r in results]


node = {"_target_": f"{__name__}.Telling", "max_batch_size": None}
ConfigStore.instance().store(group="hydra/sweeper", name="telling", node=node)
'''


def test_a_sweep_returns_what_its_jobs_return_and_raise(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(APP)
    plugin = tmp_path / "hydra_plugins" / "telling"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").touch()
    (plugin / "sweeper.py").write_text(SWEEPER)
    given = {"sweeper": "telling", "launcher": "hpcsched"}
    words = [*(f"hydra/{key}={value}" for key, value in given.items()), "hydra.launcher.run.devices=cpu:2"]
    words += ["hydra.sweep.dir=out", "hydra.job.chdir=true", "hydra.launcher.gpus=share"]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HPCSCHED_")}
    done = subprocess.run(
        [sys.executable, "train.py", "--multirun", *words, "lr=0.1", "lr=0.2", "lr=0.3"],
        cwd=tmp_path,
        env={
            **clean,
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "packaging" / "hydra"), str(tmp_path))),
            "XDG_STATE_HOME": str(tmp_path / "state"),
            "HPCSCHED_DATABASE": str(tmp_path / "db"),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert "Error executing job with overrides: ['lr=0.2']" in said and "Diverged: 0.2 in main" in said
    fine, diverged, died = json.loads((tmp_path / "told.json").read_text())
    assert fine == ["COMPLETED", ["lr=0.1"], 0.1, "0.2"]
    assert diverged[:3] == ["FAILED", ["lr=0.2"], 0.2] and "0.2 in main" in diverged[3]
    assert died[:3] == ["FAILED", ["lr=0.3"], 0.3] and "JobFailed" in died[3]
    for number in (5, 6, 7):
        folder = tmp_path / "out" / str(number)
        assert (folder / "where").read_text() == f"{folder} {number} {number} {number - 4}\n"
        assert (folder / ".hydra" / "config.yaml").read_text() == f"lr: 0.{number - 4}\n"
    status = json.loads((tmp_path / "hpcsched-run" / "status.json").read_text())
    assert status["run"]["state"] == "FINISHED"
    jobs = [(job["name"], job["array"], job["state"], job.get("metrics")) for job in status["jobs"]]
    assert jobs[0] == ("train-5-lr-0.1", "train", "COMPLETED", {"result": 0.2})
    assert [state for _, _, state, _ in jobs[1:]] == ["FAILED", "FAILED"]
