"""Hydra's launcher `hpcsched`: the jobs of a `--multirun` share the GPUs of one allocation."""
