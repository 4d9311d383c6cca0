"""Adapters on one frozen model in a pack: as jobs, and compared in one process.

    python lora_packed.py '{"within_s": 60, "cases": [{"width": 64, "batch": 4, "members": 8}]}'

prints, by case, what `Comparison.page` says; null where the time was over.

It is run by a Python that has PEFT and Transformers (`adapters.py --python`, and the day on a GPU).
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch
from lora import Record, training

from hpcsched.worker import Parts, Trainer
from hpcsched.worker.packed import Pack, load, pack
from hpcsched.worker.session.data_parallel import DataParallel
from hpcsched.worker.session.session import session_of

RANKS, ALPHAS, RATES = (4, 8, 16, 2), (8, 16, 16, 32), (1e-2, 3e-3, 1e-3)
ROUNDS, SLICE_S, LEAST_STEPS = 3, 0.25, 2
CHECKED_STEPS = 20
FIRST_STEPS = 6
"""After these a pack's optimizers have their state, and it is in its mode."""


class Tuning(Trainer):
    """`args`: those of `lora.training`, `batch`, and `name`, `record`, `steps` of its record."""

    def build(self, args: dict[str, Any]) -> Parts:
        rest = dict(args)
        about = {key: rest.pop(key) for key in ("name", "record", "steps")}
        made = training(**{key: value for key, value in rest.items() if key != "batch"})
        Record(made, **about)
        return _parts(made, args["batch"])


def member_args(number: int, batch: int) -> dict[str, Any]:
    """Of one of several trainings: rank, alpha and learning rate are its own, and its batch: from half of
    `batch` to half as much again, `batch` in the mean of two."""
    around = (batch, max(1, batch // 2), batch, batch + batch // 2) if batch > 1 else (batch,)
    return {
        "rank": RANKS[number % 4],
        "alpha": ALPHAS[number % 4],
        "lr": RATES[number % 3],
        "batch": around[number % len(around)],
        "seed": number,
    }


def _parts(made: Any, batch: int) -> Parts:
    return Parts(
        model=made.model,
        optimizer=made.optimizer,
        dataset=(made.tokens,),
        global_batch=batch,
        loss=made.loss,
        epochs=10**6,
        data=f"{tuple(made.tokens.shape)} random words",
    )


class Comparison:
    """So many adapters, trained one after another, as a loop of a pack, and on one pass of the frozen model.

    Args:
        device: where; on a GPU times are the wall's, on a CPU those of its one thread.
        size: of `lora.training`: kind, width, layers, tokens, words, dtype.
        seconds: that a way is measured for, at least.
    """

    def __init__(
        self, device: torch.device, *, members: int, batch: int, seconds: float = SLICE_S, **size: Any
    ) -> None:
        self.device, self._size, self._seconds = device, size, seconds
        self.args = [member_args(number, batch) for number in range(members)]
        self.samples = sum(one["batch"] for one in self.args)

    def page(self) -> dict[str, Any]:
        """Seconds of a step of all, by way, and the largest difference to each alone."""
        ways = {"alone": self.alone(), "loop": self.loop(), "adapters": self.adapters()}
        return {"step_s": self.times(ways), "differs": self.differs()}

    def parts(self, number: int, **more: Any) -> Parts:
        """Of one of them."""
        args = {**self.args[number], **self._size, **more}
        batch = args.pop("batch")
        return _parts(training(**args), batch)

    def alone(self, **more: Any) -> Callable[[], None]:
        """A step of each, as `ddp` makes it; all of them in turn."""
        trainings = [self.one(number, **more) for number in range(len(self.args))]

        def step() -> None:
            for one in trainings:
                next(one)

        return step

    def one(self, number: int, **more: Any) -> Iterator[torch.nn.Module]:
        """A training by itself, a step at a time."""
        parts = self.parts(number, **more)
        strategy = DataParallel(parts)
        for _ in session_of(parts, strategy, total_steps=10**9).steps():
            strategy.train_step()
            yield parts.model

    def loop(self) -> Callable[[], None]:
        """A step of each, as a pack's loop makes it."""
        return self._together(self.pack("loop"))

    def adapters(self) -> Callable[[], None]:
        """A step of all on one pass of the frozen model. Raises ConfigError where that cannot be."""
        return self._together(self.pack("adapters"))

    def _together(self, pack: Pack) -> Callable[[], None]:
        def step() -> None:
            pack.step()

        return step

    def pack(self, mode: str, **more: Any) -> Pack:
        """All of them, in a mode."""
        members = [
            load(self.parts(number, **more), name=str(number), steps=10**9)
            for number in range(len(self.args))
        ]
        # A pack that is to loop lets those with small batches make more steps; one that may choose does not.
        together = pack(members, mode="auto" if mode == "loop" else mode, device=self.device)
        for group in together.groups:
            group.wanted = mode
        for _ in range(FIRST_STEPS):
            together.step()
        return together

    def times(self, ways: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
        """Seconds of a step, by way: these take turns in random order."""
        counts = {}
        for name, step in ways.items():
            step()
            taken = self.seconds(step, 1)
            counts[name] = max(LEAST_STEPS, round(self._seconds / ROUNDS / taken))
        found: dict[str, list[float]] = {name: [] for name in ways}
        draw, order = random.Random(0), list(ways)
        for _ in range(ROUNDS):
            draw.shuffle(order)
            for name in order:
                found[name].append(self.seconds(ways[name], counts[name]) / counts[name])
        return found

    def seconds(self, step: Callable[[], object], count: int) -> float:
        """What so many steps take."""
        began = self._now()
        for _ in range(count):
            step()
        return self._now() - began

    def _now(self) -> float:
        if self.device.type != "cuda":
            return time.thread_time()
        torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def differs(self, steps: int = CHECKED_STEPS, dtype: str = "float64") -> float:
        """How far the adapters of a pack are from those trained alone after so many steps, at most.

        `steps`: more than a pack makes before it is in its mode.
        """
        assert steps > FIRST_STEPS
        alone = []
        for number in range(len(self.args)):
            training = self.one(number, dtype=dtype)
            for _ in range(steps):
                model = next(training)
            alone.append(_adapter(model))
            training.close()
        together = self.pack("adapters", dtype=dtype)
        members = together.members
        while members[0].session.step < steps:
            together.step()
        return max(
            difference(_adapter(one.parts.model), other) for one, other in zip(members, alone, strict=True)
        )


def _adapter(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().cpu().clone() for name, p in model.named_parameters() if p.requires_grad}


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest of any weight."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def clear(device: torch.device) -> None:
    """The memory that was needed counts from here."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def rates(samples: int, times: dict[str, Sequence[float]]) -> dict[str, float]:
    """Samples a second of each way."""
    return {name: samples / median(some) for name, some in times.items()}


def main() -> None:
    torch.set_num_threads(1)
    asked = json.loads(sys.argv[1])
    end = time.monotonic() + asked["within_s"]
    pages = []
    for case in asked["cases"]:
        here = Comparison(torch.device("cpu"), **case) if time.monotonic() < end else None
        pages.append(here and here.page())
    print(json.dumps(pages))


if __name__ == "__main__":
    main()
