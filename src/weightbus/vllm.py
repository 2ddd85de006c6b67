"""Weight transfer to vLLM: `from weightbus.vllm import TrainerInit, VllmServers`.

If weightbus is installed where vLLM runs, `--weight-transfer-config '{"backend": "weightbus"}'`
makes vLLM's workers load what a trainer publishes: vLLM calls `register` in each of its processes.
Importing this module needs neither vLLM nor torch; `TrainerInit` needs both.
"""

from weightbus.lazy import lazy

TYPE_CHECKING = False  # as in the __init__.py of the package
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

__getattr__, __dir__ = lazy(
    globals(),
    "weightbus.python_client.serving",
    {
        "ServerError": "calls",
        "TrainerInit": "vllm_trainer",
        "UnsupportedVllmError": "vllm_plugin",
        "VllmServer": "server",
        "VllmServers": "server",
        "register": "vllm_plugin",
    },
)
