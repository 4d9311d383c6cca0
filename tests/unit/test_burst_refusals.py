"""Networks and losses that a burst plan would compute wrongly are refused at the start."""

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from torch import nn  # noqa: E402

from hpcsched.errors import ConfigError  # noqa: E402
from hpcsched.planning.burst.plan import Plan, PlannedLayer  # noqa: E402
from hpcsched.worker.burst.owners import check_norms  # noqa: E402
from hpcsched.worker.burst.prepare import describe, prepare  # noqa: E402
from hpcsched.worker.burst.wires import Wires  # noqa: E402
from hpcsched.worker.layers.graph import capture_inputs, trace  # noqa: E402
from hpcsched.worker.strategies.burst import _check_optimizer, _example  # noqa: E402
from hpcsched.worker.trainer import Parts  # noqa: E402


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, g):
        return g


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        with torch.no_grad():
            x = self.backbone(x)
        return self.head(x)


class Straight(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(Sign.apply(self.first(x)))


class Cast(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.head(x)


def hooked():
    model = nn.Linear(4, 2)
    model.register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Frozen, "runs with gradients switched on or off"),
        (Straight, "Sign, an autograd.Function, has a backward pass of its own"),
        (Cast, "runs under autocast"),
        (hooked, "has forward hooks of its own"),
    ],
)
def test_what_a_graph_of_operations_does_not_hold(model, words):
    with pytest.raises(ConfigError, match=words):
        trace(model(), (torch.rand(2, 4),))


def test_the_users_functions_work_as_before_after_tracing():
    with pytest.raises(ConfigError):
        trace(Straight(), (torch.rand(2, 4),))
    x = torch.tensor([-2.0, 3.0], requires_grad=True)
    Sign.apply(x).sum().backward()
    assert x.grad.tolist() == [1.0, 1.0]


class Mixing(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.first, self.inner, self.head = nn.Linear(6, 6), inner, nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.inner(self.first(x)).mean(1))


class Softmax0(nn.Module):
    def forward(self, x):
        return torch.softmax(x, 0)


@pytest.mark.parametrize(
    "inner",
    [Softmax0(), nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=False)],
    ids=["softmax over the batch", "batch taken for time"],
)
def test_layers_that_mix_the_samples_of_a_batch(inner):
    example = (torch.rand(2, 5, 6),)
    units = prepare(trace(Mixing(inner), example), Wires(0, 1, torch.device("cpu")), seed=0)
    with pytest.raises(ConfigError, match="mixes the samples of a batch"):
        describe(units, example)


def test_batch_norm_and_layer_norm_are_not_taken_for_mixing():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 2))
    example = (torch.rand(2, 6),)
    units = prepare(trace(model, example), Wires(0, 1, torch.device("cpu")), seed=0)
    before = model[1].running_mean.clone()
    assert describe(units, example)
    assert torch.equal(model[1].running_mean, before)
    assert model[1].training


def parts(loss):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Parts(model=model, optimizer=optimizer, dataset=(torch.rand(8, 4),), global_batch=4, loss=loss)


def test_losses_that_draw_random_numbers():
    def noisy(model, batch):
        noise = torch.randn_like(batch[0])
        return (model(batch[0] + noise) - noise).square().mean(1)

    with pytest.raises(ConfigError, match="loss: draws random numbers before it calls the model"):
        _example(parts(noisy), torch.device("cpu"))
    assert _example(parts(lambda model, batch: model(batch[0]).mean(1)), torch.device("cpu"))[0].shape == (
        2,
        4,
    )


def test_losses_that_call_the_model_under_autocast():
    def cast(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(batch[0]).mean(1)

    with pytest.raises(ConfigError, match="called under autocast"):
        capture_inputs(cast, nn.Linear(4, 4), (torch.rand(2, 4),))


def test_optimizers_that_need_the_gradients_of_all_parameters():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _check_optimizer(optimizer)
    clip = nn.utils.clip_grad_norm_
    optimizer.register_step_pre_hook(lambda *_: clip(model.parameters(), 1.0))
    with pytest.raises(ConfigError, match="has hooks before its step"):
        _check_optimizer(optimizer)
    with pytest.raises(ConfigError, match="LBFGS"):
        _check_optimizer(torch.optim.LBFGS(model.parameters()))


def test_a_batch_norm_of_several_layers_needs_them_on_the_same_ranks_and_in_the_models_order():
    norm = nn.BatchNorm1d(4)
    users = [(0, "a", [norm]), (1, "b", [norm])]

    def plan(*layers):
        planned = (PlannedLayer(id=i, name="ab"[i], ranks=ranks) for i, ranks in layers)
        return Plan(model="m", gpus=2, global_batch=4, layers=tuple(planned))

    check_norms(users, plan((0, (0, 1)), (1, (0, 1))), "plan")
    with pytest.raises(ConfigError, match="other ranks than layer 'a'"):
        check_norms(users, plan((0, (0,)), (1, (1,))), "plan")
    with pytest.raises(ConfigError, match="a turn before layer 'a'"):
        check_norms(users, plan((1, (0,)), (0, (0,))), "plan")


def test_local_statistics_of_a_single_sample():
    users = [(0, "a", [nn.BatchNorm1d(4)]), (1, "b", [])]

    def plan(first, second):
        planned = (PlannedLayer(id=i, name="ab"[i], ranks=r) for i, r in enumerate((first, second)))
        return Plan(model="m", gpus=2, global_batch=3, layers=tuple(planned))

    check_norms(users, plan((0,), (0, 1)), "plan", alone_of=3)
    check_norms(users, plan((0, 1), (0, 1)), "plan", alone_of=4)
    with pytest.raises(ConfigError, match="layer 'a': 2 ranks for a batch of 3"):
        check_norms(users, plan((0, 1), (0, 1)), "plan", alone_of=3)
