"""What plain adapters add to a frozen layer, for several trainings at once: what each one's own code adds."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from adapter_trainings import Lora, adapter, members, peft
from packed_trainings import one_thread
from torch import nn

from hpcsched.worker.packed import pack
from hpcsched.worker.packing.adapters.lora import added, computed_together, plain_lora
from hpcsched.worker.packing.adapters.rows import Rows
from hpcsched.worker.packing.reference import NotStackable

pytestmark = pytest.mark.torch
__all__ = ["one_thread", "peft"]

IN, OUT, TOKENS = 24, 40, 7


def layers(*ranks: int, frozen: torch.dtype = torch.float32, dropout: float = 0.0) -> list[Lora]:
    """Adapters of these ranks, each of its own scale, on one frozen layer."""
    torch.manual_seed(0)
    base = nn.Linear(IN, OUT).to(frozen).requires_grad_(False)
    return [Lora(base, rank, 2.0 * rank + number, dropout) for number, rank in enumerate(ranks)]


def nobody_draws(_: int) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def gradients(made: Sequence[nn.Module]) -> list[torch.Tensor]:
    found = [p.grad for module in made for p in module.parameters() if p.requires_grad]
    assert all(g is not None for g in found)
    for module in made:
        module.zero_grad()
    return [g for g in found if g is not None]


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("frozen", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("needs", [True, False], ids=["inner", "first"])
def test_each_adds_what_it_adds_by_itself(autocast: bool, frozen: torch.dtype, needs: bool) -> None:
    made, counts = layers(3, 8, 1, 5, frozen=frozen), (2, 4, 1, 3)
    rows = torch.randn(sum(counts), TOKENS, IN).to(frozen)
    inside = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    apart = [piece.clone().requires_grad_(needs) for piece in rows.split(counts)]
    with inside:
        alone = [module(piece) for module, piece in zip(made, apart, strict=True)]
    weight = torch.randn(sum(counts), TOKENS, OUT)
    torch.cat(alone).float().mul(weight).sum().backward()
    expected = gradients(made)

    x = rows.clone().requires_grad_(needs)
    with inside:
        given = made[0].base_layer(x)
        more = added(x, [plain_lora(one) for one in made], Rows(counts, None), nobody_draws)
        together = (given + more).to(given.dtype)
    assert torch.equal(together, torch.cat(alone))
    together.float().mul(weight).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(expected, gradients(made), strict=True))
    if needs:
        assert x.grad is not None
        close = 1e-6 if frozen == torch.float32 and not autocast else 2e-2
        torch.testing.assert_close(x.grad, torch.cat([p.grad for p in apart]), rtol=close, atol=close)


def test_one_without_an_adapter_is_given_nothing_and_one_that_fails_harms_nobody() -> None:
    made, counts = layers(3, 8), (2, 1, 2)
    x = torch.randn(5, TOKENS, IN)
    x[:2] = torch.nan
    x.requires_grad_()
    first, last = (plain_lora(one) for one in made)
    more = added(x, [first, None, last], Rows(counts, None), nobody_draws)
    assert not more[2].any()
    assert more[:2].isnan().all()
    more.sum().backward()
    assert x.grad is not None
    assert not x.grad[2].any()
    assert x.grad[3:].isfinite().all()
    assert [bool(g.isfinite().all()) for g in gradients(made)] == [False, False, True, True]


def test_what_one_does_not_train_gets_no_gradient() -> None:
    (one, other) = layers(3, 8)
    one.lora_A.requires_grad_(False)
    x = torch.randn(4, TOKENS, IN, requires_grad=True)
    added(x, [plain_lora(one), plain_lora(other)], Rows((2, 2), None), nobody_draws).sum().backward()
    assert one.lora_A["default"].weight.grad is None
    assert one.lora_B["default"].weight.grad is not None


def test_several_rows_for_each_of_the_batch_are_shared_out() -> None:
    one, other = layers(3, 8)
    x, loras = torch.randn(12, IN), [plain_lora(one), plain_lora(other)]
    together = added(x, loras, Rows((1, 2), None), nobody_draws)
    assert torch.equal(one.base_layer(x[:4]) + together[:4], one(x[:4]))
    assert torch.equal(one.base_layer(x[4:]) + together[4:], other(x[4:]))
    with pytest.raises(NotStackable, match="makes other rows"):
        added(x[:11], loras, Rows((1, 2), None), nobody_draws)


def both(module: Lora) -> None:
    for part in (module.lora_A, module.lora_B, module.lora_dropout):
        part["second"] = part["default"]
    module.active_adapters.append("second")


CHANGES: dict[str, Callable[[Any], Any]] = {
    "merged": lambda m: setattr(m, "merged", True),
    "off": lambda m: setattr(m, "disable_adapters", True),
    "two at once": both,
    "none": lambda m: m.active_adapters.clear(),
    "bias": lambda m: m.lora_bias.update(default=True),
    "dora, earlier": lambda m: setattr(m, "use_dora", {"default": True}),
    "dora": lambda m: setattr(m, "lora_variant", {"default": "DoRA"}),
    "a bias of its own": lambda m: m.lora_A.update({"default": nn.Linear(IN, 3)}),
    "a kind of its own": lambda m: m.lora_B.update({"default": nn.Conv1d(3, OUT, 1, bias=False)}),
    "heard": lambda m: m.lora_A["default"].register_forward_hook(lambda *_: None),
    "drops and is heard": lambda m: m.lora_dropout["default"].register_forward_pre_hook(lambda *_: None),
    "another forward": lambda m: setattr(m.lora_B["default"], "forward", lambda x: x),
    "a scale that is trained": lambda m: m.scaling.update(default=nn.Parameter(torch.ones(()))),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_all_else_is_left_to_its_own_code(change: Callable[[Any], Any]) -> None:
    (module,) = layers(3, dropout=0.1)
    assert plain_lora(module) is not None
    change(module)
    assert plain_lora(module) is None
    assert plain_lora(nn.Linear(2, 2)) is None


def test_all_compute_in_one_precision() -> None:
    one, other = (plain_lora(module) for module in layers(3, 8))
    assert computed_together([one, None, other])
    assert not computed_together([None])
    (half,) = layers(3)
    half.lora_A.double()
    half.lora_B.double()
    assert not computed_together([one, plain_lora(half)])


@pytest.mark.parametrize("known", [True, False], ids=["as one", "each one's code"])
def test_a_pack_runs_no_code_of_adapters_that_it_understands(
    monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    if not known:
        monkeypatch.delitem(sys.modules, "peft.tuners.lora.layer")
    ran: list[nn.Module] = []
    forward = Lora.forward

    def counted(module: Lora, x: torch.Tensor) -> torch.Tensor:
        ran.append(module)
        return forward(module, x)

    monkeypatch.setattr(Lora, "forward", counted)
    made = members(adapter(1), adapter(2, rank=2, dropout=0.2, batch=3), adapter(3, targets=("query",)))
    together = pack(made, mode="adapters")
    for _ in range(6):
        together.step()
    ran.clear()
    together.step()
    assert together.groups[0].mode == "adapters"
    assert len(ran) == (0 if known else 10)
