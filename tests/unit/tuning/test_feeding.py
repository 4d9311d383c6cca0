"""A search as the source of a run's jobs: what the run knows in, the jobs that are missing out."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from hpcsched.core.events import JobsSubmitted, WorkersSpawned
from hpcsched.core.model import Kind
from hpcsched.errors import ConfigError
from hpcsched.sim.engine import Simulation
from hpcsched.testing.builders import Driver, a_profile
from hpcsched.tuning import Tuning, parse_search, source_of
from hpcsched.tuning.feeding import Feeder, outcomes_of
from hpcsched.tuning.grouping import axes_of

SEARCH = """
schema = 1
trainer = "examples.digits:Digits"
metric = "accuracy"
mode = "max"
R = 9
seed = 3
{rest}
[args]
kind = "mlp"
[defaults]
retries = 0
[space]
lr = {{ log = [1e-3, 1.0] }}
"""


def feeder(rest=""):
    source = source_of(parse_search(SEARCH.format(rest=rest), where="search.toml"))
    return Feeder(source, workdir=Path("/somewhere"), user="ada")


def submit(driver, feed):
    new = feed(driver.machine)
    if new:
        driver.tell(JobsSubmitted, first_id=len(driver.machine.run.jobs) + 1, jobs=tuple(new))
    return new


def test_a_rung_s_trainings_are_packed_jobs_of_one_gpu_and_so_many_epochs():
    driver, feed = Driver(gpus=1), feeder()
    new = submit(driver, feed)
    assert {spec.epochs for spec in new} == {1.0, 3.0, 9.0}
    first = new[0]
    assert (first.kind, first.gpus_min, first.gpus_max) == (Kind.TRAINER, 1, 1)
    assert first.args["kind"] == "mlp" and 1e-3 <= first.args["lr"] <= 1.0
    assert first.strategy == {"kind": "packed", "mode": "loop"} and first.retries == 0
    assert (first.workdir, first.user, first.steps, first.continues) == ("/somewhere", "ada", None, None)
    assert feed(driver.machine) == []  # they are there now


def test_only_a_search_that_need_not_be_exact_computes_models_as_one():
    new = submit(Driver(gpus=1), feeder("exact = false"))
    assert {spec.strategy["mode"] for spec in new} == {"auto"}


def test_trials_with_batches_of_one_size_come_one_after_the_other():
    text = SEARCH.format(rest="") + 'batch = { choice = [64, 16, 32] }\nkind2 = { choice = ["a", "b"] }\n'
    feed = Feeder(Tuning(parse_search(text, where="search.toml")), workdir=Path("/somewhere"), user="ada")
    batches = [spec.args["batch"] for spec in feed(Driver(gpus=1).machine)]
    assert batches == sorted(batches, key=[64, 16, 32].index)
    assert set(batches) == {64, 16, 32}


ADAPTERS = """
batch = { choice = [4, 8] }
alpha = { choice = [8, 16] }
rank = { choice = [4, 8, 16, 64] }
dropout = { uniform = [0.0, 0.1] }
"""


def adapters(lines=""):
    """What a search over LoRA adapters submits: the first rung of 60 trials."""
    text = SEARCH.format(rest=f'method = "halving"\ntrials = 60\n{lines}') + ADAPTERS
    return submit(
        Driver(gpus=2), Feeder(source_of(parse_search(text, where="s.toml")), workdir=Path("/somewhere"))
    )


def runs_of(specs, *keys):
    """How often what these arguments are changes from one job to the next."""
    values = [tuple(spec.args[key] for key in keys) for spec in specs]
    return 1 + sum(one != other for one, other in pairwise(values)), len(set(values))


def test_adapters_that_differ_only_in_alpha_and_rates_are_next_to_each_other_if_the_rank_is_the_model():
    pieces, kinds = runs_of(adapters(), "rank", "batch")
    assert pieces > kinds  # all choices count, alpha too
    named = adapters('exact = false\narchitecture = ["rank"]')
    assert runs_of(named, "rank") == (4, 4)
    assert runs_of(named, "rank", "batch") == (8, 8)
    assert {spec.model for spec in named} == {f"Digits-rank={rank}" for rank in (4, 8, 16, 64)}
    exact = adapters('architecture = ["rank"]')  # they share batches, and are not computed as one
    assert runs_of(exact, "batch") == (2, 2) and runs_of(exact, "batch", "rank") == (8, 8)


def test_of_one_model_the_longest_comes_first():
    text = SEARCH.format(rest='exact = false\narchitecture = ["rank"]') + "rank = { int = [1, 2] }\n"
    feed = Feeder(source_of(parse_search(text, where="s.toml")), workdir=Path("/somewhere"))
    specs = submit(Driver(gpus=2), feed)
    keys = [(spec.args["rank"], -spec.epochs) for spec in specs]
    assert keys == sorted(keys)


def test_only_what_makes_another_model_or_batch_counts_for_how_far_trials_are_apart():
    lines = 'packing = "knn"\narchitecture = ["rank"]'
    for architecture, names in (("", "lr batch alpha rank dropout"), (lines, "batch rank")):
        found = parse_search(SEARCH.format(rest=architecture) + ADAPTERS, where="s.toml")
        assert [axis.name for axis in axes_of(found)] == names.split()


def test_packing_off_is_data_parallel_and_steps_are_steps():
    new = submit(Driver(gpus=1), feeder('packing = "off"\nunit = "steps"'))
    assert {spec.strategy["kind"] for spec in new} == {"ddp"}
    assert {(spec.steps, spec.epochs) for spec in new} == {(1, None), (3, None), (9, None)}


def test_the_best_of_a_rung_go_on_from_where_they_are():
    driver, feed = Driver(gpus=20), feeder('method = "halving"\ntrials = 9')
    names = [spec.name for spec in submit(driver, feed)]
    for value, name in enumerate(names):
        driver.runs(name)
        driver.exits(name, 0, 10, 10, metrics={"accuracy": value / 10})
        if name != names[-1]:
            assert feed(driver.machine) == []
    again = submit(driver, feed)
    assert sorted(spec.continues for spec in again) == sorted(names[-3:])
    assert all(spec.after == (spec.continues,) and spec.epochs == 3.0 for spec in again)


def test_a_metric_that_the_trainer_does_not_report_is_refused_by_name():
    driver, feed = Driver(gpus=1), feeder()
    name = submit(driver, feed)[0].name
    driver.runs(name)
    driver.exits(name, 0, 10, 10, metrics={"loss": 0.1, "top5": 0.9})
    with pytest.raises(ConfigError, match=r"search.toml: metric: 'accuracy'; accepted: loss, top5"):
        feed(driver.machine)


def test_a_metric_that_is_not_finite_is_a_bad_trial_and_no_reason_to_stop():
    driver, feed = Driver(gpus=20), feeder('method = "halving"\ntrials = 3')
    names = [spec.name for spec in submit(driver, feed)]
    for name, value in zip(names, (None, 0.5, None), strict=True):
        driver.runs(name)
        driver.exits(name, 0, 10, 10, metrics={"accuracy": value})
        feed(driver.machine)
    (again,) = submit(driver, feed)
    assert again.continues == names[1]
    rows = feed.source.trials(outcomes_of(driver.machine))
    assert [row.state for row in rows] == ["no metric", "running", "no metric"]


def test_what_the_trainer_refuses_again_and_again_ends_the_search():
    driver, feed = Driver(gpus=20), feeder("")
    names = [spec.name for spec in submit(driver, feed)]
    for number, name in enumerate(names[:3]):
        driver.tell(WorkersSpawned, name, processes=((100, 1),))
        if number == 2:
            assert feed(driver.machine) == []
        driver.exits(name, 2, None, None, detail="args: 'wdith'; accepted: width")
    with pytest.raises(ConfigError, match="refuses the first 3 trials: args: 'wdith'; accepted: width"):
        feed(driver.machine)
    driver.now += 1.0
    driver.start_agent(20)  # the trainer may have been mended since
    assert feed(driver.machine) == []


def test_one_that_was_refused_among_others_does_not():
    driver, feed = Driver(gpus=20), feeder("")
    names = [spec.name for spec in submit(driver, feed)]
    for number, name in enumerate(names[:5]):
        driver.runs(name)
        driver.exits(name, 2 if number else 0, 10, 10, metrics={"accuracy": 0.1})
    assert feed(driver.machine) == []


def test_a_search_in_a_simulation_trains_what_hyperband_says():
    """27 trials of 1, 9 of 3, ... epochs: all of them run, the simulated winner is the best."""
    feed = feeder()

    def in_steps(machine):
        return [replace(spec, steps=int(spec.epochs * 10), training=None) for spec in feed(machine)]

    simulation = Simulation(
        (),
        [a_profile("Digits", [10.0])],
        gpus=2,
        source=in_steps,
        metrics=lambda spec: {"accuracy": -abs(spec.args["lr"] - 0.1)},
    )
    machine = simulation.run()
    outcomes = outcomes_of(machine)
    assert feed.source.finished(outcomes)
    best = feed.source.best(outcomes)
    lrs = [job.spec.args["lr"] for job in machine.run.jobs.values()]
    assert best.job.args["lr"] == min(lrs, key=lambda lr: abs(lr - 0.1))
    progress = feed.source.progress(outcomes)
    assert (progress.rungs_done, progress.jobs_done) == (progress.rungs, progress.jobs) == (6, len(outcomes))


@pytest.mark.parametrize("packing", ["knn", "batch", "random"])
def test_with_a_strategy_of_the_paper_s_every_training_is_told_its_pack(packing):
    space = "batch = { choice = [16, 32] }"
    text = SEARCH.format(rest=f'packing = "{packing}"\nmethod = "random"\ntrials = 12') + space
    feed = Feeder(Tuning(parse_search(text, where="search.toml")), workdir=Path("/somewhere"))
    driver = Driver(gpus=2)
    new = submit(driver, feed)
    packs = {}
    for spec in new:
        packs.setdefault(spec.strategy["pack"], []).append(spec.args["batch"])
    assert sum(map(len, packs.values())) == 12
    assert max(map(len, packs.values())) > 1
    if packing == "batch":
        assert all(len(set(batches)) == 1 for batches in packs.values())
    assert [spec.strategy for spec in feed(Driver(gpus=2).machine)] == [spec.strategy for spec in new]


def test_the_threshold_says_how_far_apart_members_of_a_pack_may_be():
    def packs(line):
        rest = f'packing = "knn"\nmethod = "random"\ntrials = 40\narchitecture = ["width"]\n{line}'
        text = SEARCH.format(rest=rest) + "width = { choice = [1, 2, 3, 4, 5, 6, 7, 8] }\n"
        found = {}
        for spec in submit(Driver(gpus=2), Feeder(source_of(parse_search(text, where="s")), workdir=Path())):
            found.setdefault(spec.strategy["pack"], set()).add(spec.args["width"])
        return [max(widths) - min(widths) for widths in found.values()]

    assert max(packs("")) > 2, "more than one place to either side"
    assert max(packs("knn_threshold = 1")) in (1, 2), "one place to either side of the first"
    assert set(packs("knn_threshold = 0")) == {0}


@pytest.mark.parametrize(
    ("rest", "trainings"),
    [
        ("trials = 30", 16),
        ('trials = 30\npacking = "off"', 2),
        ("trials = 30\nparallel = 5", 5),
        ("trials = 3", 3),
    ],
    ids=["packs of 8", "one a GPU", "as the file says", "all there are"],
)
def test_asha_has_as_many_trainings_as_gpus_and_packs_have_room_for(rest, trainings):
    driver, feed = Driver(gpus=2), feeder(f'method = "asha"\n{rest}')
    names = [spec.name for spec in submit(driver, feed)]
    assert len(names) == trainings and submit(driver, feed) == []
    driver.runs(names[0])
    driver.exits(names[0], 0, 10, 10, metrics={"accuracy": 0.1})
    assert len(submit(driver, feed)) == (0 if trainings == 3 else 1)


def test_a_trial_that_asha_has_chosen_goes_on_before_its_rung_is_complete():
    driver, feed = Driver(gpus=9), feeder('method = "asha"\ntrials = 9\npacking = "off"')
    names = [spec.name for spec in submit(driver, feed)]
    for name, value in zip(names[:3], (0.1, 0.3, 0.2), strict=True):
        driver.runs(name)
        driver.exits(name, 0, 10, 10, metrics={"accuracy": value})
    (again,) = submit(driver, feed)
    assert (again.continues, again.after, again.epochs) == (names[1], (names[1],), 3.0)


def in_simulation(method, *, gpus, trials=81, packing="off"):
    """A search over trials of which one in four is ten times as slow: the machine, and its search."""
    rest = f'method = "{method}"\ntrials = {trials}\npacking = "{packing}"'
    text = SEARCH.format(rest=rest).replace("R = 9", "R = 27") + "width = { choice = [1, 2, 3, 40] }\n"
    feed = Feeder(source_of(parse_search(text, where="search.toml")), workdir=Path("/somewhere"))

    def in_steps(machine):
        return [
            replace(
                spec,
                model="slow" if spec.args["width"] == 40 else "fast",
                steps=round((spec.epochs - (spec.epochs / 3 if spec.continues else 0)) * 10),
                training=None,
            )
            for spec in feed(machine)
        ]

    machine = Simulation(
        (),
        [a_profile("slow", [1.0]), a_profile("fast", [10.0])],
        gpus=gpus,
        source=in_steps,
        metrics=lambda spec: {"accuracy": -abs(spec.args["lr"] - 0.1)},
    ).run()
    assert feed.source.finished(outcomes_of(machine))
    return machine, feed.source


def test_in_a_simulation_asha_waits_for_no_slow_trial_where_halving_does():
    found = {}
    for method in ("halving", "asha"):
        machine, source = in_simulation(method, gpus=9)
        jobs = machine.run.jobs.values()
        whole_s = min(job.ended_s for job in jobs if job.spec.name.endswith("-r3"))
        found[method] = whole_s, max(job.ended_s for job in jobs), source.best(outcomes_of(machine)).metric
    # Halving's rungs wait for the ten times as long of the slow trials, with most of the GPUs free.
    assert found["asha"][0] < 0.7 * found["halving"][0]
    assert found["asha"][1] < found["halving"][1]
    assert found["asha"][2] == found["halving"][2], "the best learning rate of these is the best in each rung"


def test_a_search_by_asha_is_the_same_when_it_is_run_again():
    stories = []
    for _ in range(2):
        machine, _ = in_simulation("asha", gpus=3, trials=27, packing="auto")
        stories.append([(job.spec.name, job.started_s, job.ended_s) for job in machine.run.jobs.values()])
    assert stories[0] == stories[1]
