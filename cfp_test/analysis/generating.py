"""Steps that generate tokens in a loop, with a cache of what was computed for them."""

import jax
import jax.numpy as jnp

from cfp_test.programs.common import normal

ROWS, LENGTH, HEADS, SIZE, WORDS, LAYERS, TOKENS, PROMPT = 8, 6, 4, 3, 32, 2, 3, 2
WIDTH = HEADS * SIZE


def layer_params(seed, heads=HEADS):
    shapes = {
        "q": (WIDTH, WIDTH),
        "k": (WIDTH, heads * SIZE),
        "v": (WIDTH, heads * SIZE),
        "o": (WIDTH, WIDTH),
        "up": (WIDTH, 2 * WIDTH),
        "down": (2 * WIDTH, WIDTH),
    }
    return {
        name: normal(seed + i, *shape) for i, (name, shape) in enumerate(shapes.items())
    }


def heads_of(p, x):
    return [(x @ p[name]).reshape(*x.shape[:-1], -1, SIZE) for name in "qkv"]


def weighted(q, keys, values, seen):
    q = q.reshape(len(q), keys.shape[2], -1, SIZE)
    scores = jnp.where(seen, jnp.einsum("bhgd,bthd->bhgt", q, keys), -1e9)
    out = jnp.einsum("bhgt,bthd->bhgd", jax.nn.softmax(scores), values)
    return out.reshape(len(q), WIDTH)


def write(cache, new, position):
    return jax.lax.dynamic_update_slice(cache, new[:, None], (0, position, 0, 0))


def written_first(p, x, cache, position):
    """Attention to a cache that has the new token."""
    q, k, v = heads_of(p, x)
    keys, values = write(cache["k"], k, position), write(cache["v"], v, position)
    seen = jnp.arange(LENGTH) <= position
    return weighted(q, keys, values, seen), {"k": keys, "v": values}


def read_first(p, x, cache, position):
    """Attention to a cache that gets the new token afterwards."""
    q, k, v = heads_of(p, x)
    out = weighted(q, cache["k"], cache["v"], jnp.arange(LENGTH) < position)
    new = {"k": write(cache["k"], k, position), "v": write(cache["v"], v, position)}
    return out + v.reshape(len(x), WIDTH), new


def rolling(p, x, cache, position):
    """Attention to the last tokens."""
    q, k, v = heads_of(p, x)
    new = {
        name: jnp.concatenate([cache[name][:, 1:], one[:, None]], 1)
        for name, one in (("k", k), ("v", v))
    }
    return weighted(q, new["k"], new["v"], jnp.arange(LENGTH) >= LENGTH - position), new


def linear(p, x, cache, position):
    """An attention that keeps sums of products."""
    q, k, v = heads_of(p, x)
    sums = 0.9 * cache["sums"] + jnp.einsum("bhd,bhe->bhde", k, v)
    return jnp.einsum("bhd,bhde->bhe", q, sums).reshape(len(x), WIDTH), {"sums": sums}


def recurrent(p, x, cache, position):
    """A cell with a hidden state of its own for each layer."""
    hidden = jnp.tanh(x @ p["q"] + cache["hidden"] @ p["k"])
    return hidden, {"hidden": hidden}


def through(attention, p, x, cache, position):
    out, cache = attention(p, x, cache, position)
    x = x + out @ p["o"]
    return x + jnp.tanh(x @ p["up"]) @ p["down"], cache


def unrolled(attention, layers, x, caches, position):
    found = []
    for p, cache in zip(layers, caches, strict=True):
        x, cache = through(attention, p, x, cache, position)
        found.append(cache)
    return x, found


def scanned(attention, layers, x, caches, position):
    """Layers in a scan, which takes each one's cache and stacks the new ones."""

    def body(x, layer):
        return through(attention, layer[0], x, layer[1], position)

    return jax.lax.scan(body, x, (layers, caches))


def one_of(caches, i):
    return jax.tree.map(lambda cache: cache[i], caches)


def carried(attention, layers, x, caches, position):
    """Layers in a scan that carries all caches."""

    def body(carry, layer):
        x, caches = carry
        p, i = layer
        x, new = through(attention, p, x, one_of(caches, i), position)
        caches = jax.tree.map(
            lambda c, n: jax.lax.dynamic_update_index_in_dim(c, n, i, 0), caches, new
        )
        return (x, caches), None

    return jax.lax.scan(body, (x, caches), (layers, jnp.arange(LAYERS)))[0]


def likeliest(scores, position):
    return jnp.argmax(scores, -1).astype(jnp.int32)


def sampled(scores, position):
    key = jax.random.fold_in(jax.random.key(0), position)
    return jax.random.categorical(key, scores).astype(jnp.int32)


def empty(heads=HEADS):
    return {name: jnp.zeros((ROWS, LENGTH, heads, SIZE)) for name in "kv"}


def make(attention=written_first, stack=unrolled, pick=likeliest, cache=empty, heads=4):
    """A step that generates tokens, with its arguments."""
    layers = [layer_params(10 * i, heads) for i in range(LAYERS)]
    caches = [cache() for _ in range(LAYERS)]
    if stack is not unrolled:
        layers, caches = (
            jax.tree.map(lambda *a: jnp.stack(a), *c) for c in (layers, caches)
        )
    params = {"embed": normal(99, WORDS, WIDTH) * 3, "layers": layers}

    def one(params, cache, token, position):
        x = params["embed"][token]
        x, cache = stack(attention, params["layers"], x, cache, position)
        return cache, pick(x @ params["embed"].T, position), position + 1

    def generate(params, cache, token, position):
        def body(carry, _):
            carry = one(params, *carry)
            return carry, carry[1]

        carry = cache, token, position
        return jax.lax.scan(body, carry, None, length=TOKENS)

    args = params, caches, jnp.arange(ROWS, dtype=jnp.int32), jnp.int32(1)
    return generate, args, one


def donating(*which, **how):
    generate, args, _ = make(*which, **how)
    return generate, args, {"donate_argnums": (1, 2, 3)}


def one_token(**how):
    _, args, one = make(**how)
    return one, args, {"donate_argnums": (1, 2, 3)}


def in_one_argument(**how):
    """Weights and caches in one dict, as modules have them."""
    generate, (params, cache, *others), _ = make(**how)

    def step(variables, token, position):
        carry, out = generate(variables["params"], variables["cache"], token, position)
        return {**variables, "cache": carry[0]}, *carry[1:], out

    return step, ({"params": params, "cache": cache}, *others)


def in_state(**how):
    """All that changes in one dict."""
    generate, (params, cache, token, position), _ = make(**how)

    def step(state, params):
        carry, out = generate(params, state["cache"], state["token"], state["position"])
        return dict(zip(("cache", "token", "position"), carry, strict=True)), out

    return step, ({"cache": cache, "token": token, "position": position}, params)


def behind_a_prompt():
    """A prompt is read at once, and what follows it is generated, in one step."""
    generate, (params, cache, *_), _ = make()
    prompts = (jnp.arange(ROWS * PROMPT, dtype=jnp.int32) % WORDS).reshape(ROWS, PROMPT)

    def step(prompts, params):
        x = params["embed"][prompts]
        filled = []
        for p, layer in zip(params["layers"], cache, strict=True):
            q, k, v = heads_of(p, x)
            out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
            x = x + out.reshape(x.shape) @ p["o"]
            x = x + jnp.tanh(x @ p["up"]) @ p["down"]
            pairs = (layer["k"], k), (layer["v"], v)
            keys, values = (
                jax.lax.dynamic_update_slice(c, n, (0, 0, 0, 0)) for c, n in pairs
            )
            filled.append({"k": keys, "v": values})
        first = likeliest(x[:, -1] @ params["embed"].T, 0)
        (_, _, _), out = generate(params, filled, first, jnp.int32(PROMPT))
        return out.T

    return step, (prompts, params)


def sums():
    return {"sums": jnp.zeros((ROWS, HEADS, SIZE, SIZE))}


def hidden():
    return {"hidden": jnp.zeros((ROWS, WIDTH))}


GENERATING = {
    "written first": donating,
    "read first": lambda: donating(attention=read_first),
    "rolling": lambda: donating(attention=rolling),
    "grouped queries": lambda: donating(heads=2, cache=lambda: empty(2)),
    "sampled": lambda: donating(pick=sampled),
    "linear": lambda: donating(attention=linear, cache=sums),
    "recurrent": lambda: donating(attention=recurrent, cache=hidden),
    "scanned layers": lambda: donating(stack=scanned),
    "carried layers": lambda: donating(stack=carried),
    "read first, scanned layers": lambda: donating(attention=read_first, stack=scanned),
    "linear, scanned layers": lambda: donating(linear, scanned, cache=sums),
    "one token, scanned layers": lambda: one_token(stack=scanned),
    "in one argument": in_one_argument,
    "in one argument, scanned layers": lambda: in_one_argument(stack=scanned),
    "in state, scanned layers": lambda: in_state(stack=scanned),
    "behind a prompt": behind_a_prompt,
}
