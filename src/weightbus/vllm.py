"""vLLM over the bus: `from weightbus.vllm import TrainerInit, VllmServers`.

With weightbus installed where vLLM runs, `--weight-transfer-config '{"backend": "weightbus"}'` has
its workers load what a trainer publishes: vLLM calls `register` in each of its processes. Importing
this needs neither vLLM nor torch; `TrainerInit` needs both, and makes weightbus known to vLLM.
"""

from importlib import import_module

TYPE_CHECKING = False  # as in the face of the package
if TYPE_CHECKING:
    from weightbus.python_client.serving.calls import ServerError
    from weightbus.python_client.serving.server import VllmServer, VllmServers
    from weightbus.python_client.serving.vllm_plugin import UnsupportedVllmError, register
    from weightbus.python_client.serving.vllm_trainer import TrainerInit

__all__ = [
    "ServerError",
    "TrainerInit",
    "UnsupportedVllmError",
    "VllmServer",
    "VllmServers",
    "register",
]

# Where each of them lives.
_HOMES = {
    "ServerError": "calls",
    "TrainerInit": "vllm_trainer",
    "UnsupportedVllmError": "vllm_plugin",
    "VllmServer": "server",
    "VllmServers": "server",
    "register": "vllm_plugin",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"weightbus.python_client.serving.{home}"), name)
    globals()[name] = value  # found without us from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
