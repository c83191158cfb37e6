"""A module of `flax.nnx` for each operator.

    from cfp.operators import nnx as operators

    norm = operators.LayerNorm(1024, options={"eps": 1e-6}, rngs=nnx.Rngs(0))
    attention = operators.GPTAttention(implementation="cudnn")

Parameters are float32 and have the names and shapes of the operator's arguments, see
``python -m cfp.operators --list``.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter, Signature
from types import MappingProxyType, new_class
from typing import TYPE_CHECKING, Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jax import Array

from cfp.operators.layers import LAYERS, LayerForm, initial

_NONE: Mapping[str, Any] = MappingProxyType({})


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

    form: ClassVar[LayerForm]

    def __init__(
        self,
        *given: int,
        implementation: str | None = None,
        options: Mapping[str, Any] = _NONE,
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
        self.options = tuple(options.items())
        for one in self.form.parameters:
            if rngs is None:
                raise TypeError(f"{type(self).__name__} needs rngs=nnx.Rngs(...)")
            value = initial(one, rngs.params(), dims, param_dtype)
            setattr(self, one.name, nnx.Param(value))

    def __call__(self, *inputs: Array) -> Array:
        """Calls the operator.

        Raises:
            OperatorError: the inputs do not fit, or no implementation takes them.
        """
        parameters = {
            one.name: getattr(self, one.name)[...] for one in self.form.parameters
        }
        return self.form.apply(
            parameters,
            inputs,
            dtype=self.dtype,
            implementation=self.implementation,
            options=dict(self.options),
        )


def _layer(name: str) -> Any:
    """The module of a layer."""
    form = LAYERS[name]
    body = {
        "__doc__": form.text(Args=form.sizes),
        "__module__": __name__,
        "form": form,
    }
    return new_class(name, (Layer,), exec_body=lambda new: new.update(body))


# A class for each layer, by its name.
globals().update({name: _layer(name) for name in LAYERS})
if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
