"""A trainer as small as can be."""

import os
import time

import torch
from torch import nn

from hpcsched.worker import Parts, Trainer


class Tiny(Trainer):
    def build(self, args):
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(48, 4, generator=generator)
        y = x.sum(1)
        model = nn.Linear(4, 1)

        def loss(model, batch):
            time.sleep(float(os.environ.get("STEP_S", "0")))
            return (model(batch[0]).squeeze(1) - batch[1]) ** 2

        return Parts(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=args.get("lr", 0.01)),
                     global_batch=8, dataset=(x, y), loss=loss,
                     evaluate=lambda model: {"error": loss(model, (x, y)).mean().item()})
