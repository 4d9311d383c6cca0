"""Inputs that only `plan vsw` reads; no run comes here.

`option_table` is the input of the solver alone, `jabas_files` the format in which JABAS's authors published
their measurements.
"""
