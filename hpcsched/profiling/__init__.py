"""Measures throughput and costs of models by running them."""
