"""Programs that save by themselves: when they are suspended, what it means that they left, what it costs."""

from __future__ import annotations

import pytest

from hpcsched.cli.run.results import lost_work_s, overhead_s, result_of
from hpcsched.core import events as ev
from hpcsched.core.actions import Launch, Suspend, Terminate
from hpcsched.core.model import Kind, Restart
from hpcsched.core.reasons import Why
from hpcsched.core.saving import how_suspended
from hpcsched.testing.builders import Driver, Planned, a_job, a_profile

HANDLES = Restart(signal="SIGUSR1", saved_codes=(85,))


def a_saver(name="a", restart=HANDLES, **rest):
    return a_job(name, kind=Kind.COMMAND, command=("train",), restart=restart, **rest)


def begun(*specs, **rest):
    """The jobs run on all that they may have, and are seen to handle their signal."""
    run = Driver(*specs, **rest)
    for spec in specs:
        run.tell(ev.WorkersSpawned, spec.name, processes=((100, 1),))
        run.tell(ev.RestartSeen, spec.name, handles=True)
    return run


def passes(run, seconds):
    run.now += seconds
    run.tell(ev.ProgressObserved, progress=())


def test_it_can_be_suspended_once_it_is_seen_to_save_by_itself():
    run = Driver(a_saver())
    run.tell(ev.WorkersSpawned, "a", processes=((100, 1),))
    run.suspend("a")
    assert run.states() == ["RUNNING"]  # nobody knows yet what its signal would do
    (asked,) = run.tell(ev.RestartSeen, "a", handles=True)
    assert isinstance(asked, Suspend)
    assert run.states() == ["SUSPENDING"]


@pytest.mark.parametrize("code", [0, 75, 128 + 10, 128 + 15, 85, 1, 137])
def test_asked_to_save_it_is_suspended_whatever_its_exit_code(code):
    run = begun(a_saver())
    run.suspend("a")
    run.tell(ev.RestartSeen, "a", handles=True, step=40, saved_at=run.now)
    run.exits("a", code, step=41)
    assert run.states() == ["SUSPENDED"]
    job = run.job("a")
    assert (job.saved_step, job.step, job.steps_repeated, job.failures) == (40, 40, 1, 0)
    assert job.story[-1].reason.why is Why.SAVED
    (launch,) = run.resume("a")
    assert isinstance(launch, Launch) and launch.resume


def test_exit_code_0_means_done_where_nobody_asked_or_nothing_is_left():
    run = begun(a_saver())
    run.exits("a", 0, step=100)
    assert run.states() == ["COMPLETED"]
    run = begun(a_saver())
    run.suspend("a")
    run.exits("a", 0, step=100)
    assert run.states() == ["COMPLETED"]
    run = begun(a_saver(steps=None))
    run.suspend("a")
    run.tell(ev.WorkersExited, "a", code=0, unasked=True)
    assert run.states() == ["COMPLETED"]


def test_what_was_not_saved_is_counted_and_told():
    run = begun(a_saver())
    run.now = 100.0
    run.tell(ev.RestartSeen, "a", handles=False, step=40, saved_at=100.0)
    run.now = 160.0
    run.reports("a", 64)
    run.suspend("a")
    run.exits("a", 143, step=64, saved=40)
    job = run.job("a")
    assert (job.step, job.steps_repeated) == (40, 24)
    assert str(job.story[-1].reason) == (
        "left with signal 15 (SIGTERM) and no newer checkpoint than the one of step 40 it had: "
        "24 steps done again, about 60 s of work lost"
    )


def test_without_any_checkpoint_it_begins_once_more_and_says_so():
    run = begun(a_saver(steps=None))
    run.now = 30.0
    run.suspend("a")
    run.exits("a", 143)
    assert str(run.job("a").story[-1].reason) == (
        "left with signal 15 (SIGTERM) and has no checkpoint: it begins once more, about 30 s of work lost"
    )
    (launch,) = run.resume("a")
    assert not launch.resume


def test_the_grace_counts_from_the_last_sign_of_saving_within_a_limit():
    run = begun(a_saver(), grace_s=30.0)
    run.suspend("a")
    run.now = 25.0
    run.tell(ev.SavingSeen, "a")
    assert run.due("grace", "a") == 55.0
    assert run.tell(ev.TimerFired, key=("grace", 1, 1)) == []  # that was the one before
    for run.now in range(30, 620, 20):
        run.tell(ev.SavingSeen, "a")
    assert run.due("grace", "a") == 600.0
    (end,) = run.ring("grace", "a")
    assert isinstance(end, Terminate)
    due = run.due("term", "a")
    run.tell(ev.SavingSeen, "a")
    assert run.due("term", "a") == due  # no longer


def test_a_program_that_says_it_by_the_contract_goes_by_that():
    run = begun(a_saver(gpus=(1, 4)), gpus=4)
    run.tell(ev.WorkersReady, "a", in_place=True, parallel=True)
    job = run.job("a")
    assert job.in_place and not job.saves_by_itself
    run.suspend("a")
    run.exits("a", 0, step=10)  # it leaves with 75 when it has saved
    assert run.states() == ["COMPLETED"]


def test_a_policy_is_told_what_a_suspend_loses():
    profile = a_profile("a", [1.0, 2.0, 3.0, 4.0], start_s=1.0, suspend_s=1.0)
    run = Driver(a_saver(restart=Restart(batch="scales")), gpus=4, profiles=[profile])
    run.tell(ev.WorkersSpawned, "a", processes=((100, 1),))
    run.tell(ev.RestartSeen, "a", handles=False)
    estimates, job = run.machine.estimates, run.job("a")
    run.now = 50.0
    run.reports("a", 40)
    assert (estimates.unsaved_s(job), estimates.switch_s(job, 2)) == (50.0, 52.0)
    assert not estimates.worth_changing(job, 0)  # 15 s are left of it
    run.tell(ev.RestartSeen, "a", handles=False, step=40, saved_at=48.0)
    assert estimates.unsaved_s(job) == 2.0
    assert estimates.worth_changing(job, 0)
    run.tell(ev.RestartSeen, "a", handles=True, step=40, saved_at=48.0)
    assert estimates.unsaved_s(job) == 0.0


def test_once_begun_it_keeps_its_count_as_its_global_batch_does():
    run = begun(a_saver(gpus=(1, 8)), gpus=4)
    assert run.job("a").limits(8) == (2, 2)  # it runs on two
    run.suspend("a")
    run.exits("a", 143)
    assert run.job("a").limits(8) == (1, 8)  # it has saved nothing there
    run.resume("a")
    run.tell(ev.RestartSeen, "a", handles=True, step=10)
    run.suspend("a")
    run.exits("a", 143)
    assert (run.job("a").limits(8), run.job("a").limits(1)) == ((2, 2), (2, 0))


def test_accumulation_keeps_the_global_batch_on_the_counts_that_divide_it():
    run = begun(a_saver(gpus=(1, 16), restart=Restart(batch="kept", accumulation=3)), gpus=4)
    run.suspend("a")
    run.exits("a", 143, saved=5)
    job = run.job("a")
    assert [gpus for gpus in range(1, 17) if job.allows(gpus)] == [1, 2, 3, 6]
    assert (job.fitting(5), job.more_than(3), job.limits(16)) == (3, 6, (1, 6))


def test_a_count_that_the_job_file_now_asks_for_is_taken_and_told():
    run = begun(a_saver(gpus=2), gpus=4)
    run.suspend("a")
    run.exits("a", 143, saved=5)
    run.define(a_saver(gpus=4))
    run.resume("a")
    assert run.job("a").width == 4
    assert Why.OTHER_COUNT in [note.reason.why for note in run.job("a").story]


def test_a_handler_that_saved_nothing_is_not_relied_on_the_next_time():
    run = begun(a_saver(gpus=1))
    run.now = 60.0
    run.reports("a", 30)
    run.suspend("a")
    run.exits("a", 143, step=30)
    run.resume("a")
    run.tell(ev.RestartSeen, "a", handles=True)
    passes(run, 40.0)
    job, unsaved_s = run.job("a"), run.machine.estimates.unsaved_s
    assert unsaved_s(job) == 40.0
    run.suspend("a")
    run.exits("a", 143, step=20, saved=20)
    run.resume("a")
    run.tell(ev.RestartSeen, "a", handles=True)
    passes(run, 40.0)
    assert unsaved_s(job) == 0.0


def test_how_it_is_suspended_is_said_in_one_line():
    run = Driver(a_saver(gpus=1, restart=Restart(speaks="transformers", recognised="it makes a Trainer")))
    job = run.job("a")

    def said():
        return how_suspended(job, run.now, run.machine.estimates.unsaved_s(job))

    assert said() == (
        "saves by itself (transformers: it makes a Trainer), SIGTERM if it catches that, which is not "
        "known yet; no checkpoint yet; a suspend now loses nothing"
    )
    run.tell(ev.RestartSeen, "a", handles=False, step=500, saved_at=0.0)
    passes(run, 200.0)
    assert said() == (
        "saves by itself (transformers: it makes a Trainer), only as it goes: it does not catch SIGTERM; "
        "newest checkpoint of step 500, 3 min ago; a suspend now loses 3 min of work"
    )
    run.tell(ev.RestartSeen, "a", handles=True, step=500, saved_at=0.0)
    assert said().endswith(", SIGTERM; newest checkpoint of step 500, 3 min ago; a suspend now loses nothing")


@pytest.mark.parametrize("policy", ["marble", "planner", "equal", "optimus"])
def test_it_waits_until_as_many_gpus_are_free_as_it_began_on(policy):
    run = Planned(a_saver(gpus=(1, 2)), gpus=4, policy=policy, profiles=[a_profile("a", [1.0, 2.0])])
    run.tell(ev.WorkersSpawned, "a", processes=((100, 1),))
    run.tell(ev.RestartSeen, "a", handles=True, step=10, saved_at=0.0)
    assert run.job("a").width == 2
    run.suspend("a")
    run.exits("a", 143, step=10)
    run.submit(a_job("b", gpus=3))
    run.resume("a")
    assert run.states() == ["SUSPENDED", "STARTING"]
    assert str(run.machine.waiting_reason(run.job("a"))).startswith("waits for")
    run.exits("b", 0)
    assert run.job("a").width == 2


def test_equal_shares_are_counts_that_jobs_may_have():
    profiles = [a_profile(name, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) for name in ("a", "b")]
    jobs = [a_job(name, gpus=(2, None), gpus_multiple=2) for name in ("a", "b")]
    run = Driver(*jobs, gpus=6, policy="equal", profiles=profiles)
    assert [run.job(name).width for name in ("a", "b")] == [4, 2]


def test_what_does_not_count_is_told_though_an_older_one_is_newer_than_the_order():
    run = begun(a_saver())
    run.suspend("a")
    run.tell(ev.RestartSeen, "a", handles=True, step=40, saved_at=run.now)
    run.exits(
        "a", 3, step=46, not_taken="c-46, written 0 s before its end, may not be whole and does not count"
    )
    assert run.states() == ["SUSPENDED"]
    (told,) = (str(note.reason) for note in run.job("a").story if note.reason.why is Why.SAVED)
    assert (
        told
        == "saved at step 40 (c-46, written 0 s before its end, may not be whole and does not count) and left"
    )
    assert not run.job("a").traits.saves.in_vain


@pytest.mark.parametrize(("code", "advice"), [(3, ": 3 is not among `saved_exit_codes`"), (143, "")])
def test_what_does_not_count_is_told_with_the_exit_code_that_would_say_that_it_does(code, advice):
    run = begun(a_saver())
    run.suspend("a")
    run.exits("a", code, step=None, not_taken="c-46 may not be whole and does not count")
    (told,) = (
        str(note.reason) for note in run.job("a").story if note.reason.why in (Why.NOT_SAVED, Why.NEVER_SAVED)
    )
    assert told.endswith(f"; c-46 may not be whole and does not count{advice}")


def test_failures_before_a_newer_checkpoint_do_not_count_whether_its_step_is_known_or_not():
    run = begun(a_saver(retries=1))
    for attempt in range(4):
        run.tell(ev.WorkersSpawned, "a", processes=((100 + attempt, 1),))
        run.now += 100.0
        run.tell(ev.RestartSeen, "a", handles=False, saved_at=run.now - 5.0)
        run.exits("a", 1, detail=f"crash {attempt}", not_taken="c may not be whole and does not count")
        assert run.states() == ["RUNNING"] or run.job("a").state.active
    run.tell(ev.WorkersSpawned, "a", processes=((200, 1),))
    run.exits("a", 1, detail="no checkpoint since")
    assert run.states() == ["FAILED"]


def test_a_checkpoint_of_unknown_step_that_is_gone_is_told():
    run = begun(a_saver())
    run.tell(ev.RestartSeen, "a", handles=True, saved_at=run.now)
    run.exits("a", 1, detail="crash")
    run.tell(ev.WorkersSpawned, "a", processes=((200, 1),))
    run.tell(ev.CheckpointSaved, "a", step=0)
    job = run.job("a")
    assert str(job.story[-1].reason) == "its checkpoint cannot be used; begins anew"
    assert not job.reports


# --- what counts as overhead ----------------------------------------------------------------------


def launched(**rest):
    """A job that has no handler, none of whose steps has been seen yet."""
    run = Driver(a_saver(steps=None, **rest))
    run.tell(ev.WorkersSpawned, "a", processes=((100, 1),))
    return run


def saves(run, saved_at, step=None, after_s=2.0):
    """A checkpoint is known to be whole so many seconds after it was written."""
    run.now = saved_at + after_s
    run.tell(ev.RestartSeen, "a", handles=False, step=step, saved_at=saved_at)


def overhead(run, attempt=1):
    return overhead_s(run.machine, run.job("a"), run.job("a").attempts[attempt - 1])


@pytest.mark.parametrize(("steps", "start_s"), [((100, 200, 300), 3.0), ((100,), 10.0), ((None, None), 10.0)])
def test_a_start_ends_where_the_training_began_by_its_checkpoints(steps, start_s):
    run = launched()
    run.now = 10.0
    run.tell(ev.RestartSeen, "a", handles=False)  # by now it is known to have no handler
    for number, step in enumerate(steps, 1):
        saves(run, 3.0 + 60.0 * number, step)
    run.exits("a", 0)
    assert overhead(run) == pytest.approx(start_s)


def test_a_start_ends_where_the_training_began_by_its_progress():
    run = launched()
    run.now = 20.0
    run.reports("a", 10)
    run.tell(ev.RestartSeen, "a", handles=False)
    run.now = 30.0
    run.reports("a", 20)
    assert overhead(run) == 10.0


def test_a_start_of_which_nothing_was_seen_counts_for_nothing():
    run = launched()
    run.now = 10.0
    run.tell(ev.RestartSeen, "a", handles=False)
    run.now = 100.0
    run.exits("a", 0)
    assert overhead(run) == 0.0


def test_a_checkpoint_of_an_earlier_attempt_says_nothing_of_a_start():
    run = launched()
    for number in (1, 2, 3):
        saves(run, 5.0 + 10.0 * number, number)
    run.suspend("a")
    run.exits("a", 143, saved=3)
    began = run.now = 100.0
    run.resume("a")
    run.tell(ev.WorkersSpawned, "a", processes=((100, 1),))
    run.tell(ev.RestartSeen, "a", handles=False, step=3, saved_at=35.0)
    assert overhead(run, 2) == 0.0
    for number in (4, 5):
        saves(run, began + 2.0 + 10.0 * (number - 3), number)
    run.exits("a", 0)
    assert (overhead(run, 1), overhead(run, 2)) == (pytest.approx(5.0), pytest.approx(2.0))


def test_what_it_trains_on_after_it_was_asked_to_leave_is_no_overhead_if_it_is_kept():
    run = launched()
    for number in (1, 2):
        saves(run, 3.0 + number, number, after_s=0.5)
    run.now = 6.0
    run.suspend("a")
    for number in (4, 12):
        saves(run, 3.0 + number, number, after_s=0.5)
    run.now = 16.0
    run.exits("a", 143, step=12, saved=12)
    job = run.job("a")
    assert overhead(run) == pytest.approx(3.0 + 1.0)
    assert lost_work_s(run.machine, job, job.attempts[0]) == 0.0
    (attempt,) = result_of(run.machine).jobs[0].attempts
    assert (attempt.launch_s, attempt.suspend_s) == (pytest.approx(3.0), pytest.approx(1.0))


@pytest.mark.parametrize("asked", [True, False])
def test_what_it_did_after_its_newest_checkpoint_is_lost_though_nothing_tells_its_steps(asked):
    run = launched()
    for number in (1, 2):
        saves(run, 3.0 + number, number)
    run.now = 35.0
    if asked:
        run.suspend("a")
        run.now = 36.0
    run.exits("a", 143, saved=2)
    job = run.job("a")
    assert lost_work_s(run.machine, job, job.attempts[0]) == 30.0
    assert overhead(run) == pytest.approx(3.0 + asked)


def test_the_save_that_it_was_asked_for_is_overhead():
    run = begun(a_saver())
    run.now = 50.0
    run.reports("a", 50)
    run.suspend("a")
    run.now = 53.0
    run.tell(ev.RestartSeen, "a", handles=True, step=51, saved_at=53.0)
    run.now = 54.0
    run.exits("a", 0, step=51)
    assert overhead(run) == 4.0
