"""The command `pool`: allocations asked for as a run needs them."""
