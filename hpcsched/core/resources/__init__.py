"""What jobs hold or wait for: the GPUs that are free, the ledger of all leases, the queue."""
