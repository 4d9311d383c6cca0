"""What an agent and a program say to each other: names, messages, and both ways of their codec.

The names of variables and files, the exit codes, the JSON documents and lines of both directions, and a
version of all this. Standard library only, importable on Python 3.9, and pure: no clock, file or process. The
agent, the launcher and the worker import it, each for its half; a program in another language reads
`docs/contract.md`.

A message is a frozen dataclass with `encode` and `decode`. What cannot be decoded is `BadInput`, and in the
environment `ConfigError`: one line that says where, what, and what is accepted. Keys that are not known are
ignored: a newer minor version of the contract may add some (`version`).
"""
