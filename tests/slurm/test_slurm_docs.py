"""docs/slurm.md, as it stands: its files are written, and its commands run in order, on a real Slurm.

What the test adds is what the page leaves to the reader's site: pretended GPUs instead of real ones, and a
margin so large that a shortened allocation is over soon. Words after the language of a block:

    ```sh login [after=STATE]   run, once the batch job that matters is in that state
    ```sh install               not run
    ```toml NAME, ```bash NAME  a file

Blocks whose first word is the only one (`sh`, `bash`, `text`) show something.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from docpages import blocks
from places import ROOT

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

PAGE = ROOT / "docs" / "slurm.md"
WAIT_S = 180.0
MARGIN_S = 175
"""The page shortens a job to 3 minutes: with this, saving begins at once."""

STEERED = ("train.sbatch", "chained.sbatch", "by-hand.sbatch")
"""What these start must still run when the reader has typed a lot: it goes slowly. The rest is soon over."""

SAYS = {
    "hpcsched top -n 1": "inception",
    "hpcsched explain resnet101": "resnet101",
    "hpcsched status --all": "RUNNING",
    "--chain --dir chained": "CD",
    "squeue --me --Format=JobID": "RUNNING",
    "squeue --me\nhpcsched status\n": "it goes on by itself",
    "hpcsched status --dir by-hand": "has ended",
    "hpcsched status --dir sets/set-a": "CD",
    "srun --ntasks=1": "requeue: possible",
    "hpcsched doctor\n": "partition main (default): MaxTime=02:00:00",
}
"""What a block of commands must print: the one that holds this text, or is just these lines."""


@dataclass
class Reader:
    """Somebody who follows the page, in one directory."""

    slurm: Any
    folder: Path
    env: dict[str, str]

    def speed(self, times: int) -> None:
        """How many times as fast as in the profile every life goes that begins from now on."""
        Path(self.env["HPCSCHED_SITE_CONFIG"]).write_text(f'devices = "replay:6@{times}"\n')

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def type(self, commands: str) -> str:
        """Run commands as one would in a shell that stays open; both outputs. Fails when one of them does."""
        kept = self.folder / ".kept"
        script = f"set -e\n. {kept}\n{commands}\ndeclare -p job > {kept} 2>/dev/null || :\n"
        kept.touch()
        done = subprocess.run(
            ("bash", "-c", script),
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
        assert done.returncode == 0, f"{commands}\n{done.stdout}{done.stderr}\n{self.outputs()}"
        return done.stdout + done.stderr

    @property
    def job(self) -> str:
        """What the page calls $job."""
        found = re.search(r'job="(\d+)"', (self.folder / ".kept").read_text())
        return found[1] if found else ""

    def until(self, state: str) -> None:
        deadline = time.monotonic() + WAIT_S
        reached: Callable[[], bool] = getattr(self, state)
        while not reached():
            assert time.monotonic() < deadline, f"not {state}:\n{self.outputs()}"
            time.sleep(0.1)

    def running(self) -> bool:
        """The newest run has jobs on its GPUs, and all of them can be suspended."""
        pages = sorted(self.folder.glob("**/status.json"), key=lambda path: path.stat().st_mtime)
        if not pages:
            return False
        page = json.loads(pages[-1].read_text())
        active = [job for job in page["jobs"] if job["gpus"]]
        return page["run"]["state"] == "RUNNING" and bool(active) and all(job.get("ready") for job in active)

    def pending(self) -> bool:
        """Back in the queue; its shortened time limit is made long again, as operators may."""
        if self.slurm.state(self.job) != "PENDING":
            return False
        self.slurm.run("scontrol", "update", f"JobId={self.job}", "TimeLimit=120")
        self.slurm.rest()
        return True

    def completed(self) -> bool:
        """Ended well; coming back once more is hurried up, as the page tells."""
        state = self.slurm.state(self.job)
        if state == "PENDING":
            self.slurm.start_again(self.job, check=False)
        assert state in ("PENDING", "RUNNING", "COMPLETING", "COMPLETED"), f"{state}\n{self.outputs()}"
        return bool(state == "COMPLETED")

    def idle(self) -> bool:
        return not self.slurm.run("squeue", "--noheader").strip()

    def outputs(self) -> str:
        files = [*self.folder.glob("*.out"), *self.folder.glob("**/nodes.log")]
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in files)


@pytest.fixture
def reader(slurm: Any, tmp_path: Path) -> Reader:
    env = {
        **slurm.env,
        "HPCSCHED_PROFILES": "marble-summit",
        "HPCSCHED_MARGIN": str(MARGIN_S),
        "HPCSCHED_DATABASE": str(tmp_path / "db"),
        "HPCSCHED_SITE_CONFIG": str(tmp_path / "site.toml"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "SCRATCH": str(tmp_path / "scratch"),
    }
    return Reader(slurm, tmp_path, env)


def test_the_page_works_as_it_stands(reader: Reader) -> None:
    expected = dict(SAYS)
    for block in blocks(PAGE):
        words, text = block.words, block.text
        if block.language in ("toml", "bash") and words:
            reader.write(words[0], text)
        if words[:1] != ("login",):
            continue
        for word in words[1:]:
            reader.until(word.removeprefix("after="))
        steered = any(script in text for script in STEERED)
        reader.speed(10 if steered else 100)
        said = reader.type(text)
        if steered:
            reader.until("running")  # a life that is slow to begin is not to go as fast as the next block's
        for start in [key for key in expected if text == key or (key in text and "\n" not in key)]:
            assert expected.pop(start) in said, f"{text}\n{said}\n{reader.outputs()}"
    assert not expected, "no such block on the page"
    reader.until("idle")
    everything = reader.outputs()
    for name in ("wide", "mixed", "sets/set-a", "sets/set-b", "on-scratch"):
        page = json.loads((reader.folder / name / "status.json").read_text())
        assert page["run"]["state"] == "FINISHED", everything
        assert {job["state"] for job in page["jobs"]} == {"COMPLETED"}, everything
    first = json.loads((reader.folder / "hpcsched-run" / "status.json").read_text())
    assert {job["name"]: job["state"] for job in first["jobs"]}["extra"] == "CANCELLED"
    both = json.loads((reader.folder / "wide" / "status.json").read_text())
    assert len({gpu["host"] for gpu in both["gpus"]}) == 2
    for name in ("chained", "by-hand"):
        page = json.loads((reader.folder / name / "status.json").read_text())
        assert page["run"]["state"] == "STOPPED", everything
        assert all(job["state"] in ("SUSPENDED", "PENDING") for job in page["jobs"]), everything


def test_all_shell_blocks_are_marked(tmp_path: Path) -> None:
    for block in blocks(PAGE):
        slurms = re.search(
            r"^\s*(\S+=\$\()?(squeue|sbatch|scancel|scontrol|srun)\b", block.text, re.MULTILINE
        )
        if block.language == "sh" and slurms:
            assert block.words[:1] == ("login",), block.text
