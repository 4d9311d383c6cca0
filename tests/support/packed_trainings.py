"""Small trainings for the tests of packs, and how each of them goes when it is alone."""

from __future__ import annotations

import random
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn.functional import cross_entropy, mse_loss  # noqa: E402
from torch.utils.data import Dataset  # noqa: E402

from hpcsched.worker import Session  # noqa: E402
from hpcsched.worker.packed import Member, Pack, load  # noqa: E402
from hpcsched.worker.packing.packed_session import PackedSession  # noqa: E402
from hpcsched.worker.session.trainer import Parts, read  # noqa: E402

SAMPLES, CLASSES = 96, 4
Build = Callable[[], Parts]
Point = namedtuple("Point", ["x", "more"])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One thread of the CPU, also where there are GPUs: how sums are split depends on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield
    torch.set_num_threads(before)


# -- networks --------------------------------------------------------------------------------------------


def mlp(width: int = 12) -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4)
    )


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


def dropping(share: float = 0.3) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 12), nn.Dropout(share), nn.ReLU(), nn.Linear(12, 4))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)),
        nn.Conv2d(1, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


class Residual(nn.Module):
    """Two convolutions beside a shortcut, ReLU in place, mean over the area."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 6, 3, padding=1)
        self.block = nn.Sequential(
            nn.Conv2d(6, 6, 3, padding=1, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(inplace=True),
            nn.Conv2d(6, 6, 3, padding=1, bias=False),
            nn.BatchNorm2d(6),
        )
        self.relu = nn.ReLU(inplace=True)
        self.last = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.view(-1, 1, 4, 4))
        x = self.relu(x + self.block(x))
        result: torch.Tensor = self.last(x.mean((2, 3)))
        return result


class Words(nn.Module):
    """A transformer's layer on words that the samples are turned into; embedding and result may be tied."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norms = nn.ModuleList([nn.LayerNorm(8), nn.LayerNorm(8)])
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.out = nn.Linear(8, 10, bias=False)
        if tied:
            self.out.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = (x.abs() * 3).long().clamp(max=9)
        h = self.embedding(words)
        n = self.norms[0](h)
        h = h + self.attention(n, n, n, need_weights=False)[0]
        h = h + self.inner(self.norms[1](h))
        result: torch.Tensor = self.out(h).mean(1)
        return result


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 6, batch_first=True)
        self.out = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(self.gru(x.view(-1, 4, 4))[0][:, -1])
        return result


def frozen() -> nn.Module:
    model = mlp()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    return model


# -- losses ----------------------------------------------------------------------------------------------


def by_sample(model: nn.Module, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1], reduction="none")


def by_mean(model: nn.Module, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def from_dict(model: nn.Module, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch["point"].x), batch["y"], reduction="none") * batch["point"].more[0]


def squared(model: nn.Module, batch: Any) -> torch.Tensor:
    return mse_loss(model(batch[0]), batch[0][:, :4], reduction="none").mean(1)


# -- data ------------------------------------------------------------------------------------------------


def tensors(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, 16, generator=generator)
    return x, x[:, :CLASSES].argmax(1)


class Augmented(Dataset[Any]):
    """Samples with noise by all of the global generators."""

    def __init__(self, seed: int = 0) -> None:
        self.x, self.y = tensors(seed)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        noise = torch.randn(16) + random.random() + float(np.random.rand())
        return self.x[index] + 0.1 * noise, self.y[index]


def with_noise(samples: list[Any]) -> Any:
    """A collate function of one's own, that draws too."""
    x = torch.stack([sample[0] for sample in samples])
    return x + 0.01 * torch.randn(x.shape), torch.stack([sample[1] for sample in samples])


def as_dict(samples: list[Any]) -> Any:
    x, y = with_noise(samples)
    return {"point": Point(x, [torch.ones(len(x))]), "y": y}


# -- trainings -------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Iterable[Any], float], Any]] = {
    "sgd": lambda p, lr: torch.optim.SGD(p, lr=lr),
    "momentum": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, weight_decay=1e-3),
    "damped": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.8, dampening=0.3),
    "nesterov": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, nesterov=True),
    "adam": lambda p, lr: torch.optim.Adam(p, lr=lr / 10, weight_decay=1e-3),
    "adamw": lambda p, lr: torch.optim.AdamW(p, lr=lr / 10, weight_decay=1e-2),
    "amsgrad": lambda p, lr: torch.optim.Adam(p, lr=lr / 10, amsgrad=True),
    "adagrad": lambda p, lr: torch.optim.Adagrad(p, lr=lr, lr_decay=1e-2),
    "rmsprop": lambda p, lr: torch.optim.RMSprop(p, lr=lr / 10),
    "maximizing": lambda p, lr: torch.optim.SGD(p, lr=lr / 10, maximize=True),
}

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda optimizer: None,
    "steps": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.7),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
    "cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        0.02,
        total_steps=200,
        cycle_momentum={"momentum", "betas"} & optimizer.defaults.keys() != set(),
    ),
}


def training(
    seed: int = 0,
    *,
    net: Callable[[], nn.Module] = mlp,
    batch: int = 8,
    optimizer: str = "momentum",
    lr: float | None = None,
    scheduler: str = "none",
    loss: Callable[[nn.Module, Any], torch.Tensor] = by_sample,
    data: Callable[[], Any] = tensors,
    order: int = 0,
    **more: Any,
) -> Build:
    """How a training is built: with seeded generators, as `trainer.build` does it; `order` is of its data."""

    def build() -> Parts:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        model = net()
        wanted = [p for p in model.parameters() if p.requires_grad]
        chosen = OPTIMIZERS[optimizer](wanted, 0.02 * (1 + seed % 5) if lr is None else lr)
        return Parts(
            model=model,
            optimizer=chosen,
            scheduler=SCHEDULERS[scheduler](chosen),
            dataset=data(),
            global_batch=batch,
            loss=loss,
            seed=order,
            **more,
        )

    return build


def separate(
    build: Build, steps: int, *, before: Callable[[Parts, int], object] | None = None
) -> dict[str, Any]:
    """Its state when it has been trained alone, as `ddp` does it (its reading as if `reproducible`).

    `before` is called with the number of each step before it.
    """
    parts = build()
    parts.model.train()
    session = Session(
        model=parts.model,
        optimizer=parts.optimizer,
        scheduler=parts.scheduler,
        dataset_size=parts.size,
        global_batch=parts.global_batch,
        seed=parts.seed,
        total_steps=steps,
    )
    places = (piece for step in session.upcoming_places() for piece in step)
    batches = read(parts, places, device=session.device, loaders=parts.loaders, seeded=True)
    for _ in session.steps():
        if before is not None:
            before(parts, session.step)
        parts.optimizer.zero_grad()
        session.backward(parts.loss(parts.model, next(batches)))
        parts.optimizer.step()
        if parts.scheduler is not None:
            parts.scheduler.step()
    return state(parts, session)


def state(parts: Parts, session: Session | PackedSession) -> dict[str, Any]:
    """All that a training has come to."""
    return {
        "step": session.step,
        "model": {name: value.clone() for name, value in parts.model.state_dict().items()},
        "optimizer": parts.optimizer.state_dict(),
        "scheduler": None if parts.scheduler is None else parts.scheduler.state_dict(),
        "loss": session._training.last_loss(),
    }


def members(*builds: Build, steps: int = 10**6) -> list[Member]:
    """One after the other, as each is to start from its own generators."""
    return [load(build(), name=f"m{i}", steps=steps) for i, build in enumerate(builds)]


def packed(
    *builds: Build, mode: str = "auto", steps: int = 10**6, **options: Any
) -> tuple[Pack, list[Member]]:
    made = members(*builds, steps=steps)
    together = Pack(made[0].session.device, mode=mode, **options)
    together.join(*made)
    return together, made


def go(together: Pack, steps: int) -> None:
    """Until every member has made so many steps."""
    while min(member.session.step for member in together.members) < steps:
        together.step()
    together.write_back()


def state_of(member: Member) -> dict[str, Any]:
    return state(member.parts, member.session)


def train(builds: Iterable[Build], steps: int, mode: str) -> list[dict[str, Any]]:
    """What members come to in a pack, each after exactly so many steps."""
    together, made = packed(*builds, mode=mode, steps=steps)
    done: dict[int, dict[str, Any]] = {}
    while together.members:
        together.step()
        for member in list(together.members):
            if member.done:
                assert member.session.step == steps
                together.leave(member)
                done[id(member)] = state_of(member)
    return [done[id(member)] for member in made]


# -- comparing -------------------------------------------------------------------------------------------


def same(one: Any, other: Any) -> bool:
    """To the last bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def distance(one: Any, other: Any) -> float:
    """The largest difference between two models, as a part of the largest number in each tensor."""
    pairs = [(one[name].double(), other[name].double()) for name in one]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-2)) for a, b in pairs)
