"""Models become layers: the same numbers as the model gives, whatever it does in its forward pass."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

from hpcsched.errors import ConfigError  # noqa: E402
from hpcsched.worker.layers.graph import Layers, Value, capture_inputs, trace  # noqa: E402

pytestmark = pytest.mark.torch


class Of(nn.Module):
    """A model of these parts whose forward pass is a function of (self, inputs)."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.course = (forward,)
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.course[0](self, *inputs)


def x(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, dtype=torch.float64)


def agree(model: nn.Module, *inputs: torch.Tensor, gradients: Callable[..., bool] = torch.equal) -> Layers:
    """Trace with one batch size, compare with another: results, gradients, buffers; in both modes."""
    model.double()
    before = copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]
    layers = trace(model, tuple(t[:2] for t in inputs))
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert [module.training for module in model.modules()] == modes
    for training in (True, False):
        twin = copy.deepcopy(model).train(training)
        model.train(training)
        model.zero_grad()
        torch.manual_seed(3)
        expected = twin(*[t.clone() for t in inputs])
        torch.manual_seed(3)
        found = layers.run(*[t.clone() for t in inputs])
        assert torch.equal(found, expected)
        if expected.requires_grad:
            expected.square().sum().backward()
            found.square().sum().backward()
        for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None)
            assert mine.grad is None or gradients(mine.grad, other.grad)
        assert all(torch.equal(a, b) for a, b in zip(model.buffers(), twin.buffers(), strict=True))
    return layers


def names(layers: Layers) -> list[str]:
    return [layer.name for layer in layers.layers]


def test_a_chain_of_modules_is_cut_before_each_that_has_weights() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.5),
        nn.Linear(36, 5), nn.ReLU(inplace=True), nn.Linear(5, 2),
    )  # fmt: skip
    layers = agree(model, x(4, 3, 8, 8))
    assert names(layers) == ["0", "6", "8"]
    assert [layer.prev for layer in layers.layers] == [(), (0,), (1,)]
    assert layers.layers[0].module.get_submodule("1") is model[1]
    own = [set(layer.module.parameters()) for layer in layers.layers]
    assert set().union(*own) == set(model.parameters())


def test_a_residual_block_ends_in_a_layer_where_its_ways_meet() -> None:
    def forward(self: Any, x: Any) -> Any:
        x = self.stem(x)
        out = self.second(F.relu(self.norm(self.first(x)), inplace=True))
        out += x
        return self.head(self.relu(out).mean((2, 3)))

    parts = {name: nn.Conv2d(4, 4, 3, padding=1) for name in ("stem", "first", "second")}
    model = Of(forward, **parts, norm=nn.BatchNorm2d(4), relu=nn.ReLU(inplace=True), head=nn.Linear(4, 3))
    layers = agree(model, x(4, 4, 6, 6))
    assert names(layers) == ["stem", "first", "second", "add", "head"]
    assert layers.layers[3].prev == (0, 2)


def test_a_language_model_traces_with_its_checks_masks_and_tied_weights() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)
            self.out = nn.Linear(8, 8)
            self.register_buffer("bias", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            b, t, c = x.size()
            q, k, v = (y.view(b, t, 2, c // 2).transpose(1, 2) for y in self.qkv(x).split(c, dim=2))
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            scores = scores.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
            seen = F.dropout(F.softmax(scores, dim=-1), 0.3, self.training) @ v
            return self.out(seen.transpose(1, 2).contiguous().view(b, t, c))

    def forward(self: Any, tokens: Any) -> Any:
        b, t = tokens.size()
        assert t <= 16, f"{t} tokens do not fit"
        x = self.wte(tokens) + self.wpe(torch.arange(0, t, dtype=torch.long, device=tokens.device))
        for norm, attention, mlp in zip(self.norms, self.attentions, self.mlps, strict=True):
            y = norm(x)
            x = x + attention(y) + mlp(y)
        return F.linear(x, self.wte.weight).view(b, -1)

    model = Of(
        forward,
        wte=nn.Embedding(20, 8),
        wpe=nn.Embedding(16, 8),
        norms=nn.ModuleList(nn.LayerNorm(8) for _ in range(2)),
        attentions=nn.ModuleList(Attention() for _ in range(2)),
        mlps=nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2)),
    )
    layers = agree(model, torch.randint(20, (5, 7)))
    assert layers.layers[0].name == "wte"
    assert [v for layer in layers.layers[1:] for v in layer.inputs if v.layer == -1] == []
    tied = [
        layer.name for layer in layers.layers if any(p is model.wte.weight for p in layer.module.parameters())
    ]
    assert tied == ["wte", "linear"]


def test_functions_that_ask_for_the_mode_follow_the_model() -> None:
    def forward(self: Any, x: Any) -> Any:
        x = F.dropout(self.a(x), p=0.4, training=self.training)
        x = x * (0.5 if self.training else 2.0)
        return self.b(x)

    agree(Of(forward, a=nn.Linear(4, 6), b=nn.Linear(6, 2)), x(6, 4))


def test_a_submodule_in_another_mode_keeps_it() -> None:
    def forward(self: Any, x: Any) -> Any:
        return self.b(self.block(self.a(x)))

    block = Of(lambda self, x: F.dropout(x, 0.5, self.training))
    model = Of(forward, a=nn.Linear(4, 4), block=block, b=nn.Linear(4, 2))
    layers = trace(model, (torch.rand(2, 4),))
    block.eval()
    data = torch.rand(3, 4)
    assert torch.equal(layers.run(data), model.b(model.a(data)))


def test_what_is_overwritten_is_not_seen_by_others() -> None:
    def forward(self: Any, x: Any) -> Any:
        y = self.a(x)
        kept = self.b(y)  # before y is overwritten
        z = self.relu(y)
        y.mul_(2.0)  # y is z
        return self.c(kept + z.clamp_(max=0.7) + y)

    parts = {name: nn.Linear(4, 4) for name in "abc"}
    model = Of(forward, relu=nn.ReLU(inplace=True), **parts).double()
    layers = trace(model, (x(2, 4),))
    data = x(3, 4)
    assert torch.equal(layers.run(data), model(data))
    untouched = data.clone()
    inputs = trace(Of(lambda self, x: self.a(self.relu(x)), a=parts["a"], relu=model.relu), (data,))
    inputs.run(data)
    assert torch.equal(data, untouched)


def test_windows_that_fold_positions_into_the_batch_stay_inside_a_layer() -> None:
    def forward(self: Any, x: Any) -> Any:
        b = x.shape[0]
        x = self.a(x).unflatten(1, (2, 4)).flatten(0, 1)
        x = self.c(F.relu(self.b(x)))
        return self.d(x.view(b, -1))

    model = Of(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 4), d=nn.Linear(32, 3))
    assert names(agree(model, x(4, 8, 4))) == ["a", "d"]


def test_modules_that_return_several_tensors_can_be_used() -> None:
    def forward(self: Any, x: Any) -> Any:
        left, right = self.a(x).chunk(2, dim=-1)
        seen, _ = self.attention(left, left, right, need_weights=False)
        out, (last, _) = self.rnn(seen)
        return self.b(torch.cat([out[:, -1], last[-1]], 1))

    model = Of(
        forward,
        a=nn.Linear(4, 16),
        attention=nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True),
        rnn=nn.LSTM(8, 6, batch_first=True),
        b=nn.Linear(12, 2),
    )
    layers = agree(model, x(4, 5, 4))
    assert names(layers) == ["a", "attention", "rnn", "b"]
    assert layers.layers[1].inputs == (Value(0, 0), Value(0, 1))


def test_gates_poolings_and_squeezes_are_put_where_they_belong() -> None:
    def forward(self: Any, x: Any) -> Any:
        y = self.conv(x)
        y = y * torch.sigmoid(y)
        gate = torch.sigmoid(self.up(F.relu(self.down(y.mean((2, 3))))))
        y = y * gate[:, :, None, None]
        return self.head(torch.cat([F.avg_pool2d(y, 3, 1, 1), self.side(y)], 1).amax((2, 3)))

    model = Of(
        forward, conv=nn.Conv2d(3, 4, 3), down=nn.Linear(4, 2), up=nn.Linear(2, 4),
        side=nn.Conv2d(4, 4, 1), head=nn.Linear(8, 2),
    )  # fmt: skip
    assert names(agree(model, x(4, 3, 6, 6))) == [
        "conv",
        "down",
        "up",
        "mul",
        "avg_pool2d",
        "side",
        "cat",
        "head",
    ]


def test_what_is_made_of_parameters_is_made_anew_in_each_layer_that_uses_it() -> None:
    def forward(self: Any, x: Any) -> Any:
        scale = torch.softmax(self.scale, 0)
        token = self.token.expand(x.size(0), -1, -1)
        x = torch.cat([token, self.a(x)], 1) + torch.zeros(4)
        x = F.relu(self.b(x)) * scale
        x = self.c(x) * scale + torch.ones(x.shape[0], 1, 1, dtype=x.dtype, device=x.device)
        return self.d(x[:, 0])

    parts = {name: nn.Linear(4, 4) for name in "abcd"}
    model = Of(forward, scale=nn.Parameter(torch.rand(4)), token=nn.Parameter(torch.rand(1, 1, 4)), **parts)
    layers = agree(model, x(4, 3, 4), gradients=torch.allclose)  # summed in another order
    assert names(layers) == ["a", "b", "c", "d"]
    assert all(layer.outputs == 1 for layer in layers.layers)


def test_a_module_used_twice_is_two_layers_that_share_its_weights() -> None:
    model = Of(lambda self, x, y: self.f(x) - self.f(y), f=nn.Linear(4, 3))
    layers = agree(model, x(4, 4), x(4, 4))
    assert names(layers) == ["f", "f#2", "sub"]
    assert layers.layers[1].inputs == (Value(-1, 1),)
    assert layers.layers[0].module.f is layers.layers[1].module.f


def test_a_model_of_no_weights_is_one_layer() -> None:
    assert names(agree(Of(lambda self, x: x.relu() + 1), x(4, 3))) == ["relu"]


def test_tensors_that_are_plain_attributes_leave_no_trace_in_the_model() -> None:
    model = Of(lambda self, x: self.a(x) + self.table[0][:3] * 2, a=nn.Linear(4, 3))
    model.table = (torch.arange(5),)  # no buffer
    before = set(vars(model))
    agree(model, x(3, 4))
    assert set(vars(model)) == before


REFUSED: dict[str, tuple[Callable[..., Any], str, str]] = {
    "data decides": (lambda self, x: x if x.sum() > 0 else -x, "makes one tensor of all|depends on data", ""),
    "a sample decides": (lambda self, x: self.a(x) if x[:, 0].all() else x, "depends on data", ""),
    "the batch size decides": (lambda self, x: self.a(x) if len(x) > 8 else x, "on the batch size", ""),
    "a number of the data": (lambda self, x: self.a(x) * x.max().item(), "depends on data", ""),
    "a shape of the data": (lambda self, x: self.a(x[x[:, 0] > 0]), "depends on data", ""),
    "other ways in training": (
        lambda self, x: self.a(self.a(x)) if self.training else self.a(x), "than in evaluation", "",
    ),
    "an average over samples": (lambda self, x: self.a(x) - x.mean(), "mean makes one tensor of all", ""),
    "samples compared": (lambda self, x: self.a(x) @ x.t(), "relates the samples", ""),
    "samples one by one": (lambda self, x: torch.stack([self.a(s) for s in x]), "one by one", ""),
    "batch norm without a module": (
        lambda self, x: F.batch_norm(self.a(x), None, None, training=True), "batch_norm as a function", "",
    ),
    "two results": (lambda self, x: (self.a(x), x), "its result is a tuple", ""),
    "no result": (lambda self, x: None, "its result is a NoneType", ""),
    "the batch not first": (lambda self, x: self.a(x).t(), "shape (4, batch)", ""),
    "one number": (lambda self, x: self.a(x).sum(), "sum makes one tensor of all samples", ""),
    "nothing of the inputs": (lambda self, x: self.a.weight, "not computed from its inputs", ""),
    "a module in a module": (lambda self, x: self.block(x), "depends on data", "block"),
    "a module of nowhere": (lambda self, x: nn.Linear(4, 4)(x), "module is not installed as a submodule", ""),
    "written into": (lambda self, x: self.block2(x), "does not support item assignment", "block2"),
    "overwritten under another name": (lambda self, x: self.c(x), "overwrites a tensor that is used", "c"),
    "shapes that do not fit": (lambda self, x: self.a(x[:, :3]), "a fails", ""),
}  # fmt: skip


def _assigns(self: Any, x: Any) -> Any:
    x[:, 0] = 0
    return x


def _aliased(self: Any, x: Any) -> Any:
    y = x * 2
    flat = y.flatten(1)
    y.add_(1)
    return flat + y


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_cut_is_refused_with_the_module_and_a_reason(case: str) -> None:
    forward, reason, module = REFUSED[case]
    parts = {"block": Of(lambda self, x: x if x[0, 0] > 0 else -x), "block2": Of(_assigns), "c": Of(_aliased)}
    model = Of(forward, a=nn.Linear(4, 4), **parts)
    with pytest.raises(ConfigError) as refused:
        trace(model, (torch.rand(3, 4),))
    assert any(part in str(refused.value) for part in reason.split("|")), str(refused.value)
    assert refused.value.where == "model Of"
    assert refused.value.key.startswith(module)
    assert "\n" not in str(refused.value)
    assert model.training


@pytest.mark.parametrize(
    ("example", "got"),
    [
        ((), "none"),
        (torch.rand(2, 4), "a Tensor"),
        ((torch.rand(2, 4), "text"), "a str"),
        ((torch.tensor(1.0),), "without dimensions"),
        ((torch.rand(2, 4), torch.rand(3, 4)), "first dimensions of 2, 3"),
    ],
)
def test_inputs_that_are_no_batch_are_refused(example: Any, got: str) -> None:
    with pytest.raises(ConfigError, match=got):
        trace(nn.Linear(4, 4), example)


def test_the_inputs_of_a_loss_are_caught_without_running_the_model() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        assert model.bias is not None  # the model's attributes are there
        return F.cross_entropy(model(batch["x"] / 2, batch["mask"]), batch["y"], reduction="none")

    model = nn.Linear(4, 4)
    batch = {"x": torch.ones(3, 4), "mask": torch.zeros(3), "y": torch.zeros(3)}
    found = capture_inputs(loss, model, batch)
    assert len(found) == 2
    assert torch.equal(found[0], torch.full((3, 4), 0.5))
    assert found[1] is batch["mask"]


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda model, batch: model(x=batch), "keyword arguments x"),
        (lambda model, batch: model([batch]), "argument 0 is a list"),
        (lambda model, batch: model(), "without arguments"),
        (lambda model, batch: batch, "does not call the model"),
    ],
)
def test_a_loss_that_calls_the_model_otherwise_is_refused(loss: Any, got: str) -> None:
    with pytest.raises(ConfigError, match=got):
        capture_inputs(loss, nn.Linear(4, 4), torch.rand(2, 4))
