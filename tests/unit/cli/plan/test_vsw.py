"""`hpcsched plan vsw`: what it prints, and what it refuses."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from places import ROOT

from hpcsched.cli.main import cli
from hpcsched.errors import ConfigError

SHIPPED = ROOT / "profiles" / "vsw" / "resnet50-v100-p100.json"
TABLE = {
    "schema": 1,
    "workers": 5,
    "groups": [
        {"name": "n1", "options": [{"workers": n, "iter_s": 0.1 * n} for n in (1, 2, 3, 4)]},
        {"name": "n2", "options": [{"workers": n, "iter_s": 0.2 * n} for n in (1, 2, 3, 4)]},
        {"name": "n3", "options": [{"workers": 1, "iter_s": 9.0}]},
    ],
}


def run(*arguments):
    return CliRunner().invoke(cli, ["plan", "vsw", *map(str, arguments)])


def refused(result):
    """The line that a user sees, who gave something wrong."""
    assert isinstance(result.exception, ConfigError)
    assert result.exception.exit_code == 2
    words = str(result.exception)
    assert len(words.splitlines()) == 1
    return words


@pytest.fixture
def tabulated(tmp_path):
    def plan(table, *arguments):
        (tmp_path / "t.json").write_text(json.dumps(table))
        return run(tmp_path / "t.json", *arguments)

    return plan


# -- tables --------------------------------------------------------------------------------------------


def test_a_table_is_solved(tabulated):
    result = tabulated(TABLE, "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found.pop("solve_s") >= 0
    assert found == {
        "schema": 1,
        "iter_s": pytest.approx(0.4),
        "groups": [
            {"name": "n1", "workers": 4, "iter_s": pytest.approx(0.4)},
            {"name": "n2", "workers": 1, "iter_s": 0.2},
        ],
    }


def test_the_solution_of_a_table_as_text(tabulated):
    lines = tabulated(TABLE).stdout.splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["GROUP", "WORKERS", "STEP(ms)"],
        ["n1", "4", "400.000"],
        ["n2", "1", "200.000"],
    ]
    assert lines[-1] == "5 workers on 2 groups: 400.000 ms a step"


def test_a_table_without_solution_exits_with_1(tabulated):
    result = tabulated({**TABLE, "workers": 99}, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {
        "schema": 1,
        "feasible": False,
        "why": "the groups reach 1..9 workers, 99 are asked",
    }
    result = tabulated({**TABLE, "workers": 99})
    assert (result.exit_code, result.stdout) == (1, "")
    assert isinstance(result.exception, SystemExit)
    assert result.stderr == "hpcsched: no plan: the groups reach 1..9 workers, 99 are asked\n"


def group(**changes):
    return {**TABLE, "groups": [{**TABLE["groups"][0], **changes}]}


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({**TABLE, "schema": 2}, "schema: 2"),
        ({**TABLE, "workers": 0}, "workers: 0"),
        ({**TABLE, "workers": 10**7}, "at most 1000000"),
        ({**TABLE, "workers": True}, "workers: True"),
        ({**TABLE, "more": 1}, "unknown key 'more'"),
        ({**TABLE, "groups": []}, "at least 1"),
        ({**TABLE, "groups": [TABLE["groups"][0]] * 2}, "groups[1].name: 'n1'"),
        (group(options=None), "groups[0].options: missing"),
        (group(options=[{"workers": 1.5, "iter_s": 1}]), "groups[0].options[0].workers: 1.5"),
        (group(options=[{"workers": 1, "iter_s": -1}]), "groups[0].options[0].iter_s: -1"),
        (group(options=[{"workers": 1, "iter_s": float("nan")}]), "groups[0].options[0].iter_s: nan"),
        (group(options=[{"workers": 1}]), "groups[0].options[0].iter_s: missing"),
    ],
)
def test_a_wrong_table_is_refused_by_key(tabulated, table, words):
    assert words in refused(tabulated(table))


@pytest.mark.parametrize("option", [["--global-batch", "8"], ["--scale"], ["--gpus", "n=1:x"]])
def test_options_of_costs_are_refused_for_tables(tabulated, option):
    assert f"{option[0]}: given with a table of options" in refused(tabulated(TABLE, *option))


# -- costs ---------------------------------------------------------------------------------------------


def test_shipped_costs_are_planned_with():
    result = run("resnet50-v100-p100", "--global-batch", 4096, "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert (found["feasible"], found["model"], len(found["gpus"])) == (True, "resnet50", 8)
    assert sum(gpu["workers"] for gpu in found["gpus"]) == found["workers"]
    assert found["workers"] * found["local_batch"] == found["global_batch"] == 4096
    assert found["iter_s"] == pytest.approx(max(gpu["iter_s"] for gpu in found["gpus"]))
    assert found["samples_s"] == pytest.approx(4096 / found["iter_s"])
    v100, p100 = found["gpus"][0], found["gpus"][4]
    assert ("V100" in v100["kind"], "P100" in p100["kind"]) == (True, True)
    assert v100["workers"] > p100["workers"]
    rounds = -(-v100["workers"] // v100["at_once"])
    assert v100["accumulation"] == rounds - 1


def test_the_plan_as_text():
    lines = run("resnet50-v100-p100", "--global-batch", 250).stdout.splitlines()
    assert lines[0].split() == ["HOST", "GPUS", "WORKERS", "AT-ONCE", "ACCUMULATION", "STEP(ms)"]
    assert lines[1].split()[:5] == ["node0", "4", "x", "Tesla", "V100-PCIE-16GB"]
    assert lines[2].split()[-4:-1] == ["1", "1", "0"]
    assert lines[4].startswith("resnet50: 8 workers of 32 samples on 8 GPUs: ")
    assert lines[5] == "note: a global batch of 256, as whole workers make; 250 was asked"


def test_the_cluster_and_the_local_batches_can_be_given():
    arguments = ["--gpus", "a=2:V100", "--gpus", "b=1:p100", "--local-batch", "64,32", "--json"]
    found = json.loads(run("resnet50-v100-p100", *arguments).stdout)
    assert [(gpu["host"], gpu["kind"][6:10]) for gpu in found["gpus"]] == [
        ("a", "V100"),
        ("a", "V100"),
        ("b", "P100"),
    ]
    assert found["local_batch"] in (32, 64)


def test_an_epoch_by_the_number_of_gpus():
    arguments = ["resnet50-v100-p100", "--scale", "--global-batch", 128, "--samples", 6400]
    found = json.loads(run(*arguments, "--json").stdout)
    assert [each["count"] for each in found["sets"]] == [1, 2, 3, 4]
    assert all(set(each["gpus"]) <= {0, 1, 2, 3} for each in found["sets"])  # the faster ones
    assert (found["samples"], found["global_batch"]) == (6400, 128)
    lines = run(*arguments).stdout.splitlines()
    assert lines[4].split()[:1] == ["4"]
    assert "*  node0: 4 x Tesla V100-PCIE-16GB" in lines[4]
    assert lines[-2].startswith("an epoch of 6,400 samples in steps of about 128: ")


@pytest.mark.parametrize("way", [(), ("--scale",)])
def test_a_batch_that_the_profile_is_not_for_is_planned_and_noted(way):
    note = "note: the profile is for global batches from 256 to 32768"
    assert note in run("resnet50-v100-p100", *way, "--global-batch", 99_999).stdout
    assert note not in run("resnet50-v100-p100", *way, "--global-batch", 512).stdout


def test_steps_that_are_not_what_was_asked_are_noted():
    lines = run("resnet50-v100-p100", "--scale", "--global-batch", 32).stdout.splitlines()
    assert "note: steps of 64 samples, as whole workers make; 32 was asked" in lines
    assert "whole workers" not in run("resnet50-v100-p100", "--scale", "--global-batch", 128).stdout


def test_no_configuration_exits_with_1():
    result = run("resnet50-v100-p100", "--global-batch", 128)
    assert result.exit_code == 1
    assert "fewer workers than the 8 GPUs" in result.stderr
    result = run("resnet50-v100-p100", "--accumulation", 0, 0, "--global-batch", 32768, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["feasible"] is False


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none"], "none: no such file"),
        (["resnet50-v100-p100", "--gpus", "V100"], "--gpus: 'V100'"),
        (["resnet50-v100-p100", "--gpus", "n=2:Tesla"], "a part of one's name"),
        (["resnet50-v100-p100", "--gpus", "n=0:V100"], "1 to 1024 GPUs"),
        (["resnet50-v100-p100", "--local-batch", "32,x"], "--local-batch: '32,x'"),
        (["resnet50-v100-p100", "--accumulation", "3", "1"], "the least first"),
        (["resnet50-v100-p100", "--accumulation", "1", "3", "--scale"], "0 as the least with --scale"),
        (["resnet50-v100-p100", "--samples", "3"], "only with --scale"),
    ],
)
def test_wrong_options_are_refused_by_name(arguments, words):
    assert words in refused(run(*arguments))


def test_costs_without_cluster_or_bounds_ask_for_them(tmp_path):
    table = json.loads(SHIPPED.read_text())
    del table["cluster"], table["global_batch"]
    (tmp_path / "c.json").write_text(json.dumps(table))
    assert "--gpus: missing" in refused(run(tmp_path / "c.json", "--global-batch", 64))
    assert "--global-batch: missing" in refused(run(tmp_path / "c.json", "--gpus", "n=1:V100"))
    assert run(tmp_path / "c.json", "--gpus", "n=1:V100", "--global-batch", 64).exit_code == 0


# -- the authors' format -------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """The shipped measurements as files in the authors' format."""
    table = json.loads(SHIPPED.read_text())
    servers = {}
    for row in table["cluster"]:
        bandwidths = {"intra_network_bandwidth": 1e9, "inter_network_bandwidth": 1e9}
        servers[row["host"]] = {"type": row["kind"], "number": row["gpus"], **bandwidths}
        for speed in table["costs"]["gpus"][row["kind"]]["speeds"]:
            place = Path(str(speed["local_batch"]), row["host"])
            comp, mem = tmp_path / "comp" / place, tmp_path / "mem" / place
            comp.mkdir(parents=True)
            mem.mkdir(parents=True)
            head = {"gpu_type": row["kind"], "lbs": speed["local_batch"]}
            (mem / "max_memory_profile_info.json").write_text(
                json.dumps({**head, "max_num_models": speed["most"]})
            )
            for n, times in speed["times"].items():
                own = {"model": "resnet50", **head, "num_models": int(n), "bn_sync_time": 6.29}
                own |= {"data_time": times["data_s"] * 1e3, "fwd_time": times["forward_s"] * 1e3}
                own |= {
                    "bwd_time": times["backward_s"] * 1e3,
                    "update_time": 4.0,
                    "copy_time": 2.0 * (int(n) - 1),
                }
                name = f"resnet50_{speed['local_batch']}_{n}_comp_profile.json"
                (comp / name).write_text(json.dumps(own))
    (tmp_path / "comm").mkdir()
    for scope, key in (("intra", "within"), ("inter", "between")):
        line = table["costs"]["network"][key]
        # At 1 GB/s an ideal ms is half a megabyte sent.
        lines = [
            f"{ms},{(line['latency_s'] + line['per_byte_s'] * ms * 5e5) * 1e3}" for ms in (1.0, 10.0, 80.0)
        ]
        (tmp_path / "comm" / f"{scope}_comm_profile_data.txt").write_text("\n".join(lines))
    sizes = [size / 2**20 for size in table["costs"]["buckets"]]
    (tmp_path / "resnet50_bucket_size_profile.json").write_text(
        json.dumps({"bucket_size_distribution": sizes})
    )
    (tmp_path / "cluster_info.json").write_text(json.dumps(servers))
    bounds = {"batch_size_lower_bound": 256, "batch_size_upper_bound": 32768}
    (tmp_path / "config.json").write_text(json.dumps(bounds))
    return tmp_path


def test_a_folder_of_the_authors_gives_the_same_plan(folder):
    found = json.loads(run(folder, "--global-batch", 4096, "--json").stdout)
    shipped = json.loads(run("resnet50-v100-p100", "--global-batch", 4096, "--json").stdout)
    key = ("local_batch", "workers", "global_batch")
    assert [found[k] for k in key] == [shipped[k] for k in key]
    assert found["iter_s"] == pytest.approx(shipped["iter_s"], rel=0.01)
    kinds = {gpu["kind"]: gpu["workers"] for gpu in found["gpus"]}
    assert kinds == {gpu["kind"]: gpu["workers"] for gpu in shipped["gpus"]}


def test_a_folder_without_a_file_is_refused(folder):
    (folder / "cluster_info.json").unlink()
    assert "accepted: a cluster_info.json" in refused(run(folder))


def test_a_file_that_is_no_json_is_refused(folder):
    (folder / "cluster_info.json").write_text("{")
    assert "cluster_info.json: not readable" in refused(run(folder))
