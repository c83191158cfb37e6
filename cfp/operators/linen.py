"""A module of `flax.linen` for each operator.

    from cfp.operators import linen

    norm = linen.LayerNorm(options={"eps": 1e-6})
    attention = linen.GPTAttention(implementation="cudnn")

Parameters are float32 and have the names and shapes of the operator's arguments, see
``python -m cfp.operators --list``; sizes that the inputs do not say are attributes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from types import new_class
from typing import TYPE_CHECKING, Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from cfp.operators.layers import LAYERS, LayerForm, initial


class Layer(nn.Module):
    """An operator as a module; the others are made of it.

    Attributes:
        implementation: by name; the first that takes the arguments, if not given.
        options: of the operator.
        dtype: that everything is computed in; by default that of the inputs.
        param_dtype: of the parameters.
    """

    implementation: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: Any = None
    param_dtype: Any = jnp.float32

    form: ClassVar[LayerForm]

    @nn.compact
    def __call__(self, *inputs: Array) -> Array:
        """Calls the operator.

        Raises:
            OperatorError: the inputs do not fit, or no implementation takes them.
        """
        form = self.form
        names = (one.name for one in form.inputs)
        dims = form.operator.bind(dict(zip(names, inputs, strict=True)))
        dims |= {d: getattr(self, name) for name, d in form.sizes_of_no_input.items()}
        parameters = {}
        for one in form.parameters:

            def begin(key: Array, dtype: Any, one: Any = one) -> Any:
                return initial(one, key, dims, dtype)

            parameters[one.name] = self.param(one.name, begin, self.param_dtype)
        return form.apply(
            parameters,
            inputs,
            dtype=self.dtype,
            implementation=self.implementation,
            options=self.options,
        )


def _layer(name: str) -> Any:
    """The module of a layer, with an attribute for each size that it is not told."""
    form = LAYERS[name]
    sizes = form.sizes_of_no_input
    body = {
        "__doc__": form.text(Attributes=sizes),
        "__module__": __name__,
        "__annotations__": dict.fromkeys(sizes, int),
        "form": form,
    }
    return new_class(name, (Layer,), {"kw_only": True}, lambda new: new.update(body))


# A class for each layer, by its name.
globals().update({name: _layer(name) for name in LAYERS})
if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
