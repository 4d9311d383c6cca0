"""The core on a virtual clock: what-if for job files, runs and traces."""
