"""Burst parallelism (DeepPool, section 4): how many GPUs each layer of a training gets, and which.

`graph` holds what is known of the layers, `costs` and `table` what a choice costs, `structure` finds the
branches, `search` the best choice, `planner` puts them together, `plan` is the answer.
"""
