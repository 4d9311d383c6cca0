"""The state of a training on disk and in shared memory: saved, found, read."""
