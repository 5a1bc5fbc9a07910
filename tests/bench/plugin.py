"""The pytest plugin: options and hooks, thin. The state of a run is one `Cells` object (session.py).

With `--benchmark-compare` the decision falls after the last cell: passing reports are held back until then, and
that of a regressed cell becomes a failure, so that terminal, JUnit, `--lf` and exit code agree. A cell whose
numerics are wrong is reported at once, so `-x` stops there.
"""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from _pytest._code.code import ReprFileLocation
from _pytest.runner import runtestprotocol

from . import home, options, pin
from .cell import SUITES
from .errors import BaselineError, BenchError, EnvironmentFault, GridError, NoBaseline
from .progress import Progress, coloured
from .session import KEY, Cells


def concerned(config: pytest.Config) -> bool:
    """Whether the run's arguments hold this folder, a part of it, or a folder around it.

    The installed suite has to be named: a project's folder may be around it only for its virtual environment.
    """
    if any(home.named(str(arg)) for arg in config.args):
        return True
    paths = [Path(str(arg).split("::")[0]) for arg in config.args]
    paths = [path if path.is_absolute() else config.invocation_params.dir / path for path in paths]
    paths = [path.resolve() for path in paths]
    inside = any(path.is_relative_to(home.FOLDER) for path in paths)
    return inside or (not home.INSTALLED and any(home.FOLDER.is_relative_to(path) for path in paths))


def pytest_addoption(parser: pytest.Parser) -> None:
    try:
        home.refuse_own_repository()
    except EnvironmentFault as fault:
        raise pytest.UsageError(str(fault)) from fault
    options.add(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    compare = config.getoption("benchmark_compare")
    if isinstance(compare, str) and (compare.endswith(".py") or Path(compare).is_dir()):
        raise pytest.UsageError(
            f"--benchmark-compare {compare} takes the path for the run to compare with; "
            f"write the path first: pytest {compare} --benchmark-compare"
        )
    # pytest-xdist registers it, where it is installed.
    config.addinivalue_line("markers", "xdist_group(name): tests that one worker runs")
    if not concerned(config):
        return
    given = [
        word for word in config.invocation_params.args if str(word).startswith("--benchmark-compare-fail")
    ]
    if len(given) > 1:
        raise pytest.UsageError(
            "--benchmark-compare-fail is given twice, and pytest-benchmark keeps the last alone; give it once, or "
            "state limits in pyproject.toml ([[tool.moe-bench.limits]])"
        )
    if config.getoption("bench_changed_only") and compare is not True:
        raise pytest.UsageError(
            "--changed-only leaves out the cells whose program is the stored one, so it needs a stored one; add "
            "--benchmark-compare"
        )
    if config.getoption("bench_accepted") is not None and compare is not True:
        raise pytest.UsageError(
            "--accept-slower accepts what a comparison finds, so it needs one; add --benchmark-compare"
        )
    try:
        run = options.read(config)
        cells = config.stash[KEY] = Cells(config, run, compare is True and run.gate != "off")
        if compare is True:
            config.option.benchmark_compare = []  # Ours is matched by cell id, after collection.
        if cells.measuring:
            cells.cores = pin.pin(run.cores)
        start(cells)
    except BenchError as fault:
        raise pytest.UsageError(str(fault)) from fault


def start(cells: Cells) -> None:
    """Choose the device, describe the environment, build the grid."""
    if cells.options.device:
        platform = {"cpu": "cpu", "cuda": "cuda,cpu", "tpu": "tpu,cpu"}[cells.options.device]
        os.environ["JAX_PLATFORMS"] = platform
    import importlib.util

    if cells.measuring and importlib.util.find_spec("flatbuffers") is None:
        raise EnvironmentFault("a cell's program is stored with flatbuffers: pip install flatbuffers")
    from . import environment, grid, own_grids
    from .gate import limits

    run = cells.options
    environment.check_sources(cells.config.rootpath)
    cells.environment = environment.describe() | {"pinned": cells.cores}
    settings = home.settings(cells.config.rootpath)
    cells.settings = limits.read(settings)
    grids = own_grids.read(settings)
    cells.entries = grid.build(run.grid, run.overrides, cells.environment["backend"], grids)
    if run.only is not None:
        cells.entries = [entry for entry in cells.entries if entry.cell.matches(run.only)]
        if not cells.entries:
            raise GridError(
                f"--only={run.only!r} holds no cell of grid {run.grid}; --collect-only -q lists them"
            )


def pytest_sessionstart(session: pytest.Session) -> None:
    """Find the baseline before any work: what is missing or damaged ends the run here, with its own code."""
    from . import baseline
    from .gate.verdict import INTEGRITY, NO_BASELINE

    cells = session.config.stash.get(KEY, None)
    if cells is None or not cells.comparing or hasattr(session.config, "workerinput"):
        return
    if session.config.option.collectonly:
        return
    if not cells.measuring or not cells.options.check:
        return
    try:
        root = cells.options.baselines or baseline.ROOT
        wanted = cells.environment
        if cells.options.against_jax:
            wanted = wanted | {"jax": cells.options.against_jax}
        cells.baseline = baseline.find(root, wanted, cells.options.grid)
    except BaselineError as fault:
        none = isinstance(fault, NoBaseline)
        cells.fault = f"{fault}" if none else f"integrity: {fault}"
        if cells.options.gate != "warn":
            pytest.exit(cells.fault, NO_BASELINE if none else INTEGRITY)


def pytest_report_header(config: pytest.Config) -> list[str]:
    cells = config.stash.get(KEY, None)
    if cells is None:
        return []
    env = cells.environment
    how = f"pinned to cores {env['pinned']}" if env["pinned"] else "not pinned"
    out = [f"moe bench: grid {cells.options.grid}, jax {env['jax']}, {env['backend']} ({env['cpu']}), {how}"]
    if not cells.measuring and not config.option.collectonly:
        out.append("moe bench: numerics only (parallel or disabled): nothing is timed, nothing compared")
    return out


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A suite without a cell in this grid is not collected: it would be one empty test."""
    cells = config.stash.get(KEY, None)
    suite = collection_path.stem.removeprefix("test_")
    if cells is None or collection_path.resolve().parent != home.FOLDER or suite not in SUITES:
        return None
    return True if all(entry.cell.suite != suite for entry in cells.entries) else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    suite = getattr(metafunc.module, "SUITE", None)
    cells = metafunc.config.stash.get(KEY, None)
    if suite is None or cells is None or "entry" not in metafunc.fixturenames:
        return
    metafunc.parametrize(
        "entry",
        [
            pytest.param(entry, id=entry.cell.id, marks=pytest.mark.xdist_group(str(entry.cell.inputs)))
            for entry in cells.entries
            if entry.cell.suite == suite
        ],
    )


@pytest.fixture
def cells(request: pytest.FixtureRequest) -> Cells:
    return request.config.stash[KEY]


def cell_of(item: pytest.Item) -> Any:
    """The grid entry of a test, or None."""
    entry = getattr(getattr(item, "callspec", None), "params", {}).get("entry")
    return entry if hasattr(entry, "cell") else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    cells = config.stash.get(KEY, None)
    if cells is None:
        return
    order = {entry.cell.id: number for number, entry in enumerate(cells.entries)}
    # Cells that share inputs run side by side, also across suites; other tests stay in front.
    items.sort(key=lambda item: order[entry.cell.id] if (entry := cell_of(item)) else -1)


def pytest_collection_finish(session: pytest.Session) -> None:
    cells = session.config.stash.get(KEY, None)
    if cells is None or hasattr(session.config, "workerinput"):
        return
    # Not earlier: --lf deselects after every other hook.
    cells.ids = {item.nodeid: entry.cell.id for item in session.items if (entry := cell_of(item))}
    if cells.baseline is not None:
        _show_in_stock_table(cells)
    if cells.measuring and cells.ids:
        cells.open()
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    quiet = reporter is None or session.config.option.verbose < 0 or not cells.measuring
    colour = coloured(session.config.option.color, os.environ)
    cells.progress = Progress(None if quiet else sys.__stderr__, len(cells.ids), colour)


def _show_in_stock_table(cells: Cells) -> None:
    """Give pytest-benchmark's own table the stored statistics of the cells at hand, matched by cell id."""
    by_node = {
        node: dict(cells.baseline.records[identity])
        for node, identity in cells.ids.items()
        if identity in cells.baseline.records
    }
    session: Any = cells.config.pluginmanager.get_plugin("pytest-benchmark")
    name = Path(*cells.baseline.path.parts[-2:])  # The table shows it beside each cell: folder and file.
    session.compared_mapping = {name: by_node}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    cells = item.config.stash.get(KEY, None)
    entry = cell_of(item)
    if cells is None or entry is None or hasattr(item.config, "workerinput"):
        return None
    if cells.progress:
        cells.progress.begin(entry.cell.id)
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    failed = any(report.failed for report in reports)
    if failed:
        cells.wrong.add(entry.cell.id)
        cells.records.pop(entry.cell.id, None)
    if failed or not cells.comparing:
        if cells.progress:
            cells.progress.clear()
        log(item, reports)
    else:
        cells.held.append((item, reports))
    if cells.progress:
        cells.progress.end(cells.so_far(entry.cell.id))
    return True


def log(item: pytest.Item, reports: list[pytest.TestReport]) -> None:
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Any:
    cells = session.config.stash.get(KEY, None)
    try:
        return (yield)
    except BaseException:
        if cells is not None:
            cells.interrupted = True  # What did not run is not missing.
        raise
    finally:
        if cells is not None and not hasattr(session.config, "workerinput"):
            if cells.progress:
                cells.progress.clear()
            try:
                conclude(session, cells)
            finally:
                cells.close()


def conclude(session: pytest.Session, cells: Cells) -> None:
    """Judge, turn the reports of failing cells into failures, and log what was held back."""
    by_id = {}
    if cells.baseline is not None and not session.config.option.collectonly:
        cells.judge()
        by_id = {cell.id: cell for cell in cells.verdict.cells}
    failing = cells.options.gate in ("on", "strict")
    for item, reports in cells.held:
        judged = by_id.pop(cells.ids[item.nodeid], None)
        if failing and judged is not None and judged.failing:
            fail(reports, judged)
        if judged is not None and judged.accepted:
            mark_accepted(reports, cells.verdict.accepted)
        log(item, reports)
    cells.held.clear()
    for judged in by_id.values():
        if failing and judged.status == "missing":
            log_missing(session, judged)


class Reason(str):
    """Why a cell fails, as pytest's reports take it: `reprcrash` is what its short summary shows."""

    def __new__(cls, judged: Any) -> "Reason":
        why = "; ".join(judged.reasons)
        text = super().__new__(cls, "\n".join((f"{judged.status}: {judged.id}", *judged.reasons)))
        text.reprcrash = ReprFileLocation(home.SHOWN, 0, f"{judged.status}: {why}")
        return text

    reprcrash: ReprFileLocation


def fail(reports: list[pytest.TestReport], judged: Any) -> None:
    """Make a cell's call report a failure that says why."""
    for report in reports:
        if report.when == "call":
            report.outcome = "failed"
            report.longrepr = Reason(judged)


def mark_accepted(reports: list[pytest.TestReport], reason: str) -> None:
    """Say in JUnit that a cell passes although it regressed, and why; pytest writes properties at teardown."""
    for report in reports:
        if report.when == "teardown":
            report.user_properties.append(("accepted", reason))


def log_missing(session: pytest.Session, judged: Any) -> None:
    """A report of its own for a cell that could not be collected any more."""
    nodeid = f"{home.SHOWN}::missing[{judged.id}]"
    location = (home.SHOWN, None, judged.id)
    report = pytest.TestReport(nodeid, location, {}, "failed", Reason(judged), "call")
    session.config.hook.pytest_runtest_logreport(report=report)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Set the exit code; pytest's own faults (1 for wrong numbers, 2 to 5) come first."""
    from .gate.verdict import INTEGRITY

    cells = session.config.stash.get(KEY, None)
    if cells is None or not cells.comparing or hasattr(session.config, "workerinput"):
        return
    gated = cells.options.gate in ("on", "strict")
    own_failures = session.testsfailed - _failures_of_the_gate(cells)
    if gated and exitstatus in (0, 1) and not own_failures and not session.config.option.collectonly:
        if cells.verdict is None:
            session.exitstatus = INTEGRITY  # Disabled, parallel or unchecked: nothing was compared.
        else:
            session.exitstatus = cells.verdict.exit_code(strict=cells.options.gate == "strict")
    if cells.verdict is not None:
        cells.publish(int(session.exitstatus))


def _failures_of_the_gate(cells: Cells) -> int:
    if cells.verdict is None:
        return 0
    return sum(cell.failing for cell in cells.verdict.cells)


def pytest_benchmark_update_json(config: pytest.Config, benchmarks: Any, output_json: dict[str, Any]) -> None:
    cells = config.stash.get(KEY, None)
    if cells is None:
        return
    from .baseline import SCHEMA
    from .gate.timing import noisy
    from .record import skipped

    # A cell that failed after it was timed (in a teardown, say) is not stored either.
    wrong = {node for node, identity in cells.ids.items() if identity in cells.wrong}
    output_json["benchmarks"] = [e for e in output_json["benchmarks"] if e["fullname"] not in wrong]
    own = [entry for entry in output_json["benchmarks"] if "id" in entry["extra_info"]]
    if not own:
        return
    for entry in own:
        entry["params"] = {"cell": entry["param"]}  # The parameter itself is no JSON.
    by_id = {entry.cell.id: entry.cell for entry in cells.entries}
    run = cells.options
    output_json["moe_bench"] = {
        "schema": SCHEMA,
        "grid": run.grid,
        "partial": cells.narrowed() or not run.check,
        "options": {
            "overrides": {k: list(v) if isinstance(v, tuple) else v for k, v in run.overrides.items()},
            "bench_seconds": run.seconds,
            "check": run.check,
            "device": run.device,
        },
        "environment": cells.environment,
        "skipped": [skipped(by_id[identity], reason) for identity, reason in cells.skipped.items()],
        "declared": list(by_id),
        "noise": [str(pairs) for pairs in noisy(cells.controls)],
    }


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_terminal_summary(terminalreporter: Any) -> Any:
    """The verdict comes after pytest-benchmark's wide tables, where people look."""
    yield
    cells = terminalreporter.config.stash.get(KEY, None)
    if cells is None or terminalreporter.config.option.collectonly:
        return
    for line in cells.told():
        terminalreporter.write_line(f"moe bench: {line}")
    if cells.verdict is not None:
        from . import report

        terminalreporter.section("moe bench: comparison")
        for line in report.lines(cells.verdict):
            terminalreporter.write_line(line)
        if not cells.verdict.compared:
            terminalreporter.write_line("nothing was compared, so the run does not pass")
    elif cells.comparing:
        terminalreporter.section("moe bench")
        why = "integrity: nothing was compared: benchmarks are disabled, parallel or unchecked"
        terminalreporter.write_line(cells.fault or why)
    elif cells.ids and cells.measuring:
        terminalreporter.write_line("moe bench: not compared (no --benchmark-compare)")
