"""The batch job around a run: its end, and whether the run comes back."""
