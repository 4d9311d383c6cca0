"""Runs burst plans (DeepPool, section 4): every layer of a training on ranks of its own.

`transfers` and `program` say what a plan asks of a rank, `channels` carries samples between ranks, `engine`
runs a step. `norms` and `sample_rng` make batch norm and dropout independent of the plan, `prepare` puts them
into the layers. `ownership` sums gradients, `state_transfer` hands layers over, `feedback` learns from
measured times, `choose` finds the plan, `compare` measures it against its plain alternatives, `whole`
is the model for ranks that have all of it, `burst_parallel` makes a training of it that can be suspended.
"""
