"""The report on a terminal, on verdicts written by hand."""

import pytest

from tests.bench.gate.verdict import DRIFTS, Drift, Timing
from tests.bench.report import lines, summary
from tests.verdicts import cell, verdict_of

BASELINE = "compared with baselines/cpu-jax0/0001_default.json"
RECORD = 'tox run -e baseline -- --reason "..."'


def test_whole_report():
    slow = Timing(1.12, 1.09, 1.15, 48, 3.0)
    verdict = verdict_of(
        cell("c-forward", "unchanged", was={"median_ms": 32.5}),
        cell("a-forward-chunk64", "regressed", "time: x1.12", "and more", timing=slow),
        cell("b-train_step", "improved", "temp_bytes fell", now={"xla_temp_mb": 4.75}, op="train_step"),
        drift=(Drift("jax", "0.10 -> 0.12"),),
        notes=("controls moved by 2%",),
    )
    assert lines(verdict) == [
        BASELINE,
        "",
        "layer: float32, 1024 tokens, 8 experts, top_k 2, skew 0.0, forward",
        "  verdict    cell                             temp MiB          side by side       time ms  of matmul",
        "  regressed  dropless:chunked:sorted-chunk64      9.50  x1.12 (1.09 to 1.15)          30.0        80%",
        "      time: x1.12",
        "      and more",
        "  unchanged  dropless:chunked:sorted              9.50                        32.5 -> 30.0        80%",
        "",
        "layer: float32, 1024 tokens, 8 experts, top_k 2, skew 0.0, train_step",
        "  verdict   cell                         temp MiB  time ms  of matmul",
        "  improved  dropless:chunked:sorted  9.50 -> 4.75     30.0        80%",
        "      temp_bytes fell",
        "",
        f"jax drift: {DRIFTS['jax']}: 0.10 -> 0.12",
        "note: controls moved by 2%",
        "verdict: 1 regressed, 1 improved, 1 unchanged; 3 compared (bytes, flops and time)",
        f'if this is meant, accept it: {RECORD} --accept-slower "..."',
        f"improved: 1 cell; fix or accept what is worse, then keep it as the new bar: {RECORD}",
    ]


def test_group_stands_where_its_worst_cell_does():
    found = [
        cell("a-forward", "unchanged", tokens=1),
        cell("b-forward", "improved", tokens=2),
        cell("c-forward", "inconclusive", tokens=3),
        cell("d-forward", "unchanged", tokens=4),
        cell("e-forward", "regressed", tokens=4),
        cell("f-forward", "missing", tokens=5),
    ]
    headings = [line for line in lines(verdict_of(*found)) if line.startswith("layer")]
    assert [line.split()[2] for line in headings] == ["5", "4", "3", "2", "1"]


def test_reasons_of_an_unchanged_cell_are_not_printed():
    said = lines(verdict_of(cell("a-forward", "unchanged", "the same program")))
    assert not any("the same program" in line for line in said)


def test_figure_of_zero_is_shown():
    said = lines(verdict_of(cell("a-forward", "unchanged", was={"xla_temp_mb": 0.5}, now={"xla_temp_mb": 0})))
    assert "0.50 -> 0.00" in said[4]


def test_cell_without_a_record_has_its_id():
    said = lines(verdict_of("wrong", cell("a-forward", "unchanged")))
    assert said[2:5] == ["without a record", "  verdict  cell", "  wrong    cell0"]


def test_figure_that_a_record_lacks_is_left_out():
    (row,) = (
        line
        for line in lines(
            verdict_of(cell("a-forward", "new", was={"median_ms": None}, now={"gemm_fraction": None}))
        )
        if line.startswith("  new")
    )
    assert row.split() == ["new", "dropless:chunked:sorted", "9.50", "30.0", "80%"]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (["unchanged"], []),
        (["unchanged", "skipped", "wrong", "inconclusive"], []),
        (["regressed"], [f'if this is meant, accept it: {RECORD} --accept-slower "..."']),
        (["missing"], [f"if this is meant, accept it: {RECORD}"]),
        (["improved", "improved"], [f"improved: 2 cells; keep it as the new bar: {RECORD}"]),
        (["new"], [f"new: 1 cell; gate it from now on: {RECORD}"]),
        (
            ["missing", "new"],
            [
                f"if this is meant, accept it: {RECORD}",
                f"new: 1 cell; fix or accept what is worse, then gate it from now on: {RECORD}",
            ],
        ),
    ],
)
def test_how_to_accept(found, said):
    first, *rest = summary(verdict_of(*found))
    assert first.startswith("verdict: ")
    assert rest == said


def test_faults_come_first_and_a_partial_run_says_so():
    first, counts, partial = summary(verdict_of("unchanged", partial=True, faults=("damaged",)))
    assert first == "integrity: damaged"
    assert counts == "verdict: 1 unchanged; 1 compared (bytes and flops)"
    assert partial.startswith("PARTIAL: this run was narrowed")


def test_empty_verdict():
    assert lines(verdict_of()) == [BASELINE, "", "verdict: no cell; 0 compared (bytes and flops)"]


def test_drifts_are_one_line_a_kind_in_order_and_name_three_cells():
    found = (
        Drift("environment", "cpu: A -> B"),
        Drift("compiler", "temp_bytes 1 -> 2", "a"),
        Drift("environment", "cores: 2 -> 4"),
        *(Drift("code", f"{number} lines", f"cell{number}") for number in range(5)),
        Drift("compiler", "flops 1 -> 2", "b"),
        Drift("jax", "0.10 -> 0.12"),
    )
    assert summary(verdict_of("unchanged", drift=found))[:-1] == [
        f"code drift: {DRIFTS['code']}: cell0 (0 lines); cell1 (1 lines); cell2 (2 lines); and 2 more",
        f"jax drift: {DRIFTS['jax']}: 0.10 -> 0.12",
        f"compiler drift: {DRIFTS['compiler']}: a (temp_bytes 1 -> 2); b (flops 1 -> 2)",
        f"environment drift: {DRIFTS['environment']}: cpu: A -> B; cores: 2 -> 4",
    ]
