"""Generates with the newest weights: the worker's side of fine-tuning a language model.

Weights change between two calls of `generate`, never during one, so one version generates each
sequence. Any model with a `generate` method works, such as those of Hugging Face transformers.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..applying import Update
from ..closing import Closable
from ..settings import Settings
from ..subscriber import Subscriber


class GenerationWorker(Closable):
    """A model that applies the newest version before each generation.

    Args:
        address: The publisher's address.
        generator: The model; it must have the published names and dtypes.
        model: The model's id on the bus.
        on_commit: Called after new weights are applied, before the next generation: drop results of
            the old weights here, such as caches of prompts.
        settings: As in `Subscriber`.
        **options: Further arguments of `Subscriber`, such as `name` or `cast`.

    Raises:
        AddressError: The address is invalid.
    """

    def __init__(
        self,
        address: str,
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
        """Apply the first version, or a newer one; return None if none came in `timeout` seconds.

        Raises:
            ApplyError: The version cannot be applied; the text says why.
            RefusedError: The publisher refuses this worker.
        """
        return self._subscriber.receive(timeout)

    def generate(self, *args: Any, **options: Any) -> Any:
        """Apply the newest version that has arrived, and generate.

        Raises:
            ApplyError: A version cannot be applied; the next call generates with the old one.
            TornError: Applying failed half-way; generating fails until a version is applied.
        """
        self._subscriber.receive(0.0)
        with self._subscriber.reading():
            return self._generator.generate(*args, **options)

    @property
    def version(self) -> int:
        """The applied version, which generates next unless a newer one has arrived; 0: none."""
        return self._subscriber.version(self._model)

    def close(self) -> None:
        """Disconnect from the publisher."""
        self._subscriber.close()
