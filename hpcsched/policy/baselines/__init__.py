"""Policies to compare with."""
