"""Targets behind the command line: what reads an input is called as the agent, or the command, calls it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from hpcsched.agent.admission import Admission
from hpcsched.agent.command_outcomes import command_outcome, signal_outcome
from hpcsched.agent.inbox import Answer, Command, Inbox
from hpcsched.agent.recorder import Recorder
from hpcsched.core import events as ev
from hpcsched.core.machine import Machine
from hpcsched.devices.node_file import read_node
from hpcsched.errors import HpcschedError
from hpcsched.policy import make_policy
from hpcsched.pool.poolfile import read_pool
from hpcsched.store.journal import Journal
from hpcsched.store.replay import replay
from hpcsched.store.rundir import RunDir
from hpcsched.testing.builders import Driver, a_job, a_profile, some_devices
from hpcsched.tuning import read_search, source_of
from hpcsched.tuning.search import check_packing, example_of
from hpcsched.tuning.source import TrialOutcome

from .sandbox import Wrong, check_line, refused


def search(folder: Path, data: bytes) -> str:
    """A search file as `tune` reads it, and the first jobs of its search, whatever comes of them."""
    path = folder / "search.toml"
    path.write_bytes(data)

    def read() -> None:
        asked = read_search(path)
        check_packing(asked, "auto", where="--packing")
        asked.shortage()
        example_of(asked)
        source = source_of(asked)
        outcomes: dict[str, TrialOutcome] = {}
        for losing in (1.0, 0.5):
            jobs = source.jobs(outcomes, at_once=4)
            done = TrialOutcome("completed", {asked.metric: losing})
            outcomes |= {job.name: done for job in jobs[:50] if job.name not in outcomes}
        source.progress(outcomes)
        source.trials(outcomes)
        source.best(outcomes)

    return refused(read)


def pool(folder: Path, data: bytes) -> str:
    """A pool file as `pool start --dry-run` reads it."""
    path = folder / "pool.toml"
    path.write_bytes(data)
    return refused(lambda: read_pool(path))


def node(folder: Path, data: bytes) -> str:
    path = folder / "node.toml"
    path.write_bytes(data)
    return refused(lambda: read_node(path))


def commands() -> list[bytes]:
    """Commands as users' programs send them."""
    jobs = [
        *(a_job("new", "m"), a_job("after", "m", after=("new",), gpus=2, retries=1)),
        *(
            a_job("mine", "x", env={"A": "1"}),
            a_job("cores", "x", gpus=0, strategy={"kind": "ps", "cpus": 4}),
        ),
    ]
    made = [Command(command="submit", jobs=[job]) for job in jobs]
    made += [Command(command="submit", jobs=jobs, update=True, workdir="/w", cancelled=["mine"])]
    made *= 3  # there is more to get wrong in them
    others = ("cancel", "hold", "release", "suspend", "resume", "retry")
    made += [Command(command=what, targets=[1, 2]) for what in others]
    made += [Command(command="drain"), Command(command="signal", targets=[1], signal="SIGUSR1")]
    shell = (
        b'{"command":"submit","jobs":[{"name":"n0","kind":"command","model":"m","command":["true"],"nodes":1,'
        b'"workdir":"/","args":{"lr":0.1},"strategy":{"kind":"ddp"},"gpus_min":1,"gpus_max":2,"priority":3}]}'
    )
    return [shell, *map(msgspec.json.encode, made)]


def inbox(folder: Path, data: bytes) -> str:
    """A file in the inbox of a run under way: it is answered in a line, no event of it is void, and the
    journal can be read again."""
    rundir = RunDir(folder / "run")
    rundir.make()
    driver = Driver(a_job("a", "m"), a_job("b", "m"), profiles=[a_profile("m", [1, 1.8])], gpus=2)
    driver.runs("a")
    machine = Machine(make_policy)
    journal = Journal(rundir.journal)
    recorder = Recorder(machine, journal)
    for _ in recorder.take(driver.events):
        pass
    (rundir.inbox / "new" / "1.1.h").write_bytes(data)
    reader = Inbox(rundir)
    admission = Admission(
        machine=machine,
        find_profiles=lambda models, gpu_type: (),
        stand_ins=False,
        cores=8.0,
        devices=some_devices(2),
        memory_mib=16000.0,
    )
    answers = []
    for name, told in reader.read():
        answer = (
            told
            if isinstance(told, str)
            else _carried_out(machine, recorder, admission, told, f"inbox:{name}")
        )
        reader.answer(name, Answer(error=answer) if isinstance(answer, str) else answer)
        answers.append(str(answer if isinstance(answer, str) else answer.error or answer.outcomes))
        if isinstance(answer, str) or answer.error:
            check_line(answer if isinstance(answer, str) else str(answer.error))
    for at in (60.0, 3600.0):
        for _ in recorder.take([ev.DrainRequested(at=at, cause="x")]):
            pass
    replay(rundir.journal, make_policy)
    return "; ".join(answers)[:500]


def _carried_out(
    machine: Machine, recorder: Recorder, admission: Admission, told: Command, cause: str
) -> Answer | str:
    """As `loop.Agent._carry_out` has it."""
    events: list[ev.Event]
    if told.command == "submit":
        try:
            events, answer = admission.submitted(told, at=50.0, gpus=2, cause=cause)
        except HpcschedError as error:
            return str(error)
    elif told.command == "drain":
        events, answer = [ev.DrainRequested(at=50.0, cause=cause)], Answer()
    elif told.command == "signal":
        return signal_outcome(machine, told, lambda job_id, number: True)
    else:
        events, answer = command_outcome(machine, told, at=50.0, cause=cause)
    for event, _ in recorder.take(events):
        if isinstance(event, ev.EventVoided):
            raise Wrong(f"an event that cannot be handled was let in: {event.kind}: {event.error}")
    return answer
