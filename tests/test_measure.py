"""Measuring: rounds and anchors on a clock of the test's own, then real cells of a tiny shape."""

import dataclasses
import itertools
import json
import math
import os
import sys
import time
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe
from moe.registry import IMPLEMENTATIONS
from moe.router import route
from tests import layers
from tests.bench import (
    anchor,
    baseline,
    environment,
    inputs,
    measure,
    numerics,
    pin,
    program,
    published_import,
)
from tests.bench.cell import Cell
from tests.bench.errors import EnvironmentFault, GridError
from tests.bench.grid import CAPACITY, CHUNKED, DENSE
from tests.bench.inputs import make_inputs
from tests.timing import Clock, fixture

pytestmark = pytest.mark.xdist_group("measure")


def tiny(**changes):
    values: dict[str, Any] = {"suite": "layer", "impl": CHUNKED, "dtype": "float32", "tokens": 64}
    values |= {"experts": 4, "top_k": 2}
    return Cell(**values | {"op": "forward", "d_model": 32, "d_hidden": 48} | changes)


# Rounds and anchors


class Bench:
    """A cell that takes `cell_s`, an anchor that takes what `anchor_s` yields, and what ran in which order."""

    def __init__(self, monkeypatch, cell_s, anchor_s):
        self.clock = Clock()
        self.events: list[str] = []
        self.stats: list[Any] = []
        lengths = iter(anchor_s)
        stopwatch = SimpleNamespace(perf_counter=self.clock)
        monkeypatch.setattr(measure, "time", stopwatch)
        monkeypatch.setattr(anchor, "time", stopwatch)
        monkeypatch.setattr(measure, "check", lambda cell: None)
        monkeypatch.setattr(anchor, "compiled", lambda dtype: lambda: self.spend("anchor", next(lengths)))
        call = lambda: self.spend("cell", cell_s)  # noqa: E731
        sizes = program.Bytes(temp=3 * 2**20, argument=2**20, output=2**19, alias=0)
        compiled = program.Compiled(call, sizes, 7.0, 0.5)
        ready = program.Program(call, compiled, program.Arguments([], 0), cast(Any, None))
        monkeypatch.setattr(measure, "program", lambda cell: ready)
        self.fixture = fixture(self.clock, self.stats)

    def spend(self, what, seconds):
        self.clock.now += seconds
        self.events.append(what)


def measured_record(cell, fixture, seconds, checked=True):
    measured = measure.measure(cell, fixture, seconds, checked)
    assert measured is not None
    return measured.record


@pytest.mark.parametrize(
    ("cell_s", "budget", "rounds", "inner"),
    [
        # All lengths are binary fractions, so that the clock is exact; an anchor takes 2**-6.
        (2**-3, 2.0, 14, 1),  # 2 / (0.125 + 0.015625)
        (2**-10, 2.0, 93, 6),  # a round takes at least 5 ms
        (2**-8, 2.0, 85, 2),
        (2**-13, 1.0, 48, 41),
        (2**-20, 2.0, 127, 100),  # and at most 100 calls
        (8.0, 2.0, 5, 1),  # never less than 5 rounds
        (2**-3, 0.05, 5, 1),
        (2**-3, 1000.0, 200, 1),  # nor more than 200
    ],
)
def test_rounds_fit_in_the_budget(monkeypatch, cell_s, budget, rounds, inner):
    bench = Bench(monkeypatch, cell_s, itertools.repeat(2**-6))
    record = measured_record(tiny(), bench.fixture, budget)
    (stats,) = bench.stats
    assert (stats.stats.rounds, stats.iterations, record["inner"]) == (rounds, inner, inner)
    # Stored times are per call, whatever the repetitions.
    assert stats.stats.data == pytest.approx([cell_s] * rounds)
    assert record["median_ms"] == pytest.approx(cell_s * 1000)
    assert record["q1_ms"] == pytest.approx(record["q3_ms"])
    # After warming up, an anchor stands on both sides of each round.
    text = "".join(event[0] for event in bench.events)
    assert (("a" + "c" * inner) * rounds + "a") in text
    assert text.startswith("accaa" + "c" * inner)


def test_each_round_is_paired_with_the_anchors_around_it(monkeypatch):
    # One as the anchor is made, one to warm up, then the five rounds' six.
    bench = Bench(monkeypatch, 1.0, [9.0, 9.0, 1.0, 4.0, 9.0, 16.0, 25.0, 36.0])
    record = measured_record(tiny(), bench.fixture, 1.0)
    assert len(bench.stats[0].stats.data) == 5
    paired = [2.0, 6.0, 12.0, 20.0, 30.0]
    assert record["anchor_ms"] == pytest.approx(1000 * np.median(paired))
    useful = 6 * 64 * 2 * 32 * 48
    assert record["useful_flops"] == useful
    assert record["gemm_fraction"] == pytest.approx(np.median([useful / (2 * 1024**3 / a) for a in paired]))


def test_paired_is_the_geometric_mean_and_ignores_what_comes_after(monkeypatch):
    monkeypatch.setattr(anchor, "compiled", lambda dtype: lambda: None)
    instance = anchor.Anchor("float32")
    assert instance.seconds == []
    instance.seconds += [1.0, 4.0, 9.0, 1e9]
    assert instance.paired(2) == pytest.approx([2.0, 6.0])


def test_real_anchor_is_a_matmul_of_known_flops():
    instance = anchor.Anchor("bfloat16")
    instance()
    assert len(instance.seconds) == 1
    assert instance.seconds[0] > 0
    assert anchor.FLOPS == 2 * anchor.SIDE**3 == 2147483648


# Real cells


@pytest.fixture(scope="module")
def measured():
    """The record of a real cell, and what pytest-benchmark holds of it."""
    stats: list[Any] = []
    bench = fixture(time.perf_counter, stats)
    return measured_record(tiny(op="train_step_donated"), bench, 0.05), bench, stats


def published():
    return published_import.reconstruct(
        json.loads((baseline.ROOT / published_import.FILE).read_text("utf-8"))
    )


def test_extra_info_holds_every_published_field(measured):
    record, bench, stats = measured
    assert bench.extra_info == record
    assert len(stats) == 1
    # `code` and `run` say where a published record came from.
    names = {name for entry in published()["results"] for name in entry} - {"code", "run"}
    assert len(names) >= 25
    assert names <= set(record)
    assert json.loads(json.dumps(record)) == record
    numbers = [value for value in record.values() if isinstance(value, float)]
    assert all(map(math.isfinite, numbers))


def test_environment_holds_every_published_device_field():
    described = environment.describe()
    device = published()["device"]
    assert len(device) == 10
    assert set(device) <= set(described)
    for name in ("gpu", "driver", "gpu_memory_gb", "torch", "torch_cuda"):
        assert name in described  # None where there is none
    assert described["jax"] == jax.__version__
    assert described["devices"] == [f"{d.platform}:{d.id}" for d in jax.devices()]
    assert json.loads(json.dumps(described)) == described


def test_record_of_a_donated_step(measured):
    record, _, _ = measured
    assert record["id"] == tiny(op="train_step_donated").id
    assert record["status"] == "measured"
    assert record["alias_bytes"] > 0
    for short, name in (("temp", "temp"), ("arg", "argument"), ("out", "output"), ("alias", "alias")):
        assert record[f"xla_{short}_mb"] * 2**20 == record[f"{name}_bytes"]
    # Parameters, two moments, a count, and x.
    leaves = 32 * 4 + 3 * 4 * 32 * 48
    assert record["argument_bytes"] == 4 * (3 * leaves + 1 + 64 * 32)
    assert record["useful_flops"] == 7 * 2 * 64 * 2 * 32 * 48
    assert record["rel_err_out"] <= 5e-7
    assert 0.25 <= record["max_expert_frac"] <= 1
    assert record["compile_s"] > 0


def test_forward_returns_y_alone_as_published():
    ready = program.program(tiny())
    sizes = ready.compiled.bytes
    assert sizes.output == 4 * 64 * 32
    assert sizes.argument == 4 * (32 * 4 + 3 * 4 * 32 * 48 + 64 * 32)
    assert sizes.alias == 0
    (y,) = ready.call()
    assert y.shape == (64, 32)


def test_donated_state_is_handed_on():
    cell = tiny(op="train_step_donated")
    ready = program.program(cell)
    losses, steps = [], []
    for _ in range(3):
        *_, count, loss = [leaf for leaf in ready.call() if leaf.ndim == 0]
        losses.append(float(loss))
        steps.append(int(count))
    assert steps == [1, 2, 3]
    assert losses[0] > losses[1] > losses[2]
    # What other cells share was copied, not given away.
    params, x, _ = inputs.make_inputs(cell)
    assert np.isfinite(np.asarray(params.gate)).all()
    assert np.isfinite(np.asarray(x)).all()


def test_state_that_is_not_donated_stays():
    ready = program.program(tiny(op="train_step"))
    for first, second in zip(ready.call(), ready.call(), strict=True):
        assert np.array_equal(first, second)
    assert ready.compiled.bytes.alias == 0


def test_disabled_benchmark_checks_only(monkeypatch):
    checked: list[Cell] = []
    monkeypatch.setattr(measure, "check", checked.append)
    monkeypatch.setattr(measure, "program", lambda cell: pytest.fail("compiled to be timed"))
    stats: list[Any] = []
    assert measure.measure(tiny(), fixture(time.perf_counter, stats, disabled=True), 1.0, True) is None
    assert checked == [tiny()]
    assert stats == []


def test_unchecked_cell_has_no_errors_in_its_record(monkeypatch):
    bench = Bench(monkeypatch, 0.1, itertools.repeat(0.01))
    monkeypatch.setattr(measure, "check", lambda cell: pytest.fail("checked"))
    record = measured_record(tiny(), bench.fixture, 1.0, checked=False)
    assert not [name for name in record if name.startswith("rel_err")]


# Wrong implementations


@pytest.fixture
def install(monkeypatch):
    """Make an implementation of a function and give it the place of chunked."""

    def put(function):
        replaced = dataclasses.replace(IMPLEMENTATIONS[CHUNKED], apply=function)
        monkeypatch.setitem(IMPLEMENTATIONS, CHUNKED, replaced)
        monkeypatch.setattr(numerics, "_MEASURED", type(numerics._MEASURED)())

    return put


def dense(params, x, config):
    return IMPLEMENTATIONS[DENSE].apply(params, x, config)


def wrong(change):
    def layer(params, x, config, chunk=None, slab_elems=None):
        return change(*dense(params, x, config))

    return layer


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda y, aux: (y * (1 + 1e-6), aux), "rel_err_out=9.54e-07 is over 5.0e-07"),
        (lambda y, aux: (y.at[3, 5].set(jnp.nan), aux), "rel_err_out=nan is not finite"),
        (lambda y, aux: (y.at[3, 5].set(jnp.inf), aux), "is not finite"),
        (lambda y, aux: (y, aux._replace(counts=aux.counts[::-1])), "counts or dropped=0 differ"),
        (lambda y, aux: (y, aux._replace(dropped=jnp.int32(1))), "counts or dropped=1 differ"),
        (lambda y, aux: (y.astype(jnp.bfloat16), aux), "y is bfloat16(64, 32), x is float32(64, 32)"),
        (lambda y, aux: (y.reshape(32, 64), aux), "y is float32(32, 64)"),
        (lambda y, aux: (jax.lax.stop_gradient(y), aux), "rel_err_grad_params=1.00e+00 is over 3.0e-06"),
    ],
    ids=["scaled", "nan", "inf", "counts", "dropped", "dtype", "shape", "gradient"],
)
def test_wrong_cell_is_never_timed(install, monkeypatch, change, said):
    install(wrong(change))
    monkeypatch.setattr(measure, "program", lambda cell: pytest.fail("compiled to be timed"))
    stats: list[Any] = []
    with pytest.raises(numerics.WrongNumerics) as caught:
        measure.measure(tiny(), fixture(time.perf_counter, stats), 0.05, True)
    assert said in str(caught.value)
    assert tiny().id in str(caught.value)
    assert stats == []


@pytest.mark.parametrize(("skew", "drops"), [(0.9, True), (0.0, False)])
def test_reference_of_capacity_is_dense_without_what_is_dropped(skew, drops):
    cell = tiny(impl=CAPACITY, top_k=2, skew=skew) if drops else tiny(impl=CAPACITY, experts=1, top_k=1)
    inputs, ref = make_inputs(cell), numerics.reference(cell)
    expected = layers.reference(CAPACITY, inputs.params, inputs.x, inputs.config)
    assert (ref.dropped > 0) is drops
    assert ref.dropped == expected.dropped
    as_ran = layers.Ran(ref.y, ref.counts, ref.dropped, ref.grad_params, ref.grad_x)
    layers.assert_equal(as_ran, expected, numerics.TOLERANCES["float32"])


def test_retracing_is_reported(install):
    """An implementation that changes what JAX keys its traces by is traced again on each call."""
    state = {"precision": "float32"}
    flags: Any = jax.config
    before = flags.jax_default_matmul_precision

    def retraces(params, x, config, chunk=None, slab_elems=None):
        state["precision"] = "tensorfloat32" if state["precision"] == "float32" else "float32"
        jax.config.update("jax_default_matmul_precision", state["precision"])
        return dense(params, x, config)

    install(retraces)
    try:
        with pytest.raises(program.Retraced, match=r"was traced 2 times for one shape"):
            program.program(tiny())
    finally:
        jax.config.update("jax_default_matmul_precision", before)


# Inputs


@pytest.mark.parametrize(("top_k", "expected"), [(1, 0.9 + 0.1 / 8), (4, (0.9 + 0.1 / 2) / 4)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_skew_sends_that_share_of_the_tokens_to_expert_0(top_k, expected, dtype):
    """About 0.91 and 0.237 of the assignments; the published 0.939 at top_k 1 is of another construction."""
    cell = tiny(tokens=4096, experts=8, top_k=top_k, skew=0.9, d_model=512, d_hidden=8, dtype=dtype)
    params, x, config = inputs.make_inputs(cell)
    routing = route(params.router, x, config)
    first = np.asarray(routing.experts)[:, 0]
    counts = np.bincount(np.asarray(routing.experts).ravel(), minlength=8)
    assert counts.max() == counts[0]
    assert counts.max() / counts.sum() == pytest.approx(expected, abs=0.01)
    plain = np.asarray(inputs.make_inputs(dataclasses.replace(cell, skew=0.0)).x, np.float32)
    changed = (np.asarray(x, np.float32) != plain).any(axis=1)
    assert changed.sum() <= round(0.9 * 4096)
    assert (first[changed] == 0).all()
    assert (first == 0).sum() >= round(0.9 * 4096)


@pytest.mark.parametrize("skew", [0.0, 1.0])
def test_skew_at_its_ends(skew):
    cell = tiny(tokens=256, experts=8, top_k=1, skew=skew, d_model=64, d_hidden=8)
    params, x, config = inputs.make_inputs(cell)
    share = float(np.mean(np.asarray(route(params.router, x, config).experts) == 0))
    assert (share == 1) if skew else (share < 0.3)


def test_skew_that_no_input_can_have_is_refused():
    cell = tiny(experts=32, skew=1.0, d_model=4)
    with pytest.raises(GridError, match=r"skew=1\.0 cannot be reached.*d_model"):
        inputs.make_inputs(cell)


def test_inputs_depend_on_the_shape_alone():
    one, other = tiny(), tiny(impl=DENSE, op="train_step", suite="chunk", chunk=16)
    assert inputs.make_inputs(one).x is inputs.make_inputs(other).x
    rounded = inputs.make_inputs(tiny(dtype="bfloat16")).params
    assert rounded.gate.dtype == jnp.float32
    assert (rounded.gate == rounded.gate.astype(jnp.bfloat16).astype(jnp.float32)).all()
    assert isinstance(rounded, moe.Params)


# Pinning


def topology(folder, siblings):
    for core, text in siblings.items():
        path = folder / f"cpu{core}/topology"
        path.mkdir(parents=True)
        (path / "thread_siblings_list").write_text(text + "\n")


@pytest.mark.parametrize(
    ("siblings", "logical", "expected"),
    [
        ({0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5"}, [0, 1, 4, 5], [0, 1]),
        ({0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"}, [0, 1, 2, 3], [0, 2]),
        ({0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"}, [1, 3], [1, 3]),
        ({0: "0", 1: "1"}, [0, 1], [0, 1]),
        ({}, [0, 1, 2], [0, 1, 2]),
    ],
    ids=["two halves", "pairs", "second threads alone", "no threads", "not told"],
)
def test_one_thread_of_each_physical_core(tmp_path, monkeypatch, siblings, logical, expected):
    topology(tmp_path, siblings)
    monkeypatch.setattr(pin, "TOPOLOGY", tmp_path)
    assert pin.physical(logical) == expected


@pytest.fixture
def four_cores(tmp_path, monkeypatch):
    """A process that may use four logical cores, two of them physical; returns what it was pinned to."""
    topology(tmp_path, {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"})
    monkeypatch.setattr(pin, "TOPOLOGY", tmp_path)
    allowed = [{0, 1, 2, 3}]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: allowed[-1], raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: allowed.append(set(cores)), raising=False)
    monkeypatch.setattr(pin, "sys", SimpleNamespace(modules={}))
    return allowed


@pytest.mark.parametrize(("cores", "expected"), [(None, [0, 2]), (2, [0, 2]), (1, [0])])
def test_pin_takes_physical_cores(four_cores, cores, expected):
    assert pin.pin(cores) == expected
    assert four_cores[-1] == set(expected)


@pytest.mark.parametrize("cores", [0, -1, 3])
def test_pin_refuses_cores_that_are_not_there(four_cores, cores):
    with pytest.raises(EnvironmentFault, match=rf"--bench-cores={cores}: this process may use 1\.\.2"):
        pin.pin(cores)
    assert len(four_cores) == 1


def test_pin_comes_before_jax(four_cores, monkeypatch):
    monkeypatch.setattr(pin, "sys", sys)
    with pytest.raises(EnvironmentFault, match="jax was imported before the process was pinned"):
        pin.pin(None)
    assert len(four_cores) == 1


def test_importing_the_plugin_does_not_import_jax(tmp_path):
    """Nor does reading the options: what is imported before pinning runs unpinned for good."""
    from tests.running import Runner

    words = "import sys, tests.bench.plugin; print('jax' in sys.modules)"
    assert Runner(tmp_path / "run").python("-c", words).text == "False\n"
