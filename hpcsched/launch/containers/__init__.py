"""Containers that programs of jobs run in: one seam, and a module for each runtime."""
