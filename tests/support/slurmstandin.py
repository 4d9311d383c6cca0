"""Commands of Slurm that know one job, for live tests without a Slurm."""

from __future__ import annotations

import os
import signal
import stat
import time
from datetime import UTC, datetime

from livebench import Agent, Bench, saves

SQUEUE = """#!/bin/sh
echo "squeue $*" >> {log}
waited=0  # a controller that hangs answers once it goes on
while [ "$(cat {mood})" = hang ] && [ $waited -lt 1500 ]; do sleep 0.2; waited=$((waited + 1)); done
case $(cat {mood}) in
down) echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2; exit 1 ;;
garbage) echo "Segmentation fault, or so" ;;
*) echo "77|RUNNING|$(cat {end})" ;;
esac
"""
SCONTROL = """#!/bin/sh
echo "scontrol $*" >> {log}
case "$1 $(cat {mood})" in
"requeue down" | "requeue restarting") echo "Unable to contact slurm controller" >&2; exit 1 ;;
"requeue refuse") echo "Requested operation is presently disabled for job 77" >&2; exit 1 ;;
"--oneliner well" | "--oneliner refuse" | "--oneliner restarting")
    echo "JobId=77 JobName=x JobState=RUNNING Reason=None Restarts=${{SLURM_RESTART_COUNT:-0}}" ;;
esac
"""


SBATCH = """#!/bin/sh
echo "sbatch $*" >> {log}
echo 78
"""


SRUN = """#!/bin/sh
[ "$1" = --version ] && echo "slurm 22.05.8" && exit
case "$*" in *--nodelist=node8*) echo "srun: error: node8 is not responding" >&2; exit 1 ;; esac
while [ "$1" != --export=ALL ]; do shift; done
shift
exec "$@"
"""


class Cluster:
    """A stand-in of Slurm's commands around one job, 77: its end, and how the commands feel."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.folder = bench, bench.folder / "slurm"
        self.folder.mkdir()
        self.mood("well")
        for name, text in (("squeue", SQUEUE), ("scontrol", SCONTROL), ("sbatch", SBATCH), ("srun", SRUN)):
            path = self.folder / name
            path.write_text(text.format(**{f: self.folder / f for f in ("log", "mood", "end")}))
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        bench.env |= {
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NODELIST": "node7",
            "SLURMD_NODENAME": "node7",
            "SLURM_JOB_CPUS_PER_NODE": "2",
            "HPCSCHED_PYSLURM": "off",
        }

    def at_work(self, *options: str) -> Agent:
        """A run with these options in a job that ends in an hour, with a training that is under way."""
        self.ends_in(3600)
        agent = self.bench.start(self.bench.set_of(saves("a", steps=5000)), "--devices", "cpu:1", *options)
        self.bench.ready("a")
        return agent

    def ends_in(self, seconds: float) -> None:
        end = datetime.fromtimestamp(time.time() + seconds, UTC)
        (self.folder / "end").write_text(end.strftime("%Y-%m-%dT%H:%M:%S"))

    def shorten(self, agent: Agent, seconds: float) -> None:
        """The job now ends so soon, which the agent is told by a warning."""
        self.ends_in(seconds)
        agent.kill(signal.SIGUSR2)

    def mood(self, word: str) -> None:
        (self.folder / "mood").write_text(word)

    @property
    def log(self) -> list[str]:
        path = self.folder / "log"
        return path.read_text().splitlines() if path.exists() else []
