"""Programs that save by themselves and know nothing of hpcsched: suspended, drained, killed, resumed."""

from __future__ import annotations

import json
import signal
import sys
import textwrap
from typing import Any

import pytest
from livebench import Bench, job

TRAIN = """
import argparse, json, os, signal, sys, time
parser = argparse.ArgumentParser(allow_abbrev=False)
for option in ("--resume_from_checkpoint", "--out", "--stop-by"):
    parser.add_argument(option)
for option in ("--steps", "--every", "--accumulation"):
    parser.add_argument(option, type=int, default=0)
options, asked, step = parser.parse_args(), [], 0
if options.stop_by:
    signal.signal(signal.Signals[options.stop_by], lambda *_: asked.append(1))
if options.resume_from_checkpoint:
    with open(options.resume_from_checkpoint + "/state.json") as file:
        step = json.load(file)["step"]
print("from", step, "accumulation", options.accumulation, "resume", os.environ["HPCSCHED_RESUME"], flush=True)
def save():
    folder = f"{options.out}/checkpoint-{step}"
    os.makedirs(folder, exist_ok=True)
    with open(folder + "/state.json", "w") as file:
        json.dump({"step": step}, file)
while step < options.steps:
    time.sleep(0.02)
    step += 1
    if options.every and step % options.every == 0:
        save()
    if asked:
        save()
        print("saved", step, flush=True)
        sys.exit(0)
print("done", step, flush=True)
"""
"""A training as people write it: saves on a signal, or every so many steps, and goes on when told to."""

PYTHON = [sys.executable, "-S", "-E"]
LONG = 100_000
"""Steps that nobody waits for."""


def trains(bench: Bench, name: str, *options: object, command: list[str] | None = None, **keys: Any) -> str:
    """A [[job]] that runs TRAIN with these options."""
    (bench.folder / "train.py").write_text(TRAIN)
    run = [*PYTHON, "train.py", "--out", name, *map(str, options)]
    told = {
        "gpus": 1,
        "restartable": True,
        "checkpoints": f"{name}/checkpoint-*",
        "resume_args": ["--resume_from_checkpoint", "{checkpoint}"],
    }
    return job(name, command=command or run, **{**told, **keys})


def said(bench: Bench, job_id: int, word: str) -> list[int]:
    """The numbers that a program has printed after a word."""
    path = bench.dir / "jobs" / str(job_id) / f"hpcsched-{job_id}.out"
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [int(line[1]) for line in lines if line[:1] == [word]]


def test_a_drain_saves_them_and_they_go_on(bench: Bench) -> None:
    """By SIGTERM, by SIGUSR1, with a shell around it, and one that only saves as it goes."""
    shell = " ".join([*PYTHON, f'train.py --out shell --steps {LONG} --stop-by SIGTERM "$@"; echo tail'])
    jobs = [
        trains(bench, "term", "--steps", LONG, "--stop-by", "SIGTERM"),
        trains(bench, "usr1", "--steps", LONG, "--stop-by", "SIGUSR1", suspend_signal="SIGUSR1"),
        trains(bench, "shell", command=["bash", "-c", shell, "x"]),
        trains(bench, "goes", "--steps", LONG, "--every", 10),
    ]
    agent = bench.start(bench.set_of(*jobs), "--devices", "cpu:4")
    bench.ready("term", "usr1", "shell", "goes")
    bench("drain")
    assert agent.wait() == 75, agent.said
    assert "completed" not in agent.said
    assert set(bench.states().values()) == {"SUSPENDED"}
    saved = {number: said(bench, number, "saved") for number in (1, 2, 3)}
    assert all(len(steps) == 1 for steps in saved.values()), saved
    assert "is asked to save" in agent.said
    assert "ended with signal 15 (SIGTERM)" in agent.said, "who has no handler is only ended"
    goes = bench.job("goes")["step"]
    assert goes % 10 == 0
    assert goes > 0
    again = bench.start("--resume", "--devices", "cpu:4")
    bench.until(lambda: all(len(said(bench, number, "from")) == 2 for number in (1, 2, 3, 4)))
    assert {number: said(bench, number, "from")[1:] for number in (1, 2, 3)} == saved
    assert said(bench, 4, "from")[1] == goes
    assert "resume 1" in bench.output(1)
    bench("cancel", "1-4")
    assert again.wait() == 0, again.said
    assert bench.all_gone()


@pytest.mark.slow
def test_what_was_saved_just_before_a_suspend_counts(bench: Bench) -> None:
    """One file that is written over again and again, and no handler: as nanoGPT has it."""
    (bench.folder / "gpt.py").write_text(
        textwrap.dedent("""
            import os, sys, time
            step = int(open("out/ckpt.pt").read()) if len(sys.argv) > 1 else 0
            print("from", step, flush=True)
            os.makedirs("out", exist_ok=True)
            while True:
                step += 1
                if os.path.exists("save"):
                    os.remove("save")
                    with open("out/ckpt.pt", "w") as file:
                        file.write(str(step))
                    print("wrote", step, flush=True)
                time.sleep(0.1)
        """)
    )
    keys = {"restartable": True, "checkpoints": "out/ckpt.pt", "resume_args": ["{checkpoint}"], "gpus": 1}
    agent = bench.start(
        bench.set_of(job("gpt", command=[*PYTHON, "gpt.py"], **keys)), "--devices", "cpu:1", "--grace", "20"
    )
    bench.until(lambda: said(bench, 1, "from"))
    (bench.folder / "save").touch()
    known = bench.dir / "jobs" / "1" / "checkpoints.json"
    bench.until(lambda: known.exists() and json.loads(known.read_text())["newest"])
    (bench.folder / "save").touch()
    bench.until(lambda: len(said(bench, 1, "wrote")) == 2)
    assert bench("suspend", "gpt").returncode == 0
    bench.until(lambda: bench.states()["gpt"] == "SUSPENDED")
    bench("resume", "gpt")
    bench.until(lambda: len(said(bench, 1, "from")) == 2)
    assert said(bench, 1, "from")[1:] == said(bench, 1, "wrote")[1:]
    bench("cancel", "gpt")
    assert agent.wait() == 0


@pytest.mark.slow
def test_a_suspend_of_one_makes_room_for_another(bench: Bench) -> None:
    agent = bench.start(
        bench.set_of(trains(bench, "a", "--steps", LONG, "--stop-by", "SIGTERM")), "--devices", "cpu:1"
    )
    bench.ready("a")
    assert bench("suspend", "a").returncode == 0
    bench.until(lambda: bench.states()["a"] == "SUSPENDED")
    assert f"saved at step {said(bench, 1, 'saved')[0]}" in agent.said
    bench("resume", "a")
    bench.until(lambda: len(said(bench, 1, "from")) == 2)
    assert said(bench, 1, "from")[1:] == said(bench, 1, "saved")
    bench("cancel", "a")
    assert agent.wait() == 0


@pytest.mark.slow
def test_a_slow_save_has_its_time_as_long_as_it_writes(bench: Bench) -> None:
    """Six seconds of writing within a grace time of two."""
    writes = textwrap.dedent("""
        trap 'save' TERM
        save() {
            mkdir -p a/tmp-checkpoint-7
            for part in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep 0.5; echo x > a/tmp-checkpoint-7/$part; done
            mv a/tmp-checkpoint-7 a/checkpoint-7; echo saved 7; exit 0
        }
        echo from ${1:-0}; while :; do sleep 0.1; done
    """)
    (bench.folder / "writes.sh").write_text(writes)
    agent = bench.start(
        bench.set_of(trains(bench, "a", command=["bash", "writes.sh"], resume_args=["7"])),
        *("--devices", "cpu:1", "--grace", "2"),
    )
    bench.ready("a")
    bench("drain")
    assert agent.wait() == 75, agent.said
    assert "saved at step 7" in agent.said
    assert "SIGTERM" not in agent.said and "SIGKILL" not in agent.said


@pytest.mark.slow
@pytest.mark.parametrize("by", ["SIGTERM", "SIGUSR1"])
def test_ranks_of_torchrun_save_and_leave(bench: Bench, by: str) -> None:
    """torchrun itself is not told: it would end its ranks, and kill them after half a minute."""
    pytest.importorskip("torch", reason="torchrun comes with torch")
    ranks = "import os\nif os.environ['RANK'] == '0':\n    exec(open('train.py').read())\nelse:\n"
    ranks += "    import signal, time\n    told = []\n"
    ranks += f"    signal.signal(signal.{by}, lambda *_: told.append(1))\n"
    ranks += "    while not told: time.sleep(0.05)\n    print('rank 1 leaves', flush=True)\n"
    (bench.folder / "ranks.py").write_text(ranks)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "ranks.py"]
    command += ["--out", "a", "--steps", str(LONG), "--stop-by", by]
    agent = bench.start(
        bench.set_of(trains(bench, "a", command=command, suspend_signal=by)), "--devices", "cpu:2"
    )
    bench.ready("a")
    bench.until(lambda: bench.job("a").get("ready") and said(bench, 1, "from"))
    bench("drain")
    assert agent.wait() == 75, agent.said
    (saved,) = said(bench, 1, "saved")
    assert "rank 1 leaves" in bench.output(1)
    assert f"saved at step {saved}" in agent.said
    again = bench.start("--resume", "--devices", "cpu:2")
    bench.until(lambda: len(said(bench, 1, "from")) == 2)
    assert said(bench, 1, "from")[1] == saved
    bench("cancel", "a")
    assert again.wait() == 0, again.said
    assert bench.all_gone()


@pytest.mark.slow
def test_what_was_there_before_the_job_began_is_not_its_own(bench: Bench) -> None:
    old = bench.folder / "a" / "checkpoint-900"
    old.mkdir(parents=True)
    (old / "state.json").write_text('{"step": 900}')
    agent = bench.start(bench.set_of(trains(bench, "a", "--steps", LONG)), "--devices", "cpu:1")
    bench.until(lambda: said(bench, 1, "from"))
    bench.ready("a")
    bench("suspend", "a")
    bench.until(lambda: bench.states()["a"] in ("SUSPENDED", "PENDING", "HELD"))
    bench("resume", "a")
    bench.until(lambda: len(said(bench, 1, "from")) == 2)
    assert said(bench, 1, "from") == [0, 0]
    bench("cancel", "a")
    assert agent.wait() == 0, agent.said


def test_two_that_save_into_one_folder_do_not_take_each_others(bench: Bench) -> None:
    jobs = [
        trains(bench, "a", "--steps", LONG, "--stop-by", "SIGTERM"),
        trains(bench, "b", "--steps", LONG, "--stop-by", "SIGTERM", checkpoints="./a/check*-[0-9]*"),
        trains(bench, "c", "--steps", LONG, "--stop-by", "SIGTERM"),
    ]
    agent = bench.start(bench.set_of(*jobs), "--devices", "cpu:3")
    bench.ready("a", "c")
    bench.until(lambda: bench.states()["b"] == "FAILED")
    why = bench("explain", "b").stdout
    assert "a/check*-[0-9]* could not be told from those of job 1 (a): give each a folder of its own" in why
    assert not said(bench, 2, "from"), "it has not been started"
    bench("cancel", "1,3")
    assert agent.wait() == 1, agent.said


@pytest.mark.parametrize(
    "how",
    [
        "SIGTERM",
        pytest.param("SIGUSR1", marks=pytest.mark.slow),
        pytest.param("as it goes", marks=pytest.mark.slow),
    ],
)
def test_an_agent_that_is_killed_finds_the_newest_checkpoint_again(bench: Bench, how: str) -> None:
    """With a handler its orphan saves once more, also before a pipe; else it goes on from what it had."""
    handles = how.startswith("SIG")
    options = ["--stop-by", how] if handles else ["--every", 10]
    keys: dict[str, Any] = {"suspend_signal": how} if handles else {}
    if how == "SIGTERM":
        script = f'{" ".join(PYTHON)} train.py --out a --steps {LONG} --stop-by SIGTERM "$@" | cat'
        keys["command"] = ["bash", "-o", "pipefail", "-c", script, "x"]
    agent = bench.start(
        bench.set_of(trains(bench, "a", "--steps", LONG, *options, **keys)), "--devices", "cpu:1"
    )
    bench.ready("a")
    agent.kill(signal.SIGKILL)
    agent.wait()
    again = bench.start("--resume", "--devices", "cpu:1")
    bench.until(lambda: len(said(bench, 1, "from")) == 2)
    if handles:
        assert said(bench, 1, "from")[1:] == said(bench, 1, "saved")
    else:
        assert said(bench, 1, "from")[1] > 0
    bench("cancel", "a")
    assert again.wait() == 0, again.said


DUMP = """
# Stands for CRIU: stops the program, and writes down what is in it.
kill -STOP $1 && cp "$3" "$2" && exit ${4:-0}
"""


@pytest.mark.parametrize("code", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_a_command_saves_it_from_outside(bench: Bench, code: int) -> None:
    """A bash program that knows of nothing; a stand-in for CRIU writes its counter down."""
    (bench.folder / "dump.sh").write_text(DUMP)
    count = textwrap.dedent("""\
        n=${1:-0}; echo "from $n"
        while :; do n=$((n + 1)); echo $n > next; mv next counter; sleep 0.02; done
    """)
    (bench.folder / "count.sh").write_text(count)
    outside = job(
        "a",
        command=["bash", "count.sh"],
        gpus=1,
        suspend_command=["bash", "dump.sh", "{pid}", "image", "counter", str(code)],
        resume_command=["bash", "-c", "exec bash count.sh $(cat image)"],
    )
    agent = bench.start(bench.set_of(outside), "--devices", "cpu:1")
    bench.ready("a")
    bench.until(lambda: (bench.folder / "counter").exists())
    bench("suspend", "a")
    bench.until(lambda: bench.states()["a"] != "RUNNING" and not bench.job("a").get("gpus"))
    bench("resume", "a")
    bench.until(lambda: len(said(bench, 1, "from")) == 2)
    image = int((bench.folder / "image").read_text())
    assert said(bench, 1, "from")[1] == (image if code == 0 else 0)
    assert ("suspend_command ended with exit code 3" in agent.said) == (code == 3)
    bench("cancel", "a")
    assert agent.wait() == 0, agent.said
    assert bench.all_gone()
