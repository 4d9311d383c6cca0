"""Fakes, builders and conformance suites for the seams."""
