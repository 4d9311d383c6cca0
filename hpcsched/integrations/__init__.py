"""Adapters for frameworks: one or two lines make a training of theirs elastic.

Each module imports its framework, and nothing here is imported before it is used. All stand on
`hpcsched.Link`.
"""
