"""Publishes from the `Trainer` of Lightning (`pip install 'weightbus[training]'`).

Trainer(callbacks=[PublishWeights("tcp://127.0.0.1:5555", every=100)])
"""

from collections.abc import Callable
from typing import Any, Unpack

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy

from ..publisher import Publisher
from ..publishing.options import PublishOptions
from .publishing import StepCallback, refuse_shards


def _whole(module: Any) -> Any:
    return module


class PublishWeights(StepCallback, Callback):
    """Publishes a module at every Nth step of the optimizers, from the first process.

    Sharded models (FSDP, model parallelism, DeepSpeed's ZeRO 3) are rejected when training begins,
    with a `StateError`: no process has all of their weights.

    Args:
        publisher: A publisher, which stays open, or the address of a new publisher, which closes
            when the training is over.
        model: The model's id on the bus.
        every: Steps of the optimizers between two versions.
        part: Returns the part of the `LightningModule` to publish, for example
            `lambda module: module.actor`.
        **options: Keywords of `Publisher.publish`, such as `timeout` in seconds.
    """

    def __init__(
        self,
        publisher: Publisher | str,
        model: str = "policy",
        *,
        every: int = 1,
        part: Callable[[Any], object] = _whole,
        **options: Unpack[PublishOptions],
    ) -> None:
        super().__init__(publisher, model, every=every, **options)
        self._part = part

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Publish the initial weights."""
        strategy = trainer.strategy
        zero3 = isinstance(strategy, DeepSpeedStrategy) and strategy.zero_stage_3
        if zero3 or isinstance(strategy, FSDPStrategy | ModelParallelStrategy):
            refuse_shards(type(strategy).__name__)
        if trainer.is_global_zero:
            self._steps.begin(trainer.global_step, self._part(pl_module))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Publish if `every` steps have passed. (Several batches may make one step.)"""
        if trainer.is_global_zero:
            self._steps.step(trainer.global_step, self._part(pl_module))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Publish the final weights, and wait until the workers have them.

        This is the last hook of a fit. In the earlier hooks `on_train_end` and `on_fit_end`, other
        callbacks and the module itself still change weights: `StochasticWeightAveraging` and
        `WeightAveraging` then put their averages into the model.
        """
        if trainer.is_global_zero and self._steps.begun:
            self._steps.end(trainer.global_step, self._part(pl_module))

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Stop publishing, since the training failed."""
        self._steps.close()
