"""Who is told what of a run, and when: failures together, words of programs without secrets and orders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from hpcsched.agent.notify.announcer import BETWEEN_S, GROUP_S, KINDS, MOST_JOBS, Announcer
from hpcsched.agent.notify.channels import CommandChannel, WebhookChannel, is_accepted
from hpcsched.agent.notify.delivery import Delivery
from hpcsched.agent.notify.message import Message
from hpcsched.store.rundir import RunDir
from hpcsched.testing.builders import Driver, a_job


class Told(Driver):
    """A machine whose events an announcer sees; what it has delivered is in `sent`."""

    def __init__(self, folder: Path, jobs: int, kinds: tuple[str, ...] = KINDS) -> None:
        self.sent: list[Message] = []
        self.said: list[str] = []
        self.announcer: Any = None
        self.clock = 0.0
        super().__init__(*(a_job(f"j{i}", "m", retries=0, gpus=1) for i in range(jobs)), gpus=jobs)
        self.announcer = Announcer(
            self.machine,
            self,
            kinds=kinds,
            rundir=RunDir(folder),
            tell=self.said.append,
            clock=lambda: self.clock,
        )

    def handle(self, event: Any) -> Any:
        actions = super().handle(event)
        if self.announcer:
            self.announcer.event(event, actions)
        return actions

    def put(self, message: Message) -> None:
        self.sent.append(message)

    def trouble(self) -> list[str]:
        return ["not delivered"]

    def close(self) -> None:
        pass

    def fails(self, *jobs: int, detail: str = "no such file") -> None:
        for job in jobs:
            self.runs(job)
            self.exits(job, code=1, detail=detail)

    def after(self, seconds: float) -> list[str]:
        """The texts that are sent within so long."""
        self.clock += seconds
        before = len(self.sent)
        self.announcer.tick()
        return [message.text for message in self.sent[before:]]


def test_failures_of_a_short_time_are_one_message_and_the_next_one_waits(tmp_path: Path) -> None:
    told = Told(tmp_path, MOST_JOBS + 5)
    told.fails(1, 2)
    assert told.after(GROUP_S / 2) == []
    told.fails(*range(3, MOST_JOBS + 4))
    (text,) = told.after(GROUP_S)
    first, *lines = text.splitlines()
    assert first.startswith(f"hpcsched: {MOST_JOBS + 3} jobs failed (run {tmp_path}")
    assert lines[0] == "job 1 (j0) FAILED: ended with exit code 1: no such file" and lines[-1] == "and 3 more"
    told.fails(MOST_JOBS + 4)
    assert told.after(GROUP_S) == []
    (text,) = told.after(BETWEEN_S)
    assert text.startswith("hpcsched: a job failed (run")
    assert told.sent[-1].jobs[0].exit == 1 and told.sent[-1].run.jobs["FAILED"] == MOST_JOBS + 4
    assert told.said and set(told.said) == {"not delivered"}


def test_a_drain_and_the_end_are_told_with_what_has_failed(tmp_path: Path) -> None:
    told = Told(tmp_path, 2)
    told.fails(1)
    told.drain()
    assert "draining" in told.sent[-1].text and "1 running job save" in told.sent[-1].text
    told.drain()  # a second wish is no news
    told.announcer.over("stopped with 1 job left", "STOPPED")
    assert [message.kind for message in told.sent] == ["drain", "end"]  # which names the failure
    assert [job.name for job in told.sent[-1].jobs] == ["j0"] and told.sent[-1].run.state == "STOPPED"


def test_only_what_is_wanted_is_told(tmp_path: Path) -> None:
    told = Told(tmp_path, 2, kinds=("failure",))
    told.fails(1)
    told.drain()
    told.announcer.message("12 GiB are free", about="disk")
    told.announcer.over("stopped", "STOPPED")
    assert [message.kind for message in told.sent] == ["failure"]  # before its time, as nothing comes later


def test_words_of_programs_bring_no_secret_and_no_order(tmp_path: Path) -> None:
    told = Told(tmp_path, 1)
    told.fails(1, detail="API_TOKEN=hunter2hunter2 \x1b[2J <!everyone> @here")
    told.announcer.over("all have ended", "FINISHED")
    (message,) = told.sent
    assert "hunter2" not in message.text and "\x1b" not in message.text
    url = "https://hooks.example.org/T0/secret"
    address, _, body = WebhookChannel(url).stdin(message).partition(b"\n")
    assert address == url.encode() and "secret" not in WebhookChannel(url).name
    assert "secret" not in repr(WebhookChannel(url)) and WebhookChannel(url).argv[-1] != url
    posted = msgspec.json.decode(body)
    assert "<!everyone>" not in posted["text"] and "@here" not in posted["text"]
    assert set(posted) >= {"schema", "kind", "text", "time", "run", "jobs", "more_jobs"}


@pytest.mark.parametrize(
    ("url", "accepted"),
    [
        ("https://hooks.example.org/x", True),
        ("http://127.0.0.1:8080/x", True),
        ("http://[::1]/x", True),
        ("http://localhost/x", True),
        ("http://hooks.example.org/x", False),
        ("http://127.0.0.1.example.org/", False),
        ("https://me:pw@hooks.example.org/", False),
        ("https://hooks.example.org:port/", False),
        ("https:///x", False),
        ("file:///etc/passwd", False),
        ("https://a.example.org/\nx", False),
    ],
)
def test_what_leaves_the_host_is_encrypted(url: str, accepted: bool) -> None:
    assert is_accepted(url) is accepted


def test_what_does_not_work_is_said_and_nothing_waits_for_it() -> None:
    def run(argv: tuple[str, ...], **_: Any) -> tuple[int, bytes, bytes]:
        match argv[0]:
            case "hangs":
                raise TimeoutError
            case "gone":
                raise FileNotFoundError(2, "No such file or directory")
        return (0 if argv[0] == "good" else 3), b"", b"one\nAPI_KEY=abc \x1b[2J\n"

    channels = [CommandChannel((word,)) for word in ("hangs", "gone", "bad", "good")]
    delivery = Delivery(channels, environ={}, cwd="/", run=run)
    delivery.put(_message())
    delivery.close()
    assert delivery.trouble() == [
        "message (end) not delivered: the command hangs: not done within 10 s",
        "message (end) not delivered: the command gone: No such file or directory",
        "message (end) not delivered: the command bad: exit code 3: API_KEY=<removed> \\x1b[2J",
    ]


def _message() -> Message:
    return msgspec.convert(
        {
            "kind": "end",
            "text": "over",
            "time": "",
            "run": {"id": "r", "dir": "/r", "host": "h", "allocation": {}, "state": "", "jobs": {}},
        },
        Message,
    )
