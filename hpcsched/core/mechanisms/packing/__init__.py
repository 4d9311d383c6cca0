"""Jobs that are trained as one on a GPU."""
