"""What happens to jobs, as a pure state machine: events in, actions out. Standard library only."""
