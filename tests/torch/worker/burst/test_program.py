"""What a burst plan asks of each rank, random numbers by sample, and what measured times teach."""

from __future__ import annotations

import json
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from torch import nn  # noqa: E402

from hpcsched.errors import ConfigError  # noqa: E402
from hpcsched.planning.burst.costs import Interconnect  # noqa: E402
from hpcsched.planning.burst.graph import LayerProfile, ProfiledLayer  # noqa: E402
from hpcsched.planning.burst.plan import BurstPlan, PlannedLayer  # noqa: E402
from hpcsched.worker.burst.channels import Channels  # noqa: E402
from hpcsched.worker.burst.choose import Chooser, pinned  # noqa: E402
from hpcsched.worker.burst.engine import Engine  # noqa: E402
from hpcsched.worker.burst.feedback import Timing, corrected, pays  # noqa: E402
from hpcsched.worker.burst.placement import LayerPlacement  # noqa: E402
from hpcsched.worker.burst.program import Program, program  # noqa: E402
from hpcsched.worker.burst.sample_rng import SampleDropout, uniform_bits  # noqa: E402
from hpcsched.worker.burst.transfers import moves, share_of  # noqa: E402
from hpcsched.worker.layers.graph import Value, trace  # noqa: E402

ALONE = Channels(0, 1, torch.device("cpu"))


# -- moves and programs --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(50))
def test_every_sample_comes_to_where_it_is_needed_once_and_none_moves_in_vain(seed: int) -> None:
    draw = random.Random(seed)
    world, batch = draw.randint(1, 6), draw.randint(6, 20)
    source, target = (sorted(draw.sample(range(world), draw.randint(1, world))) for _ in range(2))
    found = [moves(batch, source, target, rank) for rank in range(world)]
    for rank, moved in enumerate(found):
        old, new = share_of(batch, source, rank), share_of(batch, target, rank)
        came = list(new[moved.kept_at : moved.kept_at + moved.kept])
        assert came == list(old[moved.kept_from : moved.kept_from + moved.kept])
        for piece in moved.receives:
            assert piece.peer != rank
            samples = list(new[piece.start : piece.stop])
            theirs = share_of(batch, source, piece.peer)
            (sent,) = [p for p in found[piece.peer].sends if p.peer == rank]
            assert samples == list(theirs[sent.start : sent.stop])
            assert not set(samples) & set(old)
            came += samples
        assert sorted(came) == list(new)
    if source == target:
        assert all(not moved.sends and moved.kept == moved.gets for moved in found)


def random_graph(draw: random.Random, world: int) -> tuple[list[tuple[int, tuple[Value, ...]]], BurstPlan]:
    count = draw.randint(1, 9)
    layers = []
    for layer in range(count):
        before = draw.sample(range(-1, layer), min(layer + 1, draw.randint(1, 3)))
        layers.append((layer, tuple(Value(b, draw.randint(0, 1) if b >= 0 else 0) for b in sorted(before))))
    planned = [
        PlannedLayer(
            id=layer, name=str(layer), ranks=tuple(sorted(draw.sample(range(world), draw.randint(1, world))))
        )
        for layer in range(count)
    ]
    return layers, BurstPlan(model="", gpus=world, global_batch=12, layers=tuple(planned))


def doings(found: Program, reads: dict[int, tuple[Value, ...]]) -> Iterator[tuple[str, Any, Any]]:
    """What a rank does in a step, as the engine does it: posts messages and waits for them."""
    waiting = set()
    for exchange in found.enters:
        waiting.add(exchange.key)
        yield "post", (exchange.key, "out"), exchange.out
    for stage in found.stages:
        if stage.mine:
            for layer in stage.layers:
                for value in reads[layer]:
                    if (value, stage.ranks) in waiting:
                        waiting.remove((value, stage.ranks))
                        yield "wait", ((value, stage.ranks), "out"), None
        for exchange in stage.departs:
            waiting.add(exchange.key)
            yield "post", (exchange.key, "out"), exchange.out
    for stage in reversed(found.stages):
        if stage.mine:
            for exchange in stage.departs:
                yield "wait", (exchange.key, "back"), None
        for exchange in stage.returns:
            if exchange.value.layer >= 0:
                yield "post", (exchange.key, "back"), exchange.back


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("seed", range(100))
def test_no_two_ranks_wait_for_each_other_and_messages_meet_in_order(seed: int, apart: bool) -> None:
    draw = random.Random(seed)
    world = draw.randint(1, 5)
    layers, plan = random_graph(draw, world)
    cuts = range(len(plan.layers)) if apart else ()
    programs = [program(layers, plan, 12, rank, cuts=cuts) for rank in range(world)]
    todo = {rank: list(doings(found, dict(layers))) for rank, found in enumerate(programs)}
    parts: dict[Any, set[int]] = defaultdict(set)
    for rank, steps in todo.items():
        for what, key, moved in steps:
            if what == "post" and not moved.idle:
                parts[key].add(rank)
    posted: dict[Any, set[int]] = defaultdict(set)
    sent: dict[tuple[int, int], list[Any]] = defaultdict(list)
    received: dict[tuple[int, int], list[Any]] = defaultdict(list)
    moving = True
    while moving:
        moving = False
        for rank, steps in todo.items():
            while steps:
                what, key, moved = steps[0]
                if what == "wait" and posted[key] < parts[key]:
                    break
                if what == "post":
                    posted[key].add(rank)
                    for piece in moved.sends:
                        sent[rank, piece.peer].append((key, piece.stop - piece.start))
                    for piece in moved.receives:
                        received[piece.peer, rank].append((key, piece.stop - piece.start))
                steps.pop(0)
                moving = True
    assert not any(todo.values())
    assert sent == received
    if len({at.ranks for at in plan.layers}) == 1:
        assert not sent
        assert all(len(found.stages) == 1 for found in programs) or apart


# -- random numbers by sample --------------------------------------------------------------------------


def test_the_bits_are_those_of_splitmix64() -> None:
    from hpcsched.worker.burst.sample_rng import _GOLDEN, _mix

    stream = _mix(torch.arange(1, 4) * _GOLDEN)
    assert [int(bits) % 2**64 for bits in stream] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


def test_bits_belong_to_seed_sample_and_drawer_and_to_nothing_else() -> None:
    whole = uniform_bits(3, torch.arange(10, 30), "layer", 1, count=40)
    parts = [uniform_bits(3, torch.arange(a, b), "layer", 1, count=40) for a, b in ((10, 17), (17, 30))]
    assert torch.equal(whole, torch.cat(parts))
    others = [
        uniform_bits(4, torch.arange(10, 30), "layer", 1, count=40),
        uniform_bits(3, torch.arange(10, 30), "layer", 2, count=40),
        uniform_bits(3, torch.arange(10, 30), "other", 1, count=40),
    ]
    found = torch.cat([whole, *others]).flatten()
    assert len(found.unique()) == len(found)


def seat(samples: int) -> LayerPlacement:
    return LayerPlacement(name="layer", seed=1, wires=ALONE, places=range(100, 100 + samples))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_zeroes_its_share_and_keeps_the_mean(p: float) -> None:
    x = torch.ones(50, 40, 10, dtype=torch.float64)
    y = SampleDropout(seat(50), whole=False, source=nn.Dropout(p))(x)
    assert (y == 0).double().mean() == pytest.approx(p, abs=0.02)
    assert y.unique().tolist() == pytest.approx([0.0, 1 / (1 - p)])


def test_dropout_of_channels_and_its_extremes() -> None:
    x = torch.ones(20, 30, 3, 3)
    y = SampleDropout(seat(20), whole=True, source=nn.Dropout2d(0.5))(x)
    assert torch.equal(y, y[:, :, :1, :1].expand_as(y))
    assert 0 < (y == 0).float().mean() < 1
    assert torch.equal(SampleDropout(seat(20), whole=False, source=nn.Dropout(0.5).eval())(x), x)
    assert torch.equal(SampleDropout(seat(20), whole=False)(x, 1.0), torch.zeros_like(x))
    place = seat(20)
    dropout = SampleDropout(place, whole=False)
    first, second = dropout(x), dropout(x)
    assert not torch.equal(first, second)
    place.calls = 0
    assert torch.equal(first, dropout(x))
    with pytest.raises(ConfigError, match="layer layer: dropout on a tensor of shape"):
        SampleDropout(seat(20), whole=False)(x.flatten(0, 1))


# -- what cannot be run --------------------------------------------------------------------------------


class Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


def engine_of(model: nn.Module, names: list[str] | None = None, batch: int = 4) -> Engine:
    example = (torch.arange(6.0).view(2, 3),)
    layers = trace(model, example)
    planned = tuple(
        PlannedLayer(id=layer.id, name=names[layer.id] if names else layer.name, ranks=(0,))
        for layer in layers.layers
    )
    plan = BurstPlan(model="", gpus=1, global_batch=batch, layers=planned)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Engine(layers, example, plan, batch=batch, seed=0, wires=ALONE, optimizer=optimizer)


def test_parameters_that_are_frozen_or_thawed_meanwhile_are_noticed() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    engine = engine_of(model)
    engine.begin(0)
    model[0].requires_grad_(False)
    with pytest.raises(ConfigError, match="frozen, or thawed, since the start"):
        engine.begin(4)


def test_an_output_of_another_precision_than_its_readers_expect_is_noticed() -> None:
    engine = engine_of(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)))
    engine.begin(0)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(ConfigError, match=r"bfloat16 for a sample; accepted: \[2\], torch.float32"),
    ):
        engine.forward((torch.rand(4, 3),))


# -- which plan to run ---------------------------------------------------------------------------------

SHAPE = [("0", ()), ("1", (0,))]


def profile_of(shape: list[tuple[str, tuple[int, ...]]]) -> LayerProfile:
    times = {1: 10.0, 2: 20.0}
    layers = (
        ProfiledLayer(
            id=i,
            name=name,
            prev=prev,
            parameter_bytes=1 << 20,
            activation_bytes=4,
            forward_us=times,
            backward_us=times,
        )
        for i, (name, prev) in enumerate(shape)
    )
    return LayerProfile(model="m", device="cpu", layers=tuple(layers))


def chooser(
    folder: Path, fits: Callable[[BurstPlan], object] = lambda plan: None
) -> tuple[Chooser, list[str]]:
    measured = []

    def measure() -> LayerProfile:
        measured.append("yes")
        return profile_of(SHAPE)

    network = Interconnect(bandwidth_bytes_s=1e9, latency_s=1.0)  # too slow for more than one rank
    found = Chooser(
        folder=folder,
        gpus=2,
        global_batch=2,
        network=network,
        amplification=1.0,
        measure=measure,
        shape=SHAPE,
        fits=fits,
    )
    return found, measured


@pytest.mark.parametrize(
    ("kept", "anew", "said"),
    [
        (json.dumps(profile_of(SHAPE).to_table()), 0, ""),
        (json.dumps(profile_of([("0", ()), ("other", (0,))]).to_table()), 1, "is about other layers"),
        ('{"schema": 1}', 1, "; the layers are measured anew"),
        (None, 1, ""),
    ],
    ids=["the model's", "another model's", "broken", "none"],
)
def test_layers_are_measured_where_the_folder_has_no_times_of_this_model(
    tmp_path: Path, kept: str | None, anew: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if kept is not None:
        (tmp_path / "layers.json").write_text(kept)
    found, measured = chooser(tmp_path)
    assert [layer.name for layer in found.first().layers] == ["0", "1"]
    assert len(measured) == anew
    words = capsys.readouterr().err
    assert (said in words and f"hpcsched: {tmp_path / 'layers.json'}" in words) if said else words == ""
    assert json.loads((tmp_path / "layers.json").read_text()) == profile_of(SHAPE).to_table()


@pytest.mark.parametrize(("limit", "ranks"), [(math.inf, (0, 1)), (1.0, (0,))])
def test_where_the_model_cannot_run_by_the_plan_all_layers_get_as_many_ranks_as_the_limit_allows(
    tmp_path: Path, limit: float, ranks: tuple[int, ...]
) -> None:
    seen: list[BurstPlan] = []

    def fits(plan: BurstPlan) -> None:
        seen.append(plan)
        if len(seen) == 1:
            raise ConfigError(where="plan", got="apart", accepted="together")

    found, _ = chooser(tmp_path, fits)
    found.amplification = limit
    plan = found.first()
    assert {at.ranks for at in plan.layers} == {ranks}
    assert all(at.amplification <= limit for at in plan.layers)
    assert plan.iter_us > 0


def test_a_model_that_can_run_by_no_plan_is_refused_for_the_first_reason(tmp_path: Path) -> None:
    def fits(plan: BurstPlan) -> None:
        raise ConfigError(where="plan", got="apart", accepted="together")

    with pytest.raises(ConfigError, match="apart"):
        chooser(tmp_path, fits)[0].first()


def test_what_does_not_fit_is_not_gone_over_to(tmp_path: Path) -> None:
    found, _ = chooser(tmp_path)
    plan = found.first()
    assert {at.ranks for at in plan.layers} == {(0,)}

    def fits(plan: BurstPlan) -> None:
        raise ConfigError(where="plan", got="apart", accepted="together")

    found.fits = fits
    faster = [Timing(layer=i, samples=1, forward_us=1e-3, backward_us=1e-3) for i in (0, 1)]
    assert found.again(faster, plan, 10**9) is None


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    found, _ = chooser(tmp_path)
    found.profile_file = tmp_path / "mine.json"
    found.profile_file.write_text(json.dumps(profile_of([("0", ())]).to_table()))
    with pytest.raises(ConfigError, match=r"mine\.json: layers: other layers than the model's"):
        found.first()


@pytest.mark.parametrize("text", ["[" * 100_000, "{", ""], ids=["deep", "cut off", "empty"])
def test_a_file_that_is_no_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ConfigError, match="not JSON"):
        pinned(tmp_path / "plan.json")


def test_what_a_plan_does_not_need_to_have_right_does_no_harm(tmp_path: Path) -> None:
    layers = [{"id": 0, "name": "0", "ranks": [0]}]
    odd = {"notes": 5, "iter_s": 10**400, "amplification_limit": 10**400}
    table = {"schema": 1, "gpus": 1, "global_batch": 2, "layers": layers, **odd}
    plan = BurstPlan.parse(table, where="plan")
    assert (plan.notes, plan.iter_us, plan.amplification_limit) == ((), math.inf, math.inf)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            nn.Sequential(nn.Linear(3, 3), Noise()),
            "layer 0: draws random numbers in another way than by dropout",
        ),
        (nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3)), "layer 0: a SyncBatchNorm"),
    ],
)
def test_layers_whose_result_would_depend_on_the_plan_are_refused_by_name(
    model: nn.Module, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_of(model)


def test_making_an_engine_changes_nothing_of_model_and_generators() -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    before, drawn = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    engine_of(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_inputs_of_another_shape_than_at_the_start_are_refused() -> None:
    engine = engine_of(nn.Linear(3, 2))
    engine.begin(0)
    with pytest.raises(
        ConfigError, match=r"input 0 of the model: \[4, 5\], torch.float32; accepted: \[4, 3\]"
    ):
        engine.forward((torch.randn(4, 5),))


# -- feedback ------------------------------------------------------------------------------------------


def profile() -> LayerProfile:
    times = {1: 10.0, 4: 20.0, 16: 60.0}
    about: dict[str, Any] = {"prev": (), "parameter_bytes": 0, "activation_bytes": 0}
    layers = tuple(
        ProfiledLayer(id=i, name=str(i), forward_us=times, backward_us=times, **about) for i in range(2)
    )
    return LayerProfile(model="m", device="cpu", layers=layers)


def test_measured_times_are_smoothed_and_those_of_other_batches_keep_their_proportion() -> None:
    found = corrected(profile(), [Timing(0, 4, 40.0, 20.0), Timing(0, 4, 60.0, 10.0)], weight=0.5)
    assert found.layers[0].forward_us == {1: 20.0, 4: 40.0, 16: 120.0}  # the slower rank, half and half
    assert found.layers[0].backward_us == profile().layers[0].backward_us
    assert found.layers[1] == profile().layers[1]


def test_a_batch_that_was_never_measured_is_learnt() -> None:
    found = corrected(profile(), [Timing(1, 8, 100.0, 100.0)], weight=1.0)
    assert found.layers[1].forward_us[8] == 100.0
    assert set(found.layers[1].forward_us) == {1, 4, 8, 16}


def test_measuring_again_and_again_leads_to_what_is_measured() -> None:
    found = profile()
    for _ in range(30):
        found = corrected(found, [Timing(0, 4, 200.0, 200.0)])
    assert found.layers[0].forward_us[4] == pytest.approx(200.0)


def test_another_plan_pays_when_it_saves_enough_for_long_enough() -> None:
    assert pays(1.0, 0.9, 100, 1.0)
    assert not pays(1.0, 0.96, 10**6, 1.0)
    assert not pays(1.0, 0.5, 2, 1.0)
