"""Data parallel training, the usual strategy."""
