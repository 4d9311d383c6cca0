"""Jobs on CPU cores: who has which, and how a training finds its configuration (NEARCHUS)."""
