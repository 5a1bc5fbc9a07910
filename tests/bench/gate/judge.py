"""The judge: each cell through the tiers in order, into the verdict."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from ..baseline import Baseline
from . import deterministic, drift, integrity, limits, stored_time, timing
from .evidence import Evidence
from .paired import Pairs
from .verdict import CellVerdict, Drift, Verdict


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run yielded, as the judge sees it.

    Attributes:
      declared: ids that the grid declares (and, for a whole run, that must have run).
      records: id -> record of the cells that were measured.
      skipped: id -> reason of the cells that a limit left out.
      wrong: ids of cells whose test failed; they carry their own error.
      partial: whether the run was narrowed, so that absent cells are no fault.
      ran: ids of the cells whose test ran; in a partial run they alone have to be there.
      subset: whether the grid is a part of the stored one by design (smoke of default).
      same_source: both records are of one source, and the compiler is under test: whatever moved is blamed on it.
      environment: of the run; empty where nothing is known of it.
      evidence: id -> what was seen of the programs.
      suspects: id -> slower or faster (`timing.suspects`).
      confirmed: id -> pairs of the fresh process, or why there are none.
      controls: null controls, programs raced against themselves.
      twice: ids that the grid holds more than once.
      faults: integrity faults found elsewhere.
      accepted: why cells may be slower or larger than their baseline, None where they may not.
    """

    declared: Collection[str]
    records: Mapping[str, dict[str, Any]]
    skipped: Mapping[str, str] = dataclasses.field(default_factory=dict)
    wrong: Collection[str] = ()
    partial: bool = False
    ran: Collection[str] = ()
    subset: bool = False
    same_source: bool = False
    environment: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    evidence: Mapping[str, Evidence] = dataclasses.field(default_factory=dict)
    suspects: Mapping[str, str] = dataclasses.field(default_factory=dict)
    confirmed: Mapping[str, Pairs | str] = dataclasses.field(default_factory=dict)
    controls: tuple[Pairs, ...] = ()
    twice: Collection[str] = ()
    faults: tuple[str, ...] = ()
    accepted: str | None = None


def judge(baseline: Baseline, run: Run, settings: tuple[limits.Limit, ...] = ()) -> Verdict:
    """Judge a run against a baseline, under these limits."""
    stored = {identity: entry["extra_info"] for identity, entry in baseline.records.items()}
    environment = dict(run.environment) or baseline.environment
    same_jax = environment["jax"] == baseline.environment["jax"] if environment else True
    same_jax = same_jax and not run.same_source
    moved = timing.noisy(list(run.controls))
    noise = timing.factor(moved[0].ratio) if moved else 1.0
    cells = [CellVerdict(identity, "wrong", (), stored.get(identity)) for identity in run.wrong]
    spared: list[str] = []  # By a limit of pyproject.toml, with its reason.
    drifts: list[Drift] = drift.of_environment(environment, baseline.environment)
    for identity, today in run.records.items():
        seen, its = run.evidence.get(identity, Evidence()), stored.get(identity)
        if identity in run.twice:
            reason = "the grid holds it more than once, so one of them was compared with nothing"
            cells.append(CellVerdict(identity, "missing", (reason,), its, today))
            continue
        cells.append(_cell(identity, today, its, seen, run, settings, same_jax, noise))
        if its is not None and cells[-1].status != "missing":
            its_figures = _bar(its, seen, run)
            spared += [
                f"{identity}: {line}" for line in deterministic.let_through(today, its_figures, settings)
            ]
            drifts += drift.of_cell(identity, seen, today, its, same_jax, settings)
    for identity, reason in run.skipped.items():
        lost = identity in stored
        reasons = (f"skipped ({reason}), but the baseline has it",) if lost else (reason,)
        cells.append(CellVerdict(identity, "missing" if lost else "skipped", reasons, stored.get(identity)))
    seen_ids = {*run.records, *run.skipped, *run.wrong}
    if run.partial:
        cells += integrity.missing(run.ran, seen_ids, {})
    else:
        cells += integrity.missing(run.declared, seen_ids, {} if run.subset else stored)
    return Verdict(
        tuple(cells),
        str(baseline.path),
        run.partial,
        run.faults,
        tuple(drift.moved_first(drifts)),
        (*_notes(environment, baseline.environment, moved, same_jax, run.same_source), *spared),
        environment,
        run.accepted,
    )


def _cell(
    identity: str,
    today: dict[str, Any],
    stored: dict[str, Any] | None,
    seen: Evidence,
    run: Run,
    settings: tuple[limits.Limit, ...],
    same_jax: bool,
    noise: float,
) -> CellVerdict:
    def verdict(status: str, reasons: list[str], time: Any = None, measured: bool = True) -> CellVerdict:
        accepted = measured and status == "regressed" and run.accepted is not None
        return CellVerdict(identity, status, tuple(reasons), stored, today, time, accepted)

    if stored is None:
        return verdict("new", ["no stored record; record a baseline to gate it"])
    lost = integrity.vanished(today, stored) + ([seen.fault] if seen.fault else [])
    if lost:
        return verdict("missing", lost)
    if seen.unstorable and stored.get("program"):
        # No figure got worse: the gate lost sight of the program, and nobody can know what is accepted.
        return verdict("regressed", [seen.unstorable], measured=False)
    # One program gets other figures only from another compiler or its flags: drift, not blamed on the change.
    worse: list[str] = []
    better: list[str] = []
    if run.same_source or (same_jax and not seen.same):
        worse, better = deterministic.compare(today, _bar(stored, seen, run), settings)
    limit = limits.slowest(settings, identity)
    status, reasons, time = timing.judge(
        seen, run.suspects.get(identity), run.confirmed.get(identity), limit, noise
    )
    if worse:
        return verdict("regressed", worse + better + reasons, time)
    if better and status == "unchanged":
        status = "improved"
    return verdict(status, better + reasons, time)


def _bar(stored: dict[str, Any], seen: Evidence, run: Run) -> dict[str, Any]:
    """What today is held against: the stored program compiled now, but where the compiler is the question."""
    return stored if seen.figures is None or run.same_source else stored | seen.figures


def _notes(
    environment: dict[str, Any], stored: dict[str, Any], moved: list[Pairs], same_jax: bool, same_source: bool
) -> list[str]:
    notes = []
    differing = [] if same_source else stored_time.not_comparable(environment, stored)
    if differing:
        notes.append(f"stored time not comparable: another {', '.join(differing)} than the baseline's")
    if moved:
        notes.append(
            f"noise: {len(moved)} null controls moved (a program against itself, {moved[0]}); times that "
            "changed by less than this beyond their limit are inconclusive: close what else runs, and run again"
        )
    if not same_jax and not same_source:
        notes.append("the baseline is another JAX's: this shows what moved, and gates nothing")
    return notes
