"""`hpcsched plan burst`: what it prints, draws and writes, and what it refuses."""

import json
import xml.etree.ElementTree as ET

import pytest
from click.testing import CliRunner

from hpcsched.cli.main import cli
from hpcsched.planning.burst.plan import BurstPlan

VGG = ("vgg16-a100", "--gpus", "8", "--global-batch", "32", "--bandwidth", "600", "--latency", "10")
TABLE = {
    "schema": 1,
    "model": "m",
    "gpus": 2,
    "global_batch": 32,
    "amplification_limit": 2.0,
    "layers": [
        {"id": 0, "name": "conv", "prev": [], "time_us": {"1": 900, "2": 480}, "sync_us": {"1": 0, "2": 30}},
        {"id": 1, "name": "fc", "prev": [0], "time_us": {"1": 100, "2": 110}},
    ],
    "transfers": [{"from": 0, "to": 1, "time_us": {"1": {"1": 0, "2": 20}, "2": {"1": 12.5, "2": 0}}}],
}


def burst(*arguments):
    return CliRunner().invoke(cli, ["plan", "burst", *map(str, arguments)])


@pytest.fixture
def table_file(tmp_path):
    path = tmp_path / "table.json"
    path.write_text(json.dumps(TABLE))
    return path


def test_a_table_of_times_becomes_a_plan(table_file):
    result = burst(table_file, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {
        "schema": 1,
        "model": "m",
        "gpus": 2,
        "global_batch": 32,
        "amplification_limit": 2.0,
        "feasible": True,
        "iter_s": pytest.approx(622.5e-6),
        "data_parallel_s": pytest.approx(620e-6),
        "gpu_s": pytest.approx((2 * 510 + 112.5) * 1e-6),
        "notes": ["plain data parallelism is faster, but the limit of 2 forbids it"],
        "layers": [
            {
                "id": 0,
                "name": "conv",
                "ranks": [0, 1],
                "start_s": 0.0,
                "end_s": pytest.approx(510e-6),
                "amplification": pytest.approx(2 * 510 / 900),
            },
            {
                "id": 1,
                "name": "fc",
                "ranks": [0],
                "start_s": pytest.approx(522.5e-6),
                "end_s": pytest.approx(622.5e-6),
                "amplification": pytest.approx(1.125),
            },
        ],
    }


def test_options_go_before_what_the_table_says(table_file):
    page = json.loads(burst(table_file, "--amplification", "3", "--json").stdout)
    assert page["amplification_limit"] == 3.0
    assert page["iter_s"] == page["data_parallel_s"]
    assert json.loads(burst(table_file, "--gpus", "1", "--json").stdout)["layers"][0]["ranks"] == [0]


def test_a_shipped_profile_can_be_planned_by_its_name():
    result = burst(*VGG, "--amplification", "2")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["LAYER", "GPUS", "RANKS", "START(ms)", "TIME(ms)", "AMPLIFICATION"]
    assert lines[1].split()[:4] == ["conv1_1", "8", "0-7", "0.000"]
    assert lines[21].split()[:3] == ["fc8", "1", "0"]
    assert "ms data parallel: 1.0" in lines[-1]


def test_a_model_that_was_measured_can_be_planned_by_its_name(tmp_path, monkeypatch):
    from hpcsched.store.database import Database

    path = tmp_path / "measured.sqlite"
    monkeypatch.setenv("HPCSCHED_DATABASE", str(path))
    with Database(path) as database:
        layer = {"id": 0, "name": "all", "prev": [], "parameter_bytes": 0, "activation_bytes": 4}
        times = {"forward_us": {"1": 5.0, "32": 160.0}, "backward_us": {"1": 5.0, "32": 160.0}}
        page = {"schema": 1, "model": "mine", "device": "cpu", "input_bytes": 4}
        database.record_layers({**page, "layers": [{**layer, **times}]})
    result = burst("mine", *VGG[1:])
    assert result.exit_code == 0
    assert "0.040 ms a step on 8 GPUs" in result.stdout


@pytest.mark.long
def test_the_plan_and_its_picture_are_written_to_files(tmp_path):
    result = burst(*VGG, "-o", tmp_path / "plan.json", "--gantt", tmp_path / "plan.svg")
    assert result.exit_code == 0
    plan = BurstPlan.parse(json.loads((tmp_path / "plan.json").read_text()), where="plan.json")
    assert len(plan.layers) == 21
    drawn = "".join(ET.parse(tmp_path / "plan.svg").getroot().itertext())
    assert "VGG-16, global batch 32" in drawn
    assert "conv1_2" in drawn


def test_without_a_plan_within_the_limit_it_says_why_and_exits_with_1(tmp_path, table_file, monkeypatch):
    from hpcsched.planning.burst import planner

    def none(problem, **_):
        raise planner.NoBurstPlan(f"layer 'fc' cannot be run within an amplification of {problem.limit:g}")

    monkeypatch.setattr(planner, "solve", none)
    result = burst(table_file)
    assert result.exit_code == 1
    assert result.stderr == "hpcsched: no plan: layer 'fc' cannot be run within an amplification of 2\n"
    page = json.loads(burst(table_file, "--json").stdout)
    assert page == {"schema": 1, "feasible": False, "why": result.stderr[len("hpcsched: no plan: ") : -1]}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nothing-here",), "nothing-here: no such file; accepted: a file, a model measured by"),
        (VGG[:1], "--gpus: missing; accepted: how many GPUs there are"),
        (VGG[:5], "--bandwidth: missing; accepted: GB/s that a GPU sends"),
        (VGG[:7], "--latency: missing; accepted: microseconds"),
        ((*VGG, "--amplification", "0.5"), "--amplification: 0.5; accepted: a number of at least 1"),
        ((*VGG, "--gantt", "/no/such/folder/x.svg"), "--gantt: no folder /no/such/folder"),
        ((*VGG, "-o", "/no/such/folder/x.json"), "--output: no folder /no/such/folder"),
        ((*VGG[:6], "0", *VGG[7:]), "--bandwidth: 0; accepted: GB/s that a GPU sends"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments, words):
    result = CliRunner().invoke(cli, ["plan", "burst", *arguments])
    assert str(result.exception).startswith(words)
    assert result.exception.exit_code == 2
    assert "\n" not in str(result.exception)


def test_network_figures_do_not_go_with_a_table(table_file):
    result = burst(table_file, "--bandwidth", "300")
    assert str(result.exception) == (
        "--bandwidth: given with a table of times; accepted: only with a layer profile"
    )
