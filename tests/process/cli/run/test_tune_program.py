"""A search that tries a program, under the real agent: the one of the page, killed on its way."""

from __future__ import annotations

import json
import re
import sys

from livebench import Bench
from places import ROOT

PAGE = (ROOT / "docs/tuning.md").read_text()


def block(kind: str) -> str:
    """The first block of code of this kind in the page."""
    found = re.search(rf"^```{kind}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert found
    return found[1]


def test_the_program_of_the_page_is_searched_and_goes_on_after_a_kill(bench: Bench) -> None:
    # Until the file is there some trainings go on, so that there are such as are killed and not.
    wait = "\nimport os, time\nwhile args.epochs == 3 and not os.path.exists('go'): time.sleep(0.02)\n"
    program, args = block("python"), "args = parser.parse_args()\n"
    assert args in program
    (bench.folder / "train.py").write_text(program.replace(args, args + wait))
    file = bench.folder / "search.toml"
    text = block("toml").replace("R = 27", "R = 3")
    file.write_text(f"{text}[defaults]\npython = {json.dumps(sys.executable)}\n")
    agent = bench.start(file, "--devices", "cpu:2", command="tune")
    bench.until(lambda: list(bench.states().values()).count("COMPLETED") == 3, "a first rung is done")
    agent.kill()
    agent.wait()
    (bench.folder / "go").touch()
    assert f"`hpcsched tune {file} --resume --dir {bench.dir}`" in bench("status").stderr
    done = bench("tune", file, "--devices", "cpu:2", "--resume", "--json")
    assert done.returncode == 0, done.stderr
    page = json.loads(done.stdout)
    assert len(page["trials"]) == 5 and "3 of 3 rungs done" in done.stderr
    losses = [trial["metric"] for trial in page["trials"]]
    assert page["best"]["metric"] <= min(losses) and page["best"]["checkpoint"] is None
    later = next(name for name in bench.states() if name.endswith("b1-r1"))
    job = bench.replayed()[0].run.job_of(later)
    assert job and "epoch 2: loss" in bench.output(job.id) and "epoch 1:" not in bench.output(job.id)
    best = f"t{next(t for t in page['trials'] if t['job'] == page['best']['job'])['trial']:04d}"
    assert [folder.name for folder in (bench.dir / "trials").iterdir()] == [best]
    assert page["best"]["dir"] == str(bench.dir / "trials" / best)
    state = json.loads((bench.dir / "trials" / best / "state.json").read_text())
    assert state["epoch"] >= page["best"]["budget"] and abs(state["slope"] - 3) < 0.5
    told = json.loads(bench("history", "--trials", "--dir", bench.dir, "--json").stdout)["trials"]
    assert [trial["value"] for trial in told] == losses
