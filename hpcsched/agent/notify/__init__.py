"""Messages about a run to people who do not look at it: a command of theirs, or a webhook."""
