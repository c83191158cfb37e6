"""A module of `flax.nnx` for each operator.

from cfp.operators import nnx as operators

norm = operators.LayerNorm(1024, options={"eps": 1e-6}, rngs=nnx.Rngs(0))
attention = operators.GPTAttention(implementation="cudnn")
"""

from __future__ import annotations

from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jax import Array

from cfp.operators.layers import Form, classes, initial


class Layer(nnx.Module):
    """An operator as a module; the others are made of it.

    Args:
        given: sizes of the parameters, in the order of the form.
        implementation: by name; the first that takes the arguments, if not given.
        options: of the operator.
        dtype: that everything is computed in; by default that of the inputs.
        param_dtype: of the parameters.
        rngs: for the parameters, if there are any.
        named: sizes by name.
    """

    form: ClassVar[Form]

    def __init__(
        self,
        *given: int,
        implementation: str | None = None,
        options: Any = (),
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs | None = None,
        **named: int,
    ):
        sizes = self.form.sizes
        names = [Parameter(one, Parameter.POSITIONAL_OR_KEYWORD) for one in sizes]
        bound = Signature(names).bind(*given, **named).arguments
        dims = {dim: bound[name] for name, dim in sizes.items()}
        self.implementation, self.dtype = implementation, dtype
        self.options = tuple(dict(options).items())
        for one in self.form.parameters:
            if rngs is None:
                raise TypeError(f"{type(self).__name__} needs rngs=nnx.Rngs(...)")
            value = initial(one, rngs.params(), dims, param_dtype)
            setattr(self, one.name, nnx.Param(value))

    def __call__(self, *inputs: Array) -> Array:
        """Calls the operator.

        Raises:
            CfpError: the inputs do not fit, or no implementation takes them.
        """
        names = [one.name for one in self.form.parameters]
        parameters = {name: getattr(self, name)[...] for name in names}
        return self.form.apply(self, parameters, *inputs)


# A class for each layer, by its name.
globals().update(classes(Layer, lambda form: form.sizes))
if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
