# %% [markdown]
# # Train a model on several devices
#
# For users who train on one device and have several. This tutorial runs a training
# loop on four devices, stops the run, continues it from a checkpoint, and continues it
# on two devices. The model learns to write, character by character, from a story of
# 4,000 characters.
# The model is not written for cfp, and its code does not change.
#
# You need cfp with its extra `models` ([installation](install.md)). On a machine
# without GPUs the tutorial runs on four virtual devices, in about a minute. Virtual
# devices share one CPU, so steps become no faster. With GPUs, use four.
# The tutorial is also [a notebook](tutorial/tutorial.ipynb) and
# [a program](tutorial/tutorial.py); run these in the folder of [the
# story](tutorial/mill.txt).

# %%
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

import cfp

jax.config.update("jax_num_cpu_devices", 4)  # Where there are GPUs it changes nothing.
devices = jax.devices()[:4]

# %% [markdown]
# ## The model, on one device
#
# A small transformer in flax NNX: two blocks, each of causal attention and an MLP.

# %%
text = Path("mill.txt").read_text()
characters = sorted(set(text))
tokens = np.array([characters.index(c) for c in text], np.int32)
length, rows = 64, 16


class Block(nnx.Module):
    def __init__(self, width, heads, rngs):
        self.heads = heads
        self.norm1 = nnx.RMSNorm(width, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.norm2 = nnx.RMSNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, use_bias=False, rngs=rngs)

    def __call__(self, x):
        split = (*x.shape[:2], 3, self.heads, -1)
        q, k, v = jnp.moveaxis(self.qkv(self.norm1(x)).reshape(split), 2, 0)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Writer(nnx.Module):
    def __init__(self, width, heads, layers, rngs):
        self.embed = nnx.Embed(len(characters), width, rngs=rngs)
        self.place = nnx.Embed(length, width, rngs=rngs)
        self.blocks = nnx.List(Block(width, heads, rngs) for _ in range(layers))
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, len(characters), use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.place(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make():
    model = Writer(width=128, heads=4, layers=2, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(2e-3), wrt=nnx.Param)


def make_state():
    return nnx.state(make())


# %% [markdown]
# The training step is a function from the old state to the new one. In the step,
# `nnx.merge` makes modules from the state's arrays. To describe the state,
# `nnx.eval_shape` makes shapes without arrays.

# %%
graph, state_shape = nnx.split(nnx.eval_shape(make))


def train_step(state, batch):
    model, optimizer = nnx.merge(graph, state)

    def loss_fn(model):
        logits = model(batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, batch[:, 1:]
        ).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return nnx.state((model, optimizer)), loss


def batch_of(number):
    """The batch of a step: the same one in every run, on any number of devices."""
    starts = np.random.default_rng(number).integers(0, len(tokens) - length, rows)
    return np.stack([tokens[start : start + length + 1] for start in starts])


def train(step, state, first, last):
    losses = []
    for number in range(first, last):
        state, loss = step(state, batch_of(number))
        losses.append(float(loss))
    return state, losses


# %% [markdown]
# On one device `jax.jit` compiles the step, without cfp:

# %%
one_step = jax.jit(train_step, donate_argnums=0)
_, one_losses = train(one_step, make_state(), 0, 80)
for number in (0, 20, 40, 60, 79):
    print(f"step {number}: loss {one_losses[number]:.3f}")

# %% [markdown]
# ## Plan
#
# `cfp.plan` takes the step, its arguments as arrays or as shapes, and a mesh. It
# looks for the fastest sharding of the step that fits into the devices' memory, and
# on GPUs times the best candidates. With all parameters on every device the step needs
# 13 MiB on each. On CPUs the tutorial sets a budget of 12 MiB, so that cfp has to save
# memory. Planning takes some seconds on CPUs.

# %%
mesh = jax.make_mesh((len(devices),), ("x",), devices=devices)
batch_shape = jax.ShapeDtypeStruct((rows, length + 1), np.int32)
budget = "12MiB" if devices[0].platform == "cpu" else None  # None: all that there is.
plan = cfp.plan(
    train_step,
    state_shape,
    batch_shape,
    mesh=mesh,
    donate_argnums=0,
    memory_budget=budget,
    quiet=True,
)
plan.save("plan.json")
print(plan)

# %% [markdown]
# How to read the plan, from the top:
#
# - The first lines have time and memory of a step on each device, and the step's FLOPs.
#   On GPUs the time is measured. On virtual devices, whose times say little about GPUs,
#   cfp chooses by estimates, and compiles the plan to see that it fits the budget.
# - *chosen* gives the reason for the plan, and the next candidate. On GPUs, the plan
#   has won a race that also times the presets (data parallel, ZeRO, fully sharded,
#   tensor parallel and others) that may be fast enough.
# - *segments* are the parts of the model: the two blocks are alike, and share one
#   line. Each product or lookup is named by its weight, or else its source line, with
#   the dim that axis `x` splits: `rows` or `batch` (data parallelism), `columns`, or
#   the `contracted` dim (after `columns`: tensor parallelism). Then follows how
#   parameters and optimizer state are stored, such as "as used", or sharded
#   along their largest dims.
# - *arguments* counts how many arrays of state and batch are sharded, and names the
#   largest.
# - *worth by prediction* says how much longer the step would take without a kind of
#   choice: 0.167 ms without a choice of how parameters are stored.
#
# `plan.report` writes one HTML file for a browser, which also shows the strategies of
# each segment ([how to read it](reading-plans.md)).

# %%
plan.report("report.html")

# %% [markdown]
# ## Train on all of them
#
# `plan.apply` returns the same step, sharded. `plan.init` makes the state in the plan's
# shardings. With both, the training loop has the losses of one device, up to rounding.

# %%
step = plan.apply(train_step)
state, losses = train(step, plan.init(make_state), 0, 40)
np.testing.assert_allclose(losses, one_losses[:40], rtol=0.01)
print(f"step 39: {losses[39]:.4f}, and on one device {one_losses[39]:.4f}")

whole = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
print(
    f"state: {whole / 2**20:.2f} MiB, and {held / 2**20:.2f} MiB of it on each device"
)

# %% [markdown]
# ## Save
#
# To resume a run you need the plan, which is in `plan.json`, and a checkpoint of the
# state. Orbax saves sharded arrays.

# %%
folder = Path("checkpoints").absolute()
with ocp.StandardCheckpointer() as checkpoints:
    checkpoints.save(folder / "40", state, force=True)

# %% [markdown]
# ## Start again
#
# Suppose that the run was stopped. In a new process (in a notebook: restart the kernel)
# run all code before `one_step` again, and then the next cell, which loads the plan.
# `bind` checks that the plan is for arguments of these shapes and types.
# Orbax restores the checkpoint in the plan's shardings. The first call checks that the
# plan is for this step, and loads the executable that planning stored in the cache.

# %%
batch_shape = jax.ShapeDtypeStruct((rows, length + 1), np.int32)
folder = Path("checkpoints").absolute()


def restore(plan, number):
    target = jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(
            shape.shape, shape.dtype, sharding=sharding
        ),
        state_shape,
        plan.in_shardings[0],
    )
    with ocp.StandardCheckpointer() as checkpoints:
        return checkpoints.restore(folder / str(number), target)


plan = cfp.Plan.load("plan.json").bind(train_step, state_shape, batch_shape)
step = plan.apply(train_step)
state, resumed = train(step, restore(plan, 40), 40, 80)
print(f"step 40: {resumed[0]:.4f}, step 79: {resumed[-1]:.4f}")

# %% [markdown]
# ## Go on with other devices
#
# Suppose that half of the devices are gone. Plan for the other half, and restore the
# checkpoint in the new plan's shardings.

# %%
half = jax.make_mesh((len(devices) // 2,), ("x",), devices=devices[: len(devices) // 2])
fewer = cfp.plan(
    train_step, state_shape, batch_shape, mesh=half, donate_argnums=0, quiet=True
)
state, on_half = train(fewer.apply(train_step), restore(fewer, 40), 40, 60)
np.testing.assert_allclose(on_half, resumed[:20], rtol=0.01)
print(f"step 59 on {half.size} devices: {on_half[-1]:.4f}, before: {resumed[19]:.4f}")

# %% [markdown]
# ## What it has learned
#
# The trained state is an `nnx.State`, from which `nnx.merge` makes the model.

# %%
writer, _ = nnx.merge(graph, jax.device_get(state))
predict = jax.jit(lambda tokens: writer(tokens)[0, -1])
written = [characters.index(c) for c in text[:length]]
for number in range(120):
    logits = predict(np.array([written[-length:]], np.int32))
    key = jax.random.fold_in(jax.random.key(0), number)
    written.append(int(jax.random.categorical(key, logits / 0.5)))
story = "".join(characters[token] for token in written[length:])
print(story[:60], story[60:], sep="\n")

# %% [markdown]
# The model needs many more steps to write words.
#
# ## Where to go from here
#
# - In place of loading, binding and applying a plan: `step =
#   cfp.parallelize(train_step, plan="plan.json", donate_argnums=0)`. Without
#   `plan`, the first call of each run plans the step, with the measurements in
#   the cache.
# - A learning rate may change under a plan; a batch of another size needs another
#   plan ([keep a plan](keep-a-plan.md)).
# - On GPUs compute in bfloat16, so that plans can use faster kernels, such as
#   cuDNN's attention ([when it helps](performance.md)).
# - To plan for a cluster that you do not have yet: [planning ahead](planning-ahead.md).
