"""Inputs that broke mixture-of-experts layers elsewhere, each with its right value and its public report."""

import functools
import json
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe
from moe import capacity, router
from tests import layers
from tests.bench.cell import Cell
from tests.bench.inputs import make_inputs
from tests.layers import CAPACITY, DROPLESS, DTYPES, IMPLEMENTATIONS, forward, tuned
from tests.loops import Update, updates_in_loops

CHUNKED = "dropless:chunked:sorted"
ROOT = Path(__file__).resolve().parents[1]
every = pytest.mark.parametrize("impl", IMPLEMENTATIONS)
dropless = pytest.mark.parametrize("impl", DROPLESS)
both = pytest.mark.parametrize("dtype", DTYPES)
# Dense in float32 is the reference itself; what the dtype changes is the same code in blocked and chunked.
pairs = pytest.mark.parametrize(
    ("impl", "dtype"),
    [
        ("dense:auto:sorted", "bfloat16"),
        (CAPACITY, "float32"),
        ("dropless:blocked:sorted", "float32"),
        *(
            (impl, dtype)
            for impl in ("dropless:ragged_dot:sorted", "dropless:chunked:sorted")
            for dtype in DTYPES
        ),
    ],
)


def in_turn(tokens: int, experts: int, top_k: int = 1) -> np.ndarray:
    """Logits (P, E), one row for each expert e: e leads, then e + 1, and so on; `top_k` of them over 0."""
    rows = np.zeros((experts, experts), np.float32)
    for expert in range(experts):
        for rank in range(top_k):
            rows[expert, (expert + rank) % experts] = 2 * (top_k - rank)
    return rows


# openxla/tokamax 887
@pairs
def test_empty_groups(impl, dtype):
    config = moe.Config(64, 43, experts=18, top_k=1, renormalize=False)
    params, x = layers.with_logits(config, in_turn(32, 18)[:6], np.arange(32) % 6, dtype)
    ran = layers.assert_equals_dense(impl, params, x, config)
    assert not ran.counts[6:].any()
    for grad in ran.params[1:]:
        assert not grad[6:].any()
        assert all(grad[expert].any() for expert in range(6))


# AI-Hypercomputer/maxtext 1183
@pairs
def test_odd_inner(impl, dtype):
    config = moe.Config(96, 96, experts=32, top_k=1, renormalize=False)
    params, x = layers.with_logits(config, in_turn(32, 32), np.arange(32), dtype)
    ran = layers.assert_equals_dense(impl, params, x, config, block_m=64, chunk=64)
    assert (ran.counts == 1).all()


# tenstorrent/tt-xla 4537
@pytest.mark.parametrize("tokens", [8, 1, 0])
@pairs
def test_few_tokens(impl, tokens, dtype):
    config = moe.Config(16, 24, experts=64, top_k=2)
    params, x = layers.parameters(config, dtype=dtype), layers.tokens_of(config, tokens, dtype=dtype)
    ran = layers.assert_equals_dense(impl, params, x, config, block_m=64, chunk=512)
    assert ran.y.shape == (tokens, 16)
    if tokens == 0:
        assert not any(grad.any() for grad in ran.params)


# kekzl/imp 2056
@every
def test_wide_router(impl):
    best = np.array([338, 511, 256, 300, 257, 499, 402, 333, 271, 480])
    logits = np.random.default_rng(0).uniform(-1, 1, (1, 512)).astype(np.float32)
    logits[0, best] = np.linspace(3, 2, 10)
    config = moe.Config(8, 4, experts=512, top_k=10)
    params, x = layers.with_logits(config, logits, np.zeros(5, int))
    routing = router.route(params.router, x, config)
    np.testing.assert_array_equal(routing.experts, np.tile(best, (5, 1)))
    wanted = np.zeros(512, int)
    wanted[best] = 5
    np.testing.assert_array_equal(forward(impl, params, x, config).aux.counts, wanted)


# sgl-project/sglang 31768
@pairs
def test_odd_experts(impl, dtype):
    rng = np.random.default_rng(0)
    ranks = np.stack([rng.permutation(60) for _ in range(16)])
    logits = (0.5 + 1.2e-7 * ranks).astype(np.float32)
    assert all(len(set(row)) == 60 for row in logits)
    config = moe.Config(24, 8, experts=60, top_k=4)
    params, x = layers.with_logits(config, logits, np.arange(16), dtype)
    wanted = np.argsort(-ranks, axis=1)[:, :4]
    np.testing.assert_array_equal(router.route(params.router, x, config).experts, wanted)
    counts = forward(impl, params, x, config).aux.counts
    np.testing.assert_array_equal(counts, np.bincount(wanted.ravel(), minlength=60))


# Reported of several layers; top_k has to break ties by index.
@pairs
def test_all_equal(impl, dtype):
    config = moe.Config(16, 24, experts=8, top_k=3)
    params, x = layers.with_logits(config, np.full((1, 8), 0.25, np.float32), np.zeros(10, int), dtype)
    routing = router.route(params.router, x, config)
    np.testing.assert_array_equal(routing.experts, np.tile([0, 1, 2], (10, 1)))
    np.testing.assert_allclose(routing.weights, 1 / 3, rtol=1e-6)
    y, aux = forward(impl, params, x, config)
    np.testing.assert_array_equal(aux.counts, [10, 10, 10, 0, 0, 0, 0, 0])
    if impl != CAPACITY:
        layers.assert_output_equals_dense(impl, params, x, config)
    else:
        size = capacity.slots(10, config)
        assert aux.dropped == 3 * (10 - size)
        assert not y[size:].any()
        assert y[:size].any(axis=1).all()


# deepspeedai/DeepSpeed 7986
@pairs
def test_negative_logits(impl, dtype):
    config = moe.Config(16, 24, experts=8, top_k=2, capacity_factor=1.0)
    logits = in_turn(24, 8, 2) - 5
    assert logits.max() == -1
    params, x = layers.with_logits(config, logits, np.arange(24) % 8, dtype)
    aux = layers.assert_output_equals_dense(impl, params, x, config).aux
    assert (aux.counts == 6).all()


# deepspeedai/DeepSpeed 1658, huggingface/transformers 37123
@pytest.mark.parametrize(
    ("impl", "dtype", "renormalize"),
    [
        (CAPACITY, "float32", True),
        (CAPACITY, "bfloat16", False),
        *((impl, "float32", False) for impl in DROPLESS),
    ],
)
def test_overflow_one(impl, dtype, renormalize):
    config = moe.Config(16, 24, experts=4, top_k=1, renormalize=renormalize, capacity_factor=1.0)
    assert capacity.slots(5, config) == 2
    params, x = layers.with_logits(config, in_turn(5, 4)[:1], np.zeros(5, int), dtype)
    ran = layers.assert_equals_dense(impl, params, x, config)
    dropped = impl == CAPACITY
    assert ran.dropped == (3 if dropped else 0)
    for rows in (ran.y, ran.x):
        assert rows[:2].any(axis=1).all()
        assert rows[2:].any() != dropped


# huggingface/transformers 48421
@pytest.mark.parametrize("dtype", DTYPES)
def test_capacity_count(dtype):
    cell = Cell("layer", CAPACITY, dtype, 4096, 8, 2, "forward", skew=0.9, d_model=16, d_hidden=8)
    params, x, config = make_inputs(cell)
    size = capacity.slots(4096, config)
    chosen = np.asarray(router.route(params.router, x, config).experts)
    used, keeps = np.zeros(8, int), np.zeros(chosen.shape, bool)
    for assignment in np.ndindex(chosen.shape):
        expert = chosen[assignment]
        keeps[assignment] = used[expert] < size
        used[expert] += keeps[assignment]
    assert used.max() == size
    np.testing.assert_array_equal(capacity.kept(jnp.asarray(chosen), size, 8), keeps)
    y, aux = forward(CAPACITY, params, x, config)
    assert aux.dropped == (~keeps).sum() > 0
    np.testing.assert_array_equal(aux.counts, np.bincount(chosen.ravel()))
    np.testing.assert_array_equal(y.any(axis=1), keeps.any(axis=1))


# NVIDIA/Megatron-LM 894
@every
def test_top1_gradient(impl):
    dtype = "float32"
    with pytest.warns(UserWarning, match="router gets no"):
        config = moe.Config(16, 24, experts=4, top_k=1, renormalize=True)
    params, x = layers.parameters(config, dtype=dtype), layers.tokens_of(config, 24, dtype=dtype)
    assert (np.asarray(router.route(params.router, x, config).weights) == 1).all()
    assert not layers.run(impl, params, x, config).params.router.any()
    with warnings.catch_warnings(action="error"):
        config = moe.Config(16, 24, experts=4, top_k=1, renormalize=False)
    assert layers.assert_equals_dense(impl, params, x, config).params.router.any()


# AstrAI 57, marin-community/marin 4234
@every
def test_near_ties(impl):
    rng = np.random.default_rng(0)
    config = moe.Config(16, 8, experts=6, top_k=1, renormalize=False)
    x = layers.tokens_of(config, 64, dtype="bfloat16")
    x[:, 0] = 8
    scores = rng.standard_normal((16, 6)) * 0.1
    scores[1:, 0] = 0
    scores[0] = [1, 1, 0, 0, 0, 0]
    scores[:, 1] = scores[:, 0]
    scores[1:, 1] += rng.standard_normal(15) * 5e-4
    params = layers.parameters(config, dtype="bfloat16")._replace(router=scores.astype(np.float32))
    exact = x.astype(np.float64) @ params.router.astype(np.float64)
    gap = np.abs(exact[:, 0] - exact[:, 1])
    apart = gap > 2e-5  # 20 roundings of a float32 near 8; bfloat16 is 0.03 apart there
    assert apart.sum() > 50
    assert gap.max() < 2**-5
    x, wanted = x[apart], exact[apart].argmax(axis=1)
    assert set(wanted) == {0, 1}
    np.testing.assert_array_equal(router.route(params.router, x, config).experts[:, 0], wanted)
    counts = forward(impl, params, x, config).aux.counts
    np.testing.assert_array_equal(counts, np.bincount(wanted, minlength=6))


# sgl-project/sglang 39351
@every
def test_weights_dtype(impl):
    config = moe.Config(64, 96, experts=4, top_k=2, renormalize=False, capacity_factor=4)
    logits = np.array([[np.log(0.9), np.log(1e-4), -20, -20]], np.float32)
    params, x = layers.with_logits(config, logits, np.zeros(32, int), "bfloat16")
    # Once weighted, both outputs are as large, so that an error of the small weight shows.
    params.down[1] = (params.down[1] * 9000).astype(jnp.bfloat16)
    routing = router.route(params.router, x, config)
    assert routing.weights.dtype == jnp.float32
    np.testing.assert_allclose(routing.weights[:, 1] / routing.weights[:, 0], 1e-4 / 0.9, rtol=1e-5)
    layers.assert_output_equals_dense(impl, params, x, config)


# vllm-project/vllm 15045
@every
def test_sum_of_eight(impl):
    errors = {}
    for top_k in (2, 8):
        config = moe.Config(64, 96, experts=64, top_k=top_k, capacity_factor=64)
        params, x = (
            layers.parameters(config, dtype="bfloat16"),
            layers.tokens_of(config, 256, dtype="bfloat16"),
        )
        errors[top_k] = layers.error(
            forward(impl, params, x, config).y,
            forward("dense:auto:sorted", params, x.astype(np.float32), config).y,
        )
    # Sums in bfloat16 would add 2e-3 for each further expert; a few percent are the luck of the draw.
    assert errors[8] <= 1.05 * errors[2]


BIG = moe.Config(64, 1024, experts=8, top_k=2)
BIG_TOKENS = 2097152


# sgl-project/sglang 4727, linkedin/Liger-Kernel 1248
@dropless
def test_big_index_lowers_to_int32_indices(impl):
    assert BIG_TOKENS * BIG.top_k * 2 * BIG.d_hidden > 2**31
    shapes = abstract(BIG, BIG_TOKENS, "bfloat16")
    lowered = jax.jit(functools.partial(moe.apply, config=BIG, impl=impl)).lower(*shapes)
    text = lowered.as_text()
    narrow = [line for line in text.splitlines() if "xi8>" in line or "xi16>" in line or "xui8>" in line]
    wide = [line for line in text.splitlines() if "xi64>" in line.partition("->")[2]]
    assert not narrow
    assert not wide
    assert "xi32>" in text
    assert lowered.compile(layers.QUICK).memory_analysis() is not None


BIG_CHILD = """
import json, resource, sys
import jax, jax.numpy as jnp, numpy as np
import moe
from tests import layers
from tests.test_cases import BIG, BIG_TOKENS

params = jax.tree.map(jnp.asarray, layers.parameters(BIG, dtype="bfloat16"))
x = jax.random.normal(jax.random.key(0), (BIG_TOKENS, BIG.d_model), jnp.bfloat16)
y, aux = jax.jit(lambda params, x: moe.apply(params, x, BIG, impl="dropless:chunked:sorted"))(params, x)
sampled = np.unique(np.concatenate([
    np.arange(64), BIG_TOKENS - 1 - np.arange(64), np.random.default_rng(0).integers(0, BIG_TOKENS, 896)
]))
ref = layers.reference("dense:auto:sorted", params, np.asarray(x[sampled]), BIG).y
print(json.dumps(dict(
    error=layers.error(y[sampled], ref),
    counts=int(aux.counts.astype(np.int64).sum()),
    peak_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
)))
"""


@pytest.mark.large
def test_big_index():
    done = subprocess.run(
        [sys.executable, "-c", BIG_CHILD], cwd=ROOT, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["error"] <= layers.tolerance("dropless:chunked:sorted", "bfloat16").out
    assert found["counts"] == BIG_TOKENS * BIG.top_k
    assert found["peak_gib"] < 20


# Reported of several layers: one broken token must stay one broken token.
@pairs
def test_poison(impl, dtype):
    # Logits of NaN sort first: that token takes experts 0 and 1, and a slot of each. The factor leaves room for it.
    config = moe.Config(16, 24, experts=6, top_k=2, capacity_factor=3)
    params, x = layers.parameters(config, dtype=dtype), layers.tokens_of(config, 24, dtype=dtype)
    clean = forward(impl, params, x, config).y
    poisoned = x.copy()
    poisoned[3], poisoned[17, 5] = np.nan, np.inf
    y, aux = forward(impl, params, poisoned, config)
    whole = np.delete(np.arange(24), [3, 17])
    assert not np.isfinite(y[3].astype(np.float32)).any()
    assert not np.isfinite(y[17].astype(np.float32)).all()
    assert layers.error(y[whole], clean[whole]) <= layers.tolerance(impl, dtype).out
    assert aux.counts.min() >= 0
    assert aux.counts.sum() == 48
    assert aux.dropped == 0


# Not dense, which is every expert on every token by definition; nor ragged_dot, which XLA's CPU lowers to that.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("impl", ["dropless:chunked:sorted", "dropless:blocked:sorted", CAPACITY])
def test_broken_expert_stays_its_own(impl, dtype):
    """Tokens that another expert takes keep their gradients when one expert's weights hold no numbers."""
    config = moe.Config(16, 24, experts=3, top_k=1, renormalize=False, capacity_factor=3)
    params, x = layers.with_logits(config, in_turn(0, 3), np.repeat([0, 1, 2], [4, 10, 10]), dtype)
    broken = params._replace(gate=np.where(np.arange(3)[:, None, None] == 0, np.inf, params.gate))

    @functools.partial(jax.jit, compiler_options=layers.QUICK)
    def grad_x(params, x):
        return jax.grad(lambda x: jnp.sum(moe.apply(params, x, config, impl=impl).y[4:].astype(jnp.float32)))(
            x
        )

    clean, found = (np.asarray(grad_x(with_params, x), np.float32)[4:] for with_params in (params, broken))
    assert np.isfinite(found).all()
    assert layers.error(found, clean) <= layers.tolerance(impl, dtype).grad


# deepspeedai/DeepSpeed 7986 in the presence of a NaN: what is dropped follows token order all the same.
def test_poison_takes_its_own_slots_only():
    config = moe.Config(16, 24, experts=4, top_k=1, renormalize=False, capacity_factor=1.0)
    params, x = layers.with_logits(config, in_turn(8, 4), np.arange(8) % 4)
    clean = forward(CAPACITY, params, x, config).y
    x[0] = np.nan
    y, aux = forward(CAPACITY, params, x, config)
    assert aux.dropped == 0
    np.testing.assert_array_equal(y[1:], clean[1:])


SMALL_SLICE = 480
LARGE_BUFFER = 64 * 1024


def small_updates(text: str) -> list[Update]:
    return [
        one
        for one in updates_in_loops(text)
        if one.slice_bytes < SMALL_SLICE and one.buffer_bytes > LARGE_BUFFER
    ]


# jax-ml/jax 40101
@pytest.mark.parametrize(
    ("op", "dtype"), [("forward", "float32"), ("gradients", "float32"), ("gradients", "bfloat16")]
)
@pytest.mark.parametrize("impl", ["dropless:chunked:sorted", "dropless:blocked:sorted"])
def test_loop_slices(impl, op, dtype):
    config = moe.Config(512, 256, experts=8, top_k=2)
    layer = functools.partial(moe.apply, config=config, impl=impl)
    function = layer if op == "forward" else functools.partial(layers.gradients, layer)
    # Compiled only, so that a value for each token or assignment is a large buffer.
    text = jax.jit(function).lower(*abstract(config, 65536, dtype)).compile().as_text()
    assert any(one.buffer_bytes > LARGE_BUFFER for one in updates_in_loops(text))
    assert not small_updates(text)


@pytest.mark.parametrize("width", [1, 119])
def test_a_loop_that_writes_small_slices_is_found(width):
    def bad(total):
        def step(index, total):
            row = jax.lax.dynamic_slice(total, (index,), (width,)) + 1
            return jax.lax.dynamic_update_slice(total, row, (index * 3,))

        return jax.lax.fori_loop(0, 100, step, total)

    text = jax.jit(bad).lower(jax.ShapeDtypeStruct((65536,), jnp.float32)).compile().as_text()
    assert [one[:2] for one in small_updates(text)] == [(4 * width, 4 * 65536)]


# marin-community/marin 8339, 7484
GROUPS = (1, 63, 65, 127, 128, 129, 256, 257, 255)


@pytest.mark.parametrize(
    ("d_model", "d_hidden", "dtype"),
    [
        (7, 1, "float32"),
        (1, 7, "float32"),
        (96, 100, "float32"),
        (160, 600, "bfloat16"),
        (600, 96, "float32"),
    ],
)
@dropless
def test_tile_offsets(impl, d_model, d_hidden, dtype):
    config = moe.Config(d_model, d_hidden, experts=len(GROUPS), top_k=1, renormalize=False, capacity_factor=9)
    params, x, groups = grouped(config, dtype)
    ran = layers.assert_equals_dense(impl, params, x, config, chunk=128, block_m=64)
    np.testing.assert_array_equal(ran.counts, groups)
    ref = layers.reference(impl, params, x, config)
    for grad, leaf in zip(ran.params[1:], ref.params[1:], strict=True):
        for expert in range(config.experts):
            assert layers.error(grad[expert], leaf[expert]) <= layers.tolerance(impl, dtype).grad, expert


def grouped(config: moe.Config, dtype: str) -> tuple[moe.Params, np.ndarray, np.ndarray]:
    """Parameters, x and counts with GROUPS rows an expert: each token is near the column of its expert.

    On a line there are two directions only: all but two experts are empty there.
    """
    params = layers.parameters(config, dtype=dtype)
    columns = params.router / np.linalg.norm(params.router, axis=0)
    expert = np.repeat(np.arange(len(GROUPS)), GROUPS)
    if config.d_model == 1:
        columns = np.array([[1, -1, 0, 0, 0, 0, 0, 0, 0]], np.float32)
        expert = (expert > 5).astype(int)
    expert = np.random.default_rng(1).permutation(expert)
    noise = layers.tokens_of(config, len(expert)) * config.d_model**-0.5
    x = (4 * columns.T[expert] + 0.2 * noise).astype(jnp.dtype(dtype))
    return params._replace(router=columns), x, np.bincount(expert, minlength=len(GROUPS))


# NVIDIA/TransformerEngine 3116
@pytest.mark.parametrize("bad", [np.inf, np.nan, 1e37], ids=["inf", "nan", "huge"])
@pytest.mark.parametrize(
    ("impl", "dtype"),
    [(impl, dtype) for impl in DROPLESS for dtype in DTYPES if "blocked" not in impl]
    + [("dropless:blocked:sorted", "float32"), (CAPACITY, "float32")],
)
def test_poisoned_padding(impl, bad, dtype):
    """Expert 2's five rows are padded; all other rows of x hold no numbers, and their outputs aren't in the loss.

    NaN goes to expert 0 (NaN logits sort first, ties to the lower index). Dense isn't here: it is every expert on
    every token by definition. The router's gradient sums over all rows of x, so it isn't looked at.
    """
    config = moe.Config(16, 24, experts=3, top_k=1, renormalize=False, capacity_factor=3)
    params, x = layers.with_logits(config, in_turn(0, 3), np.repeat([2, 0, 1], 5), dtype)
    poisoned = x.copy()
    poisoned[5:, 3:] = bad
    if bad == 1e37:
        assert (np.asarray(router.route(params.router, poisoned, config).experts)[5:] < 2).all()
    clean, found = (padded_run(impl, config)(params, rows) for rows in (x, poisoned))
    for value, ref in zip(found, clean, strict=True):
        assert np.isfinite(value.astype(np.float32)).all()
        assert layers.error(value, ref) <= layers.tolerance(impl, dtype).grad


@functools.cache
def padded_run(impl: str, config: moe.Config):
    """(params, x) -> y and gradients of the first five tokens, and gradients of expert 2, which takes them."""

    def loss(params, x):
        y = moe.apply(params, x, config, impl=impl, **tuned(impl, chunk=64, block_m=64)).y[:5]
        return jnp.mean(y.astype(jnp.float32) ** 2), y

    @functools.partial(jax.jit, compiler_options=layers.QUICK)
    def run(params, x):
        (grad_params, grad_x), y = jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)
        return y, *(grad[2] for grad in grad_params[1:]), grad_x[:5]

    return lambda params, x: jax.device_get(run(params, x))


# marin-community/marin 5394, 7012
@pytest.mark.parametrize("op", ["forward", "gradients"])
@pytest.mark.parametrize("impl", [impl for impl in IMPLEMENTATIONS if not impl.startswith("dense")])
def test_temp_by_experts(impl, op):
    temps = {}
    for experts in (8, 64):
        config = moe.Config(128, 256, experts, top_k=2)
        layer = functools.partial(moe.apply, config=config, impl=impl)
        function = layer if op == "forward" else functools.partial(layers.gradients, layer)
        compiled = jax.jit(function).lower(*abstract(config, 4096, "float32")).compile()
        temps[experts] = compiled.memory_analysis().temp_size_in_bytes
    assert temps[64] < 2 * temps[8]


# vllm-project/vllm 42608
@pytest.mark.parametrize("renormalize", [True, False])
def test_minus_infinity(renormalize):
    config = moe.Config(4, 4, experts=4, top_k=3, renormalize=renormalize)
    routing = router.select(jnp.array([[-jnp.inf, -jnp.inf, 0, -jnp.inf]]), config)
    assert len(set(routing.experts[0].tolist())) == 3
    assert routing.experts[0, 0] == 2
    np.testing.assert_array_equal(routing.weights, [[1, 0, 0]])


# deepspeedai/DeepSpeed 8155, marin-community/marin
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "factor", "slots"),
    [(4, 2, 2, 4, 4), (7680, 8, 1, 4.05, 3888), (1000, 8, 2, 1.1, 275), (5, 4, 1, 1.0, 2), (0, 4, 1, 1.0, 0)],
)
def test_capacity_clamp(tokens, experts, top_k, factor, slots):
    config = moe.Config(4, 4, experts, top_k, renormalize=False, capacity_factor=factor)
    assert capacity.slots(tokens, config) == slots


@both
def test_capacity_clamp_equals_dropless(dtype):
    config = moe.Config(16, 24, experts=2, top_k=2, capacity_factor=4)
    params, x = layers.parameters(config, dtype=dtype), layers.tokens_of(config, 4, dtype=dtype)
    ran = layers.run(CAPACITY, params, x, config)
    assert ran.dropped == 0
    dense = layers.reference("dense:auto:sorted", params, x, config)
    layers.assert_equal(ran, dense, layers.tolerance(CAPACITY, dtype))


# pytorch/torchtitan 1166
@every
def test_idle_experts(impl):
    config = moe.Config(16, 24, experts=4, top_k=1, renormalize=False)
    params, x = layers.with_logits(config, in_turn(0, 4)[:1], np.zeros(12, int))
    state = moe.init_state(jax.tree.map(jnp.asarray, params))
    step = moe.train_step(config, impl=impl, donate=False, **tuned(impl))
    stepped, loss = step.lower(state, x).compile(layers.QUICK)(state, x)
    assert np.isfinite(loss)
    # Adam's first moments are 0.1 of the gradients.
    for moment, before, after in zip(
        stepped.opt_state[0].mu[1:], params[1:], stepped.params[1:], strict=True
    ):
        assert not moment[1:].any()
        assert moment[0].any()
        np.testing.assert_array_equal(after[1:], before[1:])
        assert np.isfinite(after).all()
        assert (np.asarray(after[0]) != before[0]).any()


# sgl-project/sglang-jax 1099, 1540, ROCm/aiter 2359
@pytest.mark.parametrize(("tokens", "experts"), [(3, 5), (65, 384), (129, 5), (1000, 60)])
@pytest.mark.parametrize("impl", IMPLEMENTATIONS[1:])
def test_odd_tokens(impl, tokens, experts):
    config = moe.Config(24, 20, experts, top_k=2)
    params, x = layers.parameters(config), layers.tokens_of(config, tokens)
    layers.assert_equals_dense(impl, params, x, config)


@pytest.mark.parametrize(("tokens", "experts"), [(2, 3), (7, 60), (63, 6), (127, 3)])
@every
def test_odd_tokens_in_bfloat16(impl, tokens, experts):
    config = moe.Config(24, 20, experts, top_k=2, capacity_factor=experts)
    params, x = (
        layers.parameters(config, dtype="bfloat16"),
        layers.tokens_of(config, tokens, dtype="bfloat16"),
    )
    layers.assert_output_equals_dense(impl, params, x, config)


# The thresholds inside: pieces are taken while three quarters full, halved down to 32 rows, hidden columns cut in
# bands above 512, gradients of weights written 128 at once.
def test_both_sides_of_every_threshold():
    sizes = (31, 32, 33, 47, 48, 49, 95, 96, 97, 191, 192, 193)
    config = moe.Config(16, 32, experts=len(sizes), top_k=1, renormalize=False)
    pattern = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))
    params, x = layers.with_logits(config, in_turn(0, len(sizes)), pattern)
    ran = layers.assert_equals_dense(CHUNKED, params, x, config, chunk=256)
    np.testing.assert_array_equal(ran.counts, sizes)


@pytest.mark.parametrize("d_hidden", [512, 513, 514])
def test_hidden_columns_on_both_sides_of_a_band(d_hidden):
    config = moe.Config(8, d_hidden, experts=3, top_k=2)
    params, x = layers.parameters(config), layers.tokens_of(config, 9)
    layers.assert_equals_dense(CHUNKED, params, x, config, chunk=32, block_m=8)


# NVIDIA/Megatron-LM 7081
@pairs
def test_exact_counts(impl, dtype):
    config = moe.Config(4, 2, experts=3, top_k=2)
    pattern = np.repeat([0, 1, 2], [20420, 14579, 1])
    params, x = layers.with_logits(config, in_turn(0, 3, 2), pattern, dtype)
    counts = forward(impl, params, x, config).aux.counts
    assert np.issubdtype(counts.dtype, np.integer)
    np.testing.assert_array_equal(counts, [20421, 34999, 14580])


# NVIDIA/TensorRT-LLM 15311
@pytest.mark.parametrize(
    ("impl", "last"), [(impl, 110 if "chunked" in impl else 101) for impl in IMPLEMENTATIONS]
)
def test_retraces(impl, last):
    config = moe.Config(8, 8, experts=4, top_k=2)
    params = layers.parameters(config)
    traced = []

    @functools.partial(jax.jit, compiler_options=layers.QUICK)
    def layer(params, x):
        traced.append(x.shape)
        return moe.apply(params, x, config, impl=impl, **tuned(impl, chunk=32)).y

    shapes = [(tokens, 8) for tokens in range(100, last + 1)]
    for _ in range(2):
        for shape in shapes:
            y = layer(params, np.ones(shape, np.float32))
            assert y.shape == shape
            layer(params, y)
    assert traced == shapes


@pytest.mark.parametrize("impl", [CAPACITY, "dropless:chunked:sorted"])
def test_retraces_of_a_train_step(impl):
    config = moe.Config(8, 8, experts=4, top_k=2)
    step = moe.train_step(config, impl=impl, **tuned(impl, chunk=32))
    state = moe.init_state(jax.tree.map(jnp.asarray, layers.parameters(config)))
    for _ in range(3):
        state, _ = step(state, layers.tokens_of(config, 8))
    assert step._cache_size() == 1


# jax-ml/jax 9237; a warning is an error in these tests, such as "Some donated buffers were not usable".
@pairs
def test_donation(impl, dtype):
    config = moe.Config(16, 24, experts=4, top_k=2)
    params = jax.tree.map(jnp.asarray, layers.parameters(config))
    params = moe.Params(params.router, *(leaf.astype(dtype) for leaf in params[1:]))
    x = layers.tokens_of(config, 12, dtype=dtype)
    state, step = moe.init_state(params), moe.train_step(config, impl=impl, **tuned(impl))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    compiled = step.lower(state, x).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= 3 * size
    buffers = jax.tree.leaves(state)
    stepped, loss = compiled(state, x)
    assert np.isfinite(loss)
    assert all(buffer.is_deleted() for buffer in buffers)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(stepped))


# Dao-AILab/quack 133
@pytest.mark.parametrize("gate_scale", [1e-3, 1.0, 30.0])
@pairs
def test_activation_gradient(impl, gate_scale, dtype):
    """Against central differences in float64 of y = (silu(x gate) * (x up)) down, one expert of weight 1."""
    config = moe.Config(6, 5, experts=1, top_k=1, capacity_factor=1.0)
    params, x = layers.parameters(config, dtype=dtype), layers.tokens_of(config, 4, dtype=dtype)
    params = params._replace(gate=(params.gate * gate_scale).astype(jnp.dtype(dtype)).astype(np.float32))
    ran = layers.run(impl, params, x, config)

    def loss(gate, up, down, x):
        gated = x @ gate[0]
        return np.mean((gated / (1 + np.exp(-gated)) * (x @ up[0]) @ down[0]) ** 2)

    values = [np.array(leaf, np.float64) for leaf in (*params[1:], x)]
    # Differences are good to about 1e-9; bfloat16 rounds the gated value, which the steep loss multiplies.
    limit = layers.tolerance(impl, dtype).grad
    for grad, value in zip((*ran.params[1:], ran.x), values, strict=True):
        differences = np.zeros_like(value)
        for index in np.ndindex(value.shape):
            middle, step = value[index], 1e-6 * max(abs(value[index]), 1e-2)
            value[index] = middle + step
            above = loss(*values)
            value[index] = middle - step
            differences[index] = (above - loss(*values)) / (2 * step)
            value[index] = middle
        assert layers.error(grad, differences) <= limit


def abstract(config: moe.Config, tokens: int, dtype: str) -> tuple[moe.Params, jax.ShapeDtypeStruct]:
    """Shapes of parameters (float32) and x: enough to compile, without any memory."""
    params = jax.eval_shape(functools.partial(moe.init, config=config), jax.random.key(0))
    return params, jax.ShapeDtypeStruct((tokens, config.d_model), dtype)
