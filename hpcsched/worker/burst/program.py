"""What a plan asks of one rank: which layers to compute, and which samples to send and receive between them.

Layers that follow each other on the same ranks are one stage, unless sums start in between. The order of
exchanges is the same on every rank: those of a value follow the stage that made it, in the order in which
they are needed. So both branches of a block have their inputs on the way before either is computed, and two
ranks never wait for each other: each waits only for exchanges that all who take part in them come to before
anything that comes later. The backward pass goes through the stages in reverse, and a gradient leaves as soon
as the first reader of its value, the last to add to it, is done.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hpcsched.compat import dataclass, pairwise
from hpcsched.errors import ConfigError
from hpcsched.planning.burst.plan import BurstPlan
from hpcsched.worker.burst.channels import Ranks
from hpcsched.worker.burst.transfers import SampleTransfers, moves
from hpcsched.worker.layers.graph import Layers, Value

Key = tuple[Value, Ranks]
"""A value, as it is shared by some ranks."""


@dataclass(frozen=True, slots=True)
class ValueExchange:
    """A value's way to the ranks of some of its readers (`out`), its gradient's way back (`back`)."""

    value: Value
    target: Ranks
    out: SampleTransfers
    back: SampleTransfers

    @property
    def key(self) -> Key:
        return self.value, self.target


@dataclass(frozen=True, slots=True)
class ProgramStage:
    """The turn of some layers, all on the same ranks, that nothing interrupts.

    `turns`: their places in the plan, one after the other. `exports`: what they make that is read later.
    `departs`: the exchanges that begin when they are computed; `returns`: those whose gradients depart when
    their backward pass is done.
    """

    turns: range
    layers: tuple[int, ...]
    ranks: Ranks
    mine: bool
    exports: tuple[Value, ...]
    departs: tuple[ValueExchange, ...]
    returns: tuple[ValueExchange, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """A rank's part in every step: `enters`, the exchanges of the model's inputs, then stage after stage.

    `home`: the ranks that bring in the inputs; `last`: those that have the model's result.
    """

    home: Ranks
    last: Ranks
    enters: tuple[ValueExchange, ...]
    stages: tuple[ProgramStage, ...]


def program(
    layers: Sequence[tuple[int, tuple[Value, ...]]],
    plan: BurstPlan,
    batch: int,
    rank: int,
    *,
    cuts: Collection[int] = (),
) -> Program:
    """What `rank` does for global batches of `batch` samples.

    `layers`: the id and inputs of each layer, by id; the last one makes the result. The plan is one of these
    (see `check`). `cuts`: turns at which a stage begins in any case, as something happens before or after it.
    """
    ranks = {planned.id: planned.ranks for planned in plan.layers}
    inputs = dict(layers)
    result = Value(len(layers) - 1, 0)
    runs = _runs(plan, cuts)
    stage_of = {plan.layers[turn].id: number for number, run in enumerate(runs) for turn in run}
    order = [planned.id for planned in plan.layers]
    home = next(ranks[layer] for layer in order if any(value.layer < 0 for value in inputs[layer]))
    exchanges: dict[Key, ValueExchange] = {}
    first: dict[Key, int] = {}
    exported = {result: None}
    for layer in order:
        for value in inputs[layer]:
            if stage_of.get(value.layer) != stage_of[layer]:
                exported[value] = None
            source, key = ranks.get(value.layer, home), (value, ranks[layer])
            if source != ranks[layer] and key not in first:
                there, back = (
                    moves(batch, source, ranks[layer], rank),
                    moves(batch, ranks[layer], source, rank),
                )
                exchanges[key], first[key] = ValueExchange(value, ranks[layer], there, back), stage_of[layer]
    # Exchanges of a value come in the order of their first readers, as a dict keeps its order.
    stages = []
    for number, run in enumerate(runs):
        own = tuple(plan.layers[turn].id for turn in run)
        stages.append(
            ProgramStage(
                turns=run,
                layers=own,
                ranks=ranks[own[0]],
                mine=rank in ranks[own[0]],
                exports=tuple(value for value in exported if value.layer in own),
                departs=tuple(e for e in exchanges.values() if e.value.layer in own),
                returns=tuple(e for e in exchanges.values() if first[e.key] == number),
            )
        )
    enters = tuple(exchange for exchange in exchanges.values() if exchange.value.layer < 0)
    return Program(home=home, last=ranks[result.layer], enters=enters, stages=tuple(stages))


def _runs(plan: BurstPlan, cuts: Collection[int]) -> list[range]:
    """The places in the plan of layers that follow each other on the same ranks, and are not cut apart."""
    count = len(plan.layers)
    starts = [
        turn
        for turn in range(count)
        if turn in cuts or turn == 0 or plan.layers[turn].ranks != plan.layers[turn - 1].ranks
    ]
    return [range(start, stop) for start, stop in pairwise([*starts, count])]


def check(plan: BurstPlan, layers: Layers, *, world_size: int, batch: int, where: str) -> None:
    """Raise ConfigError, naming the layer, for a plan that these ranks cannot run for this model."""
    if plan.gpus != world_size:
        raise ConfigError(
            where=where,
            key="gpus",
            got=f"a plan for {plan.gpus}, and {world_size} are here",
            accepted=f"a run on exactly {plan.gpus} GPUs, or a profile to plan from instead of a plan",
        )
    names = {planned.id: planned.name for planned in plan.layers}
    for layer in layers.layers:
        if names.get(layer.id) != layer.name:
            raise ConfigError(
                where=where,
                key=f"layer {layer.id}",
                got=repr(names[layer.id]) if layer.id in names else "missing",
                accepted=f"{layer.name!r}, as in the model",
            )
    if len(names) > len(layers.layers):
        raise ConfigError(
            where=where,
            key=f"layer {names[len(layers.layers)]!r}",
            got="not in the model",
            accepted=f"the model's {len(layers.layers)} layers",
        )
    done: set[int] = set()
    for planned in plan.layers:
        place = f"layer {planned.name!r}"
        if planned.ranks[-1] >= world_size:
            accepted = f"ranks 0 to {world_size - 1}"
            raise ConfigError(where=where, key=place, got=f"ranks {list(planned.ranks)}", accepted=accepted)
        if len(planned.ranks) > batch:
            raise ConfigError(
                where=where,
                key=place,
                got=f"{len(planned.ranks)} ranks for a global batch of {batch}",
                accepted="at most one rank a sample",
            )
        if missing := set(layers.layers[planned.id].prev) - done:
            before = layers.layers[min(missing)].name
            accepted = f"a place after {before!r}, which it reads from"
            raise ConfigError(where=where, key=place, got="a place too early in the plan", accepted=accepted)
        done.add(planned.id)
