"""hpcsched: a companion scheduler for deep learning inside one batch allocation."""

__version__ = "0.4.0"
