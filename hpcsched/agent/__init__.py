"""The core on a real clock, inside one allocation: events in, actions out, a crash at any point survived."""
