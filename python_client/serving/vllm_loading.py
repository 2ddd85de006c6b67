# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
"""Loading a version into a model of vLLM's: layer by layer, from views of the bus's memory.

vLLM's layer-wise reload puts the parameters on the meta device and collects what is loaded for a
layer. Once it has all of it, it makes that layer's parameters, loads and post-processes them, and
copies them to where they were before: so one layer at a time is there twice. What it collects are
views of the version, which stays as it is until `load` returns.

On a processor vLLM's layers also hold what they have derived from their weights: packed copies, by
which they compute. Two of these its reload leaves as they were, and so the model would answer as
neither the old weights nor the new ones; `reloading` has vLLM make them anew.

To rehearse is to load zeros of the same names, dtypes and shapes, with every layer held back from
being made, and to put all parameters back in their places. So names, shapes and dtypes are refused
before anything is published, and not when half of the model is loaded.
"""

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import layerwise

from ...codecs.dtypes import dtype_named, torch_dtype
from ...codecs.errors import WeightBusError
from ...codecs.layout import Signature
from ..applying import Staged
from ..loading import Pairs, UnchangedError
from .vllm_proof import prove

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

PLAIN = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
SCALES = {getattr(torch, "float8_e8m0fnu", None)}  # numbers as they are: powers of two
PUBLISH_LIKE = (
    "publish a model of the kind that the server runs, under the names and dtypes of its checkpoint"
)


class LoadError(WeightBusError):
    """A version was loaded in part: the model holds parts of two."""


class LayerwiseLoader:
    """Loads versions into one model of vLLM's.

    Args:
        model, model_config, vllm_config, device: As a weight transfer engine of vLLM's has them.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        model_config: "ModelConfig",
        vllm_config: "VllmConfig",
        device: torch.device,
    ) -> None:
        self._device = torch.device(device)
        self._model: Any = model  # what has vLLM's methods
        self._model_config, self._vllm_config = model_config, vllm_config

    def prove(self) -> None:
        """Prove once that the model computes by what is loaded into it; see `vllm_proof`.

        Raises:
            ReloadError: It does not.
        """
        prove(self._model, self._vllm_config, self._device, self._load)

    def rehearse(self, tensors: Mapping[str, Signature]) -> str:
        """Say why tensors of these names, dtypes and shapes cannot be loaded."""
        at = _At()
        # A layer that may have adapters is one around the checkpoint's, and not in its names.
        wanted = {name.replace(".base_layer.", ".") for name, _ in self._model.named_parameters()}
        torchao = getattr(self._model, "_do_torchao_reload", False)
        with set_current_vllm_config(self._vllm_config):
            layerwise.initialize_layerwise_reload(self._model)
            try:
                for layer in self._model.modules():
                    layerwise.get_layerwise_info(layer).load_numel = -math.inf  # never complete
                with _Fits():  # type: ignore[no-untyped-call]
                    loaded = self._model.load_weights(at.following(_zeros(tensors)))
            except Exception as error:
                return f"{at.words(self._model, error)}: {PUBLISH_LIKE}"
            finally:
                self._put_back()
                self._model._do_torchao_reload = torchao  # noqa: SLF001 - as it was
        missing = wanted - loaded if isinstance(loaded, set) and not self._quantised else set()
        if missing:  # the rule by which vLLM itself takes a checkpoint
            some = ", ".join(sorted(missing)[:5])
            return (
                f"{len(missing)} of {len(wanted)} parameters of {type(self._model).__name__} are "
                f"in none of the {len(tensors)} tensors ({some}): {PUBLISH_LIKE}"
            )
        return ""

    def make_ready(self, staged: Staged) -> None:
        """Have the device copy from where the version lies directly."""
        if self._device.type == "cuda":
            staged.pin(self._device)

    @property
    def _quantised(self) -> bool:
        return getattr(self._model_config, "quantization", None) is not None

    def load(self, pairs: Pairs) -> None:
        """Load a version, and wait until the device has it.

        Raises:
            UnchangedError: It cannot be loaded, and nothing was changed.
            LoadError: It was loaded in part.
        """
        self._load(pairs)

    def _load(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        at = _At()
        with set_current_vllm_config(self._vllm_config), reloading(self._model, self._device):
            try:
                self._model.load_weights(at.following(iter(pairs)))
                layerwise.finalize_layerwise_reload(self._model, self._model_config)
            except BaseException as error:
                changed = self._put_back()
                words = at.words(self._model, error)
                if not isinstance(error, Exception):
                    raise
                if not changed:
                    raise UnchangedError(f"{words}; nothing was changed") from error
                raise LoadError(
                    f"{words}; the model is BROKEN: {changed} of its layers have the new weights, "
                    "the others the old ones. Use none of its outputs, and publish the whole model "
                    "again, which repairs it; or restart the server"
                ) from error
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def _put_back(self) -> int:
        """Put the parameters of every layer that is not loaded back; return how many were."""
        loaded = 0
        for layer in self._model.modules():
            info = layerwise.get_layerwise_info(layer)
            if info.can_load():
                if info.kernel_tensors is not None:
                    layerwise._place_kernel_tensors(layer, info)  # noqa: SLF001 - as `finalize`
                info.reset()
            elif any(True for _ in layer.parameters(recurse=False)):
                loaded += 1
        return loaded


@contextmanager
def reloading(model: torch.nn.Module, device: torch.device) -> Generator[None]:
    """Begin a layer-wise reload that also makes anew what layers have derived from their weights.

    Who loads ends the reload, in this block.
    """
    ties = _ties(model) if device.type == "cpu" else []
    layerwise.initialize_layerwise_reload(model)
    for places in ties:
        _pass_on(places)
    with ExitStack() as undo:
        if device.type == "cpu":
            for layer in model.modules():
                if hasattr(method := getattr(layer, "quant_method", None), "moe_kernel"):
                    undo.enter_context(_packing_experts(method))
        yield


Places = list[tuple[torch.nn.Module, str]]


def _ties(model: torch.nn.Module) -> list[Places]:
    """Return parameters that several layers share, such as embedding and head of a tied model."""
    found: dict[int, Places] = {}
    for layer in model.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            found.setdefault(id(parameter), []).append((layer, name))
    return [places for places in found.values() if len(places) > 1]


def _pass_on(places: Places) -> None:
    """Have what is loaded for one of these layers be loaded for all of them.

    The reload gives each layer a parameter of its own. Only one is in the checkpoint, so it takes
    the others for not loaded, and does not process them: a head would compute by its old copy.
    """
    parameters = [getattr(layer, name) for layer, name in places]
    loaders = [(p, p.weight_loader) for p in parameters if p.is_meta]
    for parameter, loader in loaders:
        others = [(other, load) for other, load in loaders if other is not parameter]
        parameter.weight_loader = _and_others(loader, others)


def _and_others(
    loader: Callable[..., object], others: list[tuple[torch.Tensor, Callable[..., object]]]
) -> Callable[..., object]:
    @wraps(loader)  # so that vLLM finds its own by this one's name and `__wrapped__`
    def load(parameter: torch.Tensor, *args: Any, **named: Any) -> object:
        for other, load_other in others:
            load_other(other, *args, **named)
        return loader(parameter, *args, **named)

    return load


@contextmanager
def _packing_experts(method: Any) -> Generator[None]:
    """Have experts be packed each time that they are processed.

    vLLM packs them as it makes their kernel, which it does once; later it copies what was loaded
    over what was packed. Without a kernel, each time is the first.
    """
    process = method.process_weights_after_loading

    def as_at_first(layer: torch.nn.Module) -> None:
        method.moe_kernel = None
        process(layer)

    method.process_weights_after_loading = as_at_first
    try:
        yield
    finally:
        vars(method).pop("process_weights_after_loading", None)  # several layers may share it


class _At:
    """Where among the tensors loading is."""

    def __init__(self) -> None:
        self._name, self._shown = "", ""

    def following(
        self, pairs: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in pairs:
            self._name = name
            self._shown = f"{name!r} ({tensor.dtype}, {list(tensor.shape)})"
            yield name, tensor
        self._name = ""

    def words(self, model: torch.nn.Module, error: BaseException) -> str:
        where = f" {self._shown}" if self._name else ""
        said = " ".join(f"{type(error).__name__}: {error}".split())[:1000]
        return f"{type(model).__name__} cannot load{where}: {said}"


class _Fits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses copies that would take a number for another: torch itself converts anything."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func is torch.ops.aten.copy_.default:
            into, given = args[0].dtype, args[1].dtype
            if given not in SCALES and (into in PLAIN) != (given in PLAIN):
                raise TypeError(f"{given} is published where the model holds {into}")
        return func(*args, **(kwargs or {}))


def _zeros(tensors: Mapping[str, Signature]) -> Iterator[tuple[str, torch.Tensor]]:
    """Make tensors that take no memory."""
    for name, (dtype, shape) in tensors.items():
        sizes = [*shape]
        if dtype_named(dtype).kind == "packed":
            sizes[-1] //= 2  # torch counts pairs
        yield name, torch.zeros((), dtype=torch_dtype(dtype)).expand(sizes)
