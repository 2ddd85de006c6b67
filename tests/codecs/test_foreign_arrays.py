"""Arrays of other frameworks that numpy can view are sources, and no targets."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weightbus import Publisher, StateError, Subscriber
from weightbus.codecs.state import state_of

SECONDS = 60.0


class Variable:
    """As those of Keras and Flax are: numpy views what it holds."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._value, name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self._value, dtype, copy=copy)


def test_arrays_of_jax_are_published_and_not_copied_before() -> None:
    tree = {"params": {"dense": {"kernel": jnp.arange(6.0).reshape(2, 3), "bias": jnp.ones(3)}}}
    state = state_of(tree)
    kernel = state.tensors["params.dense.kernel"]
    assert kernel.__array_interface__["data"][0] == (  # type: ignore[union-attr]
        tree["params"]["dense"]["kernel"].unsafe_buffer_pointer()
    )
    target = {
        "params.dense.kernel": np.zeros((2, 3), np.float32),
        "params.dense.bias": np.zeros(3, np.float32),
    }
    with Publisher() as publisher, Subscriber(publisher.address, {"m": target}) as worker:
        worker.start()
        publisher.publish("m", tree, expect=1, timeout=SECONDS)
        assert (target["params.dense.kernel"] == np.arange(6.0).reshape(2, 3)).all()
        tree = jax.tree.map(lambda x: x + 1, tree)  # other arrays, elsewhere
        publisher.publish("m", tree, expect=1, timeout=SECONDS)
        assert (target["params.dense.bias"] == 2).all()


def test_bfloat16_and_scalars() -> None:
    state = state_of({"a": jnp.ones(2, jnp.bfloat16), "b": jnp.float32(3.0)})
    assert state.signatures == {"a": ("BF16", (2,)), "b": ("F32", ())}


def test_a_variable_is_what_it_holds() -> None:
    held = np.ones(3, np.float32)
    assert np.shares_memory(np.asarray(state_of({"v": Variable(held)}).tensors["v"]), held)


def test_a_tied_array_is_one() -> None:
    shared = jnp.ones(3)
    assert state_of({"a": shared, "b": shared}).aliases == {"b": "a"}


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ({"k": jax.random.key(0)}, r"k: a \w+ that numpy cannot view"),
        ({"v": Variable(np.array([None]))}, "v: a Variable of objects cannot travel"),
        ([jnp.ones(2)], r"a list cannot travel.*\{str\(n\): x for n, x in enumerate"),
        ({"a": [jnp.ones(2)]}, r"a: a list cannot travel.*enumerate"),
        ({"a": None}, "a: a NoneType cannot travel"),
    ],
)
def test_what_has_no_values_is_refused_with_the_way_out(source: Any, wanted: str) -> None:
    with pytest.raises(StateError, match=wanted):
        state_of(source)


def test_a_deleted_array_is_refused_by_name() -> None:
    gone = jnp.ones(3)
    gone.delete()
    with pytest.raises(StateError, match=r"w: a .* that numpy cannot view .*deleted"):
        state_of({"w": gone})


def test_they_are_no_targets() -> None:
    with (
        Publisher() as publisher,
        Subscriber(publisher.address, {"m": {"w": jnp.zeros(3)}}, name="w0") as worker,
    ):
        worker.start()
        done = publisher.publish_async("m", {"w": jnp.ones(3)}, expect=1, timeout=SECONDS)
        detail = str(done.exception())
    assert "w: a ArrayImpl is not written into; give np.array(x)" in detail
