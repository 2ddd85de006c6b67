"""Publishing from TRL's asynchronous trainers: `from weightbus.trl import WeightTransfer`."""

from weightbus.python_client.serving.trl_transfer import WeightTransfer

__all__ = ["WeightTransfer"]
