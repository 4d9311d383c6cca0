"""Lightning: `Trainer(callbacks=[HpcschedCallback()])` makes a training elastic."""

from __future__ import annotations

from hpcsched.integrations.lightning.callback import HpcschedCallback

__all__ = ["HpcschedCallback"]
