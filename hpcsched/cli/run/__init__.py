"""Commands that make, simulate or read whole runs."""
