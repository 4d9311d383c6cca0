"""The command `demo`: a queue of small trainings, a promotion in place, and what both were worth."""
