"""The strategy of stream workers, whose global batch and configuration change between two steps (JABAS)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Union

import torch

from hpcsched.compat import zip
from hpcsched.contract.progress import Batching
from hpcsched.contract.seats import Seat
from hpcsched.errors import ConfigError
from hpcsched.planning.vsw.options import WorkerOptions
from hpcsched.worker.process.contract import Facts, say
from hpcsched.worker.ranks.gradient_sum import GradientSum, in_buckets
from hpcsched.worker.session.agreement import Agreement
from hpcsched.worker.session.batches import places_of, summed
from hpcsched.worker.session.context import Context
from hpcsched.worker.session.replicated import NO_INDICES, Replicated
from hpcsched.worker.session.state import TrainingState
from hpcsched.worker.session.trainer import Parts, Place, rehearse, to_device
from hpcsched.worker.vsw.allreduce_cost import measure_line
from hpcsched.worker.vsw.clock import DeviceClock, Kind
from hpcsched.worker.vsw.control import BatchControl, BatchCourse
from hpcsched.worker.vsw.epoch_forecast import Expectation, Trajectory, expect
from hpcsched.worker.vsw.gradient_halves import HalvedBucket, HalvedSum
from hpcsched.worker.vsw.history import History
from hpcsched.worker.vsw.measurements import DeviceTimes
from hpcsched.worker.vsw.memory import remember, remembered
from hpcsched.worker.vsw.reading import BatchReader
from hpcsched.worker.vsw.streams import StreamWorkers
from hpcsched.worker.vsw.updates import ShardOptimizer, can_be_split, scaled

LOOK_SHARE = 0.01
"""Of the time, that looking ahead may take: epochs may be short."""

_NOTHING = 4
"""Bytes of the gradients of a model of which nothing is trained, at present."""

LONG_EPOCH_S = 600.0
"""From so long epochs on, forecasts may take seconds."""


class AdaptiveBatches(Replicated):
    """A strategy that computes its steps by stream workers, and adapts the global batch.

    A step of the job is the trainer's own global batch, whatever the batch is by now: so many steps are the
    same samples as ever, `training.step` is how many of those have been seen, and learning-rate schedules go
    by it.

    Args:
        parts: of the training; its `global_batch` is where the batch begins.
        options: what the job file says.
    """

    in_place = True

    def __init__(self, parts: Parts, options: WorkerOptions) -> None:
        self._parts = parts
        self._unit = parts.global_batch
        self.control = BatchControl(options.within(parts.size), self._unit)
        self._trajectory = Trajectory(parts.size)
        self._expectation: Expectation | None = None
        self._looked_at, self._last_look = -1, time.monotonic()
        self._next_look = 0.0
        self._group: tuple[int, int, int] | None = None
        self._read_for: tuple[int, int, int] | None = None
        self._course: BatchCourse | None = None
        self._comparable = True  # as far as is known
        self._course_began, self._course_at = 0, 0.0
        self._worked_s = 0.0
        self._warm: set[Kind] = set()

    def refuses(self, training: TrainingState, world_size: int, seats: Sequence[Seat]) -> str:
        # Ranks may be without workers: the batch may grow until all have some.
        return self.control.cannot_be(world_size) if self._course is not None else ""

    def setup(self, context: Context, agreement: Agreement) -> None:
        super().setup(context, agreement)
        context.training.also.update(vsw=self.control, batches=self._trajectory)
        self._parameters = list(self._parts.model.parameters())
        self._gradients = GradientSum(self._parameters, context.peers)
        self._clock = DeviceClock(context.device)
        self._workers = StreamWorkers(self._parts.model, self._parts.loss, context.device)
        self._reader = BatchReader(self._parts, context.device, lambda: context.training.step)
        self._halved = HalvedSum(self._parts.model.parameters(), context.peers, HalvedBucket)

    def warm_up(self) -> None:
        rehearse(self._parts, self._example())
        self._gradients.prepare()
        super().warm_up()

    def start(self) -> None:
        env, training = self.context.env, self.training
        self.table = self._own_table()
        if self.control.offset is None:  # others may have trained before, with another batch
            self.control.offset = training.samples - training.step * self._unit
        self._trajectory.begin(training.samples)
        self._shard_optimizer = ShardOptimizer(self._parts.optimizer)
        self._splits = can_be_split(self._parts.optimizer)
        self._history = History(env.job_dir if env and self.rank == 0 else None)

    # -- a step ----------------------------------------------------------------------------------------

    def train_step(self) -> None:
        """Forward and backward passes of this rank's workers, sums over the ranks, the optimizer's step, and
        as many of the learning-rate schedule."""
        training, begun_at = self.training, time.monotonic()
        while True:
            training.optimizer.zero_grad()
            for parameter in self._parameters:  # also what no optimizer updates: it must not add up
                parameter.grad = None
            sums = self._halved if self.measures else self._gradients
            failed = self._compute(sums)
            if self.course.trial and self.context.peers.agree(failed)[0]:
                self._smaller(failed)
                continue
            break
        if self.world_size > 1 and not self.agreement.asked:
            self.agreement.ask()
        course = self.course
        apart = course.overlap and self._splits and self.world_size > 1 and not course.trial
        with scaled(self.training.optimizer, self.control.factor(course, self.training.global_batch)):
            if course.trial:
                sums.expect()
            sums.complete(self._shard_optimizer.step if apart else lambda _: None)
            if not apart:
                begun = self._clock.mark()
                self.training.optimizer.step()
                self._clock.update(begun, self._clock.mark())
        if self.measures:
            self._compare()
        if self._parts.scheduler is not None:
            for _ in range(self._steps_at(training.samples + training.global_batch) - training.step):
                self._parts.scheduler.step()
        self._worked_s += time.monotonic() - begun_at

    def _compare(self) -> None:
        halves = self._halved.halves(self.training.global_batch // 2)
        self.control.saw(halves)
        if not halves.known and self._comparable and self.rank == 0:
            step, why = self.training.step, f"their squares are {halves.aa:g} and {halves.bb:g}"
            say(f"step {step}: the gradient's halves cannot be compared, the batch stays: {why}")
        self._comparable = halves.known

    def _compute(self, sums: GradientSum) -> bool:
        """This rank's local batches, forward and backward; whether its memory was too small for them."""
        parts = self._cut(self.training.global_batch, self.control.updates)
        try:
            self._workers.begin()
            for number, part in enumerate(parts):
                if number > 0:
                    self._halved.keep_first()
                self._passes(part, sums, last=number == len(parts) - 1)
            if self.training.made == 0:
                self._check_gradients()
            return False
        except torch.OutOfMemoryError as error:
            kind = self.course.kind(self.rank)
            if not self.course.trial or kind is None:
                if kind is not None:
                    self.remember_too_large(kind)
                raise
            why = (str(error) or "out of memory").splitlines()[0]
            say(f"step {self.training.step}: no room for {kind[1]} local batches of {kind[0]} at once: {why}")
            if kind == (self.control.least, 1):
                raise
        return True

    def _check_gradients(self) -> None:
        compared = self.control.batching.adapts or self.world_size > 1
        parameters = self.training.model.parameters()
        if compared and any(p.grad is not None and p.grad.is_sparse for p in parameters):
            raise ConfigError(
                where="model", got="has sparse gradients", accepted="dense ones (Embedding(sparse=False))"
            )

    def _passes(self, pieces: list[range], sums: GradientSum, *, last: bool) -> None:
        at_once = self._workers.count
        for start in range(0, len(pieces), at_once):
            piece = pieces[start : start + at_once]
            self._round(piece, sums, complete=last and start + at_once >= len(pieces))
        if last and not pieces and not self.course.trial:
            sums.expect()

    def _round(self, pieces: list[range], sums: GradientSum, *, complete: bool) -> None:
        clock = self._clock
        begun = clock.mark()
        batches = [self._reader.next() for _ in pieces]
        read = clock.mark()
        losses = self._workers.forward(batches)
        totals = [summed(loss, len(piece)) for loss, piece in zip(losses, pieces, strict=True)]
        forward = clock.mark()
        if complete and self.world_size > 1 and not self.course.trial:
            self.agreement.ask()  # travels while the backward pass computes
            sums.expect()
        torch.autograd.backward([total / self.training.global_batch for total in totals])
        local = self.course.local_batch
        if all(len(piece) == local for piece in pieces):
            clock.round((local, len(pieces)), begun, read, forward, clock.mark())
        self.training.loss = torch.stack([total.detach() for total in totals]).sum() / sum(map(len, pieces))

    # -- what the steps are ----------------------------------------------------------------------------

    @property
    def course(self) -> BatchCourse:
        assert self._course is not None
        return self._course

    @property
    def measures(self) -> bool:
        """Whether the two halves of this step's gradient are compared: never in a shortened last step."""
        return self.control.measures(self.control.updates) and self.training.global_batch == self.course.batch

    def _steps_at(self, samples: int) -> int:
        """How many of the job's steps so many samples are; all of them at the end."""
        last, counted = self.training.last_step(), samples - self._offset
        return last if counted >= last * self._unit else counted // self._unit

    def advance(self) -> None:
        self._trajectory.add(self.training.global_batch)
        self.training.samples += self.training.global_batch
        self.training.step = self._steps_at(self.training.samples)
        self.control.updates += 1
        kind = self.course.kind(self.rank)
        if kind is not None and kind not in self._warm:
            self._warm.add(kind)
            self._clock.forget(kind)  # what is new takes longer the first time

    def begin_step(self) -> torch.Tensor:
        super().begin_step()
        attempt = self.context.env.attempt if self.context.env else 0
        if self._group != (attempt, self.rank, self.world_size):
            self._group = attempt, self.rank, self.world_size
            self._regrouped()
            self.decide()
        elif self.control.updates >= self.course.until:
            self.decide()
        if self.rank == 0:
            self._look_ahead()
        self.training.global_batch = self._next_batch()
        return NO_INDICES

    def _cut(self, batch: int, update: int) -> list[list[range]]:
        """The parts of a step's global batch that are the local batches of this rank's workers: all of them,
        or in two halves where these are compared. In a shortened step some are shorter, or not there."""
        course = self.course
        share, local = course.shares[self.rank], course.local_batch
        first = course.first_worker(self.rank)
        workers = range(first, first + (share.workers if share else 0))
        parts: list[Sequence[int]] = [workers]
        if self.control.measures(update) and batch == course.batch:
            parts = [[w for w in workers if w % 2 == 0], [w for w in workers if w % 2]]
        return [
            [range(w * local, min(batch, (w + 1) * local)) for w in part if w * local < batch]
            for part in parts
        ]

    def _pieces(self) -> Iterator[Sequence[Place]]:
        """This rank's local batches of all coming steps, if the course stays as it is."""
        samples, update = self.training.samples, self.control.updates
        end = self._end
        while samples < end:
            batch = min(self.course.batch, end - samples)
            for part in self._cut(batch, update):
                for piece in part:
                    yield places_of(self.training.sampler, samples, piece)
            samples, update = samples + batch, update + 1

    def _example(self) -> Any:
        """Samples to rehearse with: a smallest local batch, of two at least, as batch norm wants."""
        count = max(2, self.control.least)
        return to_device(self._parts.batch([i % self._parts.size for i in range(count)]), self.device)

    # -- decisions -------------------------------------------------------------------------------------

    def _regrouped(self) -> None:
        """There are other ranks than before, or these meet for the first time: all of them come here."""
        if self.control.batching.adapts:
            self._halved.prepare()  # better now, while a lack of memory can be helped
        trained = [p for p in reversed(list(self.training.model.parameters())) if p.requires_grad]
        buckets = [sum(p.numel() * p.element_size() for p in group) for group in in_buckets(trained)]
        self.control.buckets = tuple(buckets) or (_NOTHING,)
        first = self._course is None
        if self.context.peers.tell(self.world_size > 1 and (first or self.control.line is None), bool):
            self.control.line = measure_line(self.context.peers, self.device, max(self.control.buckets))

    def decide(self) -> None:
        """Let rank 0 say what to do next; all ranks come here."""
        former, past = self._course, self._past()
        if former is not None and past:  # a GPU works off later what it is told in a step
            steps = self.control.updates - self._course_began
            on_cpu = self.device.type == "cpu"
            self.control.took(former, self._worked_s / steps if on_cpu else past["step_s"])
        self.table.learn(self._clock.take())
        tables = self.context.peers.gather(self.table, DeviceTimes)
        refusal: ConfigError | None = None
        answer: BatchCourse | int = 0
        if self.rank == 0:
            self.control.tables = tables
            self.control.adapt()
            try:
                answer = self.control.course(self.world_size)
            except ConfigError as error:
                refusal, answer = error, error.exit_code
        course: BatchCourse | int = self.context.peers.tell(answer, Union[BatchCourse, int])
        if refusal is not None:
            raise refusal
        if isinstance(course, int):
            raise SystemExit(course)
        self._course, self._course_began = course, self.control.updates
        self._course_at, self._worked_s = time.monotonic(), 0.0
        self._have_workers(course)
        if former is None or former.order != course.order or self._read_for != self._group:
            self._aim()
        self.training.global_batch = self._next_batch()
        if self.rank == 0 and not course.trial:
            factor = self.control.factor(course, course.batch)
            self._history.add({**self._facts(), "loss": self.training.last_loss(), "factor": factor, **past})

    def _have_workers(self, course: BatchCourse) -> None:
        share = course.shares[self.rank]
        try:
            why = self._workers.have(share.at_once if share else 1)
        except torch.OutOfMemoryError as error:
            why = str(error).splitlines()[0]
        if why and self.control.options.pinned:
            got = f"several at once, of a model that cannot be copied here: {why}"
            raise ConfigError(where="strategy vsw", key="workers", got=got, accepted="1")
        if why and self.table.streams:
            self.table.streams = False
            say(f"one worker at a time on this device, as the model cannot be copied here: {why}")

    def _past(self) -> dict[str, Any]:
        """How long the steps of the course that ends have taken, and were expected to."""
        steps = self.control.updates - self._course_began
        if self._course is None or self._course.trial or not steps:
            return {}
        return {
            "step_s": (time.monotonic() - self._course_at) / steps,
            "expected_step_s": self._course.step_s,
        }

    def _look_ahead(self) -> None:
        """Say what the next epoch is expected to be like: at the beginning, as soon as enough is known, and
        at the end of each epoch."""
        epoch, now = int(self._trajectory.epoch), time.monotonic()
        if epoch > self._looked_at and not self.course.trial and now >= self._next_look:
            self._looked_at = epoch
            short = now < self._last_look + LONG_EPOCH_S
            self._expectation = expect(self.control, self._trajectory, self._parts.size, quick=short)
            self._last_look, took_s = now, time.monotonic() - now
            self._next_look = now + took_s / LOOK_SHARE

    def _facts(self) -> dict[str, Any]:
        """Where the training is, for people."""
        return {
            "attempt": self.context.env.attempt if self.context.env else 0,
            "step": self.training.step,
            "samples": self.training.samples,
            **self._batching().table(),
        }

    def _batching(self) -> Batching:
        course, control = self.course, self.control
        shares = [(share.workers, share.at_once) if share else (0, 0) for share in course.shares]
        metric = control.batching.metric.name.replace("-", "_")
        return Batching(
            global_batch=course.batch,
            local_batch=course.local_batch,
            workers=tuple(workers for workers, _ in shares),
            at_once=tuple(at_once for _, at_once in shares),
            epoch=round(self._trajectory.epoch, 4),
            **{metric: control.seen},
        )

    def facts(self) -> Facts:
        """What the agent is told besides."""
        if self._course is None:
            return Facts()
        scaling = self._expectation.told() if self._expectation else None
        return Facts(batching=self._batching(), scaling=scaling)

    def _aim(self) -> None:
        self._read_for = self._group
        self._reader.aim(self._pieces())

    def _next_batch(self) -> int:
        """The samples of the coming step: the last one has what is left."""
        return min(self.course.batch, self._end - self.training.samples)

    @property
    def _offset(self) -> int:
        assert self.control.offset is not None
        return self.control.offset

    @property
    def _end(self) -> int:
        """How many samples the training has seen when it is done."""
        return self.training.last_step() * self._unit + self._offset

    def _smaller(self, failed: bool) -> None:
        """The memory of some rank is too small for this course: find another one for the same step."""
        kind = self.course.kind(self.rank)
        if failed and kind is not None:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            self.table.too_large.add(kind)
            self.remember_too_large(kind)
        self.decide()
        self._aim()

    def _own_table(self) -> DeviceTimes:
        """What is known of this rank's device: what an earlier attempt has found out of the same one."""
        on_gpu = self.device.type == "cuda"
        name = torch.cuda.get_device_name(self.device) if on_gpu else "cpu"
        table, known = DeviceTimes.here(name, streams=on_gpu), self.control.tables
        joins = self.context.env is not None and self.context.env.joining
        if not joins and self.rank < len(known) and known[self.rank].same_device(table):
            table.rounds, table.update_s = dict(known[self.rank].rounds), known[self.rank].update_s
        table.too_large |= remembered(self.context.env.job_dir) if self.context.env else set()
        return table

    def remember_too_large(self, kind: Kind) -> None:
        """Whatever becomes of this attempt: the next one is to know. The smallest has to do in any case."""
        if self.context.env is not None and kind != (self.control.least, 1):
            remember(self.context.env.job_dir, kind)
