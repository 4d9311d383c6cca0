"""Networks and losses that a burst plan would compute wrongly are refused at the start."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from torch import nn  # noqa: E402

from hpcsched.errors import ConfigError  # noqa: E402
from hpcsched.planning.burst.plan import BurstPlan, PlannedLayer  # noqa: E402
from hpcsched.worker.burst.channels import Channels  # noqa: E402
from hpcsched.worker.burst.ownership import check_norms  # noqa: E402
from hpcsched.worker.burst.prepare import describe, prepare  # noqa: E402
from hpcsched.worker.burst.strategy import _check_optimizer, _example  # noqa: E402
from hpcsched.worker.layers.graph import capture_inputs, trace  # noqa: E402
from hpcsched.worker.session.trainer import Parts  # noqa: E402


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
    units = prepare(trace(Mixing(inner), example), Channels(0, 1, torch.device("cpu")), seed=0)
    with pytest.raises(ConfigError, match="mixes the samples of a batch"):
        describe(units, example)


class Inner(nn.Module):
    """A linear layer, and after it what `does` to a batch."""

    def __init__(self, does):
        super().__init__()
        self.first, self.does, self.last = nn.Linear(6, 6), does, nn.Linear(6, 2)
        self.norm = nn.BatchNorm1d(6, track_running_stats=False)

    def forward(self, x):
        return self.last(self.does(self.norm(self.first(x))))


@pytest.mark.parametrize(
    "does",
    [
        lambda h: h.cumsum(0),
        lambda h: h.cummax(0).values,
        lambda h: h.flip(0),
        lambda h: h + h.max(0).values,
        lambda h: h / h.shape[0],
        lambda h: h * h.size(0) ** -0.5,
        lambda h: h * (h.numel() / 100),
        lambda h: h * torch.full((1,), 1.0).expand(h.size(0)).sum(),
        lambda h: h + torch.arange(h.shape[0]).unsqueeze(1),
    ],
    ids=["sum so far", "most so far", "flip", "most", "by the batch", "root", "elements", "ones", "place"],
)
def test_what_is_done_to_a_sample_must_not_depend_on_the_others_their_number_or_its_place(does):
    example = (torch.rand(2, 6),)
    with pytest.raises(
        ConfigError, match=r"mixes the samples of a batch|one tensor of all samples|batch size"
    ):
        describe(prepare(trace(Inner(does), example), Channels(0, 1, torch.device("cpu")), seed=0), example)


def test_shapes_may_have_the_batch_size_and_dropout_may_draw():
    def does(h):
        noise = nn.functional.dropout(h.view(h.shape[0], 2, 3), 0.5).reshape(h.size(0), -1)
        return noise + torch.zeros(h.shape[0], 6)

    example = (torch.rand(2, 6),)
    units = prepare(trace(Inner(does), example), Channels(0, 1, torch.device("cpu")), seed=0)
    assert describe(units, example)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.n = nn.Linear(4, 2), 0

    def forward(self, x):
        self.n += 1
        return self.layer(x) * self.n


class Wondering(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        h = self.layer(x)
        return 2 * h if h.requires_grad else h


class Drawing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x) * float(np.random.rand())


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Counting, "changes its attribute 'n' in each forward pass"),
        (Wondering, "its course depends on autograd .a tensor's requires_grad"),
        (Drawing, "draws random numbers of Python or numpy"),
    ],
)
def test_what_a_recording_would_keep_for_ever(model, words):
    with pytest.raises(ConfigError, match=words):
        trace(model(), (torch.rand(2, 4),))


@pytest.mark.parametrize("option", [{"max_norm": 0.5}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_embeddings_that_look_at_the_whole_batch_or_have_sparse_gradients(option):
    model = nn.Sequential(nn.Embedding(9, 4, **option), nn.Linear(4, 2))
    with pytest.raises(ConfigError, match=f"layer 0: an Embedding with {next(iter(option))}"):
        prepare(
            trace(model, (torch.zeros(2, 3, dtype=torch.long),)), Channels(0, 1, torch.device("cpu")), seed=0
        )


def test_a_loss_that_changes_the_model():
    def loss(model, batch):
        model.alpha = 3
        return model(batch[0]).mean(1)

    with pytest.raises(ConfigError, match="alpha: set by the loss"):
        capture_inputs(loss, nn.Linear(4, 4), (torch.rand(2, 4),))


def test_batch_norm_and_layer_norm_are_not_taken_for_mixing():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 2))
    example = (torch.rand(2, 6),)
    units = prepare(trace(model, example), Channels(0, 1, torch.device("cpu")), seed=0)
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


def test_losses_that_give_the_model_another_number_of_rows():
    with pytest.raises(ConfigError, match=r"loss: gives the model \[4, 4\] for 2 samples"):
        _example(parts(lambda model, batch: model(torch.cat([batch[0]] * 2)).mean(1)), torch.device("cpu"))


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
        return BurstPlan(model="m", gpus=2, global_batch=4, layers=tuple(planned))

    check_norms(users, plan((0, (0, 1)), (1, (0, 1))), "plan")
    with pytest.raises(ConfigError, match="other ranks than layer 'a'"):
        check_norms(users, plan((0, (0,)), (1, (1,))), "plan")
    with pytest.raises(ConfigError, match="a turn before layer 'a'"):
        check_norms(users, plan((1, (0,)), (0, (0,))), "plan")


def test_local_statistics_of_a_single_sample():
    users = [(0, "a", [nn.BatchNorm1d(4)]), (1, "b", [])]

    def plan(first, second):
        planned = (PlannedLayer(id=i, name="ab"[i], ranks=r) for i, r in enumerate((first, second)))
        return BurstPlan(model="m", gpus=2, global_batch=3, layers=tuple(planned))

    check_norms(users, plan((0,), (0, 1)), "plan", alone_of=3)
    check_norms(users, plan((0, 1), (0, 1)), "plan", alone_of=4)
    with pytest.raises(ConfigError, match="layer 'a': 2 ranks for a batch of 3"):
        check_norms(users, plan((0, 1), (0, 1)), "plan", alone_of=3)
