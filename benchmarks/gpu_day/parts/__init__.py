"""The parts of a day; each module has `run(found)`."""
