"""Every kind of reason can be said in words, and a job's story keeps its beginning and its end."""

from __future__ import annotations

from string import Formatter

import pytest

from hpcsched.core.jobs import STORY_LENGTH, Job
from hpcsched.core.model import AUTO, Kind
from hpcsched.core.nouns import noun
from hpcsched.core.reasons import _WORDS, Reason, Why
from hpcsched.testing.builders import Driver, a_job, a_profile


@pytest.mark.parametrize("why", Why)
def test_every_reason_has_words(why):
    names = {name for _, name, _, _ in Formatter().parse(_WORDS[why]) if name}
    words = str(Reason(why, dict.fromkeys(names, 7)))
    assert words and "{" not in words and "\n" not in words


@pytest.mark.parametrize("why", Why)
def test_no_reason_tells_of_gpus_where_there_are_cpu_slots(why):
    names = {name for _, name, _, _ in Formatter().parse(_WORDS[why]) if name}
    reason = Reason(why, dict.fromkeys(names, 1))
    assert reason.said("GPU") == str(reason)
    assert reason.said("CPU slot") == str(reason).replace("GPU", "CPU slot")


def test_the_word_is_that_of_the_devices_and_names_stay():
    assert [noun(kinds) for kinds in ([], ["cuda"], ["cpu", "cpu"], ["cpu", "cuda"])] == [
        "GPU",
        "GPU",
        "CPU slot",
        "device",
    ]
    facts = {"gpu": 0, "job": 1, "name": "GPU-a", "because": "job 2 (GPU) shares no GPU"}
    assert Reason(Why.GIVES_WAY, facts).said("CPU slot") == (
        "leaves CPU slot 0 to job 1 (GPU-a): job 2 (GPU) shares no CPU slot"
    )
    names = {"how": "from its beginning", "because": ", with GPU"}
    assert Reason(Why.RETRIED, names).said("CPU slot") == "is run again from its beginning, with GPU"
    lost = Reason(Why.LOST, {"attempt": 1, "why": "GPU 3 was lost", "step": 7})
    assert lost.said("device") == "attempt 1 was lost (device 3 was lost); goes on from step 7"
    of_two = Driver(a_job("x", kind=Kind.COMMAND, command=("x",), processes=AUTO), gpus=2, kind="cpu")
    assert of_two.machine.ledger.noun == "CPU slot"
    assert of_two.job("x").story[-1].reason.said("CPU slot") == (
        "it gets 1 CPU slot, as nothing says that its program is parallel"
    )


def test_the_facts_given_are_those_the_words_need():
    """A run through most of what can happen to jobs: all their notes can be read."""
    profiles = [a_profile("m", [1, 2, 3, 2.5]), a_profile("wide", [1, 2, 3, 4, 5, 6])]
    driver = Driver(a_job("a", "m"), a_job("b", "wide"), a_job("c", "new"), profiles=profiles)
    driver.submit(a_job("d", "m", after=("c",)), a_job("e", "m", gpus=6))
    driver.hold("e")
    driver.runs("a", "b")
    driver.reports("b", 1)
    driver.reports("b", 0, again=1)
    driver.exits("a", 3, detail="no such file")
    driver.exits("a", 0)
    driver.ring("grace", "b")
    driver.ring("term", "b")
    driver.exits("b", 137)
    driver.lose(5)
    driver.cancel("c")
    driver.suspend("b")
    driver.drain()
    driver.start_agent(6)
    seen = set()
    for job in driver.machine.run.jobs.values():
        for note in job.story:
            assert str(note.reason)
            seen.add(note.reason.why)
    assert len(seen) >= 12


def test_a_long_story_keeps_its_first_line_and_the_newest_ones():
    job = Job(id=1, spec=a_job("a"), submit_s=0.0)
    job.note(0.0, Reason(Why.SUBMITTED))
    for i in range(3 * STORY_LENGTH):
        job.note(float(i), Reason(Why.FIXED, {"gpus": i}))
    assert len(job.story) == STORY_LENGTH
    assert job.story[0].reason.why is Why.SUBMITTED
    assert [note.at for note in job.story[-2:]] == [3 * STORY_LENGTH - 2, 3 * STORY_LENGTH - 1]
