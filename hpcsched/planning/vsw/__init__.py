"""Virtual stream workers (JABAS, section 5): the number of workers on each GPU, and the choice of GPUs.

`costs` holds what was measured and predicts a step from it, `rounds` how workers share a GPU, `solver` finds
the exact choice, `configure` answers for a cluster, `sets` finds the best GPUs for a trajectory of batches;
`profile` reads costs; `whatif` holds what only `plan vsw` reads.
"""
