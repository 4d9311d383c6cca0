"""The same on other hosts, through node agents."""
