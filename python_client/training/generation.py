"""Generating with the newest weights: the worker's side of fine-tuning a language model.

Weights change between two calls of `generate`, never inside one, so every sequence is of one
version. Any model with a `generate` method will do, such as those of Hugging Face transformers.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..applying import Update
from ..closing import Closable
from ..settings import Settings
from ..subscriber import Subscriber


class GenerationWorker(Closable):
    """A model whose weights are brought up to date before each generation.

    Args:
        address: The publisher's.
        generator: The model; it must have the names and dtypes that are published.
        model: What it is called on the bus.
        on_commit: Called after new weights are in place, before anything is generated with them:
            drop here what was computed with the old ones, such as caches of prompts.
        settings: As of `Subscriber`.
        **options: More of `Subscriber`, such as `name` or `cast`.

    Raises:
        AddressError: The address makes no sense.
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
        """Apply the first version, or a newer one; None if none came within `timeout` seconds.

        Raises:
            ApplyError: It cannot be applied; the text says why.
            RefusedError: The publisher refuses this worker.
        """
        return self._subscriber.receive(timeout)

    def generate(self, *args: Any, **options: Any) -> Any:
        """Take the newest version that is here, and generate.

        Raises:
            ApplyError: A version cannot be applied; the next call goes on with the old one.
            TornError: One has failed half-way; nothing can be generated until the next is applied.
        """
        self._subscriber.receive(0.0)
        with self._subscriber.reading():
            return self._generator.generate(*args, **options)

    @property
    def version(self) -> int:
        """The version that the next sequence is of, unless a newer one is here; 0 if none was."""
        return self._subscriber.version(self._model)

    def close(self) -> None:
        """Leave the publisher."""
        self._subscriber.close()
