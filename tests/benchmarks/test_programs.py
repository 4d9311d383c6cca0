"""Each benchmark works with tiny sizes and prints the schema; how fast things are is not tested here."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

BENCHMARKS = ROOT / "benchmarks"
DEADLINE_S = 300.0


def run(tmp_path: Path, name: str, *options: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{name}.py"), "--quick", "--json", *options],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("hpcsched-bench-*")) == []
    page: dict[str, Any] = json.loads(done.stdout)
    assert page["schema"] == 1
    assert page["quick"] is True
    for row in page["rows"]:
        assert row.keys() == {"what", "goal", "measured", "ok"}
    return page


def check_samples(results: dict[str, Any]) -> None:
    assert results
    for samples in results.values():
        assert samples
        assert all(isinstance(x, (int, float)) and x >= 0 for x in samples)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("marble_tables", {"set1_marble_makespan_s", "set1_exclusive_makespan_s", "set1_overhead_share"}),
        ("replay_vs_simulate", {"set1_run_makespan_s", "set1_simulated_makespan_s", "set1_steps_lost"}),
        ("decisions", {"exit_s", "promotion_s", "submission_s", "set1_scheduling_s", "set3_scheduling_s"}),
        ("advise", {"speed_processor_s", "speed_each_simulated_processor_s"}),
        ("monitoring", {"cpu_slots_s", "nvml_our_part_s"}),
        ("idle_agent", {"window_cpu_s", "window_wall_s", "rss_mib", "pss_mib"}),
        ("growth", {"bytes_a_job", "rss_bytes", "jobs_60_status_s", "jobs_60_explain_peak_mib"}),
        ("soak", {"over", "rss", "descriptors", "threads", "cpu_s", "file_bytes"}),
        ("throughput", {"first_start_s", "noop_80_wall_s", "noop_80_ends_s", "xargs_80_wall_s"}),
        ("dispatch", {"hpcsched_wall_s", "hpcsched_cpu_s", "ratio_to_xargs", "guards_cpu_ratio"}),
        ("sharing", {"alone_s", "hpcsched, one a slot: took_s", 'hpcsched, "share": makespan_s'}),
        ("plans", {"plan_of_10_default_s", "plan_of_10_goal=makespan_s"}),
        ("simulator_scale", {"jobs_1000_taken_s", "jobs_2000_events", "jobs_2000_peak_mib", "growth"}),
        ("vsw_plans", {"solve_16_of_16_200_s", "solver_wrong_cases", "iteration_errors"}),
        ("vsw_steps", {"digits_1_usual_s", "text_2_compared_s", "text_1_decision_s"}),
        ("cpu_shares", {"rests_5ms_0.5_cores", "stopped_spin_0.5_cores", "holder_cores", "rest_s"}),
        ("ps_simulated", {"A_paper_alone_dtconfig_jct_h", "B_hpcsched_trace_fixed_queueing_h"}),
        ("pack_plans", {"plan_of_10_s", "v100_paired_as_measured_over_best"}),
        ("pack_steps", {"mlp_b8_n2_separate_step_s", "mlp_unequal_ragged_step_s", "cnn_b8_n2_auto_step_s"}),
        ("packed_hyperband", {"digits_off_wall_s", "digits_auto_wall_s", "mlp_off_on_1_search_s"}),
        ("strategies", {"digits_cnn_plain_on_1_step_s", "digits_cnn_burst_on_2_ddp_step_s"}),
        ("policies", {"exclusive_jct_over_bound", "marble_makespan_over_bound", "planner_longest_plan_s"}),
    ],
)
def test_each_runs_and_prints_its_samples(tmp_path: Path, name: str, expected: set[str]) -> None:
    results = run(tmp_path, name)["results"]
    assert expected <= results.keys()
    check_samples(results)


def test_what_does_not_depend_on_the_machine_is_right(tmp_path: Path) -> None:
    page = run(tmp_path, "marble_tables")
    assert all(row["ok"] for row in page["rows"] if row["goal"])


def test_no_policy_is_better_than_the_bounds_and_the_planner_no_later_than_marble(tmp_path: Path) -> None:
    found = run(tmp_path, "policies")["results"]
    for name in ("exclusive", "marble", "equal", "optimus", "planner"):
        for measure in ("makespan_over_bound", "jct_over_bound"):
            assert all(ratio >= 1 - 1e-9 for ratio in found[f"{name}_{measure}"])
    assert all(ratio <= 1 + 1e-9 for ratio in found["planner_makespan_over_marble"])


def test_a_trace_is_simulated_too(tmp_path: Path) -> None:
    trace = tmp_path / "two.csv"
    trace.write_text("submit_s,duration_s,gpus\n0,10,1\n5,10,8\n9,10,1000\n")
    page = run(tmp_path, "simulator_scale", str(trace))
    assert page["results"]["trace_jobs"] == [2]
    assert page["results"]["trace_left_out"] == [1]
    check_samples(page["results"])


def test_all_programs_that_have_samples_are_run(tmp_path: Path) -> None:
    """But for those that need a batch system, or a GPU."""
    command = [sys.executable, str(BENCHMARKS / "run_all.py"), "--only", "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    programs = {path.stem for path in BENCHMARKS.glob("*.py")}
    helpers = {"common", "run_all", "exact_digits", "marble_training", "resize_training"}
    helpers |= {"advise", "allocations", "load", "lanes_gpu", "networks", "pack_gpu"}
    helpers |= {"gains", "gains_ways", "queue_check", "queues", "several_allocations"}
    helpers |= {"side_by_side", "vsw_gpu", "machine", "regressions"}
    helpers |= {"vsw_policies", "lora", "lora_packed"}
    assert all(name in done.stderr for name in programs - helpers)


@pytest.mark.torch
def test_resizes_are_seen_in_the_stamps_of_a_training(tmp_path: Path) -> None:
    found = run(tmp_path, "resize_seen")["results"]
    for way in ("grow", "shrink"):
        for number in ("still", "lost", "less_old", "said", "old_step", "new_step"):
            assert len(found[f"run_{way}_{number}_s"]) == 1  # may be below 0
        assert found[f"run_{way}_said_s"][0] > 0
    assert len(found["in_place_grow_gap_s"]) == 1


@pytest.mark.torch
def test_packs_of_adapters_are_compared_where_there_is_peft(tmp_path: Path) -> None:
    page = run(tmp_path, "adapters")
    if len(page["rows"]) == 1:
        assert "framework_envs.sh" in page["rows"][0]["measured"]
        pytest.skip("no PEFT here")
    ways = ("each alone, one a slot", "packs", "plain programs, two at a time", "plain programs, all at once")
    for way in ways:
        for number in ("makespan_s", "trains_s", "samples_per_s", "peak_mib"):
            assert page["results"][f"3 adapters, {way}: {number}"][0] > 0
    assert {"w64_b4_n2_alone_step_s", "w64_b4_n2_loop_step_s", "w64_b4_n2_adapters_step_s"} <= page[
        "results"
    ].keys()
    check_samples(page["results"])
    assert all(row["ok"] for row in page["rows"] if "weights" in row["what"])


def test_a_python_without_peft_is_refused_in_one_line() -> None:
    command = [sys.executable, str(BENCHMARKS / "adapters.py"), "--quick", "--python", "/bin/true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 2
    assert done.stderr.startswith("adapters.py: --python /bin/true: ") and done.stderr.count("\n") == 1


def test_status_imports_nothing_heavy(tmp_path: Path) -> None:
    page = run(tmp_path, "latency")
    assert {"status_s", "status_json_s", "help_s", "explain_s", "python_s"} <= page["results"].keys()
    check_samples(page["results"])
    (heavy,) = (row for row in page["rows"] if "imports torch, numpy, sqlalchemy" in row["what"])
    assert heavy["measured"] == "no"


@pytest.mark.torch
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "sklearn")),
    reason="needs torch and scikit-learn",
)
def test_resumed_trainings_are_equal(tmp_path: Path) -> None:
    page = run(tmp_path, "resume_equality")
    assert page["results"]["same_world_1_equal"] == [1.0]
    assert len(page["results"]["loss_relative_difference"]) == 12
    assert all(row["ok"] for row in page["rows"])


def test_all_at_once_gives_a_table_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "results" / "all.json"
    command = [sys.executable, str(BENCHMARKS / "run_all.py"), "--quick", "--output", str(file)]
    only = ["--only", "monitoring", "--only", "decisions"]
    done = subprocess.run([*command, *only], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert "| what | goal | measured | met |" in done.stdout
    assert "one decision with 500 jobs queued" in done.stdout
    page = json.loads(file.read_text())
    assert page["schema"] == 1
    assert page["results"].keys() == {"monitoring", "decisions"}
    assert {"date", "cpu", "cores", "gpus", "python", "libraries", "temporary_folder"} <= page[
        "machine"
    ].keys()
