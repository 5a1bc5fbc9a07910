"""A mixture-of-experts layer in Equinox, and what lets moe-bench measure it: `layer`, at the end."""

import equinox as eqx
import jax
import jax.numpy as jnp


class Expert(eqx.Module):
    """SwiGLU: (d,) -> (d,)."""

    gate: jax.Array
    up: jax.Array
    down: jax.Array

    def __call__(self, x):
        hidden = jax.nn.silu(x @ self.gate) * (x @ self.up)
        return hidden @ self.down


class Mixture(eqx.Module):
    """Every token through its `top_k` experts, weighted by the router: (T, d) -> (T, d)."""

    router: jax.Array
    experts: Expert  # Its arrays have a leading axis, one entry an expert.
    top_k: int = eqx.field(static=True)

    def __call__(self, x):
        logits = jnp.matmul(x.astype(jnp.float32), self.router, precision="highest")
        weights, chosen = jax.lax.top_k(jax.nn.softmax(logits), self.top_k)
        weights = weights / weights.sum(axis=-1, keepdims=True)
        share = jnp.zeros(logits.shape).at[jnp.arange(len(x))[:, None], chosen].add(weights)

        def add(y, expert_and_share):
            expert, its_share = expert_and_share
            return y + its_share[:, None] * jax.vmap(expert)(x), None

        return jax.lax.scan(add, jnp.zeros(x.shape), (self.experts, share.T))[0].astype(x.dtype)


def layer(params, x, config):
    """The adapter: moe-bench's parameters into the model, None where nothing is dropped."""
    gate, up, down = (leaf.astype(x.dtype) for leaf in (params.gate, params.up, params.down))
    return Mixture(params.router, Expert(gate, up, down), config.top_k)(x), None
