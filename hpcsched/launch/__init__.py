"""Processes of jobs: start, signal, follow, and find again after a crash."""
