"""Allocations as needed: asked for while a run has work for them, within caps, and given back."""
