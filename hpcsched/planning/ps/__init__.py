"""Parameter-server training on CPU cores (NEARCHUS): the speed of a configuration, the cores of processes.

`model` is the bottleneck model, `training` what simulations know of a training, `cores` the layout on cores,
`bucket` the throttle of a process, `stability` when measurements count; `whatif` holds what runs are compared
with.
"""
