"""The policy `planner`: a plan of the queue, carried out."""
