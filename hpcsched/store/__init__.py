"""What is on disk: the journal, the snapshot, the run directory, profiles, the database of runs."""
