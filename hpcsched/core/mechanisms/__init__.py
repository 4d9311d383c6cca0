"""Ways to use GPUs and cores better than one job alone can: each a mechanism beside the GPUs of one's own.

`base` says what a mechanism may add, `registry` which there are. Who gets what is for policies to say; a
mechanism carries it out.
"""
