"""The judge: each cell through the tiers in order, into the verdict."""

from collections.abc import Collection, Mapping
from typing import Any

from ..baseline import Baseline
from . import deterministic, integrity
from .verdict import CellVerdict, Verdict


def judge(
    baseline: Baseline,
    declared: Collection[str],
    records: Mapping[str, dict[str, Any]],
    skipped: Mapping[str, str],
    wrong: Collection[str],
    partial: bool,
    subset: bool = False,
    faults: tuple[str, ...] = (),
) -> Verdict:
    """Judge a run against a baseline.

    Args:
      baseline: the stored run.
      declared: ids that the grid declares (and, for a whole run, that must have run).
      records: id -> record of the cells that were measured.
      skipped: id -> reason of the cells that a limit left out.
      wrong: ids of cells whose test failed; they carry their own error.
      partial: whether the run was narrowed, so that absent cells are no fault.
      subset: whether the grid is a part of the stored one by design (smoke of default).
      faults: integrity faults found elsewhere.
    """
    stored = {identity: entry["extra_info"] for identity, entry in baseline.records.items()}
    cells = [CellVerdict(identity, "wrong") for identity in wrong]
    for identity, today in records.items():
        cells.append(_judge_one(identity, today, stored.get(identity)))
    for identity, reason in skipped.items():
        lost = identity in stored
        reasons = (f"skipped ({reason}), but the baseline has it",) if lost else (reason,)
        cells.append(CellVerdict(identity, "missing" if lost else "skipped", reasons, stored.get(identity)))
    if not partial:
        seen = {*records, *skipped, *wrong}
        expected = {} if subset else stored
        cells += integrity.missing(declared, seen, expected)
    return Verdict(tuple(cells), str(baseline.path), partial, faults)


def _judge_one(identity: str, today: dict[str, Any], stored: dict[str, Any] | None) -> CellVerdict:
    if stored is None:
        return CellVerdict(identity, "new", ("no stored record; record a baseline to gate it",), None, today)
    lost = integrity.vanished(today, stored)
    if lost:
        return CellVerdict(identity, "missing", tuple(lost), stored, today)
    worse, better = deterministic.compare(today, stored)
    status = "regressed" if worse else "improved" if better else "unchanged"
    return CellVerdict(identity, status, tuple(worse + better), stored, today)
