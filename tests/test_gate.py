"""The gate's tiers and its verdict, on records written by hand."""

import copy
import math
from pathlib import Path

import pytest

from tests.bench import baseline
from tests.bench.gate import deterministic, integrity
from tests.bench.gate.judge import Run, judge
from tests.bench.gate.verdict import FAILING, WORST_FIRST
from tests.verdicts import record, verdict_of

GIB = 2**30


def stored(skipped=None, **records):
    entries = {name: {"extra_info": values} for name, values in records.items()}
    return baseline.Baseline(Path("baselines/cpu-jax0/0001_default.json"), {}, entries, skipped or {})


def judged(before, today, *, declared=None, skipped=None, wrong=(), partial=False, **more):
    declared = [*today, *(skipped or {}), *wrong] if declared is None else declared
    return judge(before, Run(declared, today, skipped or {}, wrong, partial, **more))


def one(before, today):
    """The verdict of one cell, and the exit code of a run of that cell."""
    verdict = judged(stored(a=before), {"a": today})
    (cell,) = verdict.cells
    return cell.status, cell.reasons, verdict.exit_code(strict=False)


# Bytes and flops


@pytest.mark.parametrize(
    ("name", "was", "now", "status"),
    [
        # 1 %, where that is the larger of the two limits
        ("temp_bytes", 10_000_000, 10_100_000, "unchanged"),
        ("temp_bytes", 10_000_000, 10_100_001, "regressed"),
        ("temp_bytes", 10_000_000, 9_900_000, "unchanged"),
        ("temp_bytes", 10_000_000, 9_899_999, "improved"),
        ("argument_bytes", 50_000_000, 50_500_000, "unchanged"),
        ("argument_bytes", 50_000_000, 50_500_001, "regressed"),
        ("output_bytes", 2_000_000, 2_020_000, "unchanged"),
        ("output_bytes", 2_000_000, 2_020_001, "regressed"),
        # 4 KiB, where 1 % is less
        ("temp_bytes", 1000, 1000 + 4096, "unchanged"),
        ("temp_bytes", 1000, 1000 + 4097, "regressed"),
        ("temp_bytes", 6000, 6000 - 4096, "unchanged"),
        ("temp_bytes", 6000, 6000 - 4097, "improved"),
        ("output_bytes", 0, 4096, "unchanged"),
        ("output_bytes", 0, 4097, "regressed"),
        # Less alias is worse: a donation that no longer holds
        ("alias_bytes", 1_000_000, 990_000, "unchanged"),
        ("alias_bytes", 1_000_000, 989_999, "regressed"),
        ("alias_bytes", 1_000_000, 0, "regressed"),
        ("alias_bytes", 1_000_000, 1_010_001, "improved"),
        ("alias_bytes", 0, 1_000_000, "improved"),
        # Flops have no least amount
        ("flops", 5_000_000.0, 5_050_000.0, "unchanged"),
        ("flops", 5_000_000.0, 5_050_001.0, "regressed"),
        ("flops", 5_000_000.0, 4_949_999.0, "improved"),
        ("flops", 100.0, 102.0, "regressed"),
        # Seconds, errors and the like have no say here
        ("median_ms", 30.0, 300.0, "unchanged"),
        ("compile_s", 1.0, 100.0, "unchanged"),
    ],
)
def test_limits(name, was, now, status):
    got, reasons, code = one(record(**{name: was}), record(**{name: now}))
    assert got == status
    assert code == (10 if status == "regressed" else 0)
    assert [name in reason for reason in reasons] == ([] if status == "unchanged" else [True])


def test_reason_names_both_figures_and_the_limit():
    worse, better = deterministic.compare(record(temp_bytes=12_000_000, flops=4e6), record())
    assert worse == ["temp_bytes 10,000,000 -> 12,000,000 (+20.0%) (limit 1% and 4096)"]
    assert better == ["flops 5,000,000 -> 4,000,000 (-20.0%) (limit 1% and 0)"]


def test_worse_and_better_at_once_is_regressed():
    status, reasons, code = one(record(), record(temp_bytes=20_000_000, flops=1e6))
    assert (status, len(reasons), code) == ("regressed", 2, 10)


# Metrics that vanish


@pytest.mark.parametrize("name", integrity.METRICS)
@pytest.mark.parametrize("now", [None, math.nan, math.inf, "many", "absent"])
@pytest.mark.parametrize("was", [7, 0])
def test_vanished_metric_is_a_fault(name, now, was):
    today = record(**{name: now})
    if now == "absent":
        del today[name]
    status, reasons, code = one(record(**{name: was}), today)
    assert (status, code) == ("missing", 11)
    assert len(reasons) == 1
    assert name in reasons[0]
    assert "vanished" in reasons[0]


@pytest.mark.parametrize("name", [name for name in integrity.METRICS if name != "alias_bytes"])
def test_metric_that_turned_zero_is_a_fault(name):
    status, reasons, code = one(record(), record(**{name: 0}))
    assert (status, code) == ("missing", 11)
    assert "the metric vanished" in reasons[0]


def test_metric_that_the_baseline_never_had_is_none():
    assert one(record(flops=None), record(flops=None))[0] == "unchanged"
    assert one(record(flops=None), record())[0] == "unchanged"
    assert one(record(alias_bytes=0), record(alias_bytes=0))[0] == "unchanged"


# Cells that are not there


def statuses(verdict):
    return {cell.id: cell.status for cell in verdict.cells}


def test_declared_cell_that_did_not_run():
    verdict = judged(stored(a=record(), b=record()), {"a": record()}, declared=["a", "b"])
    assert statuses(verdict) == {"a": "unchanged", "b": "missing"}
    assert verdict.cells[1].reasons == ("declared by the grid, but it did not run",)
    assert verdict.exit_code(strict=False) == 11


def test_declared_cell_that_no_baseline_has_either():
    verdict = judged(stored(a=record()), {"a": record()}, declared=["a", "new"])
    assert statuses(verdict) == {"a": "unchanged", "new": "missing"}


def test_cell_of_the_baseline_that_left_the_grid():
    verdict = judged(stored(a=record(), gone=record()), {"a": record()})
    assert statuses(verdict) == {"a": "unchanged", "gone": "missing"}
    assert "no longer in the grid" in verdict.cells[1].reasons[0]
    assert verdict.exit_code(strict=False) == 11


def test_smoke_is_compared_with_the_same_cells_of_default():
    verdict = judged(stored(a=record(), rest=record()), {"a": record()}, subset=True)
    assert statuses(verdict) == {"a": "unchanged"}
    assert verdict.exit_code(strict=True) == 0
    lost = judged(stored(a=record(), b=record()), {"a": record()}, declared=["a", "b"], subset=True)
    assert statuses(lost) == {"a": "unchanged", "b": "missing"}


def test_new_cell_passes():
    verdict = judged(stored(a=record()), {"a": record(), "b": record()})
    assert statuses(verdict) == {"a": "unchanged", "b": "new"}
    assert verdict.exit_code(strict=True) == 0
    assert verdict.compared == 1


def test_run_of_new_cells_only_compared_nothing():
    verdict = judged(stored(a=record()), {"b": record()}, partial=True)
    assert statuses(verdict) == {"b": "new"}
    assert verdict.exit_code(strict=False) == 11


def test_skipped_cell():
    verdict = judged(stored(a=record()), {"a": record()}, skipped={"b": "over a limit"})
    assert statuses(verdict) == {"a": "unchanged", "b": "skipped"}
    assert verdict.cells[1].reasons == ("over a limit",)
    assert verdict.exit_code(strict=True) == 0


def test_skipped_cell_that_the_baseline_measured():
    before = stored(a=record(), b=record())
    for partial in (False, True):
        verdict = judged(before, {"a": record()}, skipped={"b": "over a limit"}, partial=partial)
        assert statuses(verdict) == {"a": "unchanged", "b": "missing"}
        assert verdict.cells[1].reasons == ("skipped (over a limit), but the baseline has it",)
        assert verdict.exit_code(strict=False) == 11


def test_wrong_cell_is_neither_missing_nor_compared():
    verdict = judged(stored(a=record(), b=record()), {"a": record()}, wrong=["b"])
    assert statuses(verdict) == {"a": "unchanged", "b": "wrong"}
    assert verdict.compared == 1


def test_partial_run_compares_what_it_ran():
    before = stored(a=record(), b=record(), c=record())
    verdict = judged(before, {"a": record()}, declared=["a", "b"], partial=True)
    assert statuses(verdict) == {"a": "unchanged"}
    assert verdict.exit_code(strict=False) == 0
    assert verdict.exit_code(strict=True) == 11


# Exit codes


@pytest.mark.parametrize(
    ("verdict", "plain", "strict"),
    [
        (verdict_of("unchanged"), 0, 0),
        (verdict_of("unchanged", "improved", "new", "skipped"), 0, 0),
        (verdict_of("improved"), 0, 0),
        (verdict_of("unchanged", "regressed"), 10, 10),
        (verdict_of("regressed"), 10, 10),
        (verdict_of("regressed", "missing", "unchanged"), 11, 11),
        (verdict_of("unchanged", "missing"), 11, 11),
        (verdict_of("unchanged", faults=("damaged",)), 11, 11),
        (verdict_of("regressed", faults=("damaged",)), 11, 11),
        (verdict_of(), 11, 11),
        (verdict_of("skipped", "new"), 11, 11),
        (verdict_of("unchanged", partial=True), 0, 11),
        (verdict_of("regressed", partial=True), 10, 11),
    ],
)
def test_exit_codes(verdict, plain, strict):
    assert verdict.exit_code(strict=False) == plain
    assert verdict.exit_code(strict=True) == strict


def test_judging_changes_no_record():
    before, today = stored(a=record()), {"a": record(temp_bytes=99_000_000)}
    copies = copy.deepcopy((before, today))
    judged(before, today)
    assert (before, today) == copies


def test_every_status_has_its_place():
    assert set(FAILING) < set(WORST_FIRST)
    assert len(set(WORST_FIRST)) == len(WORST_FIRST)


# Two sets of records, say of two JAX versions


def test_jumps_names_each_cell_and_by_how_much():
    """As when an upgrade took a layer's temp memory from 15 to 54 GiB through another lowering of ragged_dot."""
    before = {
        "ragged": record(temp_bytes=15 * GIB),
        "small": record(temp_bytes=1000),
        "chunked": record(temp_bytes=100_000_000),
        "same": record(),
        "less": record(temp_bytes=54 * GIB),
        "near": record(temp_bytes=10_000_000),
        "only before": record(),
    }
    after = {
        "ragged": record(temp_bytes=54 * GIB),
        "small": record(temp_bytes=5096),
        "chunked": record(temp_bytes=102_000_000),
        "same": record(),
        "less": record(temp_bytes=15 * GIB),
        "near": record(temp_bytes=10_100_000),
        "only after": record(temp_bytes=54 * GIB),
    }
    assert deterministic.jumps(before, after) == [
        "ragged: temp_bytes 16,106,127,360 -> 57,982,058,496 (+260.0%)",
        "chunked: temp_bytes 100,000,000 -> 102,000,000 (+2.0%)",
    ]
    assert deterministic.jumps(after, after) == []
    assert deterministic.jumps({}, {}) == []


def test_jumps_from_stored_files():
    records = {"ragged": {"extra_info": record(temp_bytes=15 * GIB)}, "same": {"extra_info": record()}}
    old = {name: entry["extra_info"] for name, entry in records.items()}
    new = copy.deepcopy(old)
    new["ragged"]["temp_bytes"] = 54 * GIB
    (line,) = deterministic.jumps(old, new)
    assert line.startswith("ragged: ")
    verdict = judged(stored(**old), new)
    assert statuses(verdict) == {"ragged": "regressed", "same": "unchanged"}
    assert line.removeprefix("ragged: ") in verdict.cells[0].reasons[0]
