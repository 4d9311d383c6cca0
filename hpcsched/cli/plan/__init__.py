"""The command `plan`: what-if for strategies."""
