"""Runs burst plans (DeepPool, section 4): every layer of a training on ranks of its own.

`moves` and `program` say what a plan asks of a rank, `wires` carries samples between ranks, `engine` runs a
step. `norms` and `draws` make batch norm and dropout independent of the plan, `prepare` puts them into the
layers. `owners` sums gradients and hands layers over, `feedback` learns from measured times, `choose` finds
the plan, `session` makes all of it a training that can be suspended.
"""
