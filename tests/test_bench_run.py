"""The suite end to end: runs of pytest and of the verbs, in processes of their own, on the cells of grid `tiny`."""

import copy
import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.bench import baseline, recording, store
from tests.bench.__main__ import main
from tests.running import CHUNKED, DENSE, DONATED, ROOT, SKIPPED, SWEPT, Runner, cases
from tests.stores import seal

# One worker: the runs share a first one.
pytestmark = [pytest.mark.gate, pytest.mark.xdist_group("bench_run")]
MEASURED = {DENSE, CHUNKED, DONATED, SWEPT}

# An implementation that is wrong from the moment the plugin is loaded.
WRONG = """
from tests import bench
from tests.bench import plugin

whole = plugin.start

def start(cells):
    import dataclasses
    from moe.registry import IMPLEMENTATIONS

    right = IMPLEMENTATIONS["dropless:chunked:sorted"]

    def wrong(params, x, config, chunk=None, slab_elems=None):
        y, aux = right.apply(params, x, config, chunk, slab_elems)
        return y * 1.001, aux

    IMPLEMENTATIONS[right.id] = dataclasses.replace(right, apply=wrong)
    whole(cells)

plugin.start = start
"""
# A cell whose numerics and times are fine, and whose test fails after them.
LATE = """
import pytest

@pytest.fixture(autouse=True)
def late(request):
    yield
    assert "dense" not in request.node.name, "too late"
"""


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    return Runner(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def first(runner):
    """A first run of the whole grid, with all that can be asked of one at once."""
    hooks = ("--benchmark-json=first.json", "--benchmark-histogram=box", "--benchmark-autosave")
    return runner.pytest(*hooks, "--junitxml=first.xml", "--save-programs=programs", "-rs")


@pytest.fixture(scope="module")
def document(runner, first):
    assert first.code == 0, first.text
    return json.loads((runner.folder / "first.json").read_text())


@pytest.fixture(scope="module")
def compared(runner, document):
    """The words that compare a run with the first one."""
    programs = {path.stem: path.read_bytes() for path in (runner.folder / "programs").glob("*.bin")}
    assert len(programs) == len(MEASURED)
    store.save(runner.store, document, "tiny", programs, {"reason": "a first one"})
    return ("--baselines", str(runner.store), "--benchmark-compare")


def store_of(runner, name, document, grid="tiny"):
    """The words that compare a run with another document, stored as it is, sound or not."""
    return store_text(runner, name, json.dumps(document), document["moe_bench"]["environment"], grid)


def store_text(runner, name, text, environment, grid="tiny"):
    folder = runner.folder / name / f"{environment['backend']}-jax{environment['jax']}"
    folder.mkdir(parents=True)
    shutil.copytree(runner.folder / "programs", folder / "programs")
    (folder / f"0001_{grid}.json").write_text(text)
    seal(folder)
    return ("--baselines", str(folder.parent), "--benchmark-compare")


def record(document, identity):
    return next(e["extra_info"] for e in document["benchmarks"] if e["extra_info"]["id"] == identity)


def test_groups_stay_in_one_worker(request):
    """What parallel tests share is computed once; pytest-xdist tells its scheduler by the name."""
    if getattr(request.config.option, "loadgroup", False):
        assert request.node.nodeid.endswith("@bench_run")


# A run without a comparison


def test_first_run_measures_every_cell(runner, first, document):
    assert "moe bench: not compared (no --benchmark-compare)" in first.text
    assert {entry["extra_info"]["id"] for entry in document["benchmarks"]} == MEASURED
    block = document["moe_bench"]
    assert (block["schema"], block["grid"], block["partial"]) == (1, "tiny", False)
    assert [(entry["id"], entry["status"]) for entry in block["skipped"]] == [(SKIPPED, "skipped")]
    assert "over ragged_limit=1" in block["skipped"][0]["reason"]
    assert "over ragged_limit=1" in first.text
    said = cases(runner.folder / "first.xml")
    assert len(said) == 5
    assert [tags for tags in said.values() if tags] == [["skipped"]]


def test_stored_times_are_per_call(document):
    for entry in document["benchmarks"]:
        assert entry["params"] == {"cell": entry["extra_info"]["id"]}
        extra, stats = entry["extra_info"], entry["stats"]
        assert extra["inner"] == stats["iterations"] >= 1
        assert 5 <= stats["rounds"] == len(stats["data"]) <= 200
        assert extra["median_ms"] == pytest.approx(stats["median"] * 1000)
        assert extra["gemm_fraction"] > 0
        assert extra["status"] == "measured"


def test_histogram_draws_each_group(runner, document):
    assert (
        len(list(runner.folder.glob("box-*.svg"))) == len({e["group"] for e in document["benchmarks"]}) == 3
    )


def test_users_own_storage_stays_theirs(runner, document):
    """`--benchmark-autosave` writes where pytest-benchmark says, never into the baselines."""
    (saved,) = runner.folder.glob(".benchmarks/*/*.json")
    assert len(json.loads(saved.read_text())["benchmarks"]) == 4
    assert not list(baseline.ROOT.glob("*/*_unversioned_*"))


def test_stock_tools_read_the_store(runner, compared):
    listed = runner.python("-m", "pytest_benchmark", "--storage", str(runner.store), "list")
    assert listed.code == 0
    assert listed.text.split() == [str(next(runner.store.glob("*/0001_tiny.json")))]
    shown = runner.python("-m", "pytest_benchmark", "--storage", str(runner.store), "compare", "0001")
    assert shown.code == 0, shown.text
    for identity in MEASURED:
        assert identity in shown.text


# A run that is compared


def test_second_run_equals_the_first_from_a_subdirectory(runner, compared, document):
    """Every program is compiled anew, and bytes and flops are the same."""
    before = sorted(baseline.ROOT.rglob("*"))
    again = runner.pytest(
        *compared,
        f"--benchmark-json={runner.folder / 'second.json'}",
        "--benchmark-autosave",
        f"--benchmark-storage={runner.folder / 'mine'}",
        path="bench",
        cwd=ROOT / "tests",
        JAX_ENABLE_COMPILATION_CACHE="false",
    )
    assert again.code == 0, again.text
    assert "verdict: 1 skipped, 4 unchanged; 4 compared" in again.text
    assert "PARTIAL" not in again.text
    second = json.loads((runner.folder / "second.json").read_text())
    exact = ("temp_bytes", "argument_bytes", "output_bytes", "alias_bytes", "flops")
    for identity in MEASURED:
        was, now = record(document, identity), record(second, identity)
        assert [now[name] for name in exact] == [was[name] for name in exact]
    # The stock table shows the stored figures beside today's, matched by cell.
    assert len(re.findall(r"\(NOW\)", again.text)) == 4
    assert len(re.findall(r"\(cpu-jax[\d.]+/0001_tiny\)", again.text)) == 4
    assert len(list((runner.folder / "mine").glob("*/*.json"))) == 1
    assert sorted(baseline.ROOT.rglob("*")) == before
    assert [path.name for path in runner.store.glob("*/*.json")] == ["0001_tiny.json"]


@pytest.fixture(scope="module")
def regressed(runner, document):
    """The first run, but one cell took a tenth less memory."""
    edited = copy.deepcopy(document)
    # Without its program: with it, other figures of the same program would be the compiler's doing.
    figures = {"temp_bytes": round(record(document, DONATED)["temp_bytes"] * 0.9), "program": None}
    record(edited, DONATED).update(figures)
    return store_of(runner, "regressed", edited)


def test_regressed_cell_fails_and_lf_reruns_it_alone(runner, batch):
    run = batch["regressed"]
    assert run.code == 10, run.text
    assert "1 failed, 3 passed, 1 skipped" in run.text
    assert re.search(
        r"regressed: .*train_step_donated\n(E +)?temp_bytes [\d,]+ -> [\d,]+ \(\+11\.1%\)", run.text
    )
    assert "verdict: 1 regressed, 1 skipped, 3 unchanged" in run.text
    assert "accept it: tox run -e baseline" in run.text
    said = cases(runner.folder / "regressed.xml")
    assert len(said) == 5
    assert [name for name, tags in said.items() if "failure" in tags] == [f"test_layer[{DONATED}]"]
    again = batch["regressed-lf"]
    assert again.code == 10, again.text
    assert "PARTIAL" in again.text
    assert cases(runner.folder / "lf.xml") == {f"test_layer[{DONATED}]": ["failure"]}


def test_regressed_cell_passes_with_a_reason_that_is_told(runner, batch):
    run = batch["accepted"]
    assert run.code == 0, run.text
    assert "4 passed, 1 skipped" in run.text
    assert "accepted (1 cell): rows in blocks" in run.text
    junit = (runner.folder / "accepted.xml").read_text()
    assert '<property name="accepted" value="rows in blocks"' in junit
    assert junit.count("<property ") == 1
    assert batch["accepted-nothing"].code == 4
    assert "--accept-slower accepts what a comparison finds" in batch["accepted-nothing"].text


def test_cell_that_the_grid_lost(runner, batch):
    run = batch["lost"]
    assert run.code == 11, run.text
    assert "1 missing, 1 skipped, 4 unchanged" in run.text
    assert "in the baseline, but no longer in the grid" in run.text
    said = cases(runner.folder / "lost.xml")
    assert {name: tags for name, tags in said.items() if tags and "skipped" not in tags} == {
        "missing[gone:auto:sorted-of-an-older-grid]": ["failure"]
    }


def damaged(document):
    """(name, text of the file, what the run says of it) of each file that cannot be trusted."""
    text = json.dumps(document)

    def edited(change):
        other = copy.deepcopy(document)
        change(other)
        return json.dumps(other)

    def twice(other):
        other["benchmarks"].append(other["benchmarks"][0])

    yield "truncated", text[: len(text) // 2], "is truncated or not JSON"
    yield "schema", edited(lambda d: d["moe_bench"].update(schema=2)), "is of schema 2, this suite reads 1"
    yield (
        "backend",
        edited(lambda d: d["moe_bench"]["environment"].update(backend="tpu")),
        "for another backend",
    )
    yield "nan", edited(lambda d: d["benchmarks"][0]["stats"].update(median=math.nan)), "stats.median=nan"
    yield "twice", edited(twice), "twice"
    yield "empty", edited(lambda d: d["benchmarks"].clear()), "holds no benchmarks"
    yield "foreign", edited(lambda d: d.pop("moe_bench")), "has no moe_bench block"


@pytest.fixture(scope="module")
def batch(runner, compared, regressed, document):
    """Runs that are all right in one process: the numerics of a cell are computed in the first of them only."""
    older = copy.deepcopy(document)
    lost = copy.deepcopy(older["benchmarks"][0])
    lost["extra_info"]["id"] = lost["name"] = "gone:auto:sorted-of-an-older-grid"
    older["benchmarks"].append(lost)
    late = runner.plugin("late", LATE)
    environment = document["moe_bench"]["environment"]
    whole = runner.options()
    one = [*whole, "-k", "dense"]
    none = ("--baselines", str(runner.folder / "nothing"), "--benchmark-compare")
    runs = {
        "regressed": [*whole, *regressed, "--junitxml=regressed.xml"],
        "regressed-lf": [*whole, *regressed, "--lf", "--junitxml=lf.xml"],
        "accepted": [*whole, *regressed, "--accept-slower", "rows in blocks", "--junitxml=accepted.xml"],
        "accepted-nothing": ["-p", "tinygrid", str(ROOT / "tests/bench"), "--accept-slower", "x"],
        "lost": [*whole, *store_of(runner, "lost", older), "--junitxml=lost.xml"],
        "late": [*whole, "-p", late, *compared, "-x", "--benchmark-json=late.json"],
        "parallel": [*whole, "-n", "2", "--dist", "loadgroup", "-k", "dense or chunk16"],
        "parallel-compared": [*one, "-n", "1", *compared],
        "listed": [*whole, "--collect-only", "-q", *compared],
        "none": [*whole, *none],
        "none-warn": [*one, *none, "--gate", "warn"],
        "other-grid": [*runner.options(grid=None), *compared],
        "narrowed": [*one, *compared],
        "narrowed-strict": [*one, *compared, "--gate", "strict"],
        "overridden": [*whole, *compared, "--ops", "forward", "--suites", "layer", "--impls", "dense"],
        "regressed-warn": [*whole, "-k", "donated", *regressed, "--gate", "warn"],
        "regressed-off": [*whole, "-k", "donated", *regressed, "--gate", "off"],
        "nothing-left": [*whole, "-k", "no_such_cell", *compared],
        "only": [*one, "--benchmark-only"],
        "disabled": [*whole, "--benchmark-disable"],
        "disabled-compared": [*whole, "--benchmark-disable", *compared],
        "skipped-compared": [*whole, "--benchmark-skip", *compared],
        "unchecked": [*one, "--no-check", *compared],
        "swallowed": ["-p", "tinygrid", "--benchmark-compare", "tests/bench"],
        "swallowed-file": ["-p", "tinygrid", "--benchmark-compare", "tests/bench/test_layer.py"],
    }
    for name, text, _ in damaged(document):
        runs[name] = [*whole, *store_text(runner, f"damaged-{name}", text, environment)]
    return runner.batch(runs, {"swallowed": ROOT, "swallowed-file": ROOT})


def test_collect_only_lists_the_cells(batch):
    code, text = batch["listed"]
    assert code == 0
    assert {line.split("[")[1][:-1] for line in text.splitlines() if "::" in line} == {*MEASURED, SKIPPED}
    assert "5 tests collected" in text


def test_no_baseline(batch, runner):
    code, text = batch["none"]
    assert code == 13
    assert re.search(r"no baseline for cpu-jax.* in .*nothing: there is none at all", text)
    assert "tox run -e baseline" in text
    code, text = batch["none-warn"]
    assert code == 0
    assert "no baseline for" in text


def test_no_baseline_of_this_grid(batch):
    code, text = batch["other-grid"]
    assert code == 11
    assert "no baseline of grid default" in text
    assert "there is tiny" in text


def test_damaged_baseline_ends_the_run_before_any_cell(batch, document):
    for name, _, reason in damaged(document):
        code, text = batch[name]
        assert code == 11, (name, text)
        assert f"damaged-{name}" in text
        assert reason in text, name
        assert "collected" not in text
        assert "passed" not in text


def test_narrowed_run_compares_what_it_ran(batch):
    for name in ("narrowed", "overridden"):
        code, text = batch[name]
        assert code == 0, text
        assert "PARTIAL" in text
    assert "verdict: 1 unchanged; 1 compared" in batch["narrowed"].text
    assert batch["narrowed-strict"].code == 11
    assert "PARTIAL" in batch["narrowed-strict"].text
    assert batch["nothing-left"].code == 5


def test_gate_warn_and_off(batch):
    code, text = batch["regressed-warn"]
    assert code == 0
    assert "verdict: 1 regressed" in text
    assert "1 passed" in text
    code, text = batch["regressed-off"]
    assert code == 0
    assert "verdict" not in text
    assert "not compared" in text


def test_runs_that_compare_nothing_do_not_pass(batch):
    for name in ("disabled-compared", "skipped-compared", "unchecked"):
        code, text = batch[name]
        assert code == 11, (name, text)
        assert "integrity: nothing was compared" in text


def test_stock_switches(batch):
    code, text = batch["only"]
    assert code == 0
    assert "1 passed" in text
    code, text = batch["disabled"]
    assert code == 0
    assert "4 passed, 1 skipped" in text
    assert "numerics only (parallel or disabled): nothing is timed, nothing compared" in text


def test_compare_that_swallows_the_path(batch):
    for name, path in (("swallowed", "tests/bench"), ("swallowed-file", "tests/bench/test_layer.py")):
        code, text = batch[name]
        assert code == 4
        assert f"write the path first: pytest {path} --benchmark-compare" in text


# Wrong numbers


def test_wrong_cells_fail_and_are_not_stored(runner, compared, regressed):
    wrong = runner.plugin("wrong", WRONG)
    run = runner.pytest("-p", wrong, *regressed, "--benchmark-json=wrong.json")
    assert run.code == 1, run.text
    assert "3 failed, 1 passed, 1 skipped" in run.text
    assert re.search(r"dropless:chunked:.*: rel_err_out=1\.00e-03 is over 5\.0e-07", run.text)
    assert "verdict: 3 wrong, 1 skipped, 1 unchanged" in run.text
    stored = json.loads((runner.folder / "wrong.json").read_text())
    assert [entry["extra_info"]["id"] for entry in stored["benchmarks"]] == [DENSE]


def test_x_stops_at_once(batch):
    code, text = batch["late"]
    assert code == 1, text
    assert "stopping after 1 failures" in text
    assert "1 passed, 1 error" in text  # dense is the first cell, and its own call had passed
    assert "verdict: 1 wrong; 0 compared" in text
    assert "PARTIAL" in text


def test_cell_that_fails_after_its_times_is_not_stored(batch, runner):
    assert batch["late"].code == 1
    assert json.loads((runner.folder / "late.json").read_text())["benchmarks"] == []


# In parallel


def test_parallel_run_checks_the_numbers_only(batch):
    code, text = batch["parallel"]
    assert code == 0, text
    assert "2 workers" in text
    assert "2 passed" in text
    assert "numerics only (parallel or disabled): nothing is timed, nothing compared" in text
    assert "integrity" not in text
    code, text = batch["parallel-compared"]
    assert code == 11, text
    assert "1 passed" in text
    assert "integrity: nothing was compared" in text


# The verb baseline


def refused(capsys, *words):
    """What the verb `baseline` says as it refuses, with its exit code."""
    code = main(["baseline", "--grid", "tiny", "--allow-dirty", *map(str, words)])
    out, err = capsys.readouterr()
    assert out == ""
    return code, err


def test_baseline_refuses_before_it_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(recording, "subprocess", SimpleNamespace(run=lambda *_, **__: pytest.fail("it ran")))
    code, said = refused(capsys, "--baselines", tmp_path / "store", "--reason", " ")
    assert code == 2
    assert "--reason is empty" in said
    (tmp_path / "file").write_text("")
    code, said = refused(capsys, "--baselines", tmp_path / "file/store", "--reason", "why")
    assert code == 2
    assert "cannot write to" in said
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(("code", "partial"), [(1, False), (10, False), (0, True)])
def test_baseline_refuses_a_failed_or_partial_run(tmp_path, capsys, monkeypatch, document, code, partial):
    def run(command, **_):
        edited = copy.deepcopy(document)
        if partial:
            del edited["benchmarks"][0]
        report = next(word for word in command if word.startswith("--benchmark-json="))
        Path(report.partition("=")[2]).write_text(json.dumps(edited))
        return SimpleNamespace(returncode=code)

    monkeypatch.setattr(recording, "subprocess", SimpleNamespace(run=run))
    ended, said = refused(capsys, "--baselines", tmp_path, "--reason", "why")
    assert ended == (code or 2)
    assert ("the run was partial" if partial else f"not recorded: the run ended with {code}") in said
    assert [path.name for path in tmp_path.glob("*/*")] == [".lock"]


def test_baseline_records(runner, document):
    recorded = runner.folder / "recorded"
    addopts = f"-p tinygrid --bench-seconds 0.05 -o cache_dir={runner.folder / 'cache'}"
    verb = (
        "-m",
        "tests.bench",
        "baseline",
        "--grid",
        "tiny",
        "--reason",
        "a first one",
        "--allow-dirty",
        "--baselines",
        str(recorded),
    )
    run = runner.python(*verb, PYTEST_ADDOPTS=addopts)
    assert run.code == 0, run.text
    found = baseline.find(recorded, document["moe_bench"]["environment"], "tiny")
    assert f"recorded {found.path}" in run.text
    assert set(found.records) == MEASURED
    assert set(found.skipped) == {SKIPPED}
    assert json.loads(found.path.read_text())["moe_bench"]["reason"] == "a first one"
    (told,) = found.history
    assert (told["reason"], told["file"], told["grid"]) == ("a first one", "0001_tiny.json", "tiny")
    assert told["environment"]["jax"] == found.environment["jax"]
    for entry in found.records.values():
        assert entry["extra_info"]["program"] == entry["extra_info"]["accepted"]
        assert found.program_path(entry["extra_info"]["program"]).is_file()


# A sixth implementation

SIXTH = '''
"""An implementation of one's own: dense, called by another name."""

from moe.dense import dense


def sixth(params, x, config):
    """As dense."""
    return dense(params, x, config)
'''


def test_sixth_implementation_takes_a_module_and_a_registry_line(runner):
    """The line is a row of the table, and the import that it needs."""
    tree = runner.folder / "tree"
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in ("moe", "tests/bench"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=ignored)
    for file in ("conftest.py", "pyproject.toml", "tests/__init__.py"):
        shutil.copy(ROOT / file, tree / file)
    (tree / "moe/sixth.py").write_text(SIXTH)
    registry = tree / "moe/registry.py"
    before = registry.read_text()
    after = before.replace(
        "from moe.ragged_dot import ragged_dot\n",
        "from moe.ragged_dot import ragged_dot\nfrom moe.sixth import sixth\n",
    ).replace(
        '        Implementation("capacity:auto:sorted", capacity),\n',
        '        Implementation("capacity:auto:sorted", capacity),\n'
        '        Implementation("sixth:auto:sorted", sixth),\n',
    )
    registry.write_text(after)
    lines = set(after.splitlines()) - set(before.splitlines())
    assert lines == {"from moe.sixth import sixth", '        Implementation("sixth:auto:sorted", sixth),'}
    assert len(after.splitlines()) == len(before.splitlines()) + 2
    files = [{path.relative_to(root) for path in (root / "moe").glob("*.py")} for root in (ROOT, tree)]
    assert files[1] - files[0] == {Path("moe/sixth.py")}

    shape = (
        "--tokens",
        "64",
        "--experts",
        "4",
        "--d-model",
        "32",
        "--d-hidden",
        "48",
        "--bench-seconds",
        "0.05",
    )
    words = ("tests/bench", "--grid", "smoke", *shape, "-k", "sixth", "--benchmark-json=sixth.json", "-v")
    run = runner.python("-m", "pytest", *words, cwd=tree, PYTHONPATH=str(tree))
    assert run.code == 0, run.text
    identity = "sixth:auto:sorted-float32-t64-e4-k2-s0.0-d32-h48-forward"
    assert f"[{identity}] PASSED" in run.text
    (entry,) = json.loads((tree / "sixth.json").read_text())["benchmarks"]
    assert entry["extra_info"]["id"] == identity
    assert entry["extra_info"]["rel_err_out"] <= 5e-7
    assert entry["extra_info"]["temp_bytes"] > 0
