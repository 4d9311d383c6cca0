"""Jobs by the inbox are checked as a job file's are, whatever is in them."""

from __future__ import annotations

from collections.abc import KeysView
from dataclasses import replace
from functools import reduce
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest

from hpcsched import jobfile
from hpcsched.agent.admission import Admission
from hpcsched.agent.inbox import Command, Inbox, send
from hpcsched.core.machine import Machine
from hpcsched.core.model import Device, HostCores, JobSpec, Kind
from hpcsched.core.needs import Needs
from hpcsched.core.packed import Jobs
from hpcsched.core.reasons import Why
from hpcsched.decoding import decode
from hpcsched.errors import ConfigError
from hpcsched.policy import make_policy
from hpcsched.store.rundir import RunDir
from hpcsched.submission import checked
from hpcsched.testing.builders import Driver, a_job, a_profile

SETS = [
    {"command": ["true"]},
    {
        "command": ["sh", "-c", "x"],
        "gpus": {"min": 2, "max": 4},
        "steps": 9,
        "after": ["b"],
        "processes": "one",
    },
    {
        "command": ["x"],
        "processes": "per-gpu",
        "nodes": 2,
        "env": {"A": "1"},
        "workdir": "/tmp",
        "retries": 0,
    },
    {"command": ["x"], "processes": 3, "gpus": 3, "submit_at": "2h", "checkpoint_every": "90s"},
    {"command": ["torchrun", "x.py"], "gpus": 2},
    {"command": ["x"], "background": True, "max_foreground_slowdown": 0.2},
    {"command": ["x"], "strategy": {"kind": "cpu", "cpus": 1.5}},
    {"trainer": "a.b:C", "epochs": 2.5, "args": {"x": [1, {"y": 2.5}]}, "keep_checkpoints": 5},
    {"trainer": "a.b:C", "continues": "b", "strategy": {"kind": "ps", "cpus": 4}},
    {"trainer": "a.b:C", "strategy": "packed", "venv": "/envs/a"},
    {"command": ["x"], "python": "python3.12"},
    {"trainer": "a.b:C", "conda": "torch24"},
    {"trainer": "a.b:C", "strategy": {"kind": "ddp", "reproducible": True, "shards": 4}},
    {"command": ["x"], "time": "2h", "cpus_per_gpu": 4, "memory": "1.5G", "modules": ["cuda/12.4", "gcc"]},
    {"trainer": "a.b:C", "gpu_type": "H100 NVL", "gpu_memory": "0.04T"},
    {"replay": True, "model": "m", "steps": 5, "output": "%x.out"},
    {"command": ["x"], "gpus": {"min": 3, "max": 9, "multiple_of": 4}, "restartable": True},
    {"command": ["x"], "speaks": "transformers", "suspend_signal": "usr1", "checkpoints": "out/*"},
    {"command": ["x"], "suspend_command": ["save"], "resume_command": ["load"], "suspend_signal": "none"},
    {
        "command": ["x"],
        "checkpoints": ["a", "b"],
        "resume_args": ["--from={checkpoint}", "{accumulation}"],
        "accumulation": 8,
        "saved_exit_codes": [85],
        "progress_pattern": "step ([0-9]+)",
    },
    {"command": ["x"], "batch": "scales"},
    {"command": ["x"], "speaks": "none", "progress_pattern": "[0-9]+ of (\\d+)"},
    {"command": ["x"], "speaks": "none"},
    {"command": ["x"], "array": {"name": "x", "index": 0, "at_once": 4}},
]


@pytest.mark.parametrize("table", SETS, ids=str)
def test_what_a_job_file_says_is_taken_as_it_is(table):
    jobs = [{"name": "a", **table}, {"name": "b", "command": ["true"]}]
    specs = jobfile.parse({"schema": 1, "job": jobs}, where="x", workdir=Path("/w"), user="me").jobs
    sent = decode(msgspec.json.encode(Command(command="submit", jobs=list(specs))), Command)
    assert [checked(spec, where="x") for spec in sent.jobs] == list(specs)


def test_a_job_that_0_1_0_has_left_in_the_inbox_is_taken(tmp_path):
    rundir = RunDir(tmp_path / "run")
    rundir.make()
    old = (
        b'{"command":"submit","jobs":[{"name":"a","kind":"command","model":"m","command":["torchrun","x"]}]}'
    )
    (rundir.inbox / "new" / "1").write_bytes(old)
    ((_, command),) = Inbox(rundir).read()
    assert isinstance(command, Command)
    assert checked(command.jobs[0], where="x").name == "a"


WRONG = {
    "name": "../x",
    "priority": 10_001,
    "kind": "trainer",
    "model": "\0",
    "trainer": "no colon",
    "command": [],
    "args": {"x": 2**70},
    "steps": 2**63,
    "training": {"epochs": -1},
    "after": ["nobody"],
    "gpus_min": 0,
    "gpus_max": 0,
    "nodes": 0,
    "strategy": {},
    "submit_at": -1.0,
    "retries": 2**70,
    "env": {"A=B": "x"},
    "output": "",
    "checkpoint_every_s": -1e30,
    "keep_checkpoints": 0,
    "workdir": "\0",
    "processes": "many",
    "user": "a\x1b[2J",
    "background": True,
    "max_foreground_slowdown": 7.0,
    "environment": {"kind": "python", "name": "\0"},
    "container": {"image": "--privileged"},
    "needs": {"time_s": -1.0},
    "gpus_multiple": 0,
    "restart": {"checkpoints": ["../*"]},
    "progress_pattern": "no number",
    "array": {"name": "../x", "index": 1},
}


def test_every_key_of_a_spec_has_a_wrong_value_here():
    assert set(WRONG) == set(JobSpec.__dataclass_fields__)


MORE = [
    ("array", {"name": "x", "index": -1}),
    ("array", {"name": "x", "index": 1, "at_once": 0}),
    ("needs", {"memory_mib": 1e300}),
    ("needs", {"memory_mib": -5.0}),
    ("needs", {"cpus_per_gpu": 0}),
    ("needs", {"gpu_type": "$(x)"}),
    ("needs", {"modules": ["--force"]}),
    ("needs", {"modules": ["a;b"]}),
    ("strategy", {"kind": "vsw", "local_batch": "q"}),
    ("strategy", {"kind": 7}),
    ("strategy", {"kind": "ps", "cpus": 4}),
    ("nodes", -3),
    ("environment", {"kind": "venv", "name": " "}),
    ("gpus_max", 2**70),
    ("gpus_multiple", 2**70),
    ("gpus_multiple", 3),
    ("restart", {"signal": "SIGKILL"}),
    ("restart", {"complete": "../x"}),
    ("restart", {"recognised": "a\nb"}),
    ("restart", {"speaks": "cobol"}),
    ("restart", {"accumulation": -1}),
    ("args", {"deep": reduce(lambda inner, _: [inner], range(40))}),
]


@pytest.mark.parametrize(("key", "value"), [*WRONG.items(), *MORE], ids=str)
def test_a_wrong_value_of_any_key_is_refused_in_one_line(key, value):
    job = {"name": "a", "kind": "command", "model": "m", "command": ["true"], key: value}
    spec = msgspec.convert(job, JobSpec)
    admission = Admission(
        machine=Machine(make_policy), find_profiles=lambda models, gpu_type: (), stand_ins=False
    )
    with pytest.raises(ConfigError) as caught:
        admission.submitted(Command(command="submit", jobs=[spec]), at=0.0, gpus=4, cause="inbox:1")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1500


def test_jobs_that_were_cancelled_before_an_agent_took_them_come_as_such_and_need_not_fit():
    driver = Driver(a_job("known", kind=Kind.COMMAND, command=("true",)), gpus=1)
    admission = Admission(machine=driver.machine, find_profiles=lambda models, gpu_type: (), stand_ins=False)
    keys = {"a": {"gpus": 9}, "b": {"after": ("a",)}, "c": {}, "known": {"gpus": 2}}
    jobs = [a_job(name, kind=Kind.COMMAND, command=("true",), **own) for name, own in keys.items()]
    command = Command(command="submit", jobs=jobs, cancelled=["a", "b", "known"])
    events, answer = admission.submitted(command, at=0.0, gpus=1, cause="inbox:1")
    for event in events:
        driver.handle(event)
    assert driver.states() == ["STARTING", "CANCELLED", "CANCELLED", "PENDING"]
    assert answer.ids == [2, 3, 4] and answer.kept == []
    assert driver.job("a").story[-1].reason.why is Why.CANCELLED


def test_to_submit_a_job_does_not_go_through_all_that_there_have_been(monkeypatch):
    first = [a_job(name, kind=Kind.COMMAND, command=("true",)) for name in ("known", "waits")]
    driver = Driver(first[0], replace(first[1], after=("known",)), gpus=1)
    gone_through = Mock(side_effect=AssertionError("all of them"))

    class Keys(KeysView):
        __iter__ = gone_through

    class Names(dict):
        def keys(self):
            return Keys(self)

    driver.machine.run.by_name = Names(driver.machine.run.by_name)
    monkeypatch.setattr(Jobs, "_ids", gone_through)
    admission = Admission(machine=driver.machine, find_profiles=lambda models, gpu_type: (), stand_ins=False)
    jobs = [a_job(name, kind=Kind.COMMAND, command=("true",), after=("known",)) for name in ("a", "b")]
    for update in (False, True):
        command = Command(command="submit", jobs=jobs, update=update)
        assert admission.submitted(command, at=0.0, gpus=1, cause="x")[1].ids == [3, 4]
    changed = replace(driver.job("waits").spec, steps=7)
    command = Command(command="submit", jobs=[changed], update=True)
    ((event,), answer) = admission.submitted(command, at=0.0, gpus=1, cause="x")
    assert event.updated[2].steps == 7 and answer.ids == [2]


def test_a_change_that_closes_a_circle_is_refused():
    names = {"a": (), "b": ("a",), "c": ("b",), "other": ("a",)}
    jobs = {n: a_job(n, kind=Kind.COMMAND, command=("true",), after=after) for n, after in names.items()}
    admission = Admission(
        machine=Driver(*jobs.values(), gpus=1).machine,
        find_profiles=lambda models, gpu_type: (),
        stand_ins=False,
    )
    for after, said in {"c": "a cycle", "other": "a cycle", "a": "a cycle", "nobody": "is no job"}.items():
        with pytest.raises(ConfigError, match=said):
            admission.edits(
                [replace(jobs["a"], after=(after,))],
                update=True,
                called_in="",
                gpus=1,
                where="submit",
                living=False,
            )


def test_a_cancelled_job_leaves_its_name_to_one_that_was_submitted_later(tmp_path):
    rundir = RunDir(tmp_path)
    send(rundir, Command(command="submit", jobs=[a_job("a", "old"), a_job("b")], cancelled=["a", "b"]))
    send(rundir, Command(command="submit", jobs=[a_job("a", "new")]))
    for found in (Inbox.peek(rundir), Inbox(rundir).read()):
        assert [[(job.name, job.model) for job in command.jobs] for _, command in found] == [
            [("b", "b")],
            [("a", "new")],
        ]


def test_why_those_that_are_left_can_never_start_is_said_of_each():
    jobs = [
        a_job("big", needs=Needs(memory_mib=2048.0)),
        a_job("wide", gpus=4),
        a_job("next", after=("big",)),
        a_job("held", gpus=4),
        a_job("fits"),
    ]
    driver = Driver(a_job("runs"), *jobs, gpus=1)
    driver.hold("held")
    admission = Admission(
        machine=driver.machine,
        find_profiles=lambda models, gpu_type: (),
        stand_ins=False,
        host_cores=[HostCores(host="n1", memory_mib=1000.0)],
    )
    big, wide, fits = admission.cannot_start()
    assert big == "job big.memory: 2G; accepted: at most 1000M: no host here has more for jobs"
    assert wide == "job wide.gpus: 4 GPUs; accepted: at most 1: so many are here"
    assert fits.startswith("job fits: waits for GPUs")


@pytest.mark.parametrize(
    "data",
    [
        b'{"command":"submit","jobs":[{"name":"\xe8"}]}',
        b'{"command":"submit","x":' + b"[" * 9000 + b"]" * 9000 + b"}",
        b'{"command":"' + b"x" * 5000 + b'\\u001b"}',
        b"\xff\xfe",
        b"",
        b'{"command":"drain","targets":[1e999]}',
    ],
)
def test_a_file_that_makes_no_sense_is_refused_in_one_line(tmp_path, data):
    rundir = RunDir(tmp_path / "run")
    rundir.make()
    (rundir.inbox / "new" / "1").write_bytes(data)
    ((_, told),) = Inbox(rundir).read()
    assert told.startswith("refused: ")
    assert told.isprintable()
    assert len(told) < 400


def test_a_name_that_cannot_be_written_down_and_what_is_no_file_are_refused(tmp_path):
    rundir = RunDir(tmp_path / "run")
    rundir.make()
    good = send(rundir, Command(command="drain"))
    new = rundir.inbox / "new"
    (new / good).rename(new / "caf\udce9")
    (new / "folder").mkdir()
    (new / "link").symlink_to("caf\udce9")
    told = Inbox(rundir).read()
    assert len(told) == 3
    assert all(str(text).startswith("refused: ") for _, text in told)


def test_profiles_of_other_types_of_gpu_are_those_that_were_measured_there():
    def find(models, gpu_type):
        if gpu_type == "many":
            raise ConfigError(where="profiles", got="2 profiles", accepted="one")
        return tuple(replace(a_profile(model, [1.0]), device="own") for model in models) + (
            (replace(a_profile("m", [9.0]), device="new"),) if gpu_type == "new" else ()
        )

    driver = Driver(a_job("a", "m"), gpus=1)
    there = [
        Device(index=i, host=kind, kind=kind, handle="0")
        for i, kind in enumerate(("own", "new", "odd", "many"))
    ]
    about = {"machine": driver.machine, "find_profiles": find, "stand_ins": False, "devices": there[:1]}
    admission = Admission(**about)
    (loaded,) = admission.joined(there, 5.0)
    assert (loaded.at, loaded.gpu_type, [p.throughput for p in loaded.profiles]) == (5.0, "new", [{1: 9.0}])
    driver.handle(loaded)
    assert admission.joined(there, 6.0) == [], "it is known by now"
    own, *_ = replace(admission, devices=there).events([a_job("b", "n")], at=7.0, gpus=1, where="submit")
    assert (own.gpu_type, [p.device for p in own.profiles]) == ("", ["own"])
