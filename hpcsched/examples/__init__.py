"""Trainings to try things with; `make demo` and the guides run them."""
