"""Comparisons for `plan ps` and `simulate`; no run comes here.

`best` is the fastest configuration by the model, `optimus` the allocation of Optimus (Peng et al. 2018),
`models_file` the JSON form of models.
"""
