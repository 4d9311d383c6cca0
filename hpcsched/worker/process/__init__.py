"""The process of a rank: its contract with the agent, start, memory, random numbers."""
