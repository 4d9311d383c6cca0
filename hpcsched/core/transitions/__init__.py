"""How events and decisions change a run, one topic a module."""
