"""The steps of programs that do not report them, in a live run."""

from __future__ import annotations

import sys

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
