"""The ways in which a benchmark gate passes without having compared, or blames what is not to blame: each closed.

A row is a run: what is done, how it ends, what it says. The numbers are those of "Ways in which pytest-benchmark's
own compare passes silently" in notes/gating.md; `users` are its "What users of other gates hit", and `faults` bad
input. All takes place in a folder whose name has a space and letters outside ASCII.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.bench import baseline, manifest, store, stored_program
from tests.running import CHUNKED, DENSE, DONATED, ROOT, SWEPT, Runner, Serving, cases
from tests.stores import seal

# One worker: the runs share a process and a baseline.
pytestmark = [pytest.mark.gate, pytest.mark.xdist_group("silent_passes")]
Document = dict[str, Any]


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    return Runner(tmp_path_factory.mktemp("runs") / "ein Ördner é")


@pytest.fixture(scope="module")
def serving(runner):
    with Serving(runner) as process:
        yield process


@pytest.fixture(scope="module")
def stored(runner, serving):
    """Folder of a baseline of the whole grid."""
    words = ("--grid", "tiny", "--allow-dirty", "--baselines", str(runner.store))
    run = serving.verb(
        "baseline", "--reason", "a first one", *words, "--reports", str(runner.folder / "reports")
    )
    assert run.code == 0, run.text
    (path,) = runner.store.glob("*/0001_tiny.json")
    return path.parent


@dataclass(frozen=True)
class Row:
    """One run.

    Attributes:
      code: how it ends.
      said: what it says.
      words: its options.
      edit: a change of the stored record, in a store that is otherwise sound.
      damage: a change of the stored folder; called with the record's document.
      cells: `-k`: these alone run.
      unsaid: what it does not say.
      root: pyproject.toml of another root folder.
      then: a look at the folder that it ran in.
    """

    code: int | tuple[int, ...]
    said: tuple[str, ...]
    words: tuple[str, ...] = ()
    edit: Callable[[Document], Any] | None = None
    damage: Callable[[Path, Document], Any] | None = None
    cells: str | None = None
    unsaid: tuple[str, ...] = ()
    root: str | None = None
    then: Callable[[Path], Any] | None = None


def alter(*changes):
    return tuple(f"--alter={change}" for change in changes)


# Changes of the stored record


def entry(document: Document, identity: str) -> dict[str, Any]:
    return next(e["extra_info"] for e in document["benchmarks"] if e["extra_info"]["id"] == identity)


def without(identity):
    def edit(document):
        document["benchmarks"] = [e for e in document["benchmarks"] if e["extra_info"]["id"] != identity]

    return edit


def figure(identity, name, share, program=True):
    """A stored figure is another; without its program the difference is not the compiler's."""

    def edit(document):
        its = entry(document, identity)
        its[name] = type(its[name])(its[name] * share)
        if not program:
            its["program"] = its["accepted"] = None

    return edit


def environment(**changes):
    return lambda document: document["moe_bench"]["environment"].update(changes)


def lucky(document):
    """The stored run was ten times as fast."""
    its = entry(document, DENSE)
    its.update(median_ms=its["median_ms"] / 10, gemm_fraction=its["gemm_fraction"] * 10)


# Changes of the stored folder, sealed again: a checksum does not tell


def program_of(folder: Path, document: Document, identity: str = DENSE) -> Path:
    return folder / manifest.program_name(entry(document, identity)["program"])


def sealed(change):
    def damage(folder, document):
        change(folder, document)
        seal(folder)

    return damage


def cut(folder, document):
    os.truncate(program_of(folder, document), 200)


def emptied(folder, document):
    os.truncate(program_of(folder, document), 0)


def flipped(folder, document):
    """A bit in the middle of the export, its length and compression whole."""
    path = program_of(folder, document)
    program = stored_program.unpack(path.read_bytes(), str(path))
    data = bytearray(program.export)
    data[len(data) // 2] ^= 1
    path.write_bytes(stored_program.StoredProgram(**vars(program) | {"export": bytes(data)}).pack())


def swapped(folder, document):
    shutil.copy(program_of(folder, document, CHUNKED), program_of(folder, document))


def of_future_jax(folder, document):
    """As a later JAX may write it: a form of export that this one does not know."""
    path = program_of(folder, document)
    program = stored_program.unpack(path.read_bytes(), str(path))
    future = {"jax": "99.0.0", "export": b"\x10\x00\x00\x00" + b"\xff" * 60}
    path.write_bytes(stored_program.StoredProgram(**vars(program) | future).pack())


def newest(text):
    """A second file, newer than the sound first one."""

    def damage(folder, document):
        (folder / "0002_tiny.json").write_text(text(document))
        seal(folder)

    return damage


def edited(change):
    def text(document):
        other = json.loads(json.dumps(document))
        change(other)
        return json.dumps(other)

    return newest(text)


def by_hand(folder, document):
    path = folder / manifest.FILE
    path.write_text(path.read_text().replace(f'    "{DENSE}",\n', ""))


def bit_of_program(folder, document):
    path = program_of(folder, document)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


LIMITS = """
[[tool.moe-bench.limits]]
cells = "*chunked*"
metric = "{metric}"
share = {share}
reason = "a buffer that was asked for"
"""
ASKED_FOR = LIMITS.format(metric="temp_bytes", share=0.3) + LIMITS.format(metric="flops", share=0.2)


def one_failure(folder):
    said = cases(folder / "regressed.xml")
    assert [name for name, tags in said.items() if "failure" in tags] == [f"test_layer[{DONATED}]"]
    assert len(said) == 5


def only_dense_stored(folder):
    (found,) = json.loads((folder / "wrong.json").read_text())["benchmarks"]
    assert found["extra_info"]["id"] == DENSE


REGRESSED = figure(DONATED, "temp_bytes", 0.9, program=False)
ALL = ("--all-programs", "--gate-seconds=1")
ROWS = {
    # 1: no baseline, and cells that it does not know
    "1-no-baseline": Row(
        13,
        ("no baseline for cpu-jax", "there is none at all", "tox run -e baseline"),
        damage=lambda folder, _: shutil.rmtree(folder),
    ),
    "1-renamed": Row(
        11, ("1 missing, 1 new", "no longer in the grid"), alter("renamed=chunk16"), unsaid=("regressed",)
    ),
    "1-removed": Row(11, ("1 missing", "no longer in the grid"), alter("removed=dense")),
    "1-new": Row(0, ("1 new", "gate it from now on"), edit=without(DENSE)),
    "1-new-in-ci": Row(
        11, (f"integrity: no baseline has {DENSE}", "record them before"), alter("ci"), without(DENSE)
    ),
    "1-only-new": Row(11, ("nothing was compared",), edit=without(DENSE), cells="dense"),
    "1-left-out-by-a-limit": Row(11, ("1 missing", "but the baseline has it"), alter("skipped=chunk16")),
    # 2: a partial save
    "2-partial": Row(0, ("PARTIAL", "1 unchanged; 1 compared"), ("--benchmark-autosave",), cells="dense"),
    "2-partial-and-strict": Row(11, ("PARTIAL",), ("--gate=strict",), cells="dense"),
    "2-whole-after-partial": Row(0, ("4 unchanged; 4 compared",), unsaid=("PARTIAL",)),
    # 3: nothing runs
    "3-parallel": Row(11, ("integrity: nothing was compared",), ("-n", "1"), cells="dense"),
    "3-disabled": Row(11, ("integrity: nothing was compared",), ("--benchmark-disable",)),
    "3-skipped": Row(11, ("integrity: nothing was compared",), ("--benchmark-skip",)),
    "3-unchecked": Row(11, ("integrity: nothing was compared",), ("--no-check",), cells="dense"),
    "3-deselected": Row(5, ("5 deselected", "nothing was compared"), cells="no_such_cell"),
    "3-never-called": Row(11, ("1 missing", "but it did not run"), alter("uncalled=dense")),
    "3-never-called-in-part": Row(
        11, ("1 missing, 1 unchanged", "did not run"), alter("uncalled=dense"), cells="dense or chunk16"
    ),
    # 4: options that swallow or hide one another
    "4-repeated-fail": Row(
        4,
        ("--benchmark-compare-fail is given twice",),
        ("--benchmark-compare-fail=min:5%", "--benchmark-compare-fail=mean:50%"),
    ),
    "4-repeated-own": Row(4, ("--gate is given twice",), ("--gate=strict", "--gate=on")),
    # 5: saving comes before checking
    "5-saved-once": Row(10, ("1 regressed",), ("--benchmark-autosave",), REGRESSED, cells="donated"),
    "5-saved-twice": Row(10, ("1 regressed",), ("--benchmark-autosave",), REGRESSED, cells="donated"),
    # 6: wrong numbers
    "6-wrong": Row(
        1,
        ("3 wrong", "rel_err_out=1.00e-03 is over 5.0e-07"),
        (*alter("wrong"), "--benchmark-json=wrong.json"),
        then=only_dense_stored,
    ),
    # 7: a broken newest file
    "7-truncated": Row(
        11,
        ("0002_tiny.json is truncated or not JSON",),
        damage=newest(lambda document: json.dumps(document)[:-99]),
    ),
    "7-empty-list": Row(
        11, ("0002_tiny.json holds no benchmarks",), damage=edited(lambda d: d["benchmarks"].clear())
    ),
    "7-nan": Row(
        11,
        (f"has stats.mean=nan for {DENSE}, not finite",),
        damage=edited(lambda d: d["benchmarks"][0]["stats"].update(mean=float("nan"))),
    ),
    "7-twice": Row(
        11,
        (f"holds the cell {DENSE} twice",),
        damage=edited(lambda d: d["benchmarks"].append(d["benchmarks"][0])),
    ),
    "7-schema": Row(11, ("is of schema 2",), damage=edited(lambda d: d["moe_bench"].update(schema=2))),
    "7-doubled-cell": Row(
        11, ("1 missing", "the grid holds it more than once"), alter("duplicated=dense"), cells="dense"
    ),
    # 8: thresholds
    "8-limit-with-a-reason": Row(
        0,
        ("let through", "of pyproject.toml instead of 1%", "a buffer that was asked for"),
        alter("hungry=1000"),
        root=ASKED_FOR,
        cells="chunked and forward and not chunk16",
    ),
    "8-improved": Row(
        0,
        ("1 improved", "improved: 1 cell; keep it as the new bar: tox run -e baseline"),
        edit=figure(DENSE, "temp_bytes", 2, program=False),
        cells="dense",
    ),
    # 9: what the folder's name does not say
    "9-another-python": Row(0, ("1 unchanged",), edit=environment(python="3.14.1"), cells="dense"),
    "9-another-cpu": Row(
        0,
        ("stored time not comparable: another cpu", "environment drift", "1 unchanged"),
        edit=environment(cpu="Another CPU"),
        cells="dense",
    ),
    "9-another-jaxlib": Row(
        0, ("environment drift", "jaxlib: 0.1.0 ->"), edit=environment(jaxlib="0.1.0"), cells="dense"
    ),
    "9-another-backend": Row(
        11, ("is for another backend or JAX, gpu-jax",), edit=environment(backend="gpu")
    ),
    # 10: names by position
    "10-new-in-front": Row(
        0, ("1 new", "2 unchanged; 2 compared"), alter("in-front"), cells="dense or chunk16"
    ),
    # 11: a regression told from wrong numbers
    "11-regressed": Row(
        10,
        ("1 failed, 3 passed, 1 skipped", f"regressed: {DONATED}", "(+11.1%)", "accept it: tox run"),
        ("--junitxml=regressed.xml",),
        REGRESSED,
        then=one_failure,
    ),
    # 12: run and stored elsewhere
    "12-elsewhere": Row(
        0,
        ("1 unchanged",),
        ("--benchmark-storage=mine", "--benchmark-autosave"),
        lambda document: document.update(machine_info={"node": "another"}),
        cells="dense",
        root="",
    ),
    # 13: donated arguments
    "13-donated": Row(0, ("1 unchanged",), cells="donated", unsaid=("has been deleted",)),
    # What users of other gates hit
    "users-stale-baseline-blames-the-compiler": Row(
        0,
        ("compiler drift", f"{DENSE} (the stored program: temp_bytes"),
        edit=figure(DENSE, "temp_bytes", 0.5),
        cells="dense",
        unsaid=("regressed", "code drift"),
    ),
    "users-old-drift-is-not-the-new-change's": Row(
        0,
        ("compiler drift", "code drift", "unchanged"),
        alter("other"),
        figure(SWEPT, "temp_bytes", 0.5),
        cells="chunk16",
        unsaid=("regressed",),
    ),
    "users-change-is-blamed": Row(
        10,
        ("code drift", "regressed: dropless:chunked", "temp_bytes 88,488 ->"),
        alter("hungry=1000"),
        cells="chunked and forward and not chunk16",
        unsaid=("compiler drift",),
    ),
    "users-callback": Row(10, ("take callbacks and debug prints out",), alter("callback"), cells="chunk16"),
    "users-one-lucky-base-run": Row(
        (0, 12), ("dense",), ("--real-clock", "--gate-seconds=5"), lucky, cells="dense", unsaid=("regressed",)
    ),
    "users-first-side-is-slower": Row(
        (0, 12),
        ("side by side",),
        ("--real-clock", "--all-programs", "--gate-seconds=5", *alter("first-slower")),
        cells="dense",
        unsaid=("regressed", "improved"),
    ),
    "users-limit-that-is-none": Row(
        4, ("a gate that lets more through is none",), root=LIMITS.format(metric="time", share=4.0)
    ),
    "users-limit-without-a-reason": Row(
        4,
        ("reason='' must be text",),
        root=LIMITS.format(metric="time", share=0.1).replace("a buffer that was asked for", ""),
    ),
    # Gates
    "warn": Row(0, ("verdict: 1 regressed", "1 passed"), ("--gate=warn",), REGRESSED, cells="donated"),
    "off": Row(0, ("not compared",), ("--gate=off",), REGRESSED, cells="donated", unsaid=("verdict",)),
    "strict": Row(0, ("4 unchanged",), ("--gate=strict",)),
    "noise-without-a-change": Row(0, ("note: noise", "1 unchanged"), alter("noisy"), cells="dense"),
    # Clocks and figures of today
    "clock-backwards": Row(
        11,
        ("the clock went backwards",),
        (*alter("clock=backwards"), "--benchmark-timer=tests.altered.backwards"),
        cells="dense",
    ),
    "clock-stopped": Row(
        11,
        ("the clock went backwards",),
        (*alter("clock=stopped"), "--benchmark-timer=tests.altered.stopped"),
        cells="dense",
    ),
    "nan-of-today": Row(11, ("median_ms is nan",), alter("lost=median_ms"), cells="dense"),
    "nan-bytes-of-today": Row(11, ("the metric vanished",), alter("lost=temp_bytes"), cells="dense"),
    "nan-rate-of-today": Row(11, ("gemm_fraction is nan",), alter("lost=gemm_fraction"), cells="dense"),
    # Bad input
    "faults-manifest-by-hand": Row(11, ("manifest.toml is truncated or was edited by hand",), damage=by_hand),
    "faults-bit-of-a-program": Row(
        11, (".bin was changed or damaged: its checksum differs",), damage=bit_of_program
    ),
    "faults-program-cut": Row(11, ("is no stored program",), ALL, damage=sealed(cut), cells="dense"),
    "faults-program-empty": Row(11, ("is no stored program",), ALL, damage=sealed(emptied), cells="dense"),
    "faults-program-flipped": Row(
        11, ("programs/", "record again"), ALL, damage=sealed(flipped), cells="dense"
    ),
    "faults-program-swapped": Row(
        11, ("holds the program", "record again"), ALL, damage=sealed(swapped), cells="dense"
    ),
    "faults-program-of-a-future-jax": Row(
        11, ("cannot be read by JAX", "written by 99.0.0"), ALL, damage=sealed(of_future_jax), cells="dense"
    ),
    "faults-reader-crashes": Row(
        11, ("crashes the process that reads it",), (*ALL, *alter("reader=crash")), cells="dense"
    ),
    "faults-reader-hangs": Row(11, ("is not read within 1 s",), (*ALL, *alter("reader=hang")), cells="dense"),
    **{
        f"faults-other-{name}": Row(
            0, ("environment drift", f"{name}: {value} ->"), edit=environment(**{name: value}), cells="dense"
        )
        for name, value in (("xla_flags", "--xla_other"), ("x64", True), ("matmul_precision", "high"))
    },
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_run_ends_with_its_code_and_says_why(runner, serving, stored, tmp_path, row):
    root = tmp_path / "störe 1"
    folder = root / stored.name
    shutil.copytree(stored, folder, ignore=shutil.ignore_patterns(".lock"))
    document = json.loads((folder / "0001_tiny.json").read_text())
    if row.edit:
        row.edit(document)
        (folder / "0001_tiny.json").write_text(json.dumps(document))
        seal(folder)
    if row.damage:
        row.damage(folder, document)
    words = [*row.words, "--baselines", str(root)]
    if row.cells:
        words += ["-k", row.cells]
    if row.root is not None:
        (tmp_path / "pyproject.toml").write_text(row.root)
        words += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)]
    before = sorted(folder.rglob("*"))
    run = serving.pytest(*words, "--benchmark-compare", cwd=tmp_path)
    codes = row.code if isinstance(row.code, tuple) else (row.code,)
    assert run.code in codes, run.text
    assert [words for words in row.said if words not in run.text] == [], run.text
    assert [words for words in row.unsaid if words in run.text] == [], run.text
    assert "INTERNALERROR" not in run.text
    assert "Traceback" not in run.text
    assert sorted(folder.rglob("*")) == before  # A run never writes a baseline.
    if row.then:
        row.then(tmp_path)


@pytest.mark.parametrize("path", ["tests/bench", "tests/bench/test_layer.py"], ids=["4-folder", "4-file"])
def test_path_that_compare_would_swallow_is_refused(serving, path):
    run = serving.bare("--benchmark-compare", path, cwd=ROOT)
    assert run.code == 4
    assert f"write the path first: pytest {path} --benchmark-compare" in run.text


def test_rounds_are_never_one(stored):
    """8: a spread of one round is none."""
    document = json.loads((stored / "0001_tiny.json").read_text())
    assert all(found["stats"]["rounds"] >= 5 for found in document["benchmarks"])


# Two copies of one package


def test_moe_of_another_folder_is_refused(runner, stored, tmp_path):
    """`users`: both revisions ran the installed copy."""
    shutil.copytree(ROOT / "moe", tmp_path / "moe")
    path = os.pathsep.join((str(tmp_path), runner.env["PYTHONPATH"]))
    code = "import sys, moe, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    words = ("-W", "ignore::pytest.PytestAssertRewriteWarning", "--benchmark-compare")
    run = runner.python("-c", code, *runner.options(), *words, PYTHONPATH=path)
    assert run.code == 4, run.text
    assert f"moe is imported from {tmp_path / 'moe'}, not from {ROOT / 'moe'}" in run.text


def test_two_jaxlibs_are_refused(runner, stored, tmp_path):
    info = tmp_path / "jaxlib-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: jaxlib\nVersion: 0.1.0\n")
    path = os.pathsep.join((runner.env["PYTHONPATH"], str(tmp_path)))
    run = runner.pytest("--baselines", str(runner.store), "--benchmark-compare", PYTHONPATH=path)
    assert run.code == 4, run.text
    assert "there are 2 jaxlibs on the path: " in run.text
    assert f"0.1.0 in {tmp_path}" in run.text


def test_no_run_above_changed_the_store(runner, stored):
    assert store.verify(runner.store) == ([], [])
    assert [path.name for path in stored.glob("*.json")] == ["0001_tiny.json"]
    assert not list(baseline.ROOT.glob("*/*_unversioned_*"))
