"""Autocast, the gradient scaler and clipping: as a loop by hand computes them, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from torch.nn.functional import cross_entropy  # noqa: E402

from hpcsched.errors import ConfigError  # noqa: E402
from hpcsched.worker.packing.packed_session import PackedSession  # noqa: E402
from hpcsched.worker.session.data_parallel import DataParallel  # noqa: E402
from hpcsched.worker.session.replicated import Replicated  # noqa: E402
from hpcsched.worker.session.sampler import Sampler  # noqa: E402
from hpcsched.worker.session.session import session_of  # noqa: E402
from hpcsched.worker.session.trainer import Parts, Trainer, build  # noqa: E402

BATCH, STEPS = 8, 12
CASES: list[dict[str, Any]] = [
    {"precision": "fp16"},
    {"precision": "fp16", "clip_norm": 0.05},
    {"precision": "bf16"},
    {"precision": "bf16", "clip_norm": 0.05},
    {"clip_norm": 0.05},
]


def made(**options: Any) -> Parts:
    """A small training; a loss of this size overflows in fp16 under the scale that GradScaler begins with."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    x, y = torch.randn(40, 6), torch.arange(40) % 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return Parts(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5),
        dataset=(x, y),
        global_batch=BATCH,
        loss=lambda model, batch: 40 * cross_entropy(model(batch[0]), batch[1], reduction="none"),
        **options,
    )


def by_hand(parts: Parts, micro_batch: int = BATCH) -> dict[str, Any]:
    """The same training in plain torch; the state of its scaler."""
    scaler = torch.amp.GradScaler("cpu", enabled=parts.precision == "fp16")
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(parts.precision or "")
    sampler = Sampler(parts.size, parts.seed)
    for step in range(STEPS):
        indices = sampler.batch(step * BATCH, BATCH)
        parts.optimizer.zero_grad()
        for start in range(0, BATCH, micro_batch):
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                losses = parts.loss(parts.model, parts.batch(indices[start : start + micro_batch]))
            scaler.scale(losses.sum() / BATCH).backward()
        scaler.unscale_(parts.optimizer)
        if parts.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parts.model.parameters(), parts.clip_norm)
        scaler.step(parts.optimizer)
        scaler.update()
        assert parts.scheduler is not None
        parts.scheduler.step()
    return scaler.state_dict()


def trained(parts: Parts, steps: int = STEPS, folder: Path | None = None, **options: Any) -> dict[str, Any]:
    """The state of a training by the library."""
    session = session_of(parts, DataParallel(parts, **options), checkpoint_dir=folder, total_steps=steps)
    session.train()
    return session._training.state_dict([])


def same(state: dict[str, Any], parts: Parts) -> None:
    assert all(torch.equal(state["model"][name], tensor) for name, tensor in parts.model.state_dict().items())
    mine, theirs = state["optimizer"]["state"], parts.optimizer.state_dict()["state"]
    assert all(torch.equal(mine[i]["momentum_buffer"], theirs[i]["momentum_buffer"]) for i in mine | theirs)


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("options", CASES, ids=str)
def test_it_is_the_loop_by_hand(options: dict[str, Any]) -> None:
    state, other = trained(made(**options)), made(**options)
    scaler = by_hand(other)
    same(state, other)
    assert state["step"] == STEPS
    if options.get("precision") == "fp16":
        assert state["extra"] == {"grad_scaler": scaler}
        assert scaler["scale"] < 65536.0  # some steps were skipped
    else:
        assert state["extra"] == {}
    plain = made()
    by_hand(plain)
    assert not torch.equal(state["model"]["0.weight"], plain.model.state_dict()["0.weight"])


@pytest.mark.parametrize("options", CASES, ids=str)
def test_a_training_that_goes_on_from_its_checkpoint_ends_as_one_that_was_not_interrupted(
    options: dict[str, Any], tmp_path: Path
) -> None:
    whole = trained(made(**options))
    for steps in (5, STEPS):
        parts = made(**options)
        state = trained(parts, steps, tmp_path)
    same(whole, parts)
    assert state["extra"] == whole["extra"]
    assert state["scheduler"] == whole["scheduler"]


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize(
    ("options", "samples"), [({"micro_batch": 3}, 3), ({"reproducible": True, "shards": 4}, 2)], ids=str
)
def test_a_batch_in_parts_is_scaled_unscaled_and_clipped_as_one(
    options: dict[str, Any], samples: int
) -> None:
    half = {"precision": "fp16", "clip_norm": 0.05}
    state, other = trained(made(**half), **options), made(**half)
    assert state["extra"]["grad_scaler"] == by_hand(other, samples)
    for name, tensor in other.model.state_dict().items():
        assert torch.allclose(state["model"][name], tensor, atol=1e-6)


@pytest.mark.parametrize("precision", [None, "fp16"])
def test_parameters_that_the_optimizer_does_not_have_are_not_clipped(precision: str | None) -> None:
    ends = []
    for frozen in (True, False):
        parts = made(precision=precision, clip_norm=1.0)
        parts.optimizer, parts.scheduler = torch.optim.SGD(parts.model[2].parameters(), lr=0.05), None
        parts.model[0].requires_grad_(not frozen)
        ends.append(trained(parts)["model"])
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_a_step_that_overflows_changes_nothing_and_counts() -> None:
    parts = made(precision="fp16")
    before = {name: tensor.clone() for name, tensor in parts.model.state_dict().items()}
    state = trained(parts, 1)
    assert state["extra"]["grad_scaler"]["scale"] == 32768.0
    assert all(torch.equal(before[name], tensor) for name, tensor in parts.model.state_dict().items())
    assert (state["step"], state["samples"], state["scheduler"]["last_epoch"]) == (1, BATCH, 1)


@pytest.mark.parametrize("options", [{"precision": "fp16"}, {"clip_norm": 1.0}], ids=str)
def test_strategies_that_would_pass_it_over_refuse_it(options: dict[str, Any]) -> None:
    line = f"{next(iter(options))}: .*; accepted: None under this strategy; the strategy 'ddp' takes it"
    with pytest.raises(ConfigError, match=line):
        session_of(made(**options), Replicated())


def test_packs_refuse_what_needs_a_scaler() -> None:
    with pytest.raises(ConfigError, match="precision: 'fp16'; accepted: None or 'bf16' under this strategy"):
        PackedSession(made(precision="fp16", clip_norm=1.0), steps=2)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"precision": "half"}, r"Odd.build: precision: 'half'; accepted: None, 'bf16', 'fp16'"),
        ({"clip_norm": 0.0}, r"Odd.build: clip_norm: 0.0; accepted: None, or a positive number"),
        ({"clip_norm": float("nan")}, r"clip_norm: nan"),
        ({"clip_norm": "1.0"}, r"clip_norm: '1.0'; accepted: None, or a positive number"),
        ({"clip_norm": True}, r"clip_norm: True"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], line: str) -> None:
    class Odd(Trainer):
        def build(self, args: dict[str, Any]) -> Parts:
            return made(**options)

    with pytest.raises(ConfigError, match=line):
        build(Odd(), {})
