"""The guides, as they stand: one reader goes through them from the first to the last, in one folder.

Files whose first comment is their name are written, then the lines of `sh` blocks and those behind a `$` are
typed, one after the other. What the test adds is what a page leaves to the reader: programs (`train.py`), a
job file, a site whose devices are CPU slots. The tables say which commands go on in another terminal, and
which are not typed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from docpages import Block, Command, blocks
from places import ROOT

from hpcsched.store.rundir import RunDir, agent_works

PAGES = (
    "first-set",
    "sweeps",
    "staying",
    "trainer",
    "elastic",
    "from-python",
    "policies",
    "profiles",
    "tuning",
    "search-files",
    "report",
    "packing",
    "adaptive-batches",
    "cpu-trainings",
    "burst",
    "sharing",
    "many-trainings",
)

WITHIN_S = 600.0
"""For one command: some take half a minute on two cores that nobody else uses."""

LEAVES_WITHIN_S = 30.0


@dataclass(frozen=True)
class Beside:
    """What goes on in another terminal up to a command, and then ends by itself with exit code 0.

    `once`: the next command is typed when it, or a job, has written that. `then`: what the reader does to
    have it ended soon.
    """

    until: str
    once: str = ""
    then: str = ""


CTRL_C = "Ctrl-C"

BESIDE = {
    "first-set": {
        "hpcsched run jobscripts/marble/set2.toml --devices replay:6@20 --profiles marble-summit "
        "--policy-option promote=always": Beside(until="hpcsched wait", once="job 2 .* starts"),
        "hpcsched logs inception-v3-1 -f": Beside(until="hpcsched wait"),
    },
    "sweeps": {
        "hpcsched run --each lr=1e-3,1e-2 --each seed=1..5 "
        "-- python train.py --lr {lr} --seed {seed}": Beside(
            until="hpcsched submit --array 0-15%4 -- python train.py --fold {index}", once="job 2 .* starts"
        )
    },
    "elastic": {
        "hpcsched run finetune.toml": Beside(
            until="hpcsched suspend finetune", once="saved a while ago", then="hpcsched cancel finetune"
        )
    },
    "profiles": {
        f"hpcsched profile run {words}": Beside(until=f"hpcsched profile {until}")
        for words, until in (
            ("jobs.toml", "list"),
            ("jobs.toml --job resnet50-a --gpus 1,2", "list"),
            ("--trainer mymodels:Mine --model mine --devices cpu:2 --seconds 2", "list"),
            ("--gpus 1 -- python run_clm.py --output_dir measured --max_steps 100000", "import mine.json"),
            (r"--gpus 1 --progress-pattern 'step (\d+)' -- python train.py", "import mine.json"),
        )
    },
    "report": {
        "hpcsched report --serve": Beside(
            until="hpcsched report hpcsched-run hpcsched-run-2 -o both.html", once="ends it", then=CTRL_C
        )
    },
    "adaptive-batches": {
        "hpcsched run adaptive.toml --devices cpu:2": Beside(
            until="hpcsched explain adaptive", once="job 2 .* starts"
        )
    },
    "cpu-trainings": {
        "hpcsched run cpu.toml --devices cpu:2": Beside(
            until="hpcsched report -o run.html", once="job 3 .* starts", then="hpcsched cancel a b c"
        )
    },
    "burst": {
        "hpcsched run jobs.toml --devices cpu:2": Beside(
            until="hpcsched explain main", once="job 1 .* starts", then="hpcsched cancel main sweep"
        )
    },
}

LEFT_OUT = {
    "first-set": {"hpcsched demo": "takes a minute, and has tests of its own"},
    "staying": {
        "salloc --nodes=1 --gres=gpu:4 --time=8:00:00": "there is no Slurm",
        "hpcsched top": "shows a table until somebody leaves it",
        "hpcsched cancel second": "is about a run that has stopped between two allocations",
    },
}

EXITS = {
    "first-set": {"hpcsched wait": 1},  # a job was cancelled
    "sweeps": {"hpcsched wait train": 1},  # and here some
}

SCRIPTS = ("from-python", "search-files")
"""Pages whose blocks of Python are one program, run when all commands of the page have been."""

OWN = ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_DATA_HOME")

MEASURES = "hpcsched profile run"
"""With this, and while something goes on in another terminal, `train.py` does so too."""

WRONG = re.compile(r"holds a run already|No such|Traceback")

NUMBER = re.compile(r"\d[\d.,:]*(?: (?:s|min|h)\b)?")
HEAD = re.compile(r"[A-Z][A-Z_]*(\([A-Za-z]+\))?|x\d+")
HERE = "/home/me/experiments"

PROGRAM = """
import argparse, json, os, time

parser = argparse.ArgumentParser()
for option in ("lr", "seed", "fold", "output_dir", "max_steps", "resume_from_checkpoint"):
    parser.add_argument(f"--{option}")
given = parser.parse_args()
step, told = 0, os.environ.get("HPCSCHED_PROGRESS_FD")
while step < 10 or not os.path.exists("enough"):
    time.sleep(0.02)
    step += 1
    print(f"step {step}", flush=True)
    if told:
        os.write(int(told), json.dumps({"step": step, "t": time.time()}).encode() + b"\\n")
    if given.output_dir == "out" and step == 10:
        os.makedirs("out/checkpoint-10")
        open("out/checkpoint-10/model", "w").write("weights")
    if given.output_dir == "out" and step == 400:
        print("saved a while ago", flush=True)
if given.seed:
    import hpcsched

    hpcsched.Link().finish({"loss": float(given.lr)})
"""

JOBS = """schema = 1

[[job]]
name = "resnet50-a"
model = "ResNet-50"
command = ["python", "train.py", "--lr", "0.1"]
processes = "per-gpu"
steps = 10
"""


def read(page: str) -> list[Block]:
    return list(blocks(ROOT / "docs" / f"{page}.md"))


def shape(line: str) -> re.Pattern[str]:
    """What a line must be like: numbers, the folder, a token and the blanks between words may be others."""
    line = re.sub(f"{HERE}|(?<=token=).*", "\0", line.rstrip())
    parts = [re.escape(part) for part in NUMBER.split(line)]
    parts = [re.sub(r"(\\\s)+", r"\\s+", part).replace("\0", r"\S*") for part in parts]
    return re.compile(re.sub(r"hpcsched\\-run(?=\W)", r"hpcsched-run(?:-\\d+)?", NUMBER.pattern.join(parts)))


def missing(shown: tuple[str, ...], said: str) -> list[str]:
    """The first line, and those of the columns' heads, that were not said."""
    lines = said.splitlines()
    heads = [line for line in shown if len(line.split()) > 2 and all(map(HEAD.fullmatch, line.split()))]
    told = [head for head in heads if head.split() not in [line.split() for line in lines]]
    first = [line for line in shown[:1] if line not in heads and not any(map(shape(line).fullmatch, lines))]
    return first + told


@dataclass
class Reader:
    folder: Path
    env: dict[str, str]
    beside: dict[str, tuple[Command, Beside, subprocess.Popen[bytes]]] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    failed: str = ""

    def go_on_to(self, page: str) -> None:
        """Read all pages up to this one that were not read yet."""
        for name in PAGES[len(self.done) : PAGES.index(page) + 1]:
            assert not self.failed, f"{self.failed} has failed before"
            self.failed = name
            self.read(name)
            self.failed = ""
            self.done.append(name)

    def read(self, page: str) -> None:
        found = read(page)
        for block in found:
            if block.file:
                file = self.folder / block.file
                file.write_text(block.text)
                file.chmod(0o755 if block.text.startswith("#!") else 0o644)
        for command in (command for block in found for command in block.commands):
            self.type(page, command)
        if page in SCRIPTS:
            texts = [block.text for block in found if block.language == "python" and not block.file]
            (self.folder / "page.py").write_text("\n".join(texts))
            self.type(page, Command("python page.py", 0))
        assert not self.beside, f"{page}: nobody has waited for {list(self.beside)}"

    def type(self, page: str, command: Command) -> None:
        if command.typed in LEFT_OUT.get(page, ()):
            return
        where = f"docs/{page}.md:{command.line}: {command.typed}"
        (self.folder / "enough").unlink(missing_ok=True)
        if beside := BESIDE.get(page, {}).get(command.typed):
            self._begin(where, command, beside)
            return
        if not self.beside and not command.typed.startswith(MEASURES):
            (self.folder / "enough").touch()
        typing = self._start(command.typed)
        self._end(where, command, typing, EXITS.get(page, {}).get(command.typed, 0))
        for name, (other, beside, process) in list(self.beside.items()):
            if beside.until == command.typed:
                if not other.typed.startswith(MEASURES):
                    (self.folder / "enough").touch()
                if beside.then == CTRL_C:
                    os.killpg(process.pid, signal.SIGINT)
                elif beside.then:
                    self._end(name, Command(beside.then, 0), self._start(beside.then))
                self._end(name, other, process)
                del self.beside[name]

    def _start(self, typed: str) -> subprocess.Popen[bytes]:
        """As in a shell that stays open: what it exports is there for the next ones."""
        kept = self.folder.parent / "exported"
        kept.touch()
        script = f"set -e\n. {kept}\n{typed}\nexport -p >{kept}.$$ && mv {kept}.$$ {kept}\n"
        with self.output(typed).open("wb") as output:
            return subprocess.Popen(
                ("bash", "-c", script),
                cwd=self.folder,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def output(self, typed: str) -> Path:
        return self.folder.parent / (re.sub(r"\W+", "-", typed)[:200] + ".out")

    def _begin(self, where: str, command: Command, beside: Beside) -> None:
        process = self._start(command.typed)
        self.beside[where] = command, beside, process
        deadline = time.monotonic() + WITHIN_S
        while not re.search(beside.once, said := self._said(command)):
            assert process.poll() is None and time.monotonic() < deadline, f"{where}\n{said}"
            time.sleep(0.05)

    def _said(self, command: Command) -> str:
        """What it has written, and the jobs of all runs so far."""
        files = [self.output(command.typed), *self.folder.glob("hpcsched-run*/jobs/*/*.out")]
        return "".join(file.read_text(errors="replace") for file in files)

    def _end(self, where: str, command: Command, process: subprocess.Popen[bytes], code: int = 0) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(WITHIN_S)
        _stop(process)
        said = self.output(command.typed).read_text(errors="replace")
        assert process.wait() == code, f"{where}\n{said}"
        assert not WRONG.search(said), f"{where}\n{said}"
        lacks = missing(command.shown, said)
        assert not lacks, f"{where}\nthe page shows {lacks}, but:\n{said}"

    def close(self) -> None:
        """End what a page that failed has left."""
        for _, _, process in self.beside.values():
            _stop(process)
        deadline = time.monotonic() + LEAVES_WITHIN_S
        for rundir in map(RunDir, self.folder.glob("hpcsched-run*")):
            record = rundir.read_record()
            while record is not None and agent_works(rundir):
                late = time.monotonic() > deadline
                with contextlib.suppress(ProcessLookupError):
                    os.kill(record.pid, signal.SIGKILL if late else signal.SIGTERM)
                time.sleep(0.5)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End one that has not ended: as by Ctrl-C, so that its jobs do not stay behind."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LEAVES_WITHIN_S)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    place = tmp_path_factory.mktemp("guides")
    folder = place / "experiments"
    unseen = shutil.ignore_patterns("__pycache__")
    for part in ("jobscripts", "hpcsched/examples"):
        shutil.copytree(ROOT / part, folder / part, ignore=unseen)
    for name in ("train.py", "compare.py", "run_clm.py"):
        (folder / name).write_text(PROGRAM)
    (folder / "jobs.toml").write_text(JOBS)
    (place / "site.toml").write_text('devices = "cpu:2"\n')
    env = {key: value for key, value in os.environ.items() if not key.startswith(("HPCSCHED_", "XDG_"))}
    env |= {name: str(place / name) for name in OWN}
    env |= {
        "HPCSCHED_DATABASE": str(place / "db"),
        "HPCSCHED_SITE_CONFIG": str(place / "site.toml"),
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), env["PATH"])),
        "PYTHONPATH": str(ROOT),  # a folder of that name lies where commands are typed
    }
    for name in OWN:
        Path(env[name]).mkdir()
    someone = Reader(folder, env)
    try:
        yield someone
    finally:
        someone.close()


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_a_page_works_as_it_stands_after_those_before_it(reader: Reader, page: str) -> None:
    reader.go_on_to(page)


def test_the_tables_are_of_commands_that_the_pages_have() -> None:
    for table in (BESIDE, LEFT_OUT, EXITS):
        assert {*table} <= {*PAGES}
    for page in PAGES:
        typed = [command.typed for block in read(page) for command in block.commands]
        beside = BESIDE.get(page, {})
        assert {*beside, *LEFT_OUT.get(page, ()), *EXITS.get(page, ())} <= {*typed}
        assert all(one.until in typed[typed.index(name) :] for name, one in beside.items())


def test_what_is_typed_stands_in_a_block_that_says_so() -> None:
    for page in PAGES:
        for block in read(page):
            shows = block.language not in ("sh", "console") and re.search(r"^\$ ", block.text, re.MULTILINE)
            assert not shows, f"docs/{page}.md:{block.line}: `console` is for what is typed"
