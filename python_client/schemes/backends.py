"""Backends: the schemes by the name of a way of deployment, for `from_backend`."""

from collections.abc import Callable
from importlib import import_module
from typing import Literal, TypeVar

Scheme = TypeVar("Scheme", bound=type)

WeightSyncBackend = Literal[
    "none",
    "direct",
    "shared",
    "thread",
    "process",
    "multiprocessing",
    "distributed",
    "rpc",
    "ray",
    "zmq",
]

# Where the scheme of each name lives. Each is loaded when it is first asked for.
_HOMES = {
    "none": "no_sync:NoWeightSyncScheme",
    "shared": "bus_schemes:SharedMemWeightSyncScheme",
    "process": "bus_schemes:MultiProcessWeightSyncScheme",
    "zmq": "bus_schemes:ZMQWeightSyncScheme",
    "distributed": "bus_schemes:DistributedWeightSyncScheme",
    "rpc": "torch_rpc:RPCWeightSyncScheme",
    "ray": "ray:RayWeightSyncScheme",
}
_ALIASES = {
    "direct": "none",
    "thread": "shared",
    "multiprocessing": "process",
}
_registered: dict[str, type] = {}


def register_weight_sync_backend(backend: str) -> Callable[[Scheme], Scheme]:
    """Return a decorator that makes a class of schemes known to `from_backend`."""

    def register(scheme: Scheme) -> Scheme:
        _registered[backend] = scheme
        return scheme

    return register


def scheme_class(backend: str) -> type:
    """Return the class of schemes of a name.

    Raises:
        ValueError: There is none.
    """
    canonical = backend if backend in _registered else _ALIASES.get(backend, backend)
    if canonical in _registered:
        return _registered[canonical]
    home = _HOMES.get(canonical)
    if home is None:
        choices = sorted({*_HOMES, *_ALIASES, *_registered})
        raise ValueError(f"Unsupported weight-sync backend {backend!r}. Expected one of {choices}.")
    module, name = home.split(":")
    found: type = getattr(import_module(f".{module}", __package__), name)
    return found
