"""Two trainings on one GPU: what each mechanism of the lanes does for the foreground, and costs the
background.

    python benchmarks/lanes_gpu.py [--output FILE] [--models vgg16,...] [--budget-s 570] [--quick] [--cpu]

The ladder of the DeepPool paper (figure 11): naive, priorities, CUDA graphs, pacing, feedback, a small
background batch; then a green context, two processes, and two processes under MPS. Foreground and background
train the same network. A foreground's slowdown is against its own time alone with CUDA graphs; a background's
throughput is in samples, as a share of what its largest batch does alone with CUDA graphs. What fails, or is
not reached in time, is recorded and does no harm to the rest. Needs one idle GPU and less than ten minutes.
`--cpu` only shows that the program works: the device is then the CPU, there are no graphs, and the numbers
mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from side_by_side import answer_rates, measured_together, quit_mps, under_mps
from torch.nn.functional import cross_entropy

from hpcsched.examples.models import make
from hpcsched.planning.background.pacing import Pacer
from hpcsched.planning.background.referee import Referee
from hpcsched.worker.background.chunks import Chunked
from hpcsched.worker.background.lane import StreamLane
from hpcsched.worker.background.settings import Mode
from hpcsched.worker.background.streams import background_stream, foreground_stream
from hpcsched.worker.background.timing import ChunkTimer

cuda_api: Any = torch.cuda
cudnn: Any = torch.backends.cudnn
"""Not all of these have types."""

MODELS = ("vgg16", "wrn101-2", "inception-v3")
SMALL = {"vgg16": {"width": 0.05, "image": 32}, "wrn101-2": {"width": 0.05, "image": 32}}
"""Arguments for --cpu; a network that is not here is not tried there."""
FOREGROUND_BATCH = 4
"""Samples a step: strong scaling leaves a GPU few."""
BACKGROUND_BATCHES = (32, 16, 8, 4)
CHUNKS = 16
LONGEST_US = 300.0
"""What a chunk of a small background batch may take."""
WARM_STEPS = 5
WAIT_S = 60.0
"""What a guest may take to begin, and to end."""


@dataclass
class Outcome:
    """One rung of the ladder for one network. Rates are in samples per second."""

    model: str
    stage: str
    foreground_rate: float | None = None
    background_rate: float | None = None
    slowdown: float | None = None
    share: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass
class Bench:
    """Runs stages until the time is over."""

    device: torch.device
    window_s: float
    deadline: float
    outcomes: list[Outcome] = field(default_factory=list)
    keep: Callable[[], None] = lambda: None
    """Called after each stage: nothing is lost if something ends the program."""

    def stage(self, model: str, name: str, work: Callable[[Outcome], None]) -> None:
        """One stage; whatever goes wrong in it is noted in its outcome."""
        outcome = Outcome(model, name)
        self.outcomes.append(outcome)
        gc.collect()
        try:
            if time.monotonic() > self.deadline:
                raise TimeoutError("not reached in time")
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            work(outcome)
        except Exception as error:
            outcome.error = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        self.keep()


class OpenLane(StreamLane):
    """No gates: launches as fast as the host can."""

    def piece(self, key: object) -> None:
        """Nothing is waited for."""


class FollowedLane(OpenLane):
    """A foreground's lane that tells which chunk of its step the device is in."""

    def __init__(self, chunks: int, device: torch.device) -> None:
        super().__init__(Referee(Pacer(1)), stream=current(device))
        order: list[object] = [("forward", index) for index in range(chunks)]
        order += ["loss", *(("backward", index) for index in reversed(range(chunks)))]
        self._index = {key: index for index, key in enumerate(order)}
        self.follower = ChunkTimer([False] * len(order), device)

    def piece(self, key: object) -> None:
        """The chunk `key` begins."""
        self.follower.boundary(self._index[key])

    def look_back(self) -> None:
        """Find out what the device has come to."""
        with self.follower.lock:
            self.follower.look()

    def step_ends(self) -> None:
        """The backward pass and what comes after it have been launched."""
        self.follower.boundary(self.follower.chunks)


class Training:
    """One network in training on random data."""

    def __init__(
        self,
        model: str,
        batch: int,
        device: torch.device,
        lane: StreamLane,
        *,
        graphs: bool,
        most: int = CHUNKS,
    ) -> None:
        torch.manual_seed(0)
        self.batch, self.device, self.lane, self.steps = batch, device, lane, 0
        self.model, example = make(model, {} if device.type == "cuda" else SMALL[model])
        drop_nothing(self.model)
        self.model.to(device).train()
        self.x = tuple(tensor.to(device) for tensor in example(batch))
        self.y = torch.arange(batch, device=device) % 10
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        # Whole networks launched operator by operator are what is compared with, so only graphs are chunked.
        self.call: Any = self.model
        if graphs or lane.__class__ is not OpenLane:
            self.call = Chunked(self.model, self.x, lane, most=most, graphs=graphs)

    def step(self) -> torch.Tensor:
        """One step; returns its loss."""
        self.optimizer.zero_grad()
        loss = cross_entropy(self.call(*self.x), self.y)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        if isinstance(self.lane, FollowedLane):
            self.lane.step_ends()
        self.steps += 1
        return loss.detach()

    def run(self, wanted: Callable[[], bool]) -> None:
        """Steps while they are wanted, at most two ahead of the device."""
        ahead: list[Any] = []
        while wanted():
            self.step()
            if self.device.type == "cuda":
                event: Any = cuda_api.Event()
                event.record()
                ahead.append(event)
                if len(ahead) > 2:
                    ahead.pop(0).synchronize()
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def rate(self, seconds: float) -> float:
        """Samples per second over so many seconds, after a warm-up."""
        warm = self.steps + WARM_STEPS
        self.run(lambda: self.steps < warm)
        before, began = self.steps, time.perf_counter()
        self.run(lambda: time.perf_counter() - began < seconds)
        return (self.steps - before) * self.batch / (time.perf_counter() - began)


class Beside:
    """A training that runs in a thread, as a guest does."""

    def __init__(self, make_it: Callable[[], Training], lane: StreamLane) -> None:
        self._make, self._lane = make_it, lane
        self.training: Training | None = None
        self.error: BaseException | None = None
        self._ready, self._end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            with torch.autograd.set_multithreading_enabled(False), self._lane.work():
                self.training = self._make()
                self.training.step()
                self._ready.set()
                self.training.run(lambda: not self._end.is_set())
        except BaseException as error:
            self.error = error
        finally:
            self._ready.set()

    def __enter__(self) -> Beside:
        self._thread.start()
        self._ready.wait(WAIT_S)
        if self.error is not None or self.training is None:
            raise RuntimeError(f"the background did not begin: {self.error}")
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._lane.open_gates = True
        self._thread.join(WAIT_S)

    @property
    def samples(self) -> int:
        """Trained on so far."""
        if self.error is not None:
            raise RuntimeError(f"the background failed: {self.error}")
        return self.training.steps * self.training.batch if self.training else 0


# -- stages --------------------------------------------------------------------------------------------------


def measure(
    bench: Bench,
    model: str,
    outcome: Outcome,
    alone: tuple[float, float],
    *,
    batch: int = BACKGROUND_BATCHES[0],
    graphs: bool = True,
    ranked: bool = True,
    most: int = CHUNKS,
    limit: int | None = None,
    feedback: bool = False,
    mode: Mode = Mode.STREAMS,
) -> None:
    """Both side by side, the background with these mechanisms."""
    cuda = bench.device.type == "cuda"
    followed: FollowedLane | None = None
    chunks = chunks_of(model, bench.device) if feedback else 0
    stream = None
    if cuda:
        stream = background_stream(bench.device, mode) if ranked else cuda_api.Stream(bench.device)
    front = foreground_stream(bench.device) if ranked else contextlib.nullcontext()
    graphs = graphs and cuda
    with front:
        if chunks:
            followed = FollowedLane(chunks, bench.device)
        referee = Referee(Pacer(limit or 1), followed.follower.feedback if followed else None)
        lane: StreamLane = OpenLane(referee, stream=stream)
        if limit is not None:
            lane = StreamLane(referee, stream=stream)
        if followed is not None:
            lane.lock, lane.between = followed.follower.lock, followed.look_back
        own = followed or OpenLane(referee, stream=current(bench.device))
        first = Training(model, FOREGROUND_BATCH, bench.device, own, graphs=graphs)
        first.run(lambda: first.steps < WARM_STEPS)
        if followed is not None:
            followed.follower.tell(referee)
        with Beside(
            lambda: Training(model, batch, bench.device, lane, graphs=graphs, most=most), lane
        ) as second:
            warm = first.steps + WARM_STEPS
            first.run(lambda: first.steps < warm)
            samples, steps, began = second.samples, first.steps, time.perf_counter()
            first.run(lambda: time.perf_counter() - began < bench.window_s)
            took = time.perf_counter() - began
            outcome.foreground_rate = (first.steps - steps) * first.batch / took
            outcome.background_rate = (second.samples - samples) / took
    if followed is not None:
        times = followed.follower.feedback.chunks
        outcome.facts["barred"] = [index for index, one in enumerate(times) if one.barred]
        outcome.facts["told_slowdown"] = followed.follower.feedback.slowdown()
    outcome.facts |= {"background_batch": batch, "background_waited_us": round(lane.waited_us)}
    compare(outcome, alone)


def compare(outcome: Outcome, alone: tuple[float, float]) -> None:
    """Against both alone: the foreground, and the background's largest batch."""
    if outcome.foreground_rate and outcome.background_rate is not None:
        outcome.slowdown = alone[0] / outcome.foreground_rate - 1
        outcome.share = outcome.background_rate / alone[1]


def chunks_of(model: str, device: torch.device) -> int:
    """How many chunks a network is cut into."""
    lane = OpenLane(Referee(Pacer(1)))
    return int(Training(model, 2, device, StreamLane(lane.referee), graphs=False).call.chunks)


def correctness(bench: Bench, model: str, outcome: Outcome) -> None:
    """Graphs in chunks train as operators one by one do; a background changes no bit of the foreground."""
    cuda = bench.device.type == "cuda"
    deterministic = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        with foreground_stream(bench.device):

            def losses(graphs: bool) -> list[float]:
                lane = OpenLane(Referee(Pacer(1)), stream=current(bench.device))
                training = Training(model, FOREGROUND_BATCH, bench.device, lane, graphs=graphs)
                return [float(training.step()) for _ in range(5)]

            eager = losses(False)
            if cuda:
                outcome.facts["graphs_differ_by"] = max(
                    abs(a - b) / abs(b) for a, b in zip(losses(True), eager, strict=True)
                )
            stream = background_stream(bench.device, Mode.STREAMS)
            lane = StreamLane(Referee(Pacer(2)), stream=stream)
            with Beside(lambda: Training(model, 4, bench.device, lane, graphs=False), lane):
                outcome.facts["same_bits_beside_a_background"] = losses(False) == eager
    finally:
        torch.backends.cudnn.deterministic = deterministic


def current(device: torch.device) -> Any:
    """The stream that this thread launches into; None on the CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def drop_nothing(model: torch.nn.Module) -> None:
    """Dropout off: here both trainings draw from one generator, and graphs in another order."""
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0


def ladder(bench: Bench, model: str) -> None:
    """All stages of one network that run in this process."""
    device, cuda = bench.device, bench.device.type == "cuda"
    bench.stage(model, "correctness", lambda outcome: correctness(bench, model, outcome))
    rates: dict[str, float] = {}

    def by_itself(name: str, batch: int, *, graphs: bool) -> None:
        def work(outcome: Outcome) -> None:
            with foreground_stream(device):
                lane = OpenLane(Referee(Pacer(1)), stream=current(device))
                training = Training(model, batch, device, lane, graphs=graphs and cuda)
                outcome.foreground_rate = rates[name] = training.rate(bench.window_s)

        bench.stage(model, name, work)

    by_itself("foreground alone, no graphs", FOREGROUND_BATCH, graphs=False)
    by_itself("foreground alone", FOREGROUND_BATCH, graphs=True)
    by_itself("background alone", BACKGROUND_BATCHES[0], graphs=True)
    if "background alone" not in rates or "foreground alone" not in rates:
        return
    alone = rates["foreground alone"], rates["background alone"]

    def beside(name: str, **options: Any) -> None:
        bench.stage(model, name, lambda outcome: measure(bench, model, outcome, alone, **options))

    def small(outcome: Outcome) -> None:
        longest = {batch: longest_chunk_us(model, batch, device) for batch in BACKGROUND_BATCHES}
        outcome.facts["longest_chunk_us"] = longest
        # If no chunk is short enough, the smallest batch: to see what it does.
        batch = max((n for n, us in longest.items() if us <= LONGEST_US), default=min(longest))
        measure(bench, model, outcome, alone, limit=2, feedback=True, batch=batch)

    beside("naive", graphs=False, ranked=False)
    beside("priorities", graphs=False)
    beside("CUDA graphs", most=1)
    for limit in (4, 2, 1):
        beside(f"pacing, {limit} outstanding", limit=limit)
    beside("feedback", limit=2, feedback=True)
    bench.stage(model, "small background batch", small)
    if cuda:
        beside("green context", limit=2, mode=Mode.GREEN)


def longest_chunk_us(model: str, batch: int, device: torch.device) -> float:
    """The longest piece of a background training of this batch, alone; microseconds."""
    found: list[float] = []

    class Noting(Referee):
        since_us = 0.0

        def launched(self, key: object, now_us: float) -> None:
            super().launched(key, now_us)
            self.since_us = now_us

        def completed(self, now_us: float, took_us: float | None = None) -> None:
            super().completed(now_us, took_us)
            found.append(now_us - self.since_us if took_us is None else took_us)

    stream = background_stream(device, Mode.STREAMS)
    lane = StreamLane(Noting(Pacer(1)), stream=stream)
    with lane.work():
        training = Training(model, batch, device, lane, graphs=device.type == "cuda")
        for _ in range(WARM_STEPS):
            training.step()
        found.clear()
        for _ in range(3):
            training.step()
    return max(found)


# -- two processes -------------------------------------------------------------------------------------------


def part(role: str, model: str, window_s: float) -> int:
    """One of two processes: says `ready`, then answers each line of its input with a measurement."""
    device = torch.device("cuda", 0)
    batch = FOREGROUND_BATCH if role == "foreground" else BACKGROUND_BATCHES[-1]
    with foreground_stream(device):
        lane = OpenLane(Referee(Pacer(1)), stream=current(device))
        training = Training(model, batch, device, lane, graphs=True)
        training.run(lambda: training.steps < WARM_STEPS)
        return answer_rates(lambda: training.rate(window_s))


def in_processes(bench: Bench, model: str, outcome: Outcome, *, shared: bool) -> None:
    """Both in processes of their own; `shared`: under MPS."""
    best = {o.stage: o.foreground_rate for o in bench.outcomes if o.model == model}
    alone = best.get("foreground alone"), best.get("background alone")
    if alone[0] is None or alone[1] is None:
        raise RuntimeError("nothing to compare with")
    commands: list[tuple[list[str], dict[str, str]]] = []
    try:
        for role in ("foreground", "background"):
            environ = under_mps(background=role == "background") if shared else dict(os.environ)
            command = [sys.executable, __file__, "--part", role, "--models", model]
            commands.append(([*command, "--window-s", str(bench.window_s)], environ))
        outcome.foreground_rate, outcome.background_rate = measured_together(commands)
    finally:
        if shared:
            quit_mps()
    outcome.facts["background_batch"] = BACKGROUND_BATCHES[-1]
    compare(outcome, (alone[0], alone[1]))


# -- the page ------------------------------------------------------------------------------------------------


def page(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    """All outcomes, with what they were measured on."""
    cuda = bench.device.type == "cuda"
    return {
        "schema": 1,
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(bench.device) if cuda else "cpu",
        "driver": driver() if cuda else None,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": cudnn.version() if cuda else None,
        },
        "quick": options.quick or options.cpu,
        "foreground_batch": FOREGROUND_BATCH,
        "window_s": bench.window_s,
        "goals": {"slowdown": 0.05, "share": 0.40},
        "outcomes": [asdict(outcome) for outcome in bench.outcomes],
    }


def driver() -> str | None:
    """The NVIDIA driver's version."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:
        return None


def table(outcomes: list[Outcome]) -> str:
    """The outcomes as a Markdown table."""

    def percent(value: float | None) -> str:
        return "" if value is None else f"{100 * value:.1f} %"

    lines = ["| network | stage | foreground slower by | background of its best | |", "|---|---|---|---|---|"]
    lines += [
        f"| {o.model} | {o.stage} | {percent(o.slowdown)} | {percent(o.share)} | {o.error or ''} |"
        for o in outcomes
    ]
    return "\n".join(lines)


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """What this program was asked for."""
    parser = argparse.ArgumentParser(description="Two trainings on one GPU.")
    parser.add_argument("--models", default=",".join(MODELS), help="networks, with commas between")
    parser.add_argument("--budget-s", type=float, default=570.0, help="stages that begin later are left out")
    parser.add_argument("--window-s", type=float, default=2.5, help="of each measurement")
    parser.add_argument("--output", type=Path, help="where to write the results")
    parser.add_argument("--json", action="store_true", help="print them too, in place of the table")
    parser.add_argument("--quick", action="store_true", help="short windows: shows that it works")
    parser.add_argument("--cpu", action="store_true", help="a self-check without a GPU")
    parser.add_argument("--part", choices=("foreground", "background"), help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    options.models = tuple(options.models.split(","))
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"unknown networks: {', '.join(sorted(unknown))}; known: {', '.join(MODELS)}")
    if options.quick or options.cpu:
        options.window_s = min(options.window_s, 0.2)
    return options


def main(words: list[str] | None = None) -> int:
    options = arguments(words)
    if options.part:
        return part(options.part, options.models[0], options.window_s)
    if not options.cpu and not torch.cuda.is_available():
        print("no GPU here; --cpu shows that the program works", file=sys.stderr)
        return 2
    device = torch.device("cpu") if options.cpu else torch.device("cuda", 0)
    bench = Bench(device, options.window_s, time.monotonic() + options.budget_s)
    bench.keep = lambda: write(bench, options)
    for model in options.models:
        if options.cpu and model not in SMALL:
            continue
        ladder(bench, model)
    if device.type == "cuda":
        for model in options.models:
            for name, shared in (("two processes", False), ("MPS", True)):
                bench.stage(model, name, partial(in_processes, bench, model, shared=shared))
    print(json.dumps(page(bench, options)) if options.json else table(bench.outcomes))
    return 0


def write(bench: Bench, options: argparse.Namespace) -> None:
    """What is known so far."""
    if options.output is not None:
        unfinished = options.output.with_name(f".{options.output.name}.new")
        unfinished.write_text(json.dumps(page(bench, options), indent=1) + "\n")
        unfinished.replace(options.output)


if __name__ == "__main__":
    sys.exit(main())
