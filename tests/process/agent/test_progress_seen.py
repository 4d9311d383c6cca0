"""The steps of programs that do not report them, in a live run."""

from __future__ import annotations

import sys

import pytest
from livebench import Bench, job

PRINTS = """
import signal, sys, time
step, leave = 0, []
signal.signal(signal.SIGTERM, lambda *_: leave.append(1))
while not leave:
    time.sleep(0.02)
    step += 1
    print(sys.argv[1].format(step), end="\\r", flush=True)
"""


ENDS = """
import time
print("epoch 3", flush=True)
time.sleep(1.5)
print("epoch 4", flush=True)
"""


@pytest.mark.slow
def test_a_pattern_alone_makes_no_program_restartable(bench: Bench) -> None:
    (bench.folder / "train.py").write_text(PRINTS)
    (bench.folder / "ends.py").write_text(ENDS)
    python, pattern = [sys.executable, "-S", "-E"], r"(\d+)"
    jobs = bench.set_of(
        job("on", command=[*python, "train.py", "{}"], gpus=1, progress_pattern=pattern),
        job("ends", command=[*python, "ends.py"], gpus=1, progress_pattern=pattern),
    )
    agent = bench.start(jobs, "--devices", "cpu:2")
    bench.until(lambda: bench.job("on").get("step") and bench.job("ends")["state"] == "COMPLETED")
    assert bench.job("ends")["step"] == 4, "the last one is seen, though it ended at once"
    assert not bench.job("on").get("saves"), "nothing says that it may be suspended"
    bench("cancel", "1")
    assert agent.wait() == 0, agent.said


def test_steps_are_seen_in_what_a_program_prints(bench: Bench) -> None:
    (bench.folder / "train.py").write_text(PRINTS)
    command = [sys.executable, "-S", "-E", "train.py"]
    jobs = bench.set_of(
        job("pattern", command=[*command, "[{}/inf] loss"], gpus=1, progress_pattern=r"^\[(\d+)/"),
        job("bar", command=[*command, " 12%|#2 | {}/600 [00:01<"], gpus=1, speaks="transformers"),
        job("none", command=[*command, "[{}/inf] loss"], gpus=1, speaks="none"),
    )
    agent = bench.start(jobs, "--devices", "cpu:3")
    bench.until(lambda: all(bench.job(name).get("step") for name in ("pattern", "bar")))
    assert not bench.job("none").get("step")
    bench("cancel", "1-3")
    assert agent.wait() == 0, agent.said
