"""The published results: that the import loses nothing, and what "beaten" means, clause by clause."""

import argparse
import copy
import json
import os
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import jax
import pytest

from tests.bench import baseline, program, published, published_cells, published_import
from tests.bench.errors import BaselineError, BenchError

COMMITTED = baseline.ROOT / published_import.FILE
TOLERANCES = {
    "float32": SimpleNamespace(out=5e-7, grad_params=3e-6, grad_x=3e-6),
    "bfloat16": SimpleNamespace(out=6e-3, grad_params=1.2e-2, grad_x=1.2e-2),
}

# The committed file


@pytest.fixture(scope="module")
def committed():
    return json.loads(COMMITTED.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def original(committed):
    return published_import.reconstruct(committed)


def test_every_published_record_is_there(original):
    records = original["results"]
    assert len(records) == 134
    assert Counter(record["code"] for record in records) == {"final": 70, "final-kernel": 16, "rejected": 48}
    assert Counter(record["run"] for record in records) == {
        "cpu_A": 20,
        "cpu_B": 10,
        "cpu_C": 8,
        "cpu_D": 24,
        "cpu_E": 8,
        "cpu_chunk_v1": 16,
        "cpu_chunk_v2": 48,
    }
    assert len(baseline.load(COMMITTED).records) == 134


def test_no_published_field_is_lost(original):
    count = Counter(field for record in original["results"] for field in record)
    assert {count.pop(field) for field in published_import.FIELDS} | {count.pop("max_expert_frac")} == {134}
    assert count.pop("empty_experts") == 134
    assert count == {
        "skew": 70,
        "chunk": 64,
        "rel_err_out": 52,
        "rel_err_grad_params": 52,
        "rel_err_grad_x": 52,
    }


def test_device_and_config_are_verbatim(original):
    assert original["device"] == {
        "jax": "0.11.2",
        "backend": "cpu",
        "devices": ["cpu:0"],
        "python": "3.14.8",
        "device_kind": "cpu",
        "gpu": "NVIDIA GeForce RTX 3090",
        "driver": "615.78.08",
        "gpu_memory_gb": 24.0,
        "torch": "2.14.1+cu130",
        "torch_cuda": "13.0",
    }
    sources = {source["file"]: source for source in original["config"]["sources"]}
    assert len(sources) == 7
    assert sources["cpu_C.json"]["config"]["ragged_limit"] == 131072
    assert sources["cpu_A.json"]["config"]["block_ms"] == [32, 64, 128]
    assert sources["cpu_chunk_v2.json"]["code"] == "rejected"
    assert "slab_elems" not in sources["cpu_chunk_v1.json"]["config"]


@pytest.mark.parametrize(
    ("identity", "figures"),
    [
        (
            "dropless:chunked:sorted-float32-t1024-e8-k2-s0.0-d512-h1024-forward",
            {"xla_temp_mb": 7.518226623535156, "inner": 1, "median_ms": 29.592196995508857, "run": "cpu_A"},
        ),
        (
            "capacity:auto:sorted-float32-t4096-e8-k1-s0.9-d512-h1024-train_step",
            {
                "xla_temp_mb": 100.20722961425781,
                "max_expert_frac": 0.939208984375,
                "xla_out_mb": 144.04698944091797,
            },
        ),
        (
            "dense:auto:sorted-bfloat16-t4096-e8-k2-s0.0-d512-h1024-forward",
            {"xla_out_mb": 8.0, "xla_arg_mb": 52.015625, "rel_err_out": 0.02007995096813788},
        ),
        (
            "chunk/dropless:chunked:sorted-float32-t16384-e64-k2-s0.0-d512-h1024-forward-chunk512",
            {"xla_temp_mb": 9.256263732910156, "code": "final-kernel", "chunk": 512},
        ),
        (
            "chunk/dropless:concatenated:sorted-float32-t1024-e64-k2-s0.0-d512-h1024-forward-chunk1024",
            {"median_ms": 392.14981099939905, "code": "rejected", "impl": "chunked", "run": "cpu_chunk_v2"},
        ),
    ],
    ids=["chunked", "capacity", "dense-bfloat16", "chunk-sweep", "rejected"],
)
def test_known_figures_stand_under_their_cell(identity, figures):
    entry = baseline.load(COMMITTED).records[identity]
    assert figures.items() <= entry["extra_info"].items()
    record = entry["extra_info"]
    for statistic, field in (("median", "median_ms"), ("q1", "q1_ms"), ("q3", "q3_ms")):
        assert entry["stats"][statistic] == record[field] / 1000
    assert entry["stats"]["iterations"] == record["inner"]


def landed_records():
    """Published records of what landed, whose bytes are figures of our kernels alone; skew has no program."""
    records = (entry["extra_info"] for entry in baseline.load(COMMITTED).records.values())
    landed = (its for its in records if its["code"] != "rejected" and its["xla_temp_mb"] is not None)
    return [its for its in landed if not its.get("skew")]


@pytest.mark.parametrize("published_record", landed_records(), ids=lambda its: its["id"])
def test_takes_at_most_the_published_memory(published_record):
    """As published on a CPU: the train step is not donated, and chunked's computes the hidden rows twice."""
    if jax.default_backend() != "cpu":
        pytest.skip("bytes are the CPU compiler's")
    needed = program.flat(published_import.cell_of(published_record)).compile().bytes
    assert needed.temp / program.MIB <= published_record["xla_temp_mb"]


def test_the_importer_gives_the_committed_file(committed, original):
    sha256 = committed["moe_bench"]["published"]["source_sha256"]
    assert published_import.convert(original, sha256) == committed


def test_the_file_is_compact():
    text = COMMITTED.read_text(encoding="utf-8")
    assert len(text) < 400_000
    assert text == baseline.dumps(json.loads(text))


def test_stock_pytest_benchmark_lists_and_compares_the_published_results(tmp_path):
    command = [sys.executable, "-m", "pytest_benchmark", "--storage", str(baseline.ROOT)]
    options = {"capture_output": True, "text": True, "cwd": tmp_path, "timeout": 120, "check": False}
    listed = subprocess.run([*command, "list"], **options)
    assert str(COMMITTED) in listed.stdout.split(), listed.stderr
    compared = subprocess.run([*command, "compare", str(COMMITTED)], **options)
    assert compared.returncode == 0, compared.stderr
    assert compared.stdout.count("test_layer[") == 70
    assert compared.stdout.count("test_chunk[") == 64


# Importing


def record(**fields):
    """A published record: chunked, float32, 4096 tokens, 8 experts, top_k 2, forward."""
    return {
        "code": "final",
        "run": "cpu_A",
        "suite": "layer",
        "routing": "dropless",
        "impl": "chunked",
        "dispatch": "sorted",
        "dtype": "float32",
        "tokens": 4096,
        "d_model": 512,
        "d_hidden": 1024,
        "experts": 8,
        "top_k": 2,
        "skew": 0.0,
        "op": "forward",
        "xla_temp_mb": 9.0,
        "xla_arg_mb": 56.0,
        "xla_out_mb": 8.0,
        "compile_s": 0.1,
        "inner": 1,
        "median_ms": 80.0,
        "q1_ms": 79.0,
        "q3_ms": 81.0,
        "rel_err_out": 4e-8,
        "rel_err_grad_params": 8e-7,
        "rel_err_grad_x": 7e-7,
    } | fields


def source(tmp_path, *records, **changes):
    content = {"device": {"jax": "0.11.2", "backend": "cpu"}, "config": {"sources": []}, "results": records}
    path = tmp_path / "results.txt"
    path.write_text(json.dumps(content | changes))
    return path


def test_an_import_can_be_undone_and_repeated(tmp_path):
    made = source(tmp_path, record(), record(top_k=4, unforeseen=[1, {"a": None}]))
    path = published.import_published(made, tmp_path)
    assert path == tmp_path / "published" / "0001_published.json"
    assert published_import.reconstruct(json.loads(path.read_text())) == json.loads(made.read_text())
    before = path.read_bytes()
    assert published.import_published(made, tmp_path) == path
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("records", "changes", "message"),
    [
        ([record(), record(run="cpu_B")], {}, "twice"),
        ([record() | {"median_ms": float("nan")}], {}, "must be a positive number"),
        ([record(compile_s=float("nan"))], {}, "compile_s=nan .*not finite"),
        ([record(median_ms=0)], {}, "median_ms=0; it must be a positive number"),
        ([record(q1_ms="79")], {}, "q1_ms='79'; it must be a positive number"),
        ([{k: v for k, v in record().items() if k != "xla_temp_mb"}], {}, r"results\[0\] lacks xla_temp_mb"),
        (["text"], {}, r"results\[0\] is not a record"),
        ([record()], {"results": None}, "not a published results file"),
        ([record()], {"device": "cpu"}, "not a published results file"),
        ([record()], {"device": {}}, "on which backend"),
        ([], {}, "no benchmarks"),
    ],
    ids=[
        *("duplicate", "nan-time", "nan-field", "zero", "text", "field-gone", "not-a-record"),
        *("no-results", "no-device", "empty-device", "empty"),
    ],
)
def test_a_source_that_is_not_the_published_file_is_refused(tmp_path, records, changes, message):
    with pytest.raises(BaselineError, match=message):
        published.import_published(source(tmp_path, *records, **changes), tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_a_source_that_is_not_json_is_refused(tmp_path):
    (tmp_path / "results.txt").write_text("{")
    with pytest.raises(BaselineError, match="truncated or not JSON"):
        published.import_published(tmp_path / "results.txt", tmp_path)


# Beaten, clause by clause

DENSE = record(routing="dense", impl="auto", median_ms=200.0)
BORROWING = {"run": "cpu_chunk_v1", "suite": "chunk", "code": "final-kernel"}


def id_of(published_record):
    return published_import.cell_of(published_record).id


def theirs(*records):
    made = {"device": {"jax": "0.11.2", "backend": "cpu"}, "config": {}, "results": list(records)}
    return published_import.convert(made, "0")


def run_of(*records, skipped=(), backend="cpu"):
    """A run of this suite that holds the cells of these records, with their figures."""
    made = theirs(*copy.deepcopy(records))
    made["moe_bench"] |= {"skipped": list(skipped), "environment": {"jax": "0.10.2", "backend": backend}}
    del made["moe_bench"]["published"]
    for entry in made["benchmarks"]:
        del entry["extra_info"]["run"], entry["extra_info"]["code"]
        entry["extra_info"] |= {"schema": 1, "param_dtype": "float32"}
    return made


def row_of(run, published_records, identity):
    rows = {row.id: row for row in published.compare(run, theirs(*published_records), TOLERANCES)}
    return rows[identity]


def judged(change, cell=None, dense=DENSE):
    """Our row of a cell, equal to the published one but for `change`."""
    cell = cell or record()
    records = [cell, dense] if dense else [cell]
    changed = {field: value for field, value in (cell | change).items() if value is not ...}
    return row_of(run_of(changed, *records[1:]), records, id_of(cell))


def test_equal_figures_are_beaten():
    row = judged({})
    assert (row.state, row.beaten, row.unmet) == ("compared", True, ())


@pytest.mark.parametrize(
    ("change", "unmet"),
    [
        ({"xla_temp_mb": 9.0 + 2**-20}, ("temp",)),
        ({"median_ms": 80.1}, ("time",)),
        ({"rel_err_out": 5.1e-7}, ("rel_err_out",)),
        ({"rel_err_grad_params": 3.1e-6}, ("rel_err_grad_params",)),
        ({"rel_err_grad_x": 3.1e-6}, ("rel_err_grad_x",)),
        ({"xla_arg_mb": 56.0 + 2**-20}, ("arguments",)),
        ({"xla_arg_mb": 55.0}, ("arguments",)),
        ({"xla_out_mb": 8.0 + 2**-20}, ("output",)),
        ({"xla_out_mb": 7.0}, ("output",)),
        ({"xla_temp_mb": 10.0, "median_ms": 90.0}, ("temp", "time")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_each_clause_flips_the_verdict(change, unmet):
    row = judged(change)
    assert (row.beaten, row.unmet) == (False, unmet)


@pytest.mark.parametrize(
    "change",
    [
        {"xla_temp_mb": 1.0},
        {"median_ms": 1.0},
        {"rel_err_out": 5e-7, "rel_err_grad_params": 3e-6, "rel_err_grad_x": 3e-6},
        {"compile_s": 1000.0},
    ],
    ids=["temp", "time", "at-tolerance", "slow-compile"],
)
def test_what_is_better_or_not_counted_keeps_the_verdict(change):
    assert judged(change).beaten
    assert judged_with("compile_s", ...).beaten


@pytest.mark.parametrize("value", [..., None, float("inf"), "9.0", True, -1.0], ids=repr)
@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("xla_temp_mb", "temp"),
        ("rel_err_out", "rel_err_out"),
        ("rel_err_grad_params", "rel_err_grad_params"),
        ("rel_err_grad_x", "rel_err_grad_x"),
        ("xla_arg_mb", "arguments"),
        ("xla_out_mb", "output"),
    ],
)
def test_a_missing_figure_is_never_beaten(field, name, value):
    if value == float("inf"):
        with pytest.raises(BaselineError, match="not finite"):
            judged_with(field, value)
    else:
        assert judged_with(field, value).unmet == (name,)


def judged_with(field, value):
    """As `judged`, for values that the import itself would refuse."""
    run = run_of(record(), DENSE)
    if value is ...:
        del run["benchmarks"][0]["extra_info"][field]
    else:
        run["benchmarks"][0]["extra_info"][field] = value
    return row_of(run, [record(), DENSE], id_of(record()))


def test_a_run_without_dense_cannot_beat_a_published_ratio():
    row = row_of(run_of(record()), [record(), DENSE], id_of(record()))
    assert row.unmet == ("time",)


def test_a_published_error_above_the_tolerance_is_the_bar():
    loose = record(rel_err_out=1e-6)
    assert judged({"rel_err_out": 1e-6}, loose).beaten
    assert judged({"rel_err_out": 1.1e-6}, loose).unmet == ("rel_err_out",)


def test_a_cell_published_without_errors_is_held_to_the_tolerance():
    silent = {k: v for k, v in record(routing="capacity", impl="auto").items() if not k.startswith("rel_err")}
    errors = {"rel_err_out": 5e-7, "rel_err_grad_params": 3e-6, "rel_err_grad_x": 3e-6}
    assert judged(errors, silent).beaten
    assert judged(errors | {"rel_err_out": 6e-7}, silent).unmet == ("rel_err_out",)
    assert judged({}, silent).unmet == ("rel_err_out", "rel_err_grad_params", "rel_err_grad_x")


def test_bfloat16_has_its_own_tolerance():
    cell, dense = record(dtype="bfloat16"), DENSE | {"dtype": "bfloat16"}
    assert judged({"rel_err_out": 6e-3}, cell, dense).beaten
    assert not judged({"rel_err_out": 6.1e-3}, cell, dense).beaten


@pytest.mark.parametrize(
    ("cell", "bar"),
    [
        (record(median_ms=1.0), 1.1 * 2 / 8),
        (record(median_ms=1.0, top_k=4), 1.1 * 4 / 8),
        (record(median_ms=1.0, routing="capacity", impl="auto"), 1.1 * 1.25 * 2 / 8),
        (record(median_ms=199.0), 199 / 200),
        (DENSE, 1.1),
    ],
    ids=["flop-limit", "flop-limit-top-k", "flop-limit-capacity", "published", "dense"],
)
def test_the_time_bar_is_the_larger_of_published_ratio_and_flop_limit(cell, bar):
    assert _time(judged({}, cell, None if cell is DENSE else DENSE)).bar == pytest.approx(bar)
    if cell is not DENSE:  # Dense over dense is always 1.
        assert judged({"median_ms": bar * 200 - 0.01}, cell).beaten
        assert judged({"median_ms": bar * 200 + 0.01}, cell).unmet == ("time",)


def test_time_is_relative_to_dense_of_the_same_run():
    cell = record(median_ms=100.0)
    run = run_of(cell | {"median_ms": 150.0}, DENSE | {"median_ms": 300.0})
    assert row_of(run, [cell, DENSE], id_of(cell)).beaten
    run = run_of(cell | {"median_ms": 99.0}, DENSE | {"median_ms": 150.0})
    assert row_of(run, [cell, DENSE], id_of(cell)).unmet == ("time",)


@pytest.mark.parametrize(
    "other",
    [{"dtype": "bfloat16"}, {"tokens": 1024}, {"experts": 64}, {"op": "train_step"}, {"d_model": 256}],
    ids=lambda other: next(iter(other)),
)
def test_dense_of_another_shape_is_no_reference(other):
    row = judged({}, dense=DENSE | other)
    time = _time(row)
    assert (time.ours, time.theirs, time.holds) == (None, None, None)


def test_dense_with_parameters_of_another_dtype_is_no_reference():
    run = run_of(record(), DENSE)
    run["benchmarks"][1]["extra_info"]["param_dtype"] = "bfloat16"
    assert row_of(run, [record(), DENSE], id_of(record())).unmet == ("time",)


@pytest.mark.parametrize(
    "fields", [{"run": "cpu_D", "top_k": 1, "skew": 0.9}, BORROWING], ids=["top_k", "sweep"]
)
def test_a_published_run_without_dense_borrows_it(fields):
    cell = record(**fields)
    row = judged({}, cell)
    assert (row.dense_run, row.borrowed, row.beaten) == ("cpu_A", True, True)
    assert judged({"median_ms": 80.1}, cell).unmet == ("time",)
    assert "* The published run of this cell holds no dense" in published.render([row])
    assert "holds no dense" not in published.render([judged({})])


def test_the_dense_of_the_own_published_run_goes_first():
    other = DENSE | {"run": "cpu_B", "top_k": 4, "median_ms": 1000.0}
    row = row_of(run_of(record(), DENSE), [record(), other, DENSE], id_of(record()))
    assert row.dense_run == "cpu_A"


def test_of_several_dense_of_ours_the_fastest_counts():
    faster = DENSE | {"top_k": 4, "median_ms": 100.0}
    row = row_of(run_of(record(), DENSE, faster), [record(), DENSE], id_of(record()))
    assert row.unmet == ("time",)


def test_without_any_dense_time_is_shown_and_not_counted():
    cell = record(tokens=16384, experts=64)
    row = judged({"median_ms": 1000.0}, cell, dense=None)
    assert row.beaten
    assert judged({"xla_temp_mb": 10.0}, cell, dense=None).unmet == ("temp",)
    assert "[1000 ms / 80 ms]" in published.render([row])


def test_our_dense_alone_sets_the_flop_limit_as_bar():
    cell = record()
    for median, beaten in ((54.9, True), (55.1, False)):
        run = run_of(cell | {"median_ms": median}, DENSE)
        assert row_of(run, [cell], id_of(cell)).beaten is beaten


def test_time_of_raw_ragged_dot_is_shown_and_not_counted():
    cell = record(impl="ragged_dot")
    row = judged({"median_ms": 10_000.0}, cell)
    assert row.beaten
    assert "[50.000 / 0.400]" in published.render([row])
    assert judged({"xla_temp_mb": 10.0}, cell).unmet == ("temp",)


def test_dense_bfloat16_forward_may_put_out_less_but_not_more():
    cell = DENSE | {"dtype": "bfloat16"}
    assert judged({"xla_out_mb": 4.0}, cell, dense=None).beaten
    assert judged({"xla_out_mb": 8.1}, cell, dense=None).unmet == ("output",)
    step = cell | {"op": "train_step"}
    assert judged({"xla_out_mb": 4.0}, step, dense=None).unmet == ("output",)


# Rows and text


def test_what_was_not_run_is_listed_with_its_reason_and_counted():
    cells = [record(), DENSE, record(top_k=1), record(top_k=4), record(top_k=8)]
    reason = "tokens x experts = 32768 is over dense_limit=1024"
    run = run_of(record(), DENSE, skipped=[{"id": id_of(cells[2]), "reason": reason}])
    rows = published.compare(run, theirs(*cells), TOLERANCES)
    assert [row.state for row in rows] == ["compared", "compared", "skipped", "absent", "absent"]
    assert [row.beaten for row in rows] == [True, True, False, False, False]
    text = published.render(rows)
    assert f"Published cells skipped in this run: 1\n  {id_of(cells[2])}: {reason}" in text
    assert f"Published cells absent in this run: 2\n  {id_of(cells[3])}\n  {id_of(cells[4])}" in text
    assert "2 of 2 compared beaten (5 published cells: 1 skipped, 2 absent)" in text


def test_the_rejected_variant_is_shown_and_counted_on_its_own():
    rejected = record(code="rejected", suite="chunk", run="cpu_chunk_v2", chunk=128)
    cells = [record(), DENSE, rejected]
    run = run_of(record(), DENSE | {"xla_temp_mb": 10.0}, rejected)
    assert run["benchmarks"][2]["extra_info"]["id"].startswith("chunk/dropless:concatenated:sorted-")
    text = published.render(published.compare(run, theirs(*cells), TOLERANCES))
    assert "Rejected variant, measured for comparison" in text
    assert "dropless:concatenated:sorted chunk 128" in text
    assert text.endswith(
        "1 of 2 compared beaten (2 published cells: 0 skipped, 0 absent)\n"
        "1 of 1 compared beaten (1 cells of the rejected variant: 0 skipped, 0 absent)\n"
    )


def test_a_line_shows_ours_and_theirs():
    text = published.render([judged({"xla_temp_mb": 12.5, "median_ms": 100.0, "rel_err_grad_params": 2e-6})])
    line = next(line for line in text.splitlines() if "chunked" in line)
    assert line.split("  ", 2)[1].strip() == "dropless:chunked:sorted"
    for part in (
        "12.50 / 9.00",
        "0.500 / 0.400 (0.400)",
        "2.0e-06 / 8.0e-07",
        "56.00 =",
        "8.00 =",
    ):
        assert part in line
    assert line.endswith("not yet: temp, time")
    assert "float32, 4096 tokens, 8 experts, top_k 2, skew 0.0, forward" in text


def test_rows_of_the_same_work_stand_together():
    step = {"op": "train_step"}
    cells = [record(), record(**step), DENSE, DENSE | step]
    text = published.render(published.compare(run_of(*cells), theirs(*cells), TOLERANCES))
    lines = [line.split("  ")[1] if line.startswith("  ") else line for line in text.splitlines()]
    where = lines.index("float32, 4096 tokens, 8 experts, top_k 2, skew 0.0, forward")
    assert lines[where + 1 : where + 3] == ["dropless:chunked:sorted", "dense:auto:sorted"]
    assert sum(line.startswith("float32") for line in lines) == 2


def test_argument_bytes_that_differ_show_both():
    assert "55.00 / 56.00" in published.render([judged({"xla_arg_mb": 55.0})])


def test_comparing_the_published_file_with_itself_beats_every_cell_that_published_its_errors(committed):
    rows = published.compare(committed, baseline.load(COMMITTED), TOLERANCES)
    landed = [row for row in rows if not row.rejected]
    assert len(landed) == 86
    assert all(row.state == "compared" for row in rows)
    assert {row.beaten for row in landed if "rel_err_out" in row.cell} == {True}
    assert all(name.startswith("rel_err") for row in rows for name in row.unmet)
    not_counted = {
        (r.cell["impl"], r.cell["tokens"], r.cell["experts"]) for r in rows if _time(r).holds is None
    }
    assert not_counted == {
        *(("ragged_dot", tokens, 8) for tokens in (1024, 4096, 16384)),
        *(("chunked", tokens, 64) for tokens in (1024, 16384)),
    }


def _time(row):
    return next(figure for figure in row.figures if figure.name == "time")


def test_every_published_run_but_three_has_its_own_dense(committed):
    rows = published.compare(committed, committed, TOLERANCES)
    assert {row.cell["run"] for row in rows if row.borrowed} == {"cpu_D", "cpu_chunk_v1", "cpu_chunk_v2"}


def test_a_damaged_run_is_refused():
    run = run_of(record(), record(top_k=1))
    run["benchmarks"][1]["extra_info"]["id"] = id_of(record())
    with pytest.raises(BaselineError, match="twice"):
        published.compare(run, theirs(record()), TOLERANCES)


# The verbs


def arguments(add, *values):
    parser = argparse.ArgumentParser()
    add(parser)
    return parser.parse_args([str(value) for value in values])


@pytest.fixture
def store(tmp_path):
    """A store with imported results of two cells."""
    root = tmp_path / "baselines"
    published.import_published(source(tmp_path, record(), DENSE), root)
    return root


@pytest.fixture
def _tolerances(monkeypatch):
    monkeypatch.setattr(published_cells, "default_tolerances", lambda: TOLERANCES)


def save_run(path, *records, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(run_of(*records, **options)))
    return path


def show(capsys, *values):
    code = published.run(arguments(published.add_arguments, *values))
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.mark.usefixtures("_tolerances")
def test_the_verb_prints_the_comparison(tmp_path, store, capsys):
    path = save_run(tmp_path / "mine.json", record(), DENSE)
    code, out, err = show(capsys, path, "--baselines", store)
    assert (code, err) == (0, "")
    assert out.startswith(f"Published: cpu, JAX 0.11.2, Python None\nRun: {path}, cpu, JAX 0.10.2")
    assert "2 of 2 compared beaten" in out


@pytest.mark.usefixtures("_tolerances")
def test_a_run_on_another_backend_is_marked(tmp_path, store, capsys):
    path = save_run(tmp_path / "mine.json", record(), DENSE, backend="gpu")
    assert "The backends differ" in show(capsys, path, "--baselines", store)[1]


@pytest.mark.usefixtures("_tolerances")
def test_without_a_file_the_newest_saved_run_is_shown(tmp_path, store, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    places = ["run.json", ".benchmarks/Linux-CPython-3.11-64bit/0001_mine.json"]
    for newest in places:
        for place in places:
            path = save_run(tmp_path / place, record(), DENSE)
            time = 2_000_000_000 if place == newest else 1_000_000_000
            os.utime(path, (time, time))
        assert newest in show(capsys, "--baselines", store)[1]


def test_without_any_saved_run_the_verb_says_how_to_get_one(tmp_path, store, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = show(capsys, "--baselines", store)
    assert (code, out) == (2, "")
    assert "pytest tests/bench --grid published --benchmark-json=run.json" in err


@pytest.mark.usefixtures("_tolerances")
def test_a_run_without_published_cells_is_an_error(tmp_path, store, capsys):
    path = save_run(tmp_path / "mine.json", record(tokens=7))
    code, _, err = show(capsys, path, "--baselines", store)
    assert code == 2
    assert "holds none of the 2 published cells" in err


def test_results_not_yet_imported_say_how(tmp_path, capsys):
    path = save_run(tmp_path / "mine.json", record())
    code, _, err = show(capsys, path, "--baselines", tmp_path / "empty")
    assert code == 2
    assert "import-published SOURCE" in err


@pytest.mark.parametrize("content", ["", "{}", "[]"], ids=["empty", "no-block", "array"])
def test_a_run_file_that_is_not_a_run_is_an_error(tmp_path, store, capsys, content):
    (tmp_path / "mine.json").write_text(content)
    code, _, err = show(capsys, tmp_path / "mine.json", "--baselines", store)
    assert code == 2
    assert "mine.json" in err
    assert "--benchmark-json" in err


def test_the_import_verb(tmp_path, capsys):
    made = source(tmp_path, record(), DENSE)
    parsed = arguments(published.add_import_arguments, made, "--baselines", tmp_path / "store")
    assert published.run_import(parsed) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'store' / published_import.FILE}: 2 records\n"
    parsed = arguments(published.add_import_arguments, tmp_path / "none", "--baselines", tmp_path / "store")
    assert published.run_import(parsed) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_newest_saved_raises_from_the_suites_family(tmp_path):
    with pytest.raises(BenchError):
        published.newest_saved(tmp_path)
