"""Parameter-server training on CPU cores (NEARCHUS): how fast a configuration is, who gets which cores."""
