"""Numerical programs: windows, transforms, linear algebra, higher derivatives."""

import jax
import jax.numpy as jnp

from cfp_test.programs.common import normal, squares, training


def windows_step():
    """Pooling of every kind, and its derivatives."""
    params = {"w": normal(0, 4, 8)}

    def loss(p, x):
        y = x @ p["w"]
        window, strides = (1, 2, 2, 1), (1, 2, 2, 1)
        top = jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, window, strides, "VALID")
        total = jax.lax.reduce_window(
            y, 0.0, jax.lax.add, (1, 3, 3, 1), strides, "SAME"
        )
        product = jnp.prod(y, axis=1)
        return squares(top) + squares(total) + squares(product)

    return training(loss, params, normal(1, 8, 8, 8, 4))


def linalg_step():
    """Decompositions, solvers and matrix functions."""

    def train_step(w, x):
        gram = x.T @ x + jnp.eye(8)
        q, r = jnp.linalg.qr(x @ w)
        values = jnp.linalg.eigvalsh(gram)
        singular = jnp.linalg.svd(x @ w, compute_uv=False)
        solution = jnp.linalg.solve(gram, w)
        return {
            "w": w - 0.1 * solution,
            "project": q @ (q.T @ x),
            "size": jnp.abs(r).sum(),
            "values": values,
            "singular": singular,
            "inverse": jnp.linalg.inv(gram),
            "determinant": jnp.linalg.slogdet(gram)[1],
            "exp": jax.scipy.linalg.expm(0.1 * gram),
        }

    step = train_step
    return step, (normal(0, 8, 8), normal(1, 16, 8)), {"tolerance": 1e-4}


def second_order_step():
    """A penalty on the gradient, and a product with the Hessian."""
    params = {"a": normal(0, 16, 32), "b": normal(1, 32, 8)}

    def net(p, x):
        return jnp.tanh(x @ p["a"]) @ p["b"]

    def loss(p, x):
        slope = jax.grad(lambda x: net(p, x).sum())(x)
        return squares(net(p, x)) + squares(jnp.linalg.norm(slope, axis=-1), 1.0)

    def train_step(p, v, x):
        grad, product = jax.jvp(jax.grad(lambda p: loss(p, x)), (p,), (v,))
        return jax.tree.map(lambda p, g, h: p - 0.1 * g - 0.01 * h, p, grad, product)

    v = {"a": normal(2, 16, 32), "b": normal(3, 32, 8)}
    return train_step, (params, v, normal(4, 8, 16))


def meta_learning_step():
    """A gradient through a step of gradient descent, for a batch of tasks."""
    params = {"a": normal(0, 8, 16), "b": normal(1, 16, 8)}

    def loss(p, task):
        def inner(p, data):
            return squares(jnp.tanh(data["x"] @ p["a"]) @ p["b"], data["y"])

        def one(task):
            grads = jax.grad(inner)(p, task["train"])
            fast = jax.tree.map(lambda p, g: p - 0.1 * g, p, grads)
            return inner(fast, task["test"])

        return jax.vmap(one)(task).mean()

    def data(seed):
        return {"x": normal(seed, 4, 8, 8), "y": normal(seed + 1, 4, 8, 8)}

    return training(loss, params, {"train": data(2), "test": data(4)})


def jacobian_step():
    """Forward and reverse Jacobians."""

    def train_step(w, x):
        def f(x):
            return jnp.tanh(x @ w)

        return (
            w + 0.1 * jax.jacfwd(f)(x).sum(0),
            jax.jacrev(f)(x),
            jax.hessian(lambda x: f(x).sum())(x),
        )

    return train_step, (normal(0, 8, 8), normal(1, 8))
