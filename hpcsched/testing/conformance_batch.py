"""What every `BatchSystem` must do. A test class that inherits it says how to get one."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path

from hpcsched.batch.base import AllocatedHost, BatchJobState, BatchSystem, EndReason
from hpcsched.errors import BatchError


class BatchConformance:
    """Tests over the batch systems that the methods without `test_` give.

    `comes_back`, `tells_lives`, `copies_script`, `gives_back`: what this kind can do at all.
    """

    comes_back = True
    tells_lives = True
    copies_script = True
    gives_back = True

    def inside(self, *, end: float | None, requeueable: bool = True) -> BatchSystem:
        """Asked from inside a job on two hosts, that is to end then."""
        raise NotImplementedError

    def outside(self) -> BatchSystem:
        """The same, where this process is in no allocation."""
        raise NotImplementedError

    def silent(self) -> BatchSystem:
        """From inside a job, while whoever answers cannot be reached."""
        raise NotImplementedError

    def lives(self) -> tuple[BatchSystem, dict[str, BatchJobState]]:
        """What is to be said of these job ids."""
        raise NotImplementedError

    def refuses(self, act: Callable[[], object]) -> None:
        """One clear line."""
        try:
            act()
        except BatchError as error:
            assert str(error).strip() and "\n" not in str(error)
        else:
            raise AssertionError("not refused")

    def test_the_allocation(self) -> None:
        end = float(int(time.time()) + 3600)
        batch = self.inside(end=end if self.tells_lives else None)
        found = batch.allocation()
        names = [host.name for host in found.hosts]
        assert found.kind == batch.kind and len(names) == len(set(names)) == 2
        assert found.here is None or found.here in names
        assert (found.id is None) == (batch.kind == "none") and found.restart_count == 0
        assert found.deadline == (end if self.tells_lives else None)
        assert all(host.gpus is None or all(host.gpus) for host in found.hosts)
        assert all(host.cpus is None or host.cpus > 0 for host in found.hosts)

    def test_the_end(self) -> None:
        end = float(int(time.time()) + 3600)
        assert self.inside(end=None).end_time() is None
        if self.tells_lives:
            assert self.inside(end=end).end_time() == end

    def test_no_allocation_is_said_so(self) -> None:
        outside = self.outside()
        if outside.kind == "none":
            assert len(outside.allocation().hosts) == 1
            return
        self.refuses(outside.allocation)
        self.refuses(outside.end_time)
        self.refuses(lambda: outside.submit_next(None))

    def test_what_cannot_be_asked_is_not_known(self) -> None:
        batch = self.silent()
        found = batch.allocation()
        assert len(found.hosts) == 2 and found.deadline is None
        assert batch.job_state("7") is BatchJobState.UNKNOWN
        assert batch.why_waiting("7") == ""
        if self.tells_lives:
            self.refuses(batch.end_time)
            self.refuses(lambda: batch.submit_next(None))

    def test_why_it_ends_is_never_an_error(self) -> None:
        for batch in (self.silent(), self.outside()):
            found = batch.reason()
            assert found is (EndReason.NONE if batch.kind == "none" else EndReason.UNKNOWN)
            wait_s = batch.kill_wait()
            assert wait_s is None or wait_s >= 0

    def test_lives(self) -> None:
        batch, expected = self.lives()
        assert {job: batch.job_state(job) for job in expected} == expected
        assert batch.job_state("") is batch.job_state("no job") is BatchJobState.UNKNOWN

    def test_coming_back(self) -> None:
        if self.comes_back:
            assert 0 < self.inside(end=None).requeue() < 256
        self.refuses(self.inside(end=None, requeueable=False).requeue)

    def test_a_job_to_follow(self, tmp_path: Path) -> None:
        script = tmp_path / "next.sh"
        script.write_text("#!/bin/sh\ntrue\n")
        if not self.comes_back:
            self.refuses(lambda: self.inside(end=None).submit_next(script))
            return
        assert self.inside(end=None).submit_next(script)
        self.refuses(lambda: self.inside(end=None).submit_next(tmp_path / "missing.sh"))
        if self.copies_script:
            assert self.inside(end=None).submit_next(None)
        else:
            self.refuses(lambda: self.inside(end=None).submit_next(None))

    def test_a_host_is_given_back(self) -> None:
        batch = self.inside(end=None)
        first, second = (host.name for host in batch.allocation().hosts)
        if not self.gives_back:
            self.refuses(lambda: batch.release([second]))
            return
        assert batch.takes_back
        self.refuses(lambda: batch.release([first]))
        self.refuses(lambda: batch.release(["no-such-host"]))
        batch.release([second])
        self.refuses(lambda: batch.release([second]))
        self.refuses(lambda: self.silent().release([second]))

    def test_a_comment_never_hurts(self) -> None:
        self.inside(end=None).comment("two\nlines, \x1b[31m and é " + "long" * 1000)

    def test_commands_for_hosts(self) -> None:
        batch = self.inside(end=None)
        hosts = [AllocatedHost(name="h36n09", gpus=("0", "1")), AllocatedHost(name="h36n10")]
        argv = ["python", "-m", "agent", "a b"]
        commands = batch.on_hosts(hosts, argv)
        assert commands == batch.on_hosts(hosts, argv)
        if len(commands) == 1:
            assert list(commands[0][-4:]) == argv
            return
        assert len(commands) == 2
        for host, command in zip(hosts, commands, strict=True):
            assert host.name in command[:-1] or any(host.name in word for word in command)
            there = [*argv, "--name", host.name]
            # Where a shell over there takes the words apart once more, they are one.
            assert list(command[-len(there) :]) == there or command[-1] == shlex.join(there)

    def test_what_is_said_of_its_kind(self) -> None:
        batch = self.inside(end=None)
        kind = type(batch)
        assert kind.kind == batch.kind and kind.launchers and not kind.restarted({})
        assert not kind.inside({})
        assert batch.requeueable().strip() and "\n" not in batch.requeueable()
        pid = batch.script_pid()
        assert pid is None or pid > 1

    def test_the_version(self) -> None:
        said = self.inside(end=None).version()
        assert said.strip() and "\n" not in said
