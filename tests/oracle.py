"""The layer in float64 NumPy, forward and hand-derived gradients: what `moe.dense` is checked against.

Shares no code with `moe`, and follows the definition token by token rather than any implementation.
"""

import math
from fractions import Fraction
from typing import NamedTuple

import numpy as np


class Weights(NamedTuple):
    """`router` (d, E), `gate` and `up` (E, d, h), `down` (E, h, d), or their gradients; all float64."""

    router: np.ndarray
    gate: np.ndarray
    up: np.ndarray
    down: np.ndarray


class Rule(NamedTuple):
    """How tokens are routed; `slots` of each expert, None where nothing is dropped."""

    top_k: int
    renormalize: bool = True
    slots: int | None = None


class Routed(NamedTuple):
    """`probabilities` (T, E) over all experts; `experts` (T, k), their `weights` (T, k), and `kept` (T, k)."""

    probabilities: np.ndarray
    experts: np.ndarray
    weights: np.ndarray
    kept: np.ndarray


class Adam(NamedTuple):
    """`weights` after one step, and the two moments."""

    weights: Weights
    mu: Weights
    nu: Weights


def float64(params) -> Weights:
    """The same values in float64, from anything with four leaves in this order."""
    return Weights(*(np.asarray(leaf).astype(np.float64) for leaf in params))


def slots(tokens: int, experts: int, top_k: int, factor: float) -> int:
    """min(tokens, ceil(tokens * top_k * factor / experts)), the factor read as its shortest decimal."""
    return min(tokens, math.ceil(tokens * top_k * Fraction(str(factor)) / experts))


def keeps(experts: np.ndarray, slots_per_expert: int) -> np.ndarray:
    """Which of the choices (T, k) get a slot, claimed token by token and then by choice rank."""
    used: dict[int, int] = {}
    kept = np.zeros(experts.shape, bool)
    for token, choices in enumerate(experts):
        for rank, expert in enumerate(choices.tolist()):
            kept[token, rank] = used.get(expert, 0) < slots_per_expert
            used[expert] = used.get(expert, 0) + 1
    return kept


def softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max(axis=1, keepdims=True, initial=-np.inf))
    return powers / powers.sum(axis=1, keepdims=True)


def sigmoid(values: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-values)) without overflow on either side."""
    small = np.exp(-np.abs(values))
    return np.where(values >= 0, 1, small) / (1 + small)


def route(router: np.ndarray, x: np.ndarray, rule: Rule) -> Routed:
    """Top-k on the logits, best first, ties to the lower index."""
    logits = x @ router
    experts = np.argsort(-logits, axis=1, kind="stable")[:, : rule.top_k]
    probabilities = softmax(logits)
    weights = np.take_along_axis(probabilities, experts, axis=1)
    if rule.renormalize:
        weights = softmax(np.take_along_axis(logits, experts, axis=1))
    kept = np.ones(experts.shape, bool) if rule.slots is None else keeps(experts, rule.slots)
    return Routed(probabilities, experts, weights, kept)


def forward(params: Weights, x: np.ndarray, rule: Rule) -> np.ndarray:
    """y (T, d) = sum over the kept choices of weight * (silu(x @ gate) * (x @ up)) @ down."""
    routed = route(params.router, x, rule)
    y = np.zeros(x.shape)
    for expert in range(params.gate.shape[0]):
        tokens, ranks = np.nonzero((routed.experts == expert) & routed.kept)
        gated, upped = x[tokens] @ params.gate[expert], x[tokens] @ params.up[expert]
        out = (gated * sigmoid(gated) * upped) @ params.down[expert]
        y[tokens] += routed.weights[tokens, ranks, None] * out
    return y


def backward(params: Weights, x: np.ndarray, rule: Rule, dy: np.ndarray) -> tuple[Weights, np.ndarray]:
    """Gradients of sum(y * dy) in all parameters and in x; the choice itself and the drops are constants."""
    routed = route(params.router, x, rule)
    grads = Weights(*(np.zeros(leaf.shape) for leaf in params))
    dx, dweights = np.zeros(x.shape), np.zeros(routed.weights.shape)
    for expert in range(params.gate.shape[0]):
        tokens, ranks = np.nonzero((routed.experts == expert) & routed.kept)
        inputs, weight = x[tokens], routed.weights[tokens, ranks, None]
        gate, up, down = params.gate[expert], params.up[expert], params.down[expert]
        gated, upped = inputs @ gate, inputs @ up
        share = sigmoid(gated)
        hidden = gated * share * upped
        dweights[tokens, ranks] = np.sum(dy[tokens] * (hidden @ down), axis=1)
        dout = weight * dy[tokens]
        dhidden = dout @ down.T
        dgated = dhidden * upped * share * (1 + gated * (1 - share))
        dupped = dhidden * gated * share
        grads.gate[expert], grads.up[expert] = inputs.T @ dgated, inputs.T @ dupped
        grads.down[expert] = hidden.T @ dout
        dx[tokens] += dgated @ gate.T + dupped @ up.T
    dlogits = _through_softmax(routed, rule, dweights)
    grads.router[:] = x.T @ dlogits
    return grads, dx + dlogits @ params.router.T


def _through_softmax(routed: Routed, rule: Rule, dweights: np.ndarray) -> np.ndarray:
    """Gradient in the logits (T, E): p * (dp - <p, dp>), over the chosen ones alone where renormalised."""
    dlogits = np.zeros(routed.probabilities.shape)
    if rule.renormalize:
        weights = routed.weights
        dchosen = weights * (dweights - np.sum(weights * dweights, axis=1, keepdims=True))
        np.put_along_axis(dlogits, routed.experts, dchosen, axis=1)
        return dlogits
    np.put_along_axis(dlogits, routed.experts, dweights, axis=1)
    mean = np.sum(routed.probabilities * dlogits, axis=1, keepdims=True)
    return routed.probabilities * (dlogits - mean)


def loss(y: np.ndarray, target: np.ndarray | None = None) -> float:
    """Mean of (y - target)**2, or of y**2; 0 where y is empty."""
    error = y if target is None else y - target
    return float(np.sum(error**2) / max(error.size, 1))


def cotangent(y: np.ndarray, target: np.ndarray | None = None) -> np.ndarray:
    """Gradient of `loss` in y."""
    return 2 * (y if target is None else y - target) / max(y.size, 1)


def adam(weights: Weights, grads: Weights, learning_rate: float = 1e-3) -> Adam:
    """The first step of Adam (Kingma and Ba 2014, algorithm 1) with b1 = 0.9, b2 = 0.999, eps = 1e-8."""
    mu, nu = Weights(*(0.1 * grad for grad in grads)), Weights(*(0.001 * grad**2 for grad in grads))
    stepped = Weights(
        *(
            weight - learning_rate * (first / 0.1) / (np.sqrt(second / 0.001) + 1e-8)
            for weight, first, second in zip(weights, mu, nu, strict=True)
        )
    )
    return Adam(stepped, mu, nu)
