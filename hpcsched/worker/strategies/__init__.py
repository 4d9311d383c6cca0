"""Ways to run a training: a module each, named by `strategy = { kind = "NAME" }`.

A module has `OPTIONS`, the other keys it takes in that table, and `run(trainer, env)`, which trains to
the end, or leaves with SystemExit when suspended.
"""
