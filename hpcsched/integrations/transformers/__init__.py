"""Trainings with Transformers' `Trainer`, and what is made of it (TRL), that are suspended and moved.

    from hpcsched.integrations.transformers import prepare_trainer

    trainer = prepare_trainer(Trainer(...))
    trainer.train()

Without hpcsched nothing changes. Transformers 4.57 or newer.
"""

from hpcsched.integrations.transformers.trainer import HpcschedCallback, prepare_trainer

__all__ = ["HpcschedCallback", "prepare_trainer"]
