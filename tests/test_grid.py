"""The grids: what they hold, by name and by count, how options change them, and what is refused."""

import dataclasses
import itertools
import json
import shutil
from collections import Counter
from typing import Any

import pytest

from moe.registry import IMPLEMENTATIONS
from tests.bench import baseline, grid, options, published_import, rejected
from tests.bench.cell import Cell
from tests.bench.errors import GridError
from tests.bench.grid import BLOCKED, CAPACITY, CHUNKED, DENSE, GRIDS, RAGGED, Source, build
from tests.running import BENCH, Runner

pytestmark = pytest.mark.xdist_group("grid")
COMMITTED = baseline.ROOT / published_import.FILE


def ids(name, overrides=None, backend="cpu"):
    return {entry.cell.id for entry in build(name, overrides, backend)}


def cell(**changes):
    values: dict[str, Any] = {"suite": "layer", "impl": CHUNKED, "dtype": "float32", "tokens": 1024}
    return Cell(**values | {"experts": 8, "top_k": 2, "op": "forward"} | changes)


@pytest.fixture(scope="module")
def published():
    return baseline.load(COMMITTED)


# Ids


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "dropless:chunked:sorted-float32-t1024-e8-k2-s0.0-d512-h1024-forward"),
        (
            {"suite": "chunk", "chunk": 256, "op": "train_step"},
            "chunk/dropless:chunked:sorted-float32-t1024-e8-k2-s0.0-d512-h1024-train_step-chunk256",
        ),
        (
            {
                "impl": BLOCKED,
                "dtype": "bfloat16",
                "param_dtype": "bfloat16",
                "block_m": 64,
                "slab_elems": 1048576,
            },
            "dropless:blocked:sorted-bfloat16-t1024-e8-k2-s0.0-d512-h1024-forward-pbfloat16-block64-slab1048576",
        ),
        (
            {"impl": CAPACITY, "tokens": 4096, "top_k": 1, "skew": 0.9, "op": "train_step_donated"},
            "capacity:auto:sorted-float32-t4096-e8-k1-s0.9-d512-h1024-train_step_donated",
        ),
        (
            {"suite": "maxtok", "impl": DENSE, "tokens": 2097152, "d_model": 64, "d_hidden": 96},
            "maxtok/dense:auto:sorted-float32-t2097152-e8-k2-s0.0-d64-h96-forward",
        ),
        (
            {"suite": "block_m", "impl": BLOCKED, "block_m": 32},
            "block_m/dropless:blocked:sorted-float32-t1024-e8-k2-s0.0-d512-h1024-forward-block32",
        ),
    ],
    ids=["plain", "chunk", "tuning", "skew", "maxtok", "block_m"],
)
def test_id_is_this_text(changes, expected):
    assert cell(**changes).id == expected


def test_every_field_of_a_cell_changes_its_id():
    changes = {
        "suite": "maxtok",
        "impl": DENSE,
        "dtype": "bfloat16",
        "tokens": 1,
        "experts": 9,
        "top_k": 3,
        "op": "train_step",
        "skew": 0.5,
        "d_model": 1,
        "d_hidden": 1,
        "param_dtype": "bfloat16",
        "chunk": 1,
        "block_m": 1,
        "slab_elems": 1,
        "keep_elems": 0,
        "lowering": "xla",
    }
    assert set(changes) == set(Cell.__dataclass_fields__)
    assert len({cell().id, *(cell(**{name: value}).id for name, value in changes.items())}) == 1 + len(
        changes
    )


@pytest.mark.parametrize("name", [*GRIDS, "sweeps"])
def test_ids_are_unique(name):
    entries = (
        build("default", {"suites": ("layer", "chunk", "block_m", "maxtok")})
        if name == "sweeps"
        else build(name)
    )
    assert not [identity for identity, count in Counter(e.cell.id for e in entries).items() if count > 1]


def test_ids_do_not_depend_on_the_order_of_values():
    values = {
        "dtypes": ("float32", "bfloat16"),
        "tokens": (64, 128),
        "experts": (4, 8),
        "ops": ("forward", "train_step"),
    }
    backwards = {name: value[::-1] for name, value in values.items()}
    assert len(ids("default", values)) == 5 * 16
    assert ids("default", values) == ids("default", backwards)


def test_cells_that_share_inputs_stand_side_by_side():
    for name in GRIDS:
        shapes = [key for key, _ in itertools.groupby(entry.cell.inputs for entry in build(name))]
        assert len(shapes) == len(set(shapes))


# Contents


def test_default_is_what_a_pull_request_must_pass():
    """float32 and bfloat16, forward and donated train step: three implementations on four shapes, two on one."""
    form = "{}-{}-t{}-e{}-k2-s0.0-d512-h1024-{}"
    both = (("float32", "bfloat16"), ("forward", "train_step_donated"))
    expected = {
        form.format(impl, dtype, tokens, experts, op)
        for dtype, op in itertools.product(*both)
        for impl in ("capacity:auto:sorted", "dropless:blocked:sorted", "dropless:chunked:sorted")
        for tokens, experts in ((1024, 8), (1024, 64), (4096, 8), (4096, 64))
    } | {
        form.format(impl, dtype, 1024, 8, op)
        for dtype, op in itertools.product(*both)
        for impl in ("dense:auto:sorted", "dropless:ragged_dot:sorted")
    }
    assert len(expected) == 56
    assert ids("default") == expected
    assert all(entry.skip is None for entry in build("default"))


def test_smoke_is_a_part_of_default():
    assert len(ids("smoke")) == 6
    assert ids("smoke") < ids("default")
    assert baseline.COMPARED_WITH == {"smoke": "default"}
    assert {e.cell.impl for e in build("smoke")} == set(IMPLEMENTATIONS)


def test_published_holds_every_published_record(published):
    assert len(published.records) == 134
    assert set(published.records) <= ids("published")


def test_published_skips_ragged_dot_where_the_published_run_did(published):
    skipped = {entry.cell.id: entry.skip for entry in build("published") if entry.skip}
    shape = "dropless:ragged_dot:sorted-float32-t4096-e64-k2-s0.0-d512-h1024"
    for op in ("forward", "train_step"):
        assert skipped[f"{shape}-{op}"] == "tokens x experts = 262144 is over ragged_limit=131072"
    assert not set(skipped) & set(published.records)
    assert {identity.split("-t4096-e64")[0] for identity in skipped} == {
        "dropless:ragged_dot:sorted-float32",
        "dropless:ragged_dot:sorted-bfloat16",
    }


@pytest.mark.parametrize("run", ["cpu_A", "cpu_B", "cpu_C", "cpu_D", "cpu_E", "cpu_chunk_v1", "cpu_chunk_v2"])
def test_published_holds_all_that_a_published_configuration_implies(published, run):
    config = {option: value for file, option, value in configurations() if file == f"{run}.json"}
    lists: dict[str, Any] = {
        name: tuple(config[name]) for name in grid.PLURAL if config.get(name) is not None
    }
    single = {name: config[name] for name in options.SINGLE if name in config}
    source = Source(**lists, **single, **grid.AS_PUBLISHED, rejected=run == "cpu_chunk_v2")
    implied = {cell.id for cell in grid._cells(source) if grid._skip(cell, source, "cpu") is None}
    assert implied == {i for i, entry in published.records.items() if entry["extra_info"]["run"] == run}
    assert {cell.id for cell in grid._cells(source)} <= ids("published")


def test_rejected_variant_is_measured_beside_the_landed_one(published):
    entries = [entry for entry in build("published") if entry.cell.impl == rejected.ID]
    assert {entry.cell.suite for entry in entries} == {"chunk"}
    assert {entry.cell.id for entry in entries} <= set(published.records)
    assert len(entries) == 48


# The published configuration


def configurations():
    """(run, option, value) of each block of configuration in the committed published file."""
    original = published_import.reconstruct(json.loads(COMMITTED.read_text(encoding="utf-8")))
    for source in original["config"]["sources"]:
        for option, value in source["config"].items():
            yield source["file"], option, value


def test_every_published_option_is_an_option_with_the_published_default():
    defaults = Source()
    seen: dict[str, dict[str, Any]] = {}
    for run, option, value in configurations():
        seen.setdefault(option, {})[run] = tuple(value) if isinstance(value, list) else value
    assert set(seen) == {
        *("device", "suites", "dtypes", "tokens", "experts", "top_k", "skew", "d_model", "d_hidden", "impls"),
        *("block_m", "block_ms", "chunks", "dense_limit", "ragged_limit", "maxtok_start", "maxtok_stop"),
        *("slab_elems", "check"),
    }
    # `check` is the option --no-check, and `device` chooses the backend; the rest is the grid's.
    assert set(seen) - {"device", "check"} <= {*grid.PLURAL, *options.SINGLE}
    assert {*options.TEXTS, *options.INTEGERS, "skew"} == set(grid.PLURAL)
    assert {*grid.PLURAL, *options.SINGLE} <= {field.name for field in dataclasses.fields(Source)}
    fixed = (
        "d_model",
        "d_hidden",
        "block_m",
        "block_ms",
        "dense_limit",
        "maxtok_start",
        "maxtok_stop",
        "slab_elems",
    )
    for option in fixed:
        assert set(seen[option].values()) == {getattr(defaults, option)}, option
    for option in ("chunks", "suites", "dtypes", "experts", "top_k", "skew", "impls"):
        assert getattr(defaults, option) in seen[option].values(), option
    # 262144 as published on an accelerator, and 131072 on the CPU, by backend.
    assert defaults.ragged_limit is None
    assert set(seen["ragged_limit"].values()) == {131072, 262144}


# Limits


@pytest.mark.parametrize(
    ("tokens", "experts", "backend", "skipped"),
    [
        (2048, 64, "cpu", False),
        (2049, 64, "cpu", True),
        (4096, 64, "gpu", False),
        (4096, 64, "tpu", False),
        (4097, 64, "gpu", True),
    ],
)
def test_ragged_limit_of_a_backend(tokens, experts, backend, skipped):
    over = {"tokens": (tokens,), "experts": (experts,), "impls": ("ragged_dot",)}
    over |= {"ops": ("forward",), "dtypes": ("float32",)}
    (entry,) = build("default", over, backend)
    limit = 131072 if backend == "cpu" else 262144
    expected = f"tokens x experts = {tokens * experts} is over ragged_limit={limit}"
    assert entry.skip == (expected if skipped else None)


@pytest.mark.parametrize(("tokens", "skipped"), [(8192, False), (8193, True)])
def test_dense_limit(tokens, skipped):
    entries = build("default", {"tokens": (tokens,), "experts": (64,), "impls": ("dense", "chunked")})
    said = {entry.skip for entry in entries if entry.cell.impl == DENSE}
    assert said == ({f"tokens x experts = {tokens * 64} is over dense_limit=524288"} if skipped else {None})
    assert {entry.skip for entry in entries if entry.cell.impl == CHUNKED} == {None}


def test_limits_are_options():
    over = {"tokens": (64,), "experts": (4,), "dense_limit": 255, "ragged_limit": 256}
    said = {entry.cell.impl: entry.skip for entry in build("default", over)}
    assert said[DENSE] == "tokens x experts = 256 is over dense_limit=255"
    assert said[RAGGED] is None
    assert build("default", over | {"ragged_limit": 1}, "tpu") != build("default", over, "tpu")


def test_limits_say_nothing_on_maxtok():
    entries = build("default", {"suites": ("maxtok",), "impls": ("dense",), "dense_limit": 1})
    assert {entry.skip for entry in entries} == {None}
    assert {(entry.maxtok_start, entry.cell.tokens) for entry in entries} == {(32768, 2097152)}


# Overrides


def test_overrides_replace_each_list():
    over = {
        "suites": ("layer",),
        "dtypes": ("bfloat16",),
        "tokens": (32,),
        "experts": (4,),
        "top_k": (1, 3),
        "skew": (0.5,),
        "d_model": 16,
        "d_hidden": 24,
        "impls": ("blocked",),
        "ops": ("train_step",),
        "block_m": 32,
        "slab_elems": 4096,
    }
    assert ids("default", over) == {
        f"dropless:blocked:sorted-bfloat16-t32-e4-k{top_k}-s0.5-d16-h24-train_step-block32-slab4096"
        for top_k in (1, 3)
    }


def test_tuning_values_reach_what_takes_them():
    over = {"keep_elems": 0, "lowering": "xla", "impls": ("chunked", "ragged_dot", "blocked")}
    shape = {"tokens": (32,), "dtypes": ("float32",), "ops": ("forward", "train_step")}
    tuned = {(e.cell.impl, e.cell.op): e.cell.tuning for e in build("smoke", over | shape)}
    raw = {"lowering": "xla"}
    # A forward pass keeps nothing: its program does not depend on it.
    assert tuned == {
        (CHUNKED, "forward"): {},
        (CHUNKED, "train_step"): {"keep_elems": 0},
        (RAGGED, "forward"): raw,
        (RAGGED, "train_step"): raw,
        (BLOCKED, "forward"): {},
        (BLOCKED, "train_step"): {},
    }


def test_a_suite_sweeps_only_what_takes_its_value():
    shape = {"tokens": (64,), "experts": (4,), "ops": ("forward",), "dtypes": ("float32",)}
    chunk = build("smoke", shape | {"suites": ("chunk",), "chunks": (16, 32)})
    assert sorted((e.cell.impl, e.cell.chunk) for e in chunk) == [(CHUNKED, 16), (CHUNKED, 32)]
    block = build("smoke", shape | {"suites": ("block_m",)})
    assert sorted((e.cell.impl, e.cell.block_m) for e in block) == [
        (BLOCKED, 32),
        (BLOCKED, 64),
        (BLOCKED, 128),
    ]


@pytest.mark.parametrize(
    ("word", "impl"),
    [
        ("chunked", CHUNKED),
        ("blocked", BLOCKED),
        ("ragged_dot", RAGGED),
        ("capacity", CAPACITY),
        ("dense", DENSE),
        ("concatenated", rejected.ID),
        (CHUNKED, CHUNKED),
        ("dropless", "dropless"),
        ("auto", "auto"),
    ],
)
def test_an_implementation_by_the_one_word_that_means_it(word, impl):
    assert grid.whole_id(word) == impl


# Bad input

BAD = [
    (
        {"impls": ("chunkd",)},
        "impls='chunkd' is unknown",
        "There are: dense:auto:sorted, capacity:auto:sorted",
    ),
    (
        {"impls": ("dropless:chunk:sorted",)},
        "did you mean dropless:chunked:sorted?",
        "dropless:concatenated:sorted",
    ),
    ({"suites": ("layr",)}, "did you mean layer?", "There are: layer, chunk, block_m, maxtok"),
    (
        {"dtypes": ("float16",)},
        "dtypes='float16' is unknown; did you mean bfloat16?",
        "There are: float32, bfloat16",
    ),
    (
        {"ops": ("backward",)},
        "ops='backward' is unknown",
        "There are: forward, train_step, train_step_donated",
    ),
    ({"top_k": (9,), "experts": (8,)}, "top_k=9 is more than experts=8", "choose 1..8"),
    ({"top_k": (0,)}, "top_k=0 must be a positive integer", ""),
    ({"tokens": (0,)}, "tokens=0 must be a positive integer", ""),
    ({"experts": (-8,)}, "experts=-8 must be a positive integer", ""),
    ({"d_model": 0}, "d_model=0 must be a positive integer", ""),
    ({"d_hidden": -1}, "d_hidden=-1 must be a positive integer", ""),
    ({"suites": ("chunk",), "chunks": (0,)}, "chunk=0 must be a positive integer", ""),
    ({"suites": ("block_m",), "block_ms": (-64,)}, "block_m=-64 must be a positive integer", ""),
    ({"block_m": 0}, "block_m=0 must be a positive integer", ""),
    ({"slab_elems": 0}, "slab_elems=0 must be a positive integer", ""),
    ({"keep_elems": -1, "impls": ("chunked",)}, "keep_elems=-1 must be 0 or a positive integer", ""),
    ({"lowering": "lop"}, "lowering='lop' is unknown; did you mean loop?", "There are: loop, xla"),
    ({"skew": (1.5,)}, "skew=1.5 must lie in [0, 1]", ""),
    ({"skew": (-0.1,)}, "skew=-0.1 must lie in [0, 1]", ""),
    ({"skew": (float("nan"),)}, "skew=nan must lie in [0, 1]", ""),
    ({"tokens": (2**30,), "experts": (2,)}, "tokens=1073741824 x experts=2 is over 2**31 - 1", "take fewer"),
    ({"tokens": (64, 64)}, "tokens=64,64 names a value twice", "give each once"),
    ({"impls": ("chunked", CHUNKED)}, "names a value twice", "give each once"),
    (
        {"suites": ("chunk",), "impls": ("dense",)},
        "with --suites, --impls holds no cell",
        "--collect-only -q",
    ),
    ({"maxtok_start": 4096, "maxtok_stop": 2048}, "maxtok_start is more than maxtok_stop", ""),
]


@pytest.mark.parametrize(("overrides", "message", "way_out"), BAD, ids=[message for _, message, _ in BAD])
def test_bad_values_are_refused(overrides, message, way_out):
    with pytest.raises(GridError) as caught:
        build("default", overrides)
    assert message in str(caught.value)
    assert way_out in str(caught.value)


def test_unknown_grid():
    with pytest.raises(
        GridError, match=r"grid='smok' is unknown; did you mean smoke\? There are: smoke, default"
    ):
        build("smok")


# (what is asked of pytest, what it answers with exit code 4)
REFUSED = [
    ("--impls chunkd", "did you mean dropless:chunked:sorted?"),
    ("--suites layr", "did you mean layer?"),
    ("--grid defalt", "did you mean default?"),
    ("--dtypes float16", "did you mean bfloat16?"),
    ("--ops backwards", "There are: forward, train_step, train_step_donated"),
    ("--top-k 9 --experts 8", "top_k=9 is more than experts=8"),
    ("--top-k 0", "--top-k='0' must be a positive integer"),
    ("--tokens -1", "--tokens='-1' must be a positive integer"),
    ("--tokens 1.5", "--tokens='1.5' must be a positive integer"),
    ("--experts none", "--experts='none' must be a positive integer"),
    ("--d-model 0", "--d-model='0' must be a positive integer"),
    ("--chunks 0,16", "--chunks='0' must be a positive integer"),
    ("--block-ms -64", "--block-ms='-64' must be a positive integer"),
    ("--block-m 0", "--block-m='0' must be a positive integer"),
    ("--slab-elems 0", "--slab-elems='0' must be a positive integer"),
    ("--keep-elems -1", "--keep-elems='-1' must be 0 or a positive integer"),
    ("--lowering lop", "lowering='lop' is unknown; did you mean loop?"),
    ("--skew 1.01", "--skew='1.01' must lie in [0, 1]"),
    ("--skew nan", "--skew='nan' must lie in [0, 1]"),
    ("--tokens 2000000000 --experts 2", "is over 2**31 - 1"),
    ("--tokens 8 --tokens 16", "--tokens is given twice; give it once, values separated by commas"),
    ("--grid smoke --grid smoke", "--grid is given twice"),
    ("--tokens 8,8", "tokens=8,8 names a value twice"),
    ("--tokens 8,,16", "has an empty value"),
    ("--suites chunk --impls dense", "holds no cell"),
    ("--gate stict", "--gate='stict' is unknown; did you mean strict?"),
    ("--device cude", "--device='cude' is unknown; did you mean cuda?"),
    ("--bench-seconds 0", "must be a positive number of seconds"),
    ("--bench-seconds nan", "must be a positive number of seconds"),
    ("--bench-cores 4096", "this process may use 1.."),
    ("--maxtok-memory 0", "--maxtok-memory='0' must be a positive integer"),
    ("--maxtok-start 64 --maxtok-stop 32", "maxtok_start is more than maxtok_stop"),
]


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    runner = Runner(tmp_path_factory.mktemp("refused"))
    words = (BENCH, "-p", "no:cacheprovider", "--benchmark-autosave", "--junitxml=never.xml")
    ended = runner.batch({asked: [*words, *asked.split()] for asked, _ in REFUSED})
    return runner.folder, ended


@pytest.mark.parametrize(("asked", "answer"), REFUSED, ids=[asked for asked, _ in REFUSED])
def test_pytest_refuses_before_any_work(refused, asked, answer):
    folder, ended = refused
    code, text = ended[asked]
    assert code == 4, text
    assert answer in text
    assert "Traceback" not in text
    assert "collected" not in text
    assert sorted(path.name for path in folder.iterdir()) == ["batch.json", "plugins"]


def test_a_backend_that_is_not_there(tmp_path):
    """Chosen before jax is imported, also where an implementation is named by a word."""
    absent = "tpu" if shutil.which("nvidia-smi") else "cuda"
    words = ("--device", absent, "--impls", "chunked", "-p", "no:cacheprovider", "--collect-only")
    run = Runner(tmp_path / "run").python("-m", "pytest", BENCH, *words)
    assert run.code == 4, run.text
    assert "JAX cannot start its backend" in run.text
    assert f"'{absent}'" in run.text
    assert 'pip install "jax[cuda12]", "jax[cuda13]" or "jax[tpu]"' in run.text
