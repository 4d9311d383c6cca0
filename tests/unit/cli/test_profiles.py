"""`hpcsched profile` apart from measuring: import, list, show, export, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hpcsched.cli.profile.group import profile
from hpcsched.errors import ConfigError, HpcschedError
from hpcsched.store.profiles import load_profiles, parse_profiles


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "h.db"
    monkeypatch.setenv("HPCSCHED_DATABASE", str(path))
    monkeypatch.chdir(tmp_path)
    return path


def call(*words: str) -> Result:
    result = CliRunner().invoke(profile, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_profiles_go_in_and_come_out_again(database: Path, tmp_path: Path) -> None:
    assert "4 profiles of marble-summit" in call("import", "marble-summit").stderr
    call("import", "marble-summit")
    assert parse_profiles(call("export").stdout, where="out") == load_profiles("marble-summit")
    call("export", "VGG-16", "ResNet-50", "-o", str(tmp_path / "two.json"))
    assert [p.model for p in load_profiles(tmp_path / "two.json")] == ["ResNet-50", "VGG-16"]


def test_list_has_a_line_for_each(database: Path) -> None:
    (header,) = call("list").stdout.splitlines()
    assert header.split()[:6] == ["MODEL", "DEVICE", "NODES", "BATCH", "GPUS", "OPTIMAL"]
    call("import", "marble-summit")
    lines = call("list").stdout.splitlines()
    assert lines[1].split() == ["ResNet-50", "V100-16GB-Summit", "1", "32", "1,2,3,4,5,6", "3", "fitted", "-"]
    assert len(json.loads(call("list", "--from", "gavel-k80", "--json").stdout)["profiles"]) == 25


def test_show_has_what_changes_in_place_cost(database: Path, tmp_path: Path) -> None:
    profile = {"model": "m", "device": "d", "throughput": {"1": 1, "2": 2}}
    profile |= {"grow_s": {"2": 0.043}, "shrink_s": 0.02}
    file = tmp_path / "m.json"
    file.write_text(json.dumps({"schema": 1, "profiles": [profile]}))
    call("import", str(file))
    lines = call("show", "m").stdout.splitlines()
    assert lines[1].split() == ["GPUS", "step/s", "GROW_S", "SHRINK_S"]
    assert [line.split()[2:4] for line in lines[2:4]] == [["-", "0.02"], ["0.04", "0.02"]]
    assert json.loads(call("export", "m").stdout)["profiles"][0]["grow_s"] == {"2": 0.043}


def test_show_marks_the_optimum(database: Path) -> None:
    call("import", "marble-summit")
    lines = call("show", "ResNet-50").stdout.splitlines()
    assert lines[0] == "ResNet-50: V100-16GB-Summit, 1 node, batch 32, fitted"
    assert lines[1].split() == ["GPUS", "step/s", "START_S", "SUSPEND_S", "RESUME_S"]
    assert [line.endswith("<- optimal") for line in lines[2:8]] == [False, False, True, False, False, False]
    assert lines[4].split()[:5] == ["3", "7.579", "21.7", "32.5", "21.7"]
    assert lines[4].count("#") == 25 and lines[2].count("#") == 15
    (found,) = parse_profiles(call("show", "ResNet-50", "--json").stdout, where="out")
    assert found == load_profiles("marble-summit")[0]


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["show", "nix"], "no profile of 'nix'"),
        (["show", "nix", "--from", "marble-summit"], "ResNet-50, Inception-v3"),
        (["export", "nix"], "no profile of 'nix'"),
        (["import", "nowhere.json"], "no such file"),
        (["run", "absent.toml"], "absent.toml"),
        (["run", "--devices", "cpu:2", "--gpus", "3", "--", "true"], "1 to 2: so many are here"),
        (["run", "--devices", "cpu:2", "--gpus", "two", "--", "true"], "counts like"),
        (["run", "--devices", "cpu:2", "--gpus", "2-1", "--", "true"], "counts like"),
        (["run", "--devices", "replay:2", "--", "true"], "pretended GPUs do not train"),
        (["run", "--devices", "cpu:2", "--trainer", "nonsense"], "package.module:Name"),
        (["run", "--devices", "cpu:2", "--trainer", "a.b:C", "--args", "{"], "--args: not JSON"),
        (["run", "--devices", "cpu:2", "--trainer", "a.b:C", "--args", "[]"], "an object"),
        (["run", "--devices", "cpu:2", "--database", "/proc/no/h.db", "--", "true"], "/proc/no/h.db"),
    ],
)
def test_bad_input_is_one_line(database: Path, words: list[str], match: str) -> None:
    with pytest.raises(HpcschedError, match=match) as error:
        call(*words)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "words",
    [
        ["run"],
        ["run", "jobs.toml", "--", "true"],
        ["run", "--job", "a", "--", "true"],
        ["run", "--args", "{}", "--", "true"],
        ["run", "--repeats", "0", "--", "true"],
        ["run", "--seconds", "0", "--", "true"],
    ],
)
def test_bad_usage_ends_with_2(database: Path, words: list[str]) -> None:
    assert call(*words).exit_code == 2


JOBS = """
schema = 1
[[job]]
name = "a1"
model = "a"
command = ["sh", "a1.sh"]
gpus = { min = 2, max = 3 }
processes = "per-gpu"
[[job]]
name = "a2"
model = "a"
command = ["sh", "a2.sh"]
processes = "one"
[[job]]
name = "b"
replay = true
"""


def test_a_dry_run_names_what_would_be_launched(database: Path, tmp_path: Path) -> None:
    (tmp_path / "jobs.toml").write_text(JOBS)
    dry = ["run", "jobs.toml", "--dry-run", "--devices", "cpu:4"]
    trials = json.loads(call(*dry, "--job", "a1", "--json").stdout)["trials"]
    assert [(t["gpus"], t["processes"], t["argv"][-1]) for t in trials] == [(2, 2, "a1.sh"), (3, 3, "a1.sh")]
    text = call(*dry, "--job", "a2", "--gpus", "4,2", "--model", "c", "--seconds", "1").stdout
    assert text.splitlines() == [
        "c on 4 x cpu, at least 5 s, 1 process(es): sh a2.sh",
        "c on 2 x cpu, at least 5 s, 1 process(es): sh a2.sh",
    ]
    unknown = call("run", "--dry-run", "--devices", "cpu:4", "--json", "--", "sh", "a3.sh").stdout
    assert [(t["gpus"], t["processes"]) for t in json.loads(unknown)["trials"]] == [(1, 1)]
    with pytest.raises(ConfigError, match="processes: counts 2, 4"):
        call("run", "--dry-run", "--devices", "cpu:4", "--gpus", "2,4", "--", "sh", "a3.sh")
    with pytest.raises(ConfigError, match="job b: replay"):
        call(*dry)
    with pytest.raises(ConfigError, match="no job 'x'; accepted: a1, a2, b"):
        call(*dry, "--job", "x")
    assert call(*dry, "--model", "c").exit_code == 2
    assert not database.exists()


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["python", "src/train.py", "--lr", "1"], "train"),
        (["python", "-m", "pkg.train"], "pkg.train"),
        (["./train.sh"], "train"),
        (["/opt/bin/train", "x.txt"], "train"),
        (["--odd"], "--odd"),
    ],
)
def test_a_command_is_named_after_its_program(database: Path, command: list[str], name: str) -> None:
    out = call("run", "--dry-run", "--devices", "cpu:1", "--json", "--", *command).stdout
    assert [(t["model"], t["argv"]) for t in json.loads(out)["trials"]] == [(name, command)]
