"""Trainings to try things with; `hpcsched demo` and the guides run them."""
