"""Trainings with Transformers' `Trainer`, and what is made of it (TRL), that are suspended and moved.

    from hpcsched.integrations.transformers import prepare_trainer

    trainer = prepare_trainer(Trainer(...))
    trainer.train()

Without hpcsched nothing changes. Transformers 4.57 or newer. `parts_of(trainer)` makes one a training that
can be packed with others.
"""

from hpcsched.integrations.transformers.parts import parts_of
from hpcsched.integrations.transformers.trainer import HpcschedCallback, prepare_trainer

__all__ = ["HpcschedCallback", "parts_of", "prepare_trainer"]
