"""`hpcsched plan pack`: what it prints, and what it refuses."""

import json
import re
from math import nan
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpcsched.cli.main import cli
from hpcsched.planning.packing.strategies import STRATEGIES

COSTS = {
    "model": "mlp",
    "batch": 32,
    "separate_s": 0.010,
    "shared_s": 0.004,
    "points": {"1": 0.010, "2": 0.016, "3": 0.018},
    "memory_mib": {"base": 400, "each": 100},
    "stackable": True,
}
MEMBER = {"name": "a", "model": "mlp", "batch": 32, "config": {"lr": 0.1}, "steps": 100}
PROBLEM = {
    "schema": 1,
    "devices": 1,
    "memory_mib": 16000,
    "members": [{**MEMBER, "name": name} for name in "abc"],
    "costs": [COSTS],
    "axes": [{"name": "lr", "kind": "numeric", "log": True, "low": 1e-4, "high": 1}],
}


@pytest.fixture
def pack(tmp_path):
    def run(problem, *arguments):
        (tmp_path / "p.json").write_text(json.dumps(problem))
        return CliRunner().invoke(cli, ["plan", "pack", str(tmp_path / "p.json"), *map(str, arguments)])

    return run


def test_the_examples_of_the_page_are_what_is_printed(pack):
    page = (Path(__file__).parents[4] / "docs/packing-plans.md").read_text()
    problem = json.loads(re.search(r"```json\n(.*?)```", page, re.DOTALL)[1])
    said = "".join(re.findall(r"```console\n(.*?)```", page, re.DOTALL))
    _, *shown = re.split(r"^\$ hpcsched plan pack packs.json(.*)\n", said, flags=re.MULTILINE)
    assert len(shown) == 8
    for options, printed in zip(shown[::2], shown[1::2], strict=True):
        found = pack(problem, *options.split())
        assert (found.stdout + found.stderr).strip() == printed.strip()


def test_the_plan_as_json(pack):
    result = pack(PROBLEM, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {
        "schema": 1,
        "strategy": "run",
        "feasible": True,
        "devices": 1,
        "packs": [
            {
                "device": 0,
                "members": ["a", "b", "c"],
                "step_s": pytest.approx(0.018),
                "time_s": pytest.approx(1.8),
                "separate_s": pytest.approx(3.0),
                "memory_mib": 700.0,
                "gain": pytest.approx(0.4),
            }
        ],
        "time_s": pytest.approx(1.8),
        "separate_s": pytest.approx(3.0),
        "strategies": {name: pytest.approx(3.0 if name == "off" else 1.8) for name in STRATEGIES},
        "notes": [],
    }


def test_the_plan_as_a_table(pack):
    lines = pack(PROBLEM).stdout.splitlines()
    assert lines[0].split() == ["PACK", "DEVICE", "STEP(ms)", "TIME(s)", "MEMORY(MiB)", "GAIN", "MEMBERS"]
    assert lines[1].split(maxsplit=6) == ["0", "0", "18.000", "1.800", "700", "40%", "a, b, c"]
    assert lines[3] == (
        "run: 1.800 s on 1 device, 3.000 s one by one: 1.67x; measured 1.800 s (1.00x), "
        "knn 1.800 s (1.00x), batch 1.800 s (1.00x), random 1.800 s (1.00x)"
    )


def test_without_steps_an_epoch_is_trained_and_the_table_says_of_how_many_samples(pack):
    members = [{"name": name, "model": "mlp", "batch": 32} for name in "ab"]
    assert (
        "note: members without steps train for an epoch of 10000 samples"
        in pack({**PROBLEM, "members": members}).stdout
    )
    made = json.loads(pack({**PROBLEM, "members": members, "epoch": 3200}, "--json").stdout)
    assert made["time_s"] == pytest.approx(100 * 0.016)


def test_options_go_before_what_the_file_says(pack):
    def packs(*options):
        made = json.loads(pack(PROBLEM, "--json", *options).stdout)
        return made["strategy"], sorted(len(each["members"]) for each in made["packs"])

    assert packs("--strategy", "off") == ("off", [1, 1, 1])
    assert packs("--devices", 3) == ("run", [1, 1, 1])
    assert packs("--memory", 700) == ("run", [1, 2])
    assert packs("--most", 2) == ("run", [1, 2])
    assert packs("--strategy", "auto", "--devices", 3) == ("off", [1, 1, 1])
    assert packs("--strategy", "knn", "--threshold", 0) == ("knn", [3])
    assert packs("--strategy", "random", "--seed", 7, "--most", 1) == ("random", [1, 1, 1])


def test_environment_variables_that_mean_other_things_are_not_read(pack, monkeypatch):
    monkeypatch.setenv("HPCSCHED_DEVICES", "cpu:2")
    assert pack(PROBLEM).exit_code == 0


def test_a_member_that_fits_nowhere_exits_with_1(pack):
    result = pack(PROBLEM, "--memory", 450)
    assert result.exit_code == 1
    why = "member 'a' fits on no device: 500 MiB, the device has 450"
    assert result.stderr == f"hpcsched: no plan: {why}\n"
    page = json.loads(pack(PROBLEM, "--memory", 450, "--json").stdout)
    assert page == {"schema": 1, "feasible": False, "why": why}


def with_member(**keys):
    return {**PROBLEM, "members": [MEMBER, {**MEMBER, "name": "b", **keys}]}


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        ([], ": []; accepted: a table with the keys schema, devices"),
        ({**PROBLEM, "schema": 2}, ": schema: 2; accepted: 1"),
        ({**PROBLEM, "device": 2}, ": unknown key 'device'; accepted: the keys schema, devices"),
        ({**PROBLEM, "devices": 0}, ": devices: 0; accepted: a positive whole number"),
        ({**PROBLEM, "devices": 10**9}, ": devices: 1000000000; accepted: at most"),
        ({**PROBLEM, "memory_mib": nan}, ": memory_mib: nan; accepted: MiB of a device, above 0"),
        ({**PROBLEM, "reserve": 1}, ": reserve: 1.0; accepted: a share of the memory below 1"),
        ({**PROBLEM, "members": []}, ": members: []; accepted: a list of tables, at least 1"),
        ({**PROBLEM, "members": [5]}, ": members[0]: 5; accepted: a table with the keys name,"),
        (with_member(name="a"), ": members[1].name: 'a' a second time; accepted: each name once"),
        (
            with_member(batch=64),
            ": members[1]: 'b' is 'mlp' with batch 64; accepted: one that has costs: mlp",
        ),
        (
            {**with_member(batch=64), "costs": [COSTS, {**COSTS, "model": "m\n"}]},
            ": members[1]: 'b' is 'mlp' with batch 64; accepted: one that has costs: m\\n with batch 32, mlp",
        ),
        (with_member(steps=0), ": members[1].steps: 0; accepted: a positive whole number"),
        (with_member(config={"lr": [1]}), ": members[1].config.lr: [1]; accepted: text, a number, true"),
        (with_member(config={"lr": 5}), ": members[1].config.lr: 5; accepted: from 0.0001 to 1"),
        (with_member(colour=1), ": members[1]: unknown key 'colour'"),
        ({**PROBLEM, "costs": None}, ": costs: missing; accepted: a list of tables, at least 1"),
        ({**PROBLEM, "costs": [COSTS, COSTS]}, ": costs[1]: 'mlp' with batch 32 a second time"),
        (
            {**PROBLEM, "costs": [{**COSTS, "points": {"2": 0}}]},
            ": costs[0] ('mlp', batch 32).points.2: 0; accepted: seconds, above 0",
        ),
        ({**PROBLEM, "axes": [{"name": "lr"}] * 2}, ": axes: 'lr' a second time; accepted: each name once"),
        (
            {**PROBLEM, "pairs": [{"models": ["mlp", "cnn"], "batches": [32, 32], "factor": 2}]},
            ": pairs[0]: 'cnn' with batch 32; accepted: a model and batch that has costs",
        ),
        (
            {**PROBLEM, "pairs": [{"models": ["mlp"]}]},
            ": pairs[0]: {'models': ['mlp']}; accepted: two models",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(pack, problem, words):
    result = pack(problem)
    assert f"p.json{words}" in str(result.exception)
    assert result.exception.exit_code == 2
    assert "\n" not in str(result.exception)


def test_pairs_that_disturb_one_another_are_kept_apart(pack):
    other = {**COSTS, "model": "cnn"}
    members = [
        {**MEMBER, "name": f"{model}{i}", "model": model} for i in range(2) for model in ("mlp", "cnn")
    ]
    pairs = [{"models": ["mlp", "cnn"], "batches": [32, 32], "factor": 4}]
    made = json.loads(
        pack(
            {**PROBLEM, "members": members, "costs": [COSTS, other], "pairs": pairs},
            *("--json", "--strategy", "auto"),
        ).stdout
    )
    assert sorted(each["members"] for each in made["packs"]) == [["cnn0", "cnn1"], ["mlp0", "mlp1"]]


def test_files_that_are_none_are_refused(tmp_path):
    result = CliRunner().invoke(cli, ["plan", "pack", str(tmp_path / "none.json")])
    assert "No such file or directory; accepted: a readable JSON file" in str(result.exception)
    (tmp_path / "bad.json").write_text("{")
    result = CliRunner().invoke(cli, ["plan", "pack", str(tmp_path / "bad.json")])
    assert "bad.json: not readable: " in str(result.exception)
