"""The file for Prometheus: in the grammar of its text format, bounded, and what it says."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpcsched.agent.metrics_file import PERIOD_S, Family, MetricsFile, exposition
from hpcsched.cli.main import cli
from hpcsched.core.model import Progress
from hpcsched.devices.base import Sample
from hpcsched.testing.builders import Driver, a_job

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\\\|\\"|\\n)*"'
SAMPLE = re.compile(rf"({NAME})(?:\{{({LABEL}(?:,{LABEL})*,?)?\}})? (\S+)(?: -?\d+)?")
KINDS = {"counter", "gauge", "histogram", "summary", "untyped"}

BUSY = Sample(gpu=0, utilisation=0.5, memory_mib=1.0, energy_j=7.5)

Series = dict[tuple[str, frozenset[str]], float]


def parsed(text: str) -> Series:
    """The samples of a text, by name and labels; fails where it breaks a rule of the format (0.0.4)."""
    assert text.endswith("\n") and "\r" not in text
    series: Series = {}
    typed, helped, done = set[str](), set[str](), set[str]()
    newest = ""
    for line in text.splitlines():
        if line.startswith("# "):
            word, name, rest = line[2:].split(" ", 2)
            assert re.fullmatch(NAME, name) and word in ("HELP", "TYPE")
            said = helped if word == "HELP" else typed
            assert name not in said and name not in done, f"a second {word} of {name}, or after its samples"
            assert word == "HELP" or rest in KINDS
            said.add(name)
            continue
        found = SAMPLE.fullmatch(line)
        assert found, line
        name, labels = found[1], frozenset(re.findall(LABEL, found[2] or ""))
        assert name == newest or name not in done, f"lines of {name} are not together"
        assert len({label.partition("=")[0] for label in labels}) == len(labels)
        assert (name, labels) not in series
        series[name, labels] = float(found[3])
        newest = name
        done.add(name)
    assert done <= typed
    return series


class Written:
    """A run of two GPUs, and its file."""

    def __init__(self, folder: Path, *names: str, gpus: int = 2) -> None:
        jobs = (a_job(name, "m", gpus=1, steps=100) for name in names)
        self.run, self.now, self.told = Driver(*jobs, gpus=gpus), 0.0, list[str]()
        self.path = folder / "run.prom"
        self.progress: dict[int, Progress] = {}
        self.file = MetricsFile(
            self.path,
            self.run.machine,
            sample=lambda gpu: None if gpu else BUSY,
            progress=lambda: self.progress,
            saved_at=lambda job_id: 900.0 if job_id == 1 else None,
            tell=self.told.append,
            clock=lambda: self.now,
            wall=lambda: 1000.0,
        )

    def after(self, seconds: float) -> Series:
        self.now += seconds
        self.run.now += seconds
        self.file.look(self.run.now)
        return parsed(self.path.read_text())


def value(series: Series, name: str, **labels: str) -> float | None:
    wanted, name = {f'{key}="{text}"' for key, text in labels.items()}, f"hpcsched_{name}"
    found = [number for (one, given), number in series.items() if one == name and wanted <= given]
    assert len(found) < 2
    return found[0] if found else None


def test_what_the_file_says(tmp_path: Path) -> None:
    written = Written(tmp_path, "a", 'odd"\\name')
    written.run.runs("a")
    written.progress[1] = Progress(job_id=1, attempt=1, step=40, rate=2.0)
    seen = written.after(PERIOD_S)
    assert value(seen, "run_state", state="RUNNING") == 1 and value(seen, "run_state", state="FINISHED") == 0
    assert value(seen, "jobs", state="RUNNING") == 1 and value(seen, "jobs", state="COMPLETED") == 0
    assert value(seen, "job_step", job="1") == 40 and value(seen, "job_steps", job="1") == 100
    assert value(seen, "job_checkpoint_age_seconds", job="1") == 100.0
    assert value(seen, "job_checkpoint_age_seconds", job="2") is None
    assert value(seen, "gpu_utilisation_ratio", gpu="0") == 0.5
    assert value(seen, "gpu_utilisation_ratio", gpu="1") is None  # nobody has measured it
    assert value(seen, "gpu_memory_used_bytes", gpu="0") == 2**20
    assert value(seen, "gpu_energy_joules_total", gpu="0") == 7.5
    assert stat.S_IMODE(written.path.stat().st_mode) == 0o644  # another user's collector reads it
    held = value(seen, "held_gpu_seconds_total")
    assert held and held > 0 and value(written.after(PERIOD_S), "held_gpu_seconds_total") > held  # type: ignore[operator]
    written.file.close()
    assert value(parsed(written.path.read_text()), "run_state", state="STOPPED") == 1


def test_it_is_written_now_and_then_and_a_failure_is_said_once(tmp_path: Path) -> None:
    written = Written(tmp_path, "a")
    written.after(0.0)
    written.path.unlink()
    written.now += PERIOD_S - 1
    written.file.look(1.0)
    assert not written.path.exists()
    written.path.mkdir()
    for _ in range(3):
        written.now += PERIOD_S
        written.file.look(1.0)
    assert len(written.told) == 1 and "cannot write" in written.told[0]


def test_jobs_with_lines_of_their_own_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcsched.agent.metrics_file.MOST_JOBS", 2)
    written = Written(tmp_path, "a", "b", "c", gpus=3)
    written.run.runs("a", "b", "c")
    assert sum(name == "hpcsched_job_gpus" for name, _ in written.after(PERIOD_S)) == 2


def test_odd_words_and_numbers() -> None:
    text = exposition([Family("m", "gauge", "About.", [({"a": 'x"\\\n\udc80'}, 1e-7), ({"a": ""}, 1e20)])])
    assert len(parsed(text)) == 2 and sorted(parsed(text).values()) == [1e-7, 1e20]
    assert exposition([Family("m", "gauge", "About.", [])]) == ""


@pytest.mark.parametrize("name", ["run.txt", "missing/run.prom"])
def test_a_file_that_nobody_would_read_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, ["run", "--metrics-file", name, "--dir", "r", "--", "true"])
    assert "ends in .prom" in str(done.exception) and not (tmp_path / "r").exists()
