"""A module of `flax.linen` for each operator.

    from cfp.operators import linen

    norm = linen.LayerNorm(options={"eps": 1e-6})
    attention = linen.GPTAttention(implementation="cudnn")

Sizes that the inputs do not say are attributes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from cfp.operators.layers import Form, classes, initial


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

    form: ClassVar[Form]

    @nn.compact
    def __call__(self, *inputs: Array) -> Array:
        """Calls the operator.

        Raises:
            CfpError: the inputs do not fit, or no implementation takes them.
        """
        form, dtype = self.form, self.param_dtype
        names = (one.name for one in form.inputs)
        dims = form.operator.bind(dict(zip(names, inputs, strict=True)))
        dims |= {d: getattr(self, name) for name, d in form.sizes_of_no_input.items()}
        parameters = {
            one.name: self.param(
                one.name, lambda key, one=one: initial(one, key, dims, dtype)
            )
            for one in form.parameters
        }
        return form.apply(self, parameters, *inputs)


# A class for each layer, by its name.
globals().update(classes(Layer, lambda form: form.sizes_of_no_input, kw_only=True))
if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
