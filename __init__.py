"""weightbus: publish a model's weights once; every worker applies them in place, verified."""

__version__ = "0.1.0"
