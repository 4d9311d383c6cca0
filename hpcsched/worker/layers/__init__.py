"""A model as layers that can run apart: found by tracing, measured one by one."""
