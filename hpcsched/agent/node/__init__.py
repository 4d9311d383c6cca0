"""The agent on each host of a run over several hosts; it starts and watches the processes there."""
