"""A training of parameter servers and workers that share CPU cores (NEARCHUS, section III)."""
