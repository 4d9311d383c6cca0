"""Which job starts when, on how many GPUs: possible futures of a queue, and the search for a good one."""
