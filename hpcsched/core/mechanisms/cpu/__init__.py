"""Jobs on CPU cores, which need no GPU."""
