"""Registers weightbus with vLLM, and checks that the installed vLLM is supported.

vLLM calls `register` in each of its processes, through the entry point group
`vllm.general_plugins`. A release of vLLM is supported if it has the names listed below.
"""

import logging
import os
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from ...codecs.errors import WeightBusError

log = logging.getLogger("weightbus.serving")

NAME = "weightbus"
TESTED = "vLLM 0.28 to 0.33"
TRANSFER = "vllm.distributed.weight_transfer"
RELOAD = "vllm.model_executor.model_loader.reload.layerwise"

# By module: the names in vLLM that the worker's side and the trainer's side need.
WORKER = {
    f"{TRANSFER}.base": (
        *("WeightTransferEngine", "WeightTransferInitInfo", "WeightTransferUpdateInfo"),
        "TrainerInitInfo",  # a vLLM without this name uses engines differently
    ),
    RELOAD: (
        *("initialize_layerwise_reload", "finalize_layerwise_reload", "get_layerwise_info"),
        "_place_kernel_tensors",
    ),
    "vllm.config": ("set_current_vllm_config",),
}
TRAINER = {
    f"{TRANSFER}.base": (
        *("TrainerInitInfo", "TrainerWeightTransferEngine", "VLLMWeightSyncClient", "WeightSource"),
    ),
    f"{TRANSFER}.factory": ("WeightTransferTrainerFactory",),
}


class UnsupportedVllmError(WeightBusError, ImportError):
    """The installed vLLM is not supported."""

    __module__ = "weightbus.vllm"


def require(needed: dict[str, tuple[str, ...]]) -> None:
    """Check that vLLM has the needed names.

    Raises:
        UnsupportedVllmError: vLLM lacks some names, or is not installed.
    """
    lacking: list[str] = []
    for module, names in needed.items():
        try:
            found = import_module(module)
        except ImportError as error:
            lacking.append(f"{module} ({error})")
        else:
            lacking += [f"{module}.{name}" for name in names if not hasattr(found, name)]
    if lacking:
        raise unsupported(f"lacks {', '.join(lacking)}")


def unsupported(why: str) -> UnsupportedVllmError:
    """Return the error for an unsupported vLLM; `why` is the predicate of its message."""
    return UnsupportedVllmError(
        f"weightbus works with {TESTED}; {_this()} {why}: install one of those versions, or serve "
        "with `weightbus bridge`, which works with any vLLM"
    )


def _this() -> str:
    try:
        return f"vLLM {version('vllm')}, which is installed,"
    except PackageNotFoundError:
        return "this environment, in which vLLM is not installed,"


def register() -> None:
    """Register weightbus with the vLLM of this process. May be called more than once.

    Errors are only logged: an exception would keep vLLM from starting, even if nothing uses this.
    """
    try:
        factory = import_module(f"{TRANSFER}.factory")
    except ImportError as error:
        log.warning(
            "%s has no weight transfer (%s): weightbus works with %s", _this(), error, TESTED
        )
        return
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and NAME not in allowed.split(","):
        log.warning(
            "VLLM_PLUGINS=%s leaves weightbus out, so a vLLM with this environment does not know "
            "the backend: add it, VLLM_PLUGINS=%s",
            allowed,
            f"{allowed},{NAME}" if allowed else NAME,
        )
    for kind, module, name in (
        ("WeightTransferEngineFactory", "vllm_worker", "WeightbusEngine"),
        ("WeightTransferTrainerFactory", "vllm_trainer", "WeightbusTrainerEngine"),
    ):
        known = getattr(factory, kind, None)
        if known is not None and NAME not in known._registry:  # noqa: SLF001 - it raises otherwise
            known.register_engine(NAME, f"{__package__}.{module}", name)
