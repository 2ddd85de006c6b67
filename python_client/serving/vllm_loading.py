# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
"""Loads a version into a vLLM model, layer by layer, from views of the bus's memory.

vLLM's layer-wise reload moves the parameters to the meta device and collects the tensors of each
layer. When a layer has all tensors, vLLM creates the layer's parameters, loads and post-processes
them, and copies them to the old memory; so only one layer at a time exists twice. The collected
tensors are views of the version's memory, which does not change until `load` returns.

On a CPU, vLLM's layers compute with packed copies of their weights. vLLM's reload does not update
the copies of experts and of tied weights, so the model would compute with a mix of old and new
weights; `reloading` makes vLLM pack these copies again.

A rehearsal loads zeros of the same names, dtypes and shapes, but lets no layer become complete, and
restores all parameters. So wrong names, shapes and dtypes are found before anything is published,
and not when half of the model is loaded.
"""

import math
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import layerwise

from ...codecs.dtypes import dtype_named, torch_dtype
from ...codecs.errors import WeightBusError
from ...codecs.layout import Signature
from ..applying.applier import Staged
from ..applying.loading import UnchangedError
from .recorder import Tensors
from .recording import Recording, record
from .vllm_proof import prove

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

PLAIN = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
SCALES = {getattr(torch, "float8_e8m0fnu", None)}  # powers of two, which any dtype may receive
PUBLISH_LIKE = (
    "publish a model of the kind that the server runs, under the names and dtypes of its checkpoint"
)


InPlace = dict[torch.nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]


class LoadError(WeightBusError):
    """A version was loaded only in part: the model has a mix of two versions."""


class LayerwiseLoader:
    """Loads versions into one vLLM model.

    Args:
        model, model_config, vllm_config, device: As in vLLM's weight transfer engine.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        model_config: "ModelConfig",
        vllm_config: "VllmConfig",
        device: torch.device,
    ) -> None:
        self._device = torch.device(device)
        self._model: Any = model  # Any: it has methods that `nn.Module` lacks
        self._model_config, self._vllm_config = model_config, vllm_config

    def prove(self) -> None:
        """Check once that the model computes with the weights that `load` loads; see `vllm_proof`.

        Raises:
            ReloadError: The model does not compute with these weights.
        """
        prove(self._model, self._vllm_config, self._device, self.load)

    def rehearse(self, tensors: Mapping[str, Signature]) -> str:
        """Return why tensors with these dtypes and shapes cannot be loaded, or "" if they can."""
        progress = _Progress()
        wanted = {_plain(name) for name, _ in self._model.named_parameters()}
        try:
            with self._rehearsal(), _CastGuard():  # type: ignore[no-untyped-call]
                loaded = self._model.load_weights(progress.track(_zeros(tensors)))
        except Exception as error:
            return f"{progress.describe(self._model, error)}: {PUBLISH_LIKE}"
        known = isinstance(loaded, set) and not self._quantised
        missing = wanted - set(map(_plain, loaded)) if known else set[str]()
        if missing:  # vLLM itself rejects a checkpoint that lacks parameters
            some = ", ".join(sorted(missing)[:5])
            return (
                f"{len(missing)} of {len(wanted)} parameters of {type(self._model).__name__} are "
                f"in none of the {len(tensors)} tensors ({some}): {PUBLISH_LIKE}"
            )
        return ""

    def record(self, tensors: Mapping[str, Signature]) -> Recording:
        """Return which part of each tensor this rank needs; `load(recording.pairs(...))` loads it.

        `Recording.apply` cannot be used, since vLLM post-processes the loaded tensors.

        Args:
            tensors: Dtype and shape of each tensor that will be published, by name; `rehearse` must
                have accepted them.
        """

        def load_weights(pairs: Tensors) -> None:
            self._model.load_weights(pairs)
            for layer in self._model.modules():
                layerwise.get_layerwise_info(layer).loaded_weights.clear()

        with self._rehearsal():
            recording = record(self._model, load_weights, tensors)
        return replace(recording, ordinary=frozenset(recording.part))

    @contextmanager
    def _rehearsal(self) -> Generator[None]:
        """Return a context manager in which loads complete no layer, and which then undoes them."""
        torchao = getattr(self._model, "_do_torchao_reload", False)
        with set_current_vllm_config(self._vllm_config):
            layerwise.initialize_layerwise_reload(self._model)
            in_place = self._in_place()
            try:
                for layer in self._model.modules():
                    layerwise.get_layerwise_info(layer).load_numel = -math.inf  # never complete
                yield
            finally:
                self._put_back(in_place)
                self._model._do_torchao_reload = torchao  # noqa: SLF001 - as it was

    def make_ready(self, staged: Staged) -> None:
        """Pin the version's memory, so that the GPU can copy from it directly."""
        if self._device.type == "cuda":
            staged.pin(self._device)

    @property
    def _quantised(self) -> bool:
        return getattr(self._model_config, "quantization", None) is not None

    def load(self, pairs: Tensors) -> None:
        """Load a version, and wait until the device has all of its values.

        Args:
            pairs: (name, tensor) pairs; to load only parts, those that `Recording.pairs` yields.

        Raises:
            UnchangedError: The version cannot be loaded, and the model is unchanged.
            LoadError: The version was partly loaded.
        """
        progress = _Progress()
        with set_current_vllm_config(self._vllm_config), reloading(self._model, self._device):
            in_place = self._in_place()
            try:
                self._model.load_weights(progress.track(iter(pairs)))
                layerwise.finalize_layerwise_reload(self._model, self._model_config)
            except BaseException as error:
                changed = self._put_back(in_place)
                text = progress.describe(self._model, error)
                if not isinstance(error, Exception):
                    raise
                if not changed:
                    raise UnchangedError(f"{text}; nothing was changed") from error
                raise LoadError(
                    f"{text}; the model is BROKEN: {changed} of its layers have the new weights, "
                    "the others the old ones. Use none of its outputs, and publish the whole model "
                    "again, which repairs it; or restart the server"
                ) from error
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def _in_place(self) -> InPlace:
        """Return each layer's tensors that a reload does not move to the meta device, with copies.

        Biases are such tensors: vLLM loads them in place, before the layer is complete.
        """
        return {
            layer: [(each, each.detach().clone()) for each in _own(layer) if not each.is_meta]
            for layer in self._model.modules()
        }

    def _put_back(self, in_place: InPlace) -> int:
        """Restore the parameters of layers that are not loaded; return how many are loaded."""
        loaded = 0
        for layer in self._model.modules():
            info = layerwise.get_layerwise_info(layer)
            if info.can_load():
                if info.kernel_tensors is not None:
                    layerwise._place_kernel_tensors(layer, info)  # noqa: SLF001 - as `finalize`
                info.reset()
                for tensor, before in in_place[layer]:
                    tensor.data.copy_(before)
            elif any(True for _ in layer.parameters(recurse=False)):
                loaded += 1
        return loaded


@contextmanager
def reloading(model: torch.nn.Module, device: torch.device) -> Generator[None]:
    """Return a context manager for a layer-wise reload that also updates packed weights.

    The reload begins at the start of the block; the caller must finish it inside the block.
    """
    ties = _ties(model) if device.type == "cpu" else []
    layerwise.initialize_layerwise_reload(model)
    for owners in ties:
        _load_together(owners)
    with ExitStack() as undo:
        if device.type == "cpu":
            for layer in model.modules():
                if hasattr(method := getattr(layer, "quant_method", None), "moe_kernel"):
                    undo.enter_context(_packing_experts(method))
        yield


def _own(layer: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from layer.parameters(recurse=False)
    yield from layer.buffers(recurse=False)


Owners = list[tuple[torch.nn.Module, str]]


def _ties(model: torch.nn.Module) -> list[Owners]:
    """Return, for each parameter that several layers share, its owners: (layer, name) pairs.

    In a tied model, for example, embedding and head share a parameter.
    """
    found: dict[int, Owners] = {}
    for layer in model.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            found.setdefault(id(parameter), []).append((layer, name))
    return [owners for owners in found.values() if len(owners) > 1]


def _load_together(owners: Owners) -> None:
    """Make a tensor that is loaded into one of these layers load into all of them.

    The reload gives each layer a parameter of its own, but the checkpoint has only one tensor. vLLM
    would not process the other layers: a head would compute with its old packed copy.
    """
    parameters = [getattr(layer, name) for layer, name in owners]
    loaders = [(p, p.weight_loader) for p in parameters if p.is_meta]
    for parameter, loader in loaders:
        others = [(other, load) for other, load in loaders if other is not parameter]
        parameter.weight_loader = _with_others(loader, others)


def _with_others(
    loader: Callable[..., object], others: list[tuple[torch.Tensor, Callable[..., object]]]
) -> Callable[..., object]:
    # Return a loader that also runs the other loaders, each with its own parameter.
    @wraps(loader)  # vLLM looks at the name and `__wrapped__` of loaders
    def load(parameter: torch.Tensor, *args: Any, **named: Any) -> object:
        for other, load_other in others:
            load_other(other, *args, **named)
        return loader(parameter, *args, **named)

    return load


@contextmanager
def _packing_experts(method: Any) -> Generator[None]:
    """Return a context manager during which vLLM packs experts whenever it processes them.

    vLLM packs experts only when it creates their kernel, the first time. Later it would copy the
    loaded tensors over the packed ones. So the kernel is removed before each processing.
    """
    process = method.process_weights_after_loading

    def as_at_first(layer: torch.nn.Module) -> None:
        method.moe_kernel = None
        process(layer)

    method.process_weights_after_loading = as_at_first
    try:
        yield
    finally:
        # Layers may share `method`, whose attribute may then be removed already.
        vars(method).pop("process_weights_after_loading", None)


def _plain(name: str) -> str:
    """Return a parameter's name without the parts that only some of vLLM's lists of names have.

    vLLM adds `base_layer` in layers that may get adapters, and `routed_experts` in experts.
    """
    return name.replace(".base_layer.", ".").replace(".routed_experts.", ".")


class _Progress:
    """Records which tensor is being loaded, for error texts."""

    def __init__(self) -> None:
        self._name, self._shown = "", ""

    def track(
        self, pairs: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in pairs:
            self._name = name
            self._shown = f"{name!r} ({tensor.dtype}, {list(tensor.shape)})"
            yield name, tensor
        self._name = ""

    def describe(self, model: torch.nn.Module, error: BaseException) -> str:
        where = f" {self._shown}" if self._name else ""
        text = " ".join(f"{type(error).__name__}: {error}".split())[:1000]
        return f"{type(model).__name__} cannot load{where}: {text}"


class _CastGuard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Rejects copies between plain and quantised dtypes, for which torch would convert values."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func is torch.ops.aten.copy_.default:
            into, given = args[0].dtype, args[1].dtype
            if given not in SCALES and (into in PLAIN) != (given in PLAIN):
                raise TypeError(f"{given} is published where the model holds {into}")
        return func(*args, **(kwargs or {}))


def _zeros(tensors: Mapping[str, Signature]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, zeros) for each signature; the zeros use no memory."""
    for name, (dtype, shape) in tensors.items():
        sizes = [*shape]
        if dtype_named(dtype).kind == "packed":
            sizes[-1] //= 2  # an element of torch's packed dtype has two values
        yield name, torch.zeros((), dtype=torch_dtype(dtype)).expand(sizes)
