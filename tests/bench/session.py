"""The state of a run: what is declared, what ran, was seen, is held back. The plugin's hooks act on it."""

from pathlib import Path
from typing import Any

import pytest

from . import options
from .progress import Progress

KEY = pytest.StashKey["Cells"]()
NARROWING = ("keyword", "markexpr", "lf", "stepwise", "deselect", "ignore", "ignore_glob")


class Cells:
    """The cells of a run. Fixture `cells` hands it to the tests, which call `run`.

    What imports jax is imported inside functions: the process is pinned first.
    """

    def __init__(self, config: pytest.Config, run: options.Run, comparing: bool) -> None:
        self.config, self.options, self.comparing = config, run, comparing
        self.entries: list[Any] = []
        self.environment: dict[str, Any] = {}
        self.baseline: Any = None
        self.settings: tuple[Any, ...] = ()  # limits in force
        self.cores: list[int] | None = None
        self.ids: dict[str, str] = {}  # node id -> cell id
        self.records: dict[str, dict[str, Any]] = {}
        self.evidence: dict[str, Any] = {}
        self.skipped: dict[str, str] = {}
        self.wrong: set[str] = set()
        self.held: list[tuple[pytest.Item, list[pytest.TestReport]]] = []
        self.examiner: Any = None
        self.journal: Any = None
        self.trial: Any = None
        self.replayed: set[str] = set()
        self.unrun: set[str] = set()  # their program is the stored one (--changed-only)
        self.verdict: Any = None
        self.progress: Progress | None = None
        self.fault: str | None = None  # why there is no baseline, under --gate warn
        self.interrupted = False

    def run(self, entry: Any, benchmark: Any) -> None:
        """The body of every cell's test: skip with a reason, or assert, measure and examine."""
        from .maxtok import measure_largest
        from .measure import measure
        from .numerics import WrongNumerics
        from .program import Retraced

        cell, run = entry.cell, self.options
        if entry.skip:
            self.skipped[cell.id] = entry.skip
            pytest.skip(entry.skip)
        self._try_out(cell, benchmark)
        if cell.suite == "maxtok":
            values = measure_largest(entry, benchmark, run.maxtok_memory, run.check)
            if values is not None:
                self.records[cell.id] = values
            return
        if self.measuring and self._known(cell, benchmark):
            return
        try:
            measured = measure(cell, benchmark, run.seconds, run.check)
        except (WrongNumerics, Retraced) as fault:
            benchmark.skipped = True  # Or pytest-benchmark warns that it was not used.
            pytest.fail(str(fault), pytrace=False)
        if measured is None:
            return
        self.records[cell.id] = measured.record
        self.evidence[cell.id] = self.examiner.examine(cell, measured.program, measured.record)
        measured.record["program"] = self.evidence[cell.id].digest
        benchmark.extra_info["program"] = self.evidence[cell.id].digest
        self._write(cell, benchmark)

    def open(self) -> None:
        """Open the journal, and what examines cells. Called once the cells are collected."""
        from . import journal
        from .gate.examine import Examiner

        run = self.options
        self.journal = journal.Journal(self.reports / "journal", run.resume)
        self.examiner = Examiner(
            self.baseline,
            self.environment,
            cells=len(self.ids),
            budget_s=run.gate_seconds,
            all_programs=run.all_programs,
            against=run.against,
            settings=self.settings,
        )

    def close(self) -> None:
        """Close what `open` opened, and write the programs where they were asked for."""
        for opened in (self.journal, self.examiner, self.trial):
            if opened is not None:
                opened.close()
        folder = self.options.programs
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            for seen in self.evidence.values():
                if seen.program is not None:
                    (folder / f"{seen.digest}.bin").write_bytes(seen.program.pack())

    def publish(self, exit_code: int) -> None:
        """Write the verdict where people and programs look for it."""
        import os

        from . import annotations, atomic, markdown, page, story, verdict_json

        verdict_json.write(self.reports / "verdict.json", self.verdict, exit_code)
        atomic.write(self.reports / "verdict.md", markdown.text(self.verdict, exit_code).encode())
        if self.options.page:
            told = story.tell(
                self.verdict,
                exit_code,
                baselines=self.baseline.path.parent.parent,
                reports=self.reports,
                settings=self.settings,
            )
            page.write(told, self.reports)
        for line in annotations.to_github(self.verdict, exit_code, os.environ):
            print(line)

    @property
    def reports(self) -> Path:
        return self.options.reports or self.config.rootpath / "reports"

    def judge(self) -> None:
        """Confirm the suspects in fresh processes, then judge all cells."""
        import collections

        from .baseline import COMPARED_WITH
        from .gate import timing
        from .gate.judge import Run, judge

        suspects = timing.suspects(self.evidence, self.settings)
        confirmed: dict[str, Any] = {}
        if not self.interrupted:
            confirmed = {
                identity: self._confirmed(identity)
                for identity in suspects
                if self.evidence[identity].asked_by != "stored time"
            }
        self.verdict = judge(
            self.baseline,
            Run(
                declared=[entry.cell.id for entry in self.entries],
                records=self.records,
                skipped=self.skipped,
                wrong=self.wrong,
                partial=self.narrowed(),
                ran=[self.ids[item.nodeid] for item, _ in self.held],
                subset=self.options.grid in COMPARED_WITH,
                environment=self.environment,
                evidence=self.evidence,
                suspects=suspects,
                confirmed=confirmed,
                controls=tuple(self.controls),
                faults=self._unrecorded(),
                accepted=self.options.accepted,
                twice=[i for i, n in collections.Counter(self.ids.values()).items() if n > 1],
            ),
            self.settings,
        )

    def so_far(self, identity: str) -> str:
        """What is known of a cell before the run is judged, in a word: a status, or suspect, or measured."""
        from .gate import timing
        from .gate.judge import Run, judge

        if identity in self.wrong:
            return "wrong"
        if identity in self.skipped:
            return "skipped"
        if self.baseline is None or identity not in self.records:
            return "measured"
        seen = {i: its for i, its in self.evidence.items() if i == identity}
        if timing.suspects(seen, self.settings):
            return "suspect"  # A fresh process has to confirm it.
        run = Run([identity], {identity: self.records[identity]}, partial=True, evidence=seen)
        return judge(self.baseline, run, self.settings).cells[0].status

    def told(self) -> list[str]:
        """What was not measured by this run, in words."""
        ran = len(self.records) - len(self.replayed) - len(self.unrun)
        out = []
        if self.journal is not None and self.options.resume:
            source = self.journal.resumed or "no journal: there is none"
            out.append(f"resumed {len(self.replayed)} cells from {source}; {ran} ran")
            out += [f"  resumed: {identity}" for identity in sorted(self.replayed)]
        if self.journal is not None and self.options.changed_only:
            out.append(
                f"changed only: {len(self.unrun)} cells did not run, their program is the stored one; {ran} ran"
            )
        return out

    @property
    def controls(self) -> list[Any]:
        """The null controls, those of replayed cells included: noise does not go away by --resume."""
        return [seen.control for seen in self.evidence.values() if seen.control]

    def _unrecorded(self) -> tuple[str, ...]:
        """In CI a new cell is a fault until it is recorded."""
        import os

        new = self.records.keys() - self.baseline.records.keys()
        if not new or os.environ.get("CI", "").lower() not in ("1", "true"):
            return ()
        return (f"no baseline has {min(new)}, nor {len(new) - 1} others; record them before they are merged",)

    def _confirmed(self, identity: str) -> Any:
        """The pairs of a fresh process, or why there are none."""
        import dataclasses

        from .gate import limits
        from .gate.confirm import NotConfirmed, confirm

        (cell,) = (entry.cell for entry in self.entries if entry.cell.id == identity)
        seen = self.evidence[identity]
        try:
            return confirm(
                dataclasses.asdict(cell),
                seen.program,
                self.baseline.program_path(seen.against),
                cores=self.cores,
                budget_s=self.options.gate_seconds,
                limit=limits.slowest(self.settings, identity),
            )
        except NotConfirmed as fault:
            return str(fault)

    def _try_out(self, cell: Any, benchmark: Any) -> None:
        """Let a user's function run in a child process first; the numerics found there are this process's too."""
        from . import numerics, own
        from .trial import Failed, Trial

        if not own.is_own(cell.impl):
            return
        self.trial = self.trial or Trial(self.options.cell_limit)
        found, why = None, None
        try:
            found = self.trial.check(cell, numerics=self.options.check, timed=self.measuring)
        except Failed as fault:
            why = str(fault)
        if why is not None:  # Not within `except`, which pytest would show as well.
            benchmark.skipped = True
            pytest.fail(why, pytrace=False)
        if found is not None:
            numerics.remember(cell, numerics.Numerics(**found))

    def _known(self, cell: Any, benchmark: Any) -> bool:
        """Whether nothing has to run: the program is the stored one (--changed-only), or measured (--resume)."""
        if not self.options.changed_only and not self.journal.earlier:
            return False
        from . import journal
        from .gate.drift import compiled_alike
        from .gate.evidence import Evidence
        from .gate.examine import exported
        from .program import flat

        seen = exported(flat(cell))
        stored = self.baseline and self.baseline.records.get(cell.id)
        against = stored and stored["extra_info"].get(self.options.against)
        line = self.journal.earlier.get((cell.id, seen.digest, against, self._environment_key()))
        if line is not None and seen.digest is not None:
            benchmark.group = cell.group
            journal.replay(line, benchmark)
            self.records[cell.id] = line.extra_info
            self.evidence[cell.id] = Evidence.from_json(line.evidence, seen.program)
            self.replayed.add(cell.id)
            return True
        alike = self.baseline and compiled_alike(self.environment, self.baseline.environment)
        if self.options.changed_only and seen.digest is not None and seen.digest == against and alike:
            self.records[cell.id] = stored["extra_info"]
            self.evidence[cell.id] = Evidence(seen.digest, against, program=seen.program)
            self.unrun.add(cell.id)
            pytest.skip("not run: its program is the stored one")
        return False

    def _write(self, cell: Any, benchmark: Any) -> None:
        """One line into the journal."""
        from .journal import Line

        seen, stats = self.evidence[cell.id], benchmark.stats
        self.journal.append(
            Line(
                cell.id,
                seen.digest,
                seen.against,
                self._environment(),
                stats.iterations,
                list(stats.stats.data),
                self.records[cell.id],
                seen.to_json(),
            )
        )

    def _environment(self) -> dict[str, Any]:
        """What has to be equal for a cell to be replayed."""
        run = self.options
        return self.environment | {
            "bench_seconds": run.seconds,
            "check": run.check,
            "against": run.against,
            "all_programs": run.all_programs,
            "gate_seconds": run.gate_seconds,
        }

    def _environment_key(self) -> str:
        import json

        return json.dumps(self._environment(), sort_keys=True)

    @property
    def measuring(self) -> bool:
        """Whether this process times cells: not under xdist, and not with benchmarks disabled."""
        get = self.config.getoption
        disabled = get("benchmark_disable") and not get("benchmark_enable")
        return not (
            parallel(self.config) or disabled or get("benchmark_skip") or self.config.option.collectonly
        )

    def narrowed(self) -> bool:
        """Whether the run was told to hold only a part of its grid, or broken off."""
        get = self.config.getoption
        files = any("::" in arg or arg.endswith(".py") for arg in self.config.args)
        return bool(
            self.interrupted
            or self.options.overrides
            or self.options.only
            or self.options.changed_only
            or files
            or get("maxfail", 0)
            or any(get(name, None) for name in NARROWING)
        )


def parallel(config: pytest.Config) -> bool:
    """Whether this process is an xdist worker or controller (-n or --tx), as pytest-benchmark sees it."""
    return hasattr(config, "workerinput") or getattr(config.option, "dist", "no") != "no"
