"""The foreground's side: takes in a background job as a guest, in a thread, and lets nothing of it get out.

A guest is built while the foreground stands between two steps, and then trains on its own. What ends it ends
only
it: an exception of its own, its process, its agent's wish. When the foreground leaves, the guest saves first.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import torch

from hpcsched.compat import zip
from hpcsched.contract import exits, variables
from hpcsched.errors import ConfigError, HpcschedError
from hpcsched.planning.background.admission import Footprint, admit
from hpcsched.planning.background.pacing import Duty, Pacer, share_of
from hpcsched.planning.background.referee import Referee
from hpcsched.worker.background import settings
from hpcsched.worker.background.build_gate import BuildGate, GuestBuild
from hpcsched.worker.background.chunks import chunked_loss
from hpcsched.worker.background.lane import StreamLane
from hpcsched.worker.background.output import divide_output
from hpcsched.worker.background.protocol import GuestConnection, is_ours, listen
from hpcsched.worker.background.rng_isolation import (
    Generators,
    NotHostable,
    divert_generators,
    draw_from,
    process_settings,
    put_back,
)
from hpcsched.worker.background.streams import background_stream, foreground_stream
from hpcsched.worker.background.timing import StepTimer
from hpcsched.worker.process.contract import JobEnv, say
from hpcsched.worker.process.guest import GuestGone, HostedGuest, be_hosted
from hpcsched.worker.ranks.process_group import own_device

LIMIT = 2
"""Pieces of the guest's that have been launched and have not completed, at most."""
SETTLED_STEPS = 3
"""Steps that the foreground makes before it takes a guest in: its memory is what it will be by then."""
LEAVES_WITHIN_S = 4.0
"""How long a foreground that leaves waits for its guest to save; a guest that is itself suspended has as
long as its own process is given."""
ENDS_WITHIN_S = 10.0
"""How long a guest whose process has gone is waited for; no other is taken in before it has ended."""
_LOOK_S = 0.2

Load = Callable[[Optional[str]], Any]
Strategy = Callable[[dict[str, Any]], Any]


@dataclass
class _Guest:
    """A job that is here. `asked`: its own process wants it to leave; `end`: what that is told at the end."""

    env: JobEnv
    hosted: HostedGuest
    line: GuestConnection
    pace: float = 1.0
    asked: bool = False
    referee: Referee | None = None
    end: dict[str, Any] = field(default_factory=dict)

    def given_up(self) -> bool:
        """Whether there is no use in its being built any more."""
        return self.hosted.gone or self.hosted.stop is not None

    def leave(self, why: str) -> None:
        """Have it save at its next step boundary, and end."""
        self.hosted.stop = self.hosted.stop or why

    def take(self, word: Mapping[str, Any]) -> None:
        """Do what its own process says."""
        if "stop" in word:
            self.asked = True
            self.leave(str(word["stop"]))
        if "pace" in word:
            self.pace = share_of(word["pace"], "order")
            if self.referee is not None:
                self.referee.pacer.duty.share = self.pace


class GuestHost:
    """Awaits guests from `open` to `close`.

    Args:
        load: makes a trainer of its name, `strategy` a strategy of its table; both raise ConfigError.
    """

    def __init__(self, environ: Mapping[str, str], *, load: Load, strategy: Strategy) -> None:
        self._environ, self._load, self._strategy = dict(environ), load, strategy
        self._mode = settings.mode(environ)
        self._device = own_device(JobEnv.from_environ(environ))
        self._watch: StepTimer | None = None
        self._listener: Any = None
        self._faulted: set[int] = set()
        self._guest: _Guest | None = None
        self._awaiting = threading.Thread(target=self._await_guests, name="awaits guests", daemon=True)
        self._leaving = threading.Event()
        self._steps = 0
        self._stand = BuildGate()
        self._last: threading.Thread | None = None

    # -- the foreground's thread -------------------------------------------------------------------------

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """The foreground's code is imported and run in here."""
        divert_generators()
        divide_output()
        address = settings.address(self._environ)
        self._listener = listen(address) if address else None
        if self._listener is None:
            say("no guests are taken here: there is no address, or another process has it")
        else:
            self._awaiting.start()
        try:
            with foreground_stream(self._device):
                yield
        finally:
            self.close()

    def watched(self, trainer: Any) -> Any:
        """The foreground's trainer, whose steps are followed from now on."""
        build = trainer.build

        def build_and_watch(args: dict[str, Any]) -> Any:
            parts = build(args)
            sums = int(self._environ.get(variables.WORLD_SIZE) or 1) > 1
            self._watch = StepTimer(parts.model, parts.optimizer, self._device, sums=sums)
            parts.optimizer.register_step_post_hook(lambda *_: self._between_steps())
            return parts

        trainer.build = build_and_watch
        return trainer

    def _between_steps(self) -> None:
        """The foreground has made a step."""
        self._steps += 1
        if self._steps >= SETTLED_STEPS:
            self._stand.stand_still()

    def close(self) -> None:
        """Take no more guests, and have the one that is there save and leave."""
        self._leaving.set()
        if self._listener is None:
            return
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        guest = self._guest
        if guest is not None:
            guest.leave("the foreground leaves")
        self._awaiting.join(LEAVES_WITHIN_S)
        while guest is not None and guest.asked and not guest.line.closed and self._awaiting.is_alive():
            self._awaiting.join(_LOOK_S)
        if guest is not None and self._awaiting.is_alive():
            guest.line.say({"left": "the foreground has left, and did not wait for this job to save"})
        self._listener.close()

    # -- guests ------------------------------------------------------------------------------------------

    def _await_guests(self) -> None:
        while not self._leaving.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            if not is_ours(connection):
                connection.close()
                continue
            line = GuestConnection(connection)
            with contextlib.suppress(HpcschedError, OSError, ValueError, KeyError, TypeError):
                self._receive(line)
            line.close()

    def _receive(self, line: GuestConnection) -> None:
        """One guest, from its greeting to its end."""
        greeting = line.hear(5.0)
        if greeting is None:
            return
        facts = greeting["guest"]
        environ = {str(name): str(value) for name, value in facts["environ"].items()}
        try:
            env = self._admit(facts, environ, line.descriptors)
        except HpcschedError as error:
            line.say({"refused": str(error)})
            return
        output, errors = (os.fdopen(os.dup(number), "w", buffering=1) for number in line.descriptors[:2])
        guest = self._guest = _Guest(env, HostedGuest(environ, output, errors), line)
        line.say({"accepted": True})
        training = threading.Thread(target=self._run, args=(guest,), name=f"guest {env.job_id}", daemon=True)
        training.start()
        if self._leaving.is_set():
            guest.leave("the foreground leaves")
        while training.is_alive() and not line.closed:
            guest.take(line.hear(_LOOK_S) or {})
        guest.hosted.gone = line.closed
        training.join(ENDS_WITHIN_S if line.closed else None)
        self._last = training
        line.say(guest.end)
        self._guest = None
        if training.is_alive():  # its output is its own until it ends
            return
        for stream in (output, errors):
            with contextlib.suppress(OSError):
                stream.close()

    def _admit(self, facts: Mapping[str, Any], environ: dict[str, str], descriptors: list[int]) -> JobEnv:
        """Whether it can be a guest here; raises HpcschedError, saying why not."""
        if self._last is not None and self._last.is_alive():
            raise NotHostable("the last guest of its foreground has not ended yet")
        if facts["job"] in self._faulted:
            raise NotHostable("it has failed as a guest before")
        here = (str(Path.cwd()), sys.prefix, self._environ.get("PYTHONPATH", ""))
        if (facts["cwd"], facts["python"], environ.get("PYTHONPATH", "")) != here:
            raise NotHostable(
                "the foreground runs in another working directory or another Python environment"
            )
        environ[variables.LOCAL_RANK] = environ["LOCAL_RANK"] = self._environ.get(variables.LOCAL_RANK, "0")
        for name in (variables.CONTROL_FD, variables.ARENA_FD, variables.PROGRESS_FD, variables.PACE):
            environ.pop(name, None)
        if len(descriptors) > 2:
            environ[variables.PROGRESS_FD] = str(descriptors[2])
        env = JobEnv.from_environ(environ)
        if env is None or env.world_size != 1 or not env.trainer:
            raise NotHostable("only a trainer of one rank can be a guest")
        if env.strategy.get("kind") != "ddp" or env.strategy.get("reproducible"):
            raise NotHostable("only the plain data-parallel strategy can be a guest's")
        return env

    # -- the guest's thread --------------------------------------------------------------------------------

    def _run(self, guest: _Guest) -> None:
        """Train; what to tell the guest's own process at the end is in `guest.end`."""
        be_hosted(guest.hosted)
        generators = Generators(self._device)
        draw_from(generators)
        try:
            with generators, torch.autograd.set_multithreading_enabled(False):
                # In the device's thread of the autograd engine its gates would hold the foreground up too.
                self._train(guest)
            guest.end = {"exit": 0}
        except GuestGone:
            pass
        except NotHostable as error:
            guest.end = {"refused": str(error)}
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            left = code == exits.SUSPENDED and self._leaving.is_set()
            guest.end = {"left": "the foreground has left"} if left else {"exit": code}
        except HpcschedError as error:
            say(str(error))
            guest.end = {"exit": error.exit_code}
        except BaseException:
            traceback.print_exc(file=guest.hosted.errors)
            self._faulted.add(guest.env.job_id)
            guest.end = {"exit": 1, "fault": True}
        finally:
            if self._watch is not None:
                self._watch.tell(None)
            guest.referee = None
            gc.collect()  # trainer and lane know each other; what they hold is the foreground's from now on
            if self._device.type == "cuda":
                with contextlib.suppress(RuntimeError):  # the device has failed, as the foreground will see
                    torch.cuda.empty_cache()

    def _train(self, guest: _Guest) -> None:
        visit = GuestBuild(guest.given_up)
        if not self._stand.wait(visit):
            raise GuestGone if guest.hosted.gone else SystemExit(exits.SUSPENDED)
        watch = self._watch
        assert watch is not None
        try:
            before, taken = process_settings(), taken_bytes(self._device)
            stream = background_stream(self._device, self._mode)
            trainer = self._load(guest.env.trainer)
            run = self._strategy(dict(guest.env.strategy))
            guest.referee = Referee(Pacer(LIMIT, Duty(guest.pace)), watch.feedback)

            def between() -> None:
                if guest.hosted.gone:
                    raise GuestGone
                lane.open_gates = guest.hosted.stop is not None
                with watch.lock:
                    watch.look()

            lane = StreamLane(guest.referee, stream=stream, lock=watch.lock, between=between)
            build = trainer.build

            from hpcsched.worker.session.trainer import is_watched

            def through_the_lane(args: dict[str, Any]) -> Any:
                parts = build(args)
                if is_watched(parts):
                    raise NotHostable("it evaluates, or has callbacks, while it trains")
                if parts.precision is not None:
                    raise NotHostable(f"its chunks cannot be computed in {parts.precision}")
                most = guest.env.strategy.get("micro_batch")
                samples = (
                    min(parts.global_batch, most) if type(most) is int and most > 0 else parts.global_batch
                )
                put_back(before)
                with visit.tracing():
                    parts.loss = chunked_loss(parts, samples, lane, self._device, graphs=stream is not None)
                    put_back(before)
                    self._check_memory(guest.hosted.environ, taken, parts.model)
                watch.tell(guest.referee)
                guest.line.say({"begun": True})
                visit.over.set()
                return parts

            trainer.build = through_the_lane
            with lane.work():
                run(trainer, guest.env)
        finally:
            visit.over.set()

    def _check_memory(self, environ: Mapping[str, str], taken: int, model: torch.nn.Module) -> None:
        """Both must fit, else the foreground may be the one that gets no more. Raises NotHostable."""
        if self._device.type != "cuda":
            return
        # Still to come: gradients, and for most optimizers two more numbers for each.
        weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        names = [known.get(variables.JOB_NAME, "") for known in (self._environ, environ)]
        needs = taken, taken_bytes(self._device) - taken + 3 * weights
        both = [Footprint(name, need) for name, need in zip(names, needs, strict=True)]
        try:
            admit(both[0], both[1], torch.cuda.get_device_properties(self._device).total_memory)
        except ConfigError as error:
            raise NotHostable(str(error)) from error


def taken_bytes(device: torch.device) -> int:
    """What this process has taken of the device's memory."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
