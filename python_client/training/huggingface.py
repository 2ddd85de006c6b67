"""Publishes from the `Trainer` of Hugging Face transformers (`pip install 'weightbus[training]'`).

Trainer(model=model, args=args, callbacks=[PublishWeights("tcp://127.0.0.1:5555", every=100)])
"""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from .publishing import StepCallback, refuse_shards


class PublishWeights(StepCallback, TrainerCallback):
    """Publishes the trained model at every Nth step of the optimizer, from the first process.

    Sharded models (FSDP, DeepSpeed's ZeRO 3) are rejected when training begins, with a
    `StateError`: no process has all of their weights.

    Args:
        publisher: A publisher, which stays open, or the address of a new publisher, which closes
            when the training is over.
        model: The model's id on the bus.
        every: Steps of the optimizer between two versions.
        **options: Keywords of `Publisher.publish`, such as `timeout` in seconds.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Publish the initial weights."""
        if args.fsdp or is_deepspeed_zero3_enabled():  # type: ignore[no-untyped-call]
            refuse_shards("FSDP" if args.fsdp else "ZeRO 3")
        if state.is_world_process_zero:
            self._steps.begin(state.global_step, kwargs.get("model"))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Publish if `every` steps have passed."""
        if state.is_world_process_zero:
            self._steps.step(state.global_step, kwargs.get("model"))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Publish the final weights, and wait until the workers have them."""
        if state.is_world_process_zero:
            self._steps.end(state.global_step, kwargs.get("model"))
