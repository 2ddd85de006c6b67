"""Generates text with the newest weights: the worker's side of fine-tuning a language model.

Weights change only between two calls of `generate`, so one version generates each sequence. Any
model with a `generate` method works, such as the models of Hugging Face transformers.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..applying.applier import Update
from ..closing import Closable
from ..settings import Settings
from ..subscriber import Subscriber


class GenerationWorker(Closable):
    """Applies the newest version to a model before each generation.

    Args:
        address: The publisher's address, or several addresses, as for a `Subscriber`.
        generator: The model; it must have the published names and dtypes.
        model: The model's id on the bus.
        on_commit: Called after new weights are applied, before the next generation. Use it to drop
            what was computed with the old weights, such as caches of prompts.
        settings: As in `Subscriber`.
        **options: Further arguments of `Subscriber`, such as `name` or `cast`.

    Raises:
        AddressError: The address is invalid.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        generator: Any,
        *,
        model: str = "policy",
        on_commit: Callable[[Update], None] | None = None,
        settings: Settings | None = None,
        **options: Any,
    ) -> None:
        self._generator, self._model = generator, model
        if on_commit is not None:
            settings = replace(settings or Settings(), on_commit=on_commit)
        self._subscriber = Subscriber(address, {model: generator}, settings=settings, **options)

    def wait_for_version(self, timeout: float) -> Update | None:
        """Wait for a newer version than the applied one; apply it, and return its `Update`.

        Return None if no such version came within `timeout` seconds.

        Raises:
            ApplyError: The version cannot be applied; the message says why.
            RefusedError: The publisher refuses this worker.
        """
        return self._subscriber.receive(timeout)

    def generate(self, *args: Any, **options: Any) -> Any:
        """Apply the newest version that has arrived, and generate.

        Raises:
            ApplyError: A version cannot be applied; the next call generates with the old weights.
            TornError: The model was partly written; each call fails until a version is applied.
        """
        self._subscriber.receive(0.0)
        with self._subscriber.reading():
            return self._generator.generate(*args, **options)

    @property
    def version(self) -> int:
        """The number of the applied version; 0: none. `generate` may first apply a newer one."""
        return self._subscriber.version(self._model)

    def close(self) -> None:
        """Disconnect from the publisher."""
        self._subscriber.close()
