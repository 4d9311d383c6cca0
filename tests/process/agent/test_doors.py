"""Hostile jobs, commands and disks beside a living agent: each costs its sender, and nobody else."""

from __future__ import annotations

import json
import random

from livebench import Bench, job, saves
from smalldisk import fill, one_line, small_disk

CPU = ["--devices", "cpu:2"]
COMMANDS = 1000

HOSTILE = r"""
import os, random, sys, time
dir_, attempt = os.environ["HPCSCHED_JOB_DIR"], os.environ["HPCSCHED_ATTEMPT"]
rng, fd = random.Random(int(attempt)), int(os.environ["HPCSCHED_PROGRESS_FD"])
bad = b'{"step":1,"samples":1,"checkpoint":"/scratch/mod\xe8le","attempt":' + attempt.encode() + b"}"
nasty = [
    bad, b"\xe8", b"[" * 5000, b'{"step":1e400}', b'{"a":' * 3000 + b"1" + b"}" * 3000, b"\0" * 99, b"",
    b'{"step":' + b"9" * 5000 + b"}", b'{"step":-5}', b'{"step":3,"metrics":{"\\ud800":1}}',
    b'{"step":7,"t":1e308,"scaling":{"rates":{"1":1e-300},"batch":1e308}}', b'{"step":"x","t":[]}',
    b'{"step":8,"t":1.0,"batching":' + b"[" * 900 + b"]" * 900 + b"}",
]
until, n = time.monotonic() + 2, 0
while n < 1000 or time.monotonic() < until:
    n += 1
    data = bytearray(rng.choice(nasty))
    if data and rng.random() < 0.5:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    os.write(fd, bytes(data).replace(b"\n", b"") + b"\n")
    for name in ("STATE.json", "ready." + attempt, "refused.2", "held." + attempt):
        with open(dir_ + "/.new", "wb") as file:
            file.write(data)
        os.replace(dir_ + "/.new", dir_ + "/" + name)
os.unlink(dir_ + "/held." + attempt)
with open(dir_ + "/STATE.json", "wb") as file:
    file.write(bad)
print("\x1b]0;owned\x07")
sys.exit(75)
"""


def command(rng: random.Random, number: int) -> bytes:
    """Something for the inbox: most of it makes no sense, some asks for what cannot be."""
    good = {"name": f"x{number}", "kind": "command", "model": "m", "command": ["true"]}
    odd = rng.choice(
        [
            {"nodes": 0},
            {"strategy": {}},
            {"strategy": {"kind": "vsw", "local_batch": "q"}},
            {"checkpoint_every_s": -1e30},
            {"steps": 2**63},
            {"gpus_min": -1},
            {"retries": 10**30},
            {"after": ["nobody"]},
            {"kind": "trainer"},
            {"name": "../../x"},
            {"args": {"x": [[]] * 9}, "kind": "replay"},
        ]
    )
    data = json.dumps({"command": "submit", "jobs": [good | odd]}).encode()
    match rng.randrange(5):
        case 0:
            return data.replace(b'"m"', b'"\xe8"')
        case 1:
            return data.replace(b'["true"]', b"[" * 4000 + b"]" * 4000)
        case 2:
            return json.dumps({"command": rng.choice(["cancel", "hold", "x"]), "targets": [77]}).encode()
        case 3:
            return data[: rng.randrange(len(data))]
    return data


def test_a_hostile_job_and_a_flood_of_commands_hurt_nobody_else(bench: Bench) -> None:
    program = bench.folder / "hostile.py"
    program.write_text(HOSTILE)
    bad = job("bad", f"exec python3 {program}", gpus=1, retries=0)
    agent = bench.start(bench.set_of(bad, saves("good", steps=60, gpus=1)), *CPU)
    bench.ready("good")
    rng, new = random.Random(7), bench.dir / "inbox" / "new"
    for number in range(COMMANDS):
        path = bench.dir / "inbox" / "tmp" / f"{number:05}"
        path.write_bytes(command(rng, number))
        path.rename(new / path.name)
    (new / b"caf\xe9".decode(errors="surrogateescape")).write_text("{}")
    bench.until(lambda: not list(new.iterdir()), "all commands answered")
    assert agent.wait() == 1, agent.said
    assert bench.states() == {"bad": "FAILED", "good": "COMPLETED"}
    assert "Traceback" not in agent.said
    assert "\x1b" not in agent.said
    told = bench("explain", "bad").stdout
    assert "STATE.json cannot be read: not UTF-8 text: byte 0xe8" in told
    assert "\x1b" not in told
    assert bench("journal", "check").returncode == 0
    done = bench("run", bench.set_of(job("more", "true", gpus=1), name="more.toml"), "--resume", "-q", *CPU)
    assert bench.states() == {"bad": "FAILED", "good": "COMPLETED", "more": "COMPLETED"}, done.stderr


def test_lost_files_never_lead_to_two_copies_of_a_training(bench: Bench) -> None:
    ledger, over = bench.folder / "ledger", bench.folder / "over"
    program = f"""
        trap 'exit 1' TERM
        : > "$HPCSCHED_JOB_DIR/ready.$HPCSCHED_ATTEMPT"
        [ -e {over} ] && exit 0
        while :; do echo $$ >> {ledger}; sleep 0.02; done
    """
    jobs = bench.set_of(job("a", program, gpus=1))
    agent = bench.start(jobs, *CPU)
    bench.ready("a")
    agent.kill()
    agent.wait()
    events, record = bench.rundir.journal.read_bytes(), bench.rundir.record.read_bytes()
    bench.rundir.journal.unlink()
    refused = bench("run", jobs, "--resume", "-q", *CPU)
    assert refused.returncode == 2
    assert "processes still live on this host" in one_line(refused.stderr)
    assert "end them first" in one_line(bench("journal", "repair").stderr)
    bench.rundir.journal.write_bytes(events)
    bench.rundir.record.unlink()
    over.touch()
    done = bench("run", "--resume", "-q", *CPU)
    assert done.returncode == 0, done.stderr
    assert json.loads(bench.rundir.record.read_bytes())["id"] == json.loads(record)["id"]
    assert bench.all_gone()
    assert len(set(ledger.read_text().split())) == 1


def test_a_full_disk_loses_attempts_and_fails_no_job(bench: Bench) -> None:
    """Of the checkpoints: the run directory's own stops the run."""
    scratch = bench.folder / "scratch"
    program = """
        mkdir -p "$HPCSCHED_CHECKPOINT_DIR" && echo much > "$HPCSCHED_CHECKPOINT_DIR/state" || exit 1
        exit 0
    """
    with small_disk(scratch, "size=1m"):
        ballast = fill(scratch)
        jobs = bench.set_of(job("a", program, gpus=1, retries=0), job("b", "sleep 1", gpus=1))
        agent = bench.start(jobs, *CPU, "--checkpoints", str(scratch))
        bench.until(lambda: bench.job("a").get("reason") == "NoSpace", "NoSpace")
        assert "no room in" in bench.job("a")["detail"]
        ballast.unlink()
        assert agent.wait() == 0, agent.said
        assert bench.states() == {"a": "COMPLETED", "b": "COMPLETED"}
