"""The agent: events in, journal, machine, actions out; until all jobs end or it is told to stop."""

from __future__ import annotations

import contextlib
import gc
import signal
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from enum import StrEnum

from hpcsched.agent.abandon import time_to_save_s
from hpcsched.agent.command_outcomes import command_outcome, signal_outcome
from hpcsched.agent.durable import Durability
from hpcsched.agent.inbox import Answer, Command
from hpcsched.agent.plans import made_plan
from hpcsched.agent.recorder import Recorder, lead_to_decisions, tell_of_ends
from hpcsched.agent.resources import Resources
from hpcsched.agent.staying import why_stuck
from hpcsched.agent.stops import Stops
from hpcsched.agent.wakeup import signals_of, signals_wake
from hpcsched.contract.exits import SUSPENDED
from hpcsched.core import events as ev
from hpcsched.core.actions import MakePlan
from hpcsched.core.model import JobState
from hpcsched.errors import HpcschedError, StoreError
from hpcsched.store.rundir import SNAPSHOT_PERIOD_S

PROGRESS_PERIOD_S = 10.0
"""How often progress goes into the journal (chosen): after a node crash, lost steps are counted from it."""

SNAPSHOT_FRACTION = 0.1
"""The largest share of the time that goes into writing snapshots (chosen)."""

MIN_SNAPSHOT_PERIOD_S = 0.25
"""The shortest time between two snapshots (chosen)."""

UNCHANGED_SNAPSHOT_PERIOD_S = 1.0
"""How often the times of running jobs are brought up to date when nothing else changes (chosen)."""

WORKER_SIGNAL_S = 2.0
"""Time after the end of a worker, or of a resize, in which a SIGUSR1 counts as that worker's (chosen)."""

MOST_PACKED = 1000
"""Jobs that are packed at once (chosen): it takes some 30 us each."""


class RunOutcome(StrEnum):
    """The end of an agent's run; the values are run states of status.json."""

    FINISHED = "FINISHED"
    STOPPED = "STOPPED"
    MOVED = "MOVED"
    """Another agent takes the run over (no state of the run)."""


class Agent:
    """The agent of a run, from its start to its end.

    Args:
        commands: names of inbox commands that earlier agents have carried out already.
    """

    def __init__(self, resources: Resources, *, commands: set[str] | None = None) -> None:
        self._r = resources
        self._machine, self._clock = resources.machine, resources.clock
        self._recorder = Recorder(resources.machine, resources.journal)
        self._done_commands = commands or set()
        self._interrupts, self._warned, self._stops = 0, False, Stops()
        self.killed = False
        """Whether the user has had all jobs killed."""
        self._progress_due = time.monotonic() + PROGRESS_PERIOD_S
        self._inbox_due = self._snapshot_due = self._snapshot_at = 0.0
        self._woken_at = float("-inf")
        self._durability = Durability(resources.effects, resources.machine, resources.clock, self._tell)
        self._left_at_last_asking = -1
        """Jobs that had not ended when the source of jobs was asked last."""

    def run(self, first: Sequence[ev.Event]) -> RunOutcome:
        """Handle the events `first` and all later ones, until nothing is left to do or the run is drained.

        Raises StoreError when the journal cannot be written any more. However this ends, no worker is left:
        all have been asked to save, and have been ended.
        """
        with self._signals():
            try:
                self._refuse(self._process(list(first)))
                if self._machine.run.reads_inbox:  # nothing starts on lost hosts, nor what is cancelled
                    self._process([*self._hosts_changed(), *self._of_the_end([])])
                    self._inbox_events(time.monotonic(), all_of_it=True)
                    self._process([ev.InboxRead(at=self._clock.now())])
                self._ask_for_jobs()
                self._write_snapshot("RUNNING")
                gc.freeze()  # a full collection that walks a long queue stops the loop for 50 ms
                while not self._over():
                    self._wait()
                if self._moves():
                    self._write_snapshot("RUNNING", durable=True)
                    return RunOutcome.MOVED
                outcome = RunOutcome.FINISHED if self._machine.run.finished else RunOutcome.STOPPED
            except StoreError as error:
                raise self._give_up(error) from error
            except BaseException:
                self._abandon()
                raise
            self._r.snapshot.idle = None
            self._write_snapshot(outcome, durable=True)
            return outcome

    def _refuse(self, voided: Sequence[ev.EventVoided]) -> None:
        """Where the jobs of a run that begins cannot be taken in there is nothing to run."""
        for void in voided:
            if void.kind == "JobsSubmitted":
                raise HpcschedError(f"these jobs cannot be taken in: {void.error}")

    def _moves(self) -> bool:
        return not self._machine.run.finished and self._r.moving is not None and self._r.moving.due()

    def _over(self) -> bool:
        if self._moves():
            return True
        machine, staying = self._machine, self._r.staying
        stuck = machine.stuck
        if not stuck and not machine.run.finished:
            staying.busy()
        if stuck and not self._stays_stuck():
            self._process([ev.DrainRequested(at=self._clock.now(), cause="stuck")])
        if self._clock.now() > machine.deadline.leave_by and machine.run.active:
            names = ", ".join(f"{job.id} ({job.spec.name})" for job in machine.run.active.values())
            self._tell(f"leaving without jobs {names}: their processes do not even end when killed")
            return True
        none_left = machine.run.finished and not self._inbox_events(time.monotonic(), all_of_it=True)
        if machine.stopped or (none_left and not staying.stays()):
            return not self._r.ending.awaits_why and self._durability.done()
        self._durability.put_off()
        return False

    def _stays_stuck(self) -> bool:
        """Whether the agent stays although no job that is left can run; says so when it finds out."""
        staying = self._r.staying
        was_idle, stays = staying.idle, staying.stays(stuck=True)
        if not was_idle:
            for line in why_stuck(self._machine, self._r.admission, "staying" if stays else "stopping"):
                self._tell(line)
        return stays

    # --- one round --------------------------------------------------------------------------

    def _wait(self) -> None:
        events: list[ev.Event] = []
        ready = self._stops.wait(self._r.selector, self._timeout_s())
        signals = signals_of(ready)
        events += self._after_a_stop(self._stops.lasted_s(continued=signal.SIGCONT in signals))
        # Signals first: a worker may have left because the batch system told all of us to end.
        events += [event for number in signals for event in self._signal(signal.Signals(number))]
        for key in ready:
            if key.data[0] not in ("wake", "hosts"):
                events += self._r.effects.on_readable(key)
        self._pump()
        events += self._of_the_end(self._r.ending.events())
        events += self._r.effects.collect()
        events += self._r.gpu_watch.look(self._clock.now(), events)
        events += self._r.shared_use.look(self._clock.now())
        self._tell_of_gpus(events)
        events += self._hosts_changed()
        for look in self._r.alongside:
            look(self._clock.now())
        now = time.monotonic()
        if now >= self._progress_due:
            self._progress_due = now + PROGRESS_PERIOD_S
            events += self._progress()
        if events:
            self._process(events)
        if self._r.hosts and self._machine.deadline.draining:
            self._r.hosts.drain()
        self._ask_for_jobs()
        if self.killed:
            # Only now: the machine has been told to drain, and takes no end for a failure.
            self._r.effects.kill()
        if now >= self._inbox_due:
            self._inbox_events(now)
        self._write_snapshot_if_due()

    def _timeout_s(self) -> float:
        now = time.monotonic()
        wait_s = min(self._r.effects.wait_s(), max(0.0, self._inbox_due - now))
        due_s = max(0.0, self._snapshot_due - now)
        return min(wait_s, due_s) if self._machine.run.changed else wait_s

    def _process(self, events: list[ev.Event]) -> list[ev.EventVoided]:
        """Journal, then handle, then act; what acting tells at once is handled too. Returns what of all that
        could not be handled, and counts for nothing."""
        pending, voided = deque(events), list[ev.EventVoided]()
        while pending:
            batch = list(pending)
            pending.clear()
            if lead_to_decisions(batch):
                batch = [*self._progress(), *batch]
            if tell_of_ends(batch):
                self._woken_at = time.monotonic()
            plan_asked: list[MakePlan] = []
            for event, actions in self._recorder.take(batch):
                if isinstance(event, ev.EventVoided):
                    voided.append(event)
                    self._tell(f"{event.kind} (record {event.record}) counts for nothing: {event.error}")
                for action in actions:
                    if isinstance(action, MakePlan):
                        plan_asked.append(action)  # from the state after all of them
                        continue
                    told = self._r.effects.perform(action)
                    if any(isinstance(news, ev.LaunchFailed) and news.host_fault for news in told):
                        pending.extend(self._hosts_changed())  # first, or it would be launched there again
                    pending.extend(told)
                with contextlib.suppress(OSError):  # nobody reads standard error any more
                    self._r.observer.event(event, actions)
            pending.extend(made_plan(self._machine, self._clock.now(), self._tell) for _ in plan_asked)
        for job_id, path in self._r.effects.outputs.items():
            self._r.snapshot.output_of(job_id, str(path))
        self._r.effects.outputs.clear()
        return voided

    def _progress(self) -> list[ev.Event]:
        progress = self._r.effects.progress()
        return [ev.ProgressObserved(at=self._clock.now(), progress=progress)] if progress else []

    def _tell_of_gpus(self, events: Sequence[ev.Event]) -> None:
        noun = self._machine.ledger.noun
        for event in events:
            if isinstance(event, ev.DeviceLost):
                self._tell(f"{noun} {event.gpu} was lost: {event.why}")
            elif isinstance(event, ev.DeviceFound):
                self._tell(f"{noun} {event.gpu} is used again: {event.why}")

    # --- the allocation ---------------------------------------------------------------------

    def _of_the_end(self, events: list[ev.Event]) -> list[ev.Event]:
        """What the end of this allocation means to the run."""
        moving = self._r.moving
        return [*moving.instead(events), *moving.events()] if moving else events

    def _pump(self) -> None:
        if self._r.hosts:
            self._r.hosts.pump()

    def _hosts_changed(self) -> list[ev.Event]:
        changes = self._r.host_changes
        return [*changes.lost(), *changes.events()] if changes else []

    def _after_a_stop(self, seconds: float) -> list[ev.Event]:
        """Where all of us were stopped for so long (0: not at all), no job ran: that time does not count."""
        if not seconds:
            return []
        self._clock.skip(seconds)
        self._tell(f"all was stopped for {seconds:.0f} s, which do not count as run time")
        return self._r.ending.after_a_stop(seconds)

    # --- signals ----------------------------------------------------------------------------

    def _signals(self) -> AbstractContextManager[None]:
        """SIGINT, SIGTERM and SIGHUP drain; SIGUSR2 is the batch system's warning.

        SIGUSR1 wakes the loop up, as workers send it when they have saved; where none was asked to,
        it is taken for a warning too. SIGCONT, which Slurm adds to others, tells of stops alone.
        """
        hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN  # as nohup leaves it
        watched = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT]
        return signals_wake(self._r.selector, [*watched, *[signal.SIGHUP] * hangs_up])

    def _signal(self, number: signal.Signals) -> list[ev.Event]:
        match number:
            case _ if self._r.moving and self._r.moving.for_a_join:
                return []  # the batch system means the allocation: `hpcsched join` has its hosts leave
            case signal.SIGINT | signal.SIGTERM | signal.SIGHUP:
                return self._asked_to_stop(number)
            case signal.SIGUSR2 if number in self._r.ends_by and self._r.ending.in_batch:
                return self._of_the_end(self._r.ending.told_to_end(number.name))
            case signal.SIGUSR2:
                return self._of_the_end(self._r.ending.warned(number.name))
            case signal.SIGUSR1 if self._r.ending.in_batch and not self._anyone_speaks():
                return self._of_the_end(self._r.ending.warned(number.name, sure=False))
        return []

    def _anyone_speaks(self) -> bool:
        """Whether a worker may just have said that it has saved; its end may have been seen before that."""
        if time.monotonic() - self._woken_at < WORKER_SIGNAL_S:
            return True
        active = self._machine.run.active.values()
        return any(job.wanted or job.resizing or job.state is JobState.SUSPENDING for job in active)

    def _asked_to_stop(self, number: signal.Signals) -> list[ev.Event]:
        told = number in self._r.ends_by
        self._interrupts += number is signal.SIGINT and not told
        if self._interrupts > 2:
            raise SystemExit(128 + signal.SIGINT)
        if self._interrupts == 2:
            self.killed = True
            self._tell("second interrupt: killing all jobs")
        if told and self._r.ending.in_batch:
            events = self._r.ending.told_to_end(number.name)
            if number in self._r.signals_all and not self._machine.deadline.draining:
                # Not before it is known why: workers that do not bear the signal have ended of it.
                self._tell(f"{number.name} to the whole job: saving all jobs, then stopping")
                cause = f"{number.name} to the whole job"
                events.append(ev.DrainRequested(at=self._clock.now(), cause=cause))
            return self._of_the_end(events)
        if self._machine.deadline.draining:
            if self._interrupts == 1 and number is signal.SIGINT:
                self._tell("SIGINT: already saving; interrupt again to kill all jobs")
        else:
            again = "interrupt again" if number is signal.SIGINT else "interrupt twice"
            self._tell(f"{number.name}: saving all jobs, then stopping ({again} to kill them)")
        return [ev.DrainRequested(at=self._clock.now(), cause=number.name)]

    # --- commands ---------------------------------------------------------------------------

    def _inbox_events(self, now: float, *, all_of_it: bool = False) -> bool:
        """Carry out what is in the inbox; whether there was anything. `all_of_it`: also what cannot be read
        at once."""
        commands = self._r.inbox.read(all_of_it=all_of_it)
        self._inbox_due = now + self._r.inbox.period_s(now)
        for name, command in commands:
            answer = self._carry_out(name, command)
            if answer.error:
                self._tell(f"inbox: {answer.error}")
            self._r.inbox.answer(name, answer)
        return bool(commands)

    def _carry_out(self, name: str, command: Command | str) -> Answer:
        if isinstance(command, str):
            return Answer(error=command)
        if name in self._done_commands:
            # An earlier agent carried it out, but did not live to say so.
            known = self._machine.run.by_name
            if any(job.name not in known for job in command.jobs):
                return Answer(error="refused by an earlier agent")
            return Answer(ids=[known[job.name] for job in command.jobs] or command.targets)
        cause, at = f"inbox:{name}", self._clock.now()
        if command.command == "submit":
            return self._submit(command, cause)
        if command.command == "drain":
            return self._done([ev.DrainRequested(at=at, cause=cause)], Answer())
        if command.command == "signal":  # nothing of the run changes by it, so no event says so
            return signal_outcome(self._machine, command, self._r.effects.signal)
        events, answer = command_outcome(
            self._machine,
            command,
            at=at,
            cause=cause,
            keeping=self._r.effects.keeping(),
            stand_ins=self._r.admission.stand_ins,
        )
        return self._done(events, answer)

    def _submit(self, command: Command, cause: str) -> Answer:
        at, gpus = self._clock.now(), len(self._machine.ledger.devices)
        try:
            events, answer = self._r.admission.submitted(command, at=at, gpus=gpus, cause=cause)
        except HpcschedError as error:
            return Answer(error=str(error))
        return self._done(events, answer)

    def _done(self, events: Sequence[ev.Event], answer: Answer) -> Answer:
        """Have the events of a command happen; the answer to it, or why they could not be handled."""
        kinds = {type(event).__name__ for event in events}
        voided = [void for void in self._process(list(events)) if void.kind in kinds]
        return Answer(error=f"refused: {voided[0].error}") if voided else answer

    def _ask_for_jobs(self) -> None:
        """Take in the jobs that those which have ended lead to."""
        machine, source = self._machine, self._r.source
        if source is None or machine.deadline.draining or machine.run.unfinished == self._left_at_last_asking:
            return
        error: str | None = None
        try:
            if new := source(machine):
                error = self._submit(Command(command="submit", jobs=list(new)), "source").error
        except HpcschedError as raised:
            error = str(raised)
        if error:
            self._tell(f"{error}; saving all jobs, then stopping")
            self._process([ev.DrainRequested(at=self._clock.now(), cause="source")])
        self._left_at_last_asking = machine.run.unfinished

    # --- what others see --------------------------------------------------------------------

    def _write_snapshot_if_due(self) -> None:
        now = time.monotonic()
        if now < self._snapshot_due:
            return
        with contextlib.suppress(OSError):
            self._r.observer.tick(self._clock.now())
        if not self._machine.run.changed:
            period_s = UNCHANGED_SNAPSHOT_PERIOD_S if self._machine.run.active else SNAPSHOT_PERIOD_S
            if now < self._snapshot_at + period_s:
                self._snapshot_due = now + MIN_SNAPSHOT_PERIOD_S
                return
        self._snapshot_at = now
        self._r.must_lead()
        self._r.ending.show()
        self._write_snapshot("DRAINING" if self._machine.deadline.draining else "RUNNING")
        cost_s = time.monotonic() - now
        # Not longer than others wait for a sign of life, whatever held this one up.
        self._snapshot_due = now + min(
            max(MIN_SNAPSHOT_PERIOD_S, cost_s / SNAPSHOT_FRACTION), SNAPSHOT_PERIOD_S
        )

    def _write_snapshot(self, state: str, *, durable: bool = False) -> None:
        self._r.snapshot.batchings = self._r.effects.batchings()
        self._r.snapshot.progress = {seen.job_id: seen for seen in self._r.effects.progress()}
        try:
            self._r.snapshot.write(state, self._clock.now(), durable=durable)
            self._warned = False
        except StoreError as error:
            if not self._warned:
                self._tell(f"{error} (status is out of date; the run goes on)")
            self._warned = True
        if self._r.source is None:  # else all jobs are looked at whenever one has ended
            self._machine.run.jobs.pack(MOST_PACKED)

    def _give_up(self, error: StoreError) -> StoreError:
        """The journal cannot be written: nothing may be decided any more. Save what can be saved."""
        self._r.must_lead()
        self._tell(f"{error}: saving all jobs, then stopping")
        codes = self._abandon()
        saved = sum(code in (0, SUSPENDED) for _, code in codes)
        what = f"{saved} of {len(codes)} running jobs saved and left" if codes else "no job was running"
        return StoreError(f"{error}; {what}; make room, then go on with `hpcsched run --resume`")

    def _abandon(self) -> list[tuple[int, int | None]]:
        """Have all workers save and leave, and what they left in memory go to disk, as at any end."""

        def between() -> None:
            self._pump()
            self._r.effects.keeping()

        seconds = 0.0 if self.killed else time_to_save_s(self._machine) / self._clock.speed
        codes = self._r.effects.abandon(seconds, between)
        if not self.killed:
            self._durability.wait(
                lambda: signals_of(key for key, _ in self._r.selector.select(0)), self._pump
            )
        return codes

    def _tell(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._r.observer.message(text)
