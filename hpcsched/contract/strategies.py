"""Strategies: the ways to run a job, and the options of each. Both sides read them by this module.

A strategy is a frozen dataclass with a field for each option. The built-in ones are at the end; others are
added by `register`. What a job file says of a strategy, a table with its `kind` and options, is kept as it is
(in specs, events and variables) and read where it is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Callable, ClassVar, NoReturn

from hpcsched.contract import schema
from hpcsched.contract.schema import Accepted, flag, number, one_of, option, text, whole

LEAST_CORES = 0.1
"""Of one process on CPU cores."""

DEFAULT_SHARDS = 8
"""Parts of a global batch where the result is to be reproducible."""

DEFAULT_SERVERS, DEFAULT_WORKERS = 1, 2
"""Of a training on CPU cores, at its start."""

DEFAULT_SIMILARITY = 0.1
"""Of the two halves of a gradient (JABAS, section 7.1)."""

LEARNING_RATES = ("sqrt", "linear", "adascale", "none")

Refuse = Callable[[str, str, str], NoReturn]
"""Called with an option, what was found, and what is accepted; raises ConfigError."""

_ROUNDING = 1e-8  # cores


class Strategy:
    """Base of all strategies: what the scheduler has to know of a kind, besides its options.

    about: one sentence.
    guide: a page of the documentation.
    module: what runs it in a training's process: a module with `run(trainer, env, options)`. None: programs.
    gpus: 0 or 1: a job has so many; None: any number, which the policy chooses.
    job: what such a job is called in messages: "a job that is packed".
    in_background: whether such a job may have the background lane of a GPU.
    only: which jobs it is for, as said in messages, if not for all.
    needs_trainer: True: not for a command; False: not for a trainer; None: for both.
    """

    about: ClassVar[str] = ""
    guide: ClassVar[str] = "python.md"
    module: ClassVar[str | None] = None
    gpus: ClassVar[int | None] = None
    job: ClassVar[str] = "a job"
    in_background: ClassVar[bool] = True
    only: ClassVar[str] = ""
    needs_trainer: ClassVar[bool | None] = None

    def check(self, given: Mapping[str, Any], refuse: Refuse) -> None:
        """Refuse options that do not fit together. `given`: those that were said, each right by itself."""

    def most_ranks(self) -> int | None:
        """Of a job, on all its hosts: one a shard of the global batch. None: as many as there are GPUs."""
        return None


KINDS: dict[str, type[Strategy]] = {}
"""The strategies that are known, by their names in job files."""


def register(kind: str, cls: type[Strategy]) -> None:
    """Make a strategy known. Raises ValueError for what is none, and for a name that is taken."""
    if not (isinstance(cls, type) and issubclass(cls, Strategy) and is_dataclass(cls)):
        raise ValueError(f"{cls!r} is not a dataclass that inherits hpcsched.contract.strategies.Strategy")
    for each in fields(cls):
        if not isinstance(each.metadata.get("accepted"), Accepted) or each.name == "kind":
            raise ValueError(f"{cls.__name__}.{each.name} is no `option(...)`")
    if KINDS.setdefault(kind, cls) is not cls:
        raise ValueError(f"there is a strategy called {kind!r} already")


def table_of(given: str | Mapping[str, Any]) -> dict[str, Any]:
    """The table of a strategy that is given by its name alone, or with options."""
    return {"kind": given} if isinstance(given, str) else dict(given)


def kind_of(given: Mapping[str, Any], *, where: str, key: str, others: tuple[str, ...] = ()) -> str:
    """The kind that a table names; raises ConfigError if it is neither known nor one of `others`."""
    kind = given.get("kind")
    if isinstance(kind, str) and (kind in KINDS or kind in others):
        return kind
    schema.refuse(where, key, "missing" if kind is None else repr(kind), ", ".join((*KINDS, *others)))


def read(given: Mapping[str, Any], *, where: str, key: str = "", trainer: bool | None = None) -> Strategy:
    """The strategy that a table describes.

    Args:
        given: its `kind`, and options.
        where: a file, or the word "strategy".
        key: where the table stands in it, such as "job a.strategy".
        trainer: whether the job has a trainer; None: it is known to be right.

    Raises ConfigError for what is not known, and for options that are not right or do not fit together.
    """
    kind = kind_of(given, where=where, key=key or "kind")
    cls = KINDS[kind]
    if trainer is not None and cls.needs_trainer not in (None, trainer):
        schema.refuse(where, key or "kind", repr(kind), cls.only)
    prefix = f"{key}." if key else ""
    said = {name: value for name, value in given.items() if name != "kind"}
    found = schema.read(cls, said, where=where, prefix=prefix, unknown="unknown option")

    def refuse(name: str, got: str, accepted: str) -> NoReturn:
        schema.refuse(where, prefix + name, got, accepted)

    found.check(said, refuse)
    return found


def batch_bounds(low: int, high: int, unit: int, refuse: Refuse) -> tuple[int, int]:
    """Bounds of a global batch in whole numbers of `unit` samples: the lower one as it is, the upper one
    rounded down.

    Refused are a lower bound that is no whole number of units, and bounds with no other batch between them.
    """
    if low % unit:
        below, above = low // unit * unit, -(-low // unit) * unit
        near = f"{below} or {above}" if below else str(above)
        refuse(
            "global_batch",
            f"{low} samples, not a whole number of {unit}",
            f"a local batch for each of an even number of workers, e.g. {near}",
        )
    if low < high < low + unit:
        refuse(
            "global_batch",
            f"[{low}, {high}], with no batch above {low} in it: they differ by {unit} samples",
            f"an upper bound of at least {low + unit}, or one number",
        )
    return low, high // unit * unit


_COUNT = whole("a positive whole number")
_FILE = text("a file name")
_SOME = whole("a positive whole number", most=2**31)


def _range() -> Accepted:
    pair = {"type": "array", "items": _SOME.schema, "minItems": 2, "maxItems": 2}
    return Accepted(
        f"{_SOME.words}, or two of them, the smaller one first",
        {"anyOf": [_SOME.schema, pair]},
        lambda value: type(value) is int or value[0] <= value[1],
    )


@dataclass(frozen=True)
class Ddp(Strategy):
    """Data parallel."""

    about = "Data parallel: every rank has the whole model, and an equal share of each global batch."
    guide = "resizing.md"
    module = "hpcsched.worker.ddp.strategy"

    micro_batch: int | None = option(
        _COUNT,
        None,
        unset="a rank's share of the global batch",
        about="The most samples that a rank takes through the model at a time; more are split, and their "
        "gradients added up. Changes memory, and nothing else.",
    )
    reproducible: bool = option(
        flag(), False, about="Whether the result is the same to the last bit on any number of GPUs."
    )
    shards: int | None = option(
        _COUNT,
        None,
        unset=f"{DEFAULT_SHARDS}, or the samples of a smaller global batch",
        about="Parts of a global batch that are computed one by one if `reproducible`; the job has no more "
        "ranks than that.",
    )

    def check(self, given: Mapping[str, Any], refuse: Refuse) -> None:
        """Shards make sense only where the result is to be reproducible."""
        if self.shards is not None and not self.reproducible:
            refuse("shards", repr(self.shards), "only with reproducible = true")

    def most_ranks(self) -> int | None:
        """One a shard, where the result is to be reproducible."""
        return (self.shards or DEFAULT_SHARDS) if self.reproducible else None


@dataclass(frozen=True)
class Burst(Strategy):
    """Burst parallel (DeepPool)."""

    about = "Burst parallel: every layer has a GPU count of its own."
    guide = "burst.md"
    module = "hpcsched.worker.burst.strategy"
    in_background = False

    amplification: float | None = option(
        number("a number of at least 1", minimum=1),
        None,
        unset="no limit",
        about="The GPU time of a layer under the plan, at most so many times that on one GPU.",
    )
    batch_norm: str = option(
        one_of("shared", "local"),
        "shared",
        about="Batch norm over all samples of a global batch, or over those that each rank has.",
    )
    plan: str | None = option(
        _FILE, None, unset="a plan is made", about="A file with the plan to run, for exactly as many GPUs."
    )
    profile: str | None = option(
        _FILE,
        None,
        unset="what is known of the model, or is measured at the start",
        about="A file with the layers' times (seconds), from which the plan is made.",
    )

    def check(self, given: Mapping[str, Any], refuse: Refuse) -> None:
        """A plan is run as it is."""
        for name in ("amplification", "profile"):
            if "plan" in given and name in given:
                refuse(name, repr(given[name]), "a plan, or what to make one from, not both")


@dataclass(frozen=True)
class Packed(Strategy):
    """Packed (Liu et al. 2020)."""

    about = "Packed: several trainings in one process on one GPU."
    guide = "packing.md"
    module = "hpcsched.worker.packing.strategy"
    gpus = 1
    job = "a job that is packed"
    in_background = False

    mode: str = option(
        one_of(
            "auto",
            "loop",
            "stacked",
            "adapters",
            "streams",
            "graph",
            words='"auto", "loop", "stacked" or "adapters"; on GPUs also "streams" or "graph"',
        ),
        "auto",
        about="How the members of a pack make their steps.",
    )
    most: int = option(_COUNT, 8, about="The most trainings in one pack, this one included.")
    pack: str | None = option(
        text("a name for those that belong together"),
        None,
        unset="any with the same trainer and `env`",
        about="Only trainings that say the same name are packed together.",
    )


@dataclass(frozen=True)
class Vsw(Strategy):
    """Virtual stream workers (JABAS)."""

    about = "Adaptive batches: stream workers on GPUs that may differ."
    guide = "adaptive-batches.md"
    module = "hpcsched.worker.vsw.strategy"
    only = "stream workers for jobs with a trainer only"
    needs_trainer = True

    local_batch: int | Sequence[int] | None = option(
        _range(),
        None,
        unset="required without `workers` and `accumulation`",
        about="Samples that a worker computes at a time: a number, or the smallest and the largest one.",
    )
    global_batch: int | Sequence[int] | None = option(
        _range(),
        None,
        unset="the trainer's own",
        about="Samples of a step: a number, or the bounds between which it adapts.",
    )
    similarity: float | None = option(
        number("a number between -1 and 1", exclusiveMinimum=-1, exclusiveMaximum=1),
        None,
        unset=f"{DEFAULT_SIMILARITY}, without `noise_scale`",
        about="Target: the cosine of the two halves of a gradient. The batch grows as long as it is less.",
    )
    noise_scale: float | None = option(
        number("a positive number", exclusiveMinimum=0),
        None,
        unset="none",
        about="Target: the batch over the gradient noise scale, both in samples.",
    )
    every: int = option(
        whole("a positive whole number of updates", most=2**31),
        100,
        about="Updates (steps) from one decision about the batch to the next.",
    )
    rate: float = option(
        number("a number between 0 and 1, such as 0.1 for 10 %", exclusiveMinimum=0, exclusiveMaximum=1),
        0.1,
        about="The share by which a decision changes the batch.",
    )
    learning_rate: str = option(
        one_of(*LEARNING_RATES, words=", ".join(LEARNING_RATES)),
        "sqrt",
        about="How the learning rate follows the batch.",
    )
    synchronize: str = option(
        one_of("auto", "sequential", "overlap", words="auto, sequential, overlap"),
        "auto",
        about="Whether gradients are summed after the backward pass, or during it.",
    )
    workers: int | None = option(
        _SOME, None, unset="found", about="Workers on each GPU, fixed; then no batch is given."
    )
    accumulation: int | None = option(
        whole("a whole number of at least 0", 0, 2**31),
        None,
        unset="found; 0 with `workers`",
        about="Further local batches of each worker in a step, fixed; then no batch is given.",
    )

    @property
    def pinned(self) -> tuple[int, int] | None:
        """Workers on each device, and how many further local batches each has in a step; None: found."""
        if self.workers is None and self.accumulation is None:
            return None
        return self.workers or 1, self.accumulation or 0

    def check(self, given: Mapping[str, Any], refuse: Refuse) -> None:
        """Numbers of workers, or batches; one target; adapting only between bounds."""
        if pins := [name for name in ("workers", "accumulation") if name in given]:
            for name in ("global_batch", "local_batch"):
                if name in given:
                    refuse(name, f"given together with {' and '.join(pins)}", "one or the other")
        elif "local_batch" not in given:
            refuse("local_batch", "not given", "the samples that a worker computes at a time")
        targets = [name for name in ("similarity", "noise_scale") if name in given]
        if len(targets) > 1:
            refuse(targets[1], f"given together with {targets[0]}", "one or the other")
        adapting = [*targets, *(name for name in ("every", "rate", "learning_rate") if name in given)]
        if adapting and "global_batch" not in given:
            refuse(adapting[0], "given without global_batch", "global_batch = [SMALLEST, LARGEST] too")
        if (local := pair_of(self.local_batch)) and (bounds := pair_of(self.global_batch)):
            batch_bounds(*bounds, 2 * local[0], refuse)


def pair_of(value: int | Sequence[int] | None) -> tuple[int, int] | None:
    """Both ends of a range that may have been given as one number."""
    return None if value is None else (value, value) if isinstance(value, int) else (value[0], value[1])


@dataclass(frozen=True)
class Ps(Strategy):
    """Parameter servers (NEARCHUS)."""

    about = "Parameter servers and workers on CPU cores, and no GPU."
    guide = "cpu-trainings.md"
    module = "hpcsched.worker.ps.strategy"
    gpus = 0
    job = "a job on CPU cores"
    in_background = False
    only = "parameter servers for jobs with a trainer only"
    needs_trainer = True

    cpus: float = option(
        number("a number of cores of at least 0.3, for a server and two workers", minimum=0.3),
        about="Budget in CPU cores, a fraction too: at least 0.1 for each process.",
    )
    staleness: int = option(
        whole("a whole number of at least 0", 0),
        0,
        about="Steps that a worker may be ahead of the slowest one; 0: synchronous.",
    )
    servers: int | None = option(_COUNT, None, unset="found", about="Parameter servers, a fixed number.")
    workers: int | None = option(_COUNT, None, unset="found", about="Workers, a fixed number.")
    start: float = option(
        number("a share above 0, at most 1", exclusiveMinimum=0, maximum=1),
        0.15,
        about="The share of the budget to begin with.",
    )
    scale_up: float = option(
        number("a share above 0, at most 2", exclusiveMinimum=0, maximum=2),
        0.5,
        about="The share by which cores are increased at a time.",
    )
    link: float | None = option(
        number("a positive number of MiB/s", exclusiveMinimum=0),
        None,
        unset="none",
        about="What a server's link can take in, and give out (MiB/s); no more than that is used.",
    )

    def check(self, given: Mapping[str, Any], refuse: Refuse) -> None:
        """Each process has its least share of a core."""
        ranks = (self.servers or DEFAULT_SERVERS) + (self.workers or DEFAULT_WORKERS)
        if self.cpus < LEAST_CORES * ranks - _ROUNDING:
            accepted = f"at least {LEAST_CORES} cores a process: {LEAST_CORES * ranks:.4g}"
            refuse("cpus", repr(self.cpus), accepted)


@dataclass(frozen=True)
class Cpu(Strategy):
    """A program on CPU cores."""

    about = "CPU cores for a command, and no GPU."
    guide = "cpu-trainings.md#programs"
    gpus = 0
    job = "a job on CPU cores"
    in_background = False
    only = "cores for jobs with a command only; for a trainer, ps"
    needs_trainer = False

    cpus: float = option(
        number("a number of cores of at least 0.1", minimum=LEAST_CORES),
        about="CPU cores that the program has, a fraction too.",
    )


for _kind, _cls in (
    ("ddp", Ddp),
    ("burst", Burst),
    ("packed", Packed),
    ("vsw", Vsw),
    ("ps", Ps),
    ("cpu", Cpu),
):
    register(_kind, _cls)
