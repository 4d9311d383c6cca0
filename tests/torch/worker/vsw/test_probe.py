"""`profile vsw`: what is measured of a device's workers, where it ends, and what is made of it."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from budget import slow
from click.testing import CliRunner, Result

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from hpcsched.cli.profile.group import profile  # noqa: E402
from hpcsched.core.model import Device  # noqa: E402
from hpcsched.devices.cpu import CpuSlots  # noqa: E402
from hpcsched.errors import ConfigError  # noqa: E402
from hpcsched.launch.base import LaunchPlan  # noqa: E402
from hpcsched.planning.vsw.costs import AllReduceCost, AllReduceCosts, BatchTimes, GpuCosts, Times, VswCosts  # noqa: E402
from hpcsched.planning.vsw.profile import VswProfile  # noqa: E402
from hpcsched.profiling.probing import ProbeFailed  # noqa: E402
from hpcsched.testing.launch import FakeLauncher, FakeWorkers  # noqa: E402
from hpcsched.worker.session.trainer import Parts  # noqa: E402
from hpcsched.worker.vsw import probe as probing  # noqa: E402
from hpcsched.worker.vsw.clock import RoundTime  # noqa: E402
from hpcsched.worker.vsw.probe import ProbePoint, VswProbe, VswTimes, doubled  # noqa: E402

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
FULL = "CUDA out of memory. Tried to allocate 2 GiB.\nMore of it"


class Held(torch.autograd.Function):
    """Keeps something for the backward pass, as activations are kept."""

    @staticmethod
    def forward(ctx: Any, x: Any, what: Any) -> Any:
        ctx.what = what
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return *grads, None


class Activations:
    """Of so many samples."""

    def __init__(self, samples: int) -> None:
        self.samples = samples


class Memory:
    """A loss that keeps activations, of at most `room` samples at a time."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.held: weakref.WeakSet[Activations] = weakref.WeakSet()
        self.calls: list[int] = []

    @property
    def used(self) -> int:
        return sum(each.samples for each in self.held)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        what = Activations(len(batch[0]))
        self.calls.append(what.samples)
        self.held.add(what)
        if self.used > self.room:
            raise torch.OutOfMemoryError(FULL)
        return Held.apply(model(batch[0]).square().mean(1), what)


def parts(loss: Callable[..., Any] | None = None, *, model: nn.Module | None = None, size: int = 40) -> Parts:
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    return Parts(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-4),
        dataset=(torch.rand(size, 4),),
        global_batch=8,
        loss=loss or Memory(10**6).loss,
    )


def probe(made: Parts, *, halves: bool = False, **changed: Any) -> VswProbe:
    return VswProbe(made, CPU, halves=halves, seconds=0.0, **changed)


def last(found: Iterator[VswTimes]) -> VswTimes:
    return [*found][-1]


def kinds(found: VswTimes) -> list[tuple[int, int]]:
    return [(point.local_batch, point.at_once) for point in found.points]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Two would wait for each other most of the time, where others use the machine too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def gaining(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine does meanwhile, more always gains something."""
    monkeypatch.setattr(probing, "_gains", lambda former, point: True)


# -- where it ends -------------------------------------------------------------------------------------


def test_local_batches_are_doubled_up_to_the_last_one() -> None:
    assert doubled(1, 8) == [1, 2, 4, 8]
    assert doubled(3, 20) == [3, 6, 12, 20]
    assert doubled(5, 5) == [5]


@pytest.mark.usefixtures("gaining")
@pytest.mark.parametrize("halves", [False, slow(True)])
def test_memory_ends_rows_and_then_the_list(halves: bool) -> None:
    memory = Memory(24)
    found = last(probe(parts(memory.loss), halves=halves).run([4, 8, 16, 32], 8))
    assert kinds(found) == [*((4, n) for n in range(1, 7)), *((8, n) for n in range(1, 4)), (16, 1)]
    assert (found.most, found.too_large, found.why) == ({4: 6, 8: 3, 16: 1}, 32, FULL.splitlines()[0])
    assert memory.used == 0
    assert [(local, speed.usable) for local, speed in found.costs.speeds.items()] == [(4, 6), (8, 3), (16, 1)]


@pytest.mark.usefixtures("gaining")
def test_what_is_not_tried_is_not_known_not_to_fit() -> None:
    found = last(probe(parts()).run([4, 8], 2))
    assert kinds(found) == [(4, 1), (4, 2), (8, 1), (8, 2)]
    assert (found.most, found.too_large) == ({}, None)
    assert [speed.most for speed in found.costs.speeds.values()] == [None, None]


def made_up(local: int, count: int, samples_s: float, **changed: Any) -> ProbePoint:
    half_s = 0.5 * local * count / samples_s
    each = RoundTime(read_s=0.0, forward_s=half_s, backward_s=half_s)
    rest: dict[str, Any] = {"update_s": 0.01, "begin_s": 0.0, "memory_mib": None}
    return ProbePoint(local_batch=local, at_once=count, round=each, **{**rest, **changed})


def run_on(monkeypatch: pytest.MonkeyPatch, rates: dict[tuple[int, int], float], at_once: int) -> VswTimes:
    """What is measured where the samples a second are these."""
    made = probe(parts())
    monkeypatch.setattr(made, "_point", lambda local, count: made_up(local, count, rates[local, count]))
    return last(made.run(sorted({local for local, _ in rates}), at_once))


def test_workers_at_once_end_with_the_first_that_gains_less_than_3_percent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = run_on(monkeypatch, {(4, 1): 100, (4, 2): 104, (4, 3): 107, (8, 1): 300, (8, 2): 200}, 8)
    assert kinds(found) == [(4, 1), (4, 2), (4, 3), (8, 1), (8, 2)]
    assert found.most == {}


def test_a_cpus_local_batches_end_when_two_in_a_row_gain_less_than_3_percent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rates = {(2, 1): 100, (4, 1): 101, (8, 1): 150, (16, 1): 151, (32, 1): 140, (64, 1): 500}
    found = run_on(monkeypatch, rates, 1)
    assert (kinds(found)[-1], found.flat) == ((32, 1), True)
    del rates[64, 1]
    assert not run_on(monkeypatch, rates, 1).flat  # there is no larger one


def test_a_gpus_local_batches_go_on_to_the_end_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made = probe(parts())
    made._device = torch.device("cuda")
    monkeypatch.setattr(made, "_rehearse", lambda local: None)
    monkeypatch.setattr(made, "_point", lambda local, count: made_up(local, count, 100))
    assert kinds(last(made.run([1, 2, 4, 8], 1))) == [(1, 1), (2, 1), (4, 1), (8, 1)]


def test_a_model_that_cannot_be_copied_is_measured_with_one_worker_at_once() -> None:
    class Alone(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("there is only one of me")

    found = last(probe(parts(model=Alone(4, 3))).run([2, 4], 4))
    assert kinds(found) == [(2, 1), (4, 1)]
    assert "there is only one of me" in found.single
    assert found.most == {}


def test_no_room_for_a_copy_is_no_room() -> None:
    class Large(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise torch.OutOfMemoryError(FULL)

    found = last(probe(parts(model=Large(4, 3))).run([2, 4], 4))
    assert (kinds(found), found.most, found.single) == ([(2, 1), (4, 1)], {2: 1, 4: 1}, "")


def test_where_nothing_fits_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="a local batch of 4: no room for it: CUDA out of memory"):
        last(probe(parts(Memory(3).loss)).run([4, 8], 1))

    class Huge(nn.Linear):
        def to(self, *args: Any, **kwargs: Any) -> Any:
            raise torch.OutOfMemoryError(FULL)

    with pytest.raises(ConfigError, match="the model: no room for it"):
        probe(parts(model=Huge(4, 3)))


def test_a_mistake_of_the_trainer_is_none_of_memory() -> None:
    def wrong(model: nn.Module, batch: Any) -> Any:
        raise RuntimeError("shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        last(probe(parts(wrong)).run([4], 1))
    with pytest.raises(ValueError, match="losses of shape"):
        last(probe(parts(lambda model, batch: model(batch[0]))).run([4], 1))


# -- what is measured ----------------------------------------------------------------------------------


def test_times_are_those_of_reading_both_passes_and_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            time.sleep(0.004)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            time.sleep(0.006)
            return grads

    made = parts(lambda model, batch: Slow.apply(model(batch[0]).mean(1)))
    whole, step = Parts.batch, made.optimizer.step

    def read(self: Parts, indices: Any) -> Any:
        time.sleep(0.002)
        return whole(self, indices)

    def update(*args: Any) -> Any:
        time.sleep(0.008)
        return step(*args)

    monkeypatch.setattr(Parts, "batch", read)
    monkeypatch.setattr(made.optimizer, "step", update)
    monkeypatch.setattr(probing, "_gains", lambda former, point: True)
    one, two = last(probe(made).run([4], 2)).points
    for point in (one, two):
        assert point.round.read_s >= 0.002 * point.at_once
        assert point.round.forward_s >= 0.004 * point.at_once
        assert point.round.backward_s >= 0.006 * point.at_once
        assert point.update_s >= 0.008
        assert point.samples_s == pytest.approx(4 * point.at_once / point.round.all_s)


def test_each_point_is_measured_for_so_long_by_its_own_rounds() -> None:
    memory, alive = Memory(10**6), []
    made = VswProbe(parts(memory.loss), CPU, halves=False, seconds=0.2, alive=lambda: alive.append(1))
    began = time.monotonic()
    last(made.run([4, 8], 1))
    assert time.monotonic() - began >= 0.4
    assert len(alive) > 2 * probing.LEAST
    assert set(memory.calls) == {4, 8}


def test_buckets_are_those_in_which_gradients_travel() -> None:
    model = nn.Sequential(nn.Linear(600, 700), nn.Linear(700, 4))
    model[0].bias.requires_grad_(False)
    assert probe(parts(model=model)).buckets == [4 * 2804, 4 * 420_000]


def test_costs_are_medians_with_buffers_by_worker() -> None:
    found = VswTimes(
        points=[
            made_up(4, 1, 100, update_s=0.01, begin_s=9.0),
            made_up(4, 2, 100, update_s=0.03, begin_s=0.2),
            made_up(8, 1, 100, update_s=0.02, begin_s=9.0),
        ],
        most={4: 2},
    )
    costs = found.costs
    assert (costs.update_s, costs.copy_s, costs.buffers_s) == (0.02, 0.0, 0.1)
    assert costs.speeds[4].times[2] == Times(data_s=0.0, forward_s=0.04, backward_s=0.04)
    assert (costs.speeds[4].most, costs.speeds[8].most) == (2, None)


@pytest.mark.usefixtures("gaining")
def test_a_gpus_peak_is_that_of_each_point_and_what_failed_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = Memory(24)
    peaks, emptied = [0], []
    loss = memory.loss

    def watched(model: nn.Module, batch: Any) -> Any:
        result = loss(model, batch)
        peaks.append(memory.used)
        return result

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peaks.clear())
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: max(peaks) * 2**20)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(memory.used))
    cleared: list[int] = []
    monkeypatch.setattr(
        torch._C, "_cuda_clearCublasWorkspaces", lambda: cleared.append(made._workers.count), raising=False
    )
    made = probe(parts(watched))
    made._cuda = True
    found = last(made.run([4, 8, 16, 32], 8))
    assert cleared == [1, 1, 1, 1], "work areas of streams that are not measured any more"
    made._workers.have(3)
    made._point(4, 1)
    assert cleared[4:] == [3]
    assert [point.memory_mib for point in found.points] == [4, 8, 12, 16, 20, 24, 8, 16, 24, 16]
    assert emptied == [0, 0, 0, 0]  # nothing held what had not fitted


# -- by whom it is measured ----------------------------------------------------------------------------

JOBS = """
schema = 1
[[job]]
name = "plain"
trainer = "mine:Mine"
[[job]]
name = "adaptive"
model = "m"
trainer = "mine:Mine"
strategy = { kind = "vsw", local_batch = [8, 32], global_batch = [64, 512] }
[[job]]
name = "script"
command = ["true"]
"""


def answer(kind: str = "cpu", *local_batches: int) -> dict[str, Any]:
    """What the program that measures has found."""
    times = {1: Times(data_s=0.0, forward_s=0.01, backward_s=0.02)}
    speeds = {local: BatchTimes(local_batch=local, times=times) for local in local_batches or (8, 16)}
    guessed = AllReduceCost(per_byte_s=1e-9, latency_s=2e-4)
    costs = VswCosts(
        gpus={kind: GpuCosts(speeds=speeds, update_s=0.001)},
        buckets=(100, 5000),
        network=AllReduceCosts(within=guessed, between=guessed),
    )
    return {"profile": VswProfile(model="m", costs=costs, note=f"on {kind}").to_table(), "global_batch": 64}


POINT = {
    "local_batch": 8,
    "at_once": 1,
    "round": {"read_s": 0.001, "forward_s": 0.01, "backward_s": 0.02},
    "samples_s": 258.06,
    "memory_mib": None,
}


class Probes(FakeLauncher):
    """Programs that find, tell, write and end as it is said here."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[dict[str, Any]] = []
        self.found: Callable[[dict[str, Any]], dict[str, Any] | None] = lambda asked: answer(asked["device"])
        self.line: dict[str, Any] | None = {"line": {"per_byte_s": 3e-9, "latency_s": 0.001}}
        self.code: int | None = 0
        self.writes = ""
        self.points = [POINT]

    def launch(self, plan: LaunchPlan) -> FakeWorkers:
        request = json.loads(plan.env["HPCSCHED_VSW"])
        self.requests.append(request)
        workers = super().launch(plan)
        sums = "sum_bytes" in request
        found = self.line if sums else self.found(request)
        if found is not None:
            Path(request["result"]).write_text(json.dumps(found))
        plan.output.write_text("" if sums else self.writes)
        for point in [] if sums else self.points:
            workers.say(json.dumps(point) + "\n")
        if sums or self.code is not None:
            for rank in range(len(plan.devices)):
                workers.end(rank, int(self.line is None) if sums else self.code or 0)
        return workers


@pytest.fixture
def probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Probes:
    probes = Probes()
    monkeypatch.setattr("hpcsched.launch.local.LocalLauncher", lambda **how: probes)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs.toml").write_text(JOBS)
    return probes


def call(*words: str) -> Result:
    return CliRunner().invoke(profile, ["vsw", "-o", "f.json", *words])


def written() -> VswProfile:
    return VswProfile.parse(json.loads(Path("f.json").read_text()), where="f.json")


def test_a_jobs_options_say_what_is_measured_and_all_of_it_is_written(probes: Probes, tmp_path: Path) -> None:
    done = call("jobs.toml", "--job", "adaptive", "--devices", "cpu:2")
    assert done.exit_code == 0, done.stderr
    workers, sums = probes.requests
    assert (workers["local_batch"], workers["halves"], workers["at_once"]) == ([8, 32], True, None)
    assert workers["seconds"] == 1.0
    assert [len(plan.devices) for plan, _ in probes.launched] == [1, 2]
    assert sums["sum_bytes"] == 5000
    made = written()
    assert (made.model, made.global_batch, len(made.cluster)) == ("m", (64, 512), 2)
    assert (
        made.costs.network.within
        == made.costs.network.between
        == AllReduceCost(per_byte_s=3e-9, latency_s=0.001)
    )
    assert made.note.endswith("over 2 ranks of this host, taken to be the same between hosts")
    head, titles, row, line = done.stdout.splitlines()
    assert head == "m on one cpu"
    assert titles == "LOCAL-BATCH  AT-ONCE  READ(ms)  FORWARD(ms)  BACKWARD(ms)  SAMPLES/S"
    assert row.split() == ["8", "1", "1.000", "10.000", "20.000", "258.1"]
    assert line == "all-reduce over 2 ranks: 1.000 ms and 3.000 ms for each MB that travels"
    assert "`hpcsched plan vsw f.json --global-batch 512`" in done.stderr
    assert not [*tmp_path.glob("hpcsched-*")]


def test_options_go_before_the_jobs(probes: Probes) -> None:
    words = ["--local-batch", "4-12", "--at-once", "3", "--seconds", "0.5", "--devices", "cpu:1"]
    assert call("jobs.toml", "--job", "adaptive", *words).exit_code == 0
    (asked,) = probes.requests
    assert (asked["local_batch"], asked["at_once"], asked["seconds"]) == ([4, 12], 3, 0.5)


def test_one_device_has_nothing_to_sum_and_the_note_says_so(probes: Probes) -> None:
    done = call("--trainer", "mine:Mine", "--args", "width=3", "--devices", "cpu:1")
    assert done.exit_code == 0, done.stderr
    (asked,) = probes.requests
    assert (asked["local_batch"], asked["halves"], asked["model"]) == (None, False, "Mine")
    assert asked["note"].endswith('mine:Mine {"width": 3}')
    made = written()
    assert made.note.endswith("all-reduce not measured, taken to be 0.2 ms and 1 ms for each MB")
    assert made.costs.network.within == AllReduceCost(per_byte_s=1e-9, latency_s=2e-4)
    assert "all-reduce" not in done.stdout
    assert "`hpcsched plan vsw f.json --global-batch 64`" in done.stderr


def test_each_kind_of_device_is_measured(probes: Probes, monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = [Device(index=i, host="h", kind=kind, handle="0") for i, kind in enumerate(["A", "B", "A"])]
    monkeypatch.setattr(CpuSlots, "inventory", lambda self: tuple(mixed))
    probes.points = [{**POINT, "memory_mib": 812.4}]
    done = call("--trainer", "mine:Mine", "--devices", "cpu:3")
    assert done.exit_code == 0, done.stderr
    assert [plan.devices for plan, _ in probes.launched] == [(mixed[0],), (mixed[1],), tuple(mixed)]
    made = written()
    assert [*made.costs.gpus] == ["A", "B"]
    assert sorted(gpu.kind for gpu in made.cluster) == ["A", "A", "B"]
    assert made.note.startswith("on A; on B; ")
    assert [line for line in done.stdout.splitlines() if line.startswith("Mine")] == [
        "Mine on one A",
        "Mine on one B",
    ]
    assert done.stdout.splitlines()[1].split()[-1] == "MEMORY(MiB)"
    assert done.stdout.splitlines()[2].split()[-1] == "812"


def test_sums_that_fail_leave_a_guess_and_a_word(probes: Probes) -> None:
    probes.line = None
    done = call("--trainer", "mine:Mine", "--devices", "cpu:2")
    assert done.exit_code == 0
    assert "note: the all-reduce could not be measured: it ended with exit code 1" in done.stderr
    assert "not measured" in written().note


def test_what_was_measured_before_it_failed_is_kept(probes: Probes) -> None:
    probes.code, probes.writes = 137, "hpcsched: a word\nKilled\n"
    done = call("--trainer", "mine:Mine", "--devices", "cpu:1")
    assert done.exit_code == 0
    assert "note: a word\n" in done.stderr
    assert "ended with signal 9 (SIGKILL); " in done.stderr
    assert "ends: Killed; what comes after local batch 16 is missing" in done.stderr
    assert written().local_batches == [8, 16]


def test_a_program_that_falls_silent_is_ended_and_what_was_measured_is_kept(probes: Probes) -> None:
    probes.code = None
    done = call("--trainer", "mine:Mine", "--devices", "cpu:1", "--timeout", "0.3")
    assert isinstance(done.exception, ProbeFailed)
    assert "it made no step in 0.3 s" in str(done.exception)
    assert "note: what was measured before is in f.json" in done.stderr
    assert written().local_batches == [8, 16]
    assert probes.launched[0][1].closed


def test_a_trainer_that_is_refused_is_told_in_its_own_words(probes: Probes, tmp_path: Path) -> None:
    probes.found, probes.points = (lambda asked: None), []
    probes.code, probes.writes = 2, "hpcsched: trainer 'mine:Mine': mine has no Mine\n"
    done = call("--trainer", "mine:Mine", "--devices", "cpu:1")
    assert isinstance(done.exception, ProbeFailed)
    assert done.exception.exit_code == 2
    assert str(done.exception) == "trainer 'mine:Mine': mine has no Mine"
    assert done.stdout == ""
    assert not Path("f.json").exists()
    assert not [*tmp_path.glob("hpcsched-*")]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "give a job file or --trainer"),
        (["jobs.toml", "--trainer", "mine:Mine"], "give a job file or --trainer"),
        (["--trainer", "mine:Mine", "--job", "plain"], "--job names a job of a job file"),
        (["jobs.toml", "--args", "a=1"], "--args goes with --trainer"),
        (["jobs.toml", "--job", "nobody"], "no job 'nobody'"),
        (["jobs.toml", "--job", "script"], "a job with a trainer"),
        (["two.toml"], "2 jobs to measure; accepted: --job NAME of one: a, b"),
        (["--trainer", "mine:Mine", "--local-batch", "9-3"], "--local-batch: '9-3'"),
        (["--trainer", "mine:Mine", "--local-batch", "0"], "--local-batch: '0'"),
        (["--trainer", "mine:Mine", "--devices", "replay:2"], "pretended GPUs compute nothing"),
        (["--trainer", "mine:Mine", "-o", "nowhere/f.json"], "nowhere/f.json: no such place"),
    ],
)
def test_what_makes_no_sense_is_refused(probes: Probes, words: list[str], text: str) -> None:
    Path("two.toml").write_text(
        'schema = 1\n[[job]]\nname = "a"\ntrainer = "m:A"\n[[job]]\nname = "b"\ntrainer = "m:B"\n'
    )
    done = call(*words)
    if done.exit_code != 2:
        assert isinstance(done.exception, ConfigError)
    assert text in (done.stderr + str(done.exception)).replace("\n", " ")
    assert probes.requests == []


def test_of_several_jobs_the_one_with_stream_workers_is_meant(probes: Probes) -> None:
    assert call("jobs.toml", "--devices", "cpu:1").exit_code == 0
    assert probes.requests[0]["model"] == "m"
