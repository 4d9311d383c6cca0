"""The process of a pack, and the jobs that are members in it."""
