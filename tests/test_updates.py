"""Updates of the baselines, and runs that go on from an earlier one: what is refused, kept, replayed, told.

All takes place in a copy of the tree that is a repository of its own, so that it can be clean, or dirty.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.bench import baseline, journal, store
from tests.running import ADDOPTS, CHUNKED, DENSE, DONATED, ROOT, SKIPPED, SWEPT, Runner, Serving
from tests.stores import seal

# One worker: the runs share a process and a baseline.
pytestmark = [pytest.mark.gate, pytest.mark.xdist_group("updates")]
MEASURED = {DENSE, CHUNKED, DONATED, SWEPT}
HUNGRY = {CHUNKED}
"""What `--alter hungry` changes."""
ONLY = ("--only", "dropless:chunked*-forward")


def git(tree, *words):
    identity = ("-c", "user.name=A Maintainer", "-c", "user.email=maintainer@example.org")
    done = subprocess.run(["git", *identity, *words], cwd=tree, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of what is measured and of what measures, committed."""
    made = tmp_path_factory.mktemp("updates") / "a tree"
    for folder in ("moe", "tests/bench"):
        shutil.copytree(ROOT / folder, made / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("conftest.py", "pyproject.toml", ".gitignore", "tests/__init__.py", "tests/altered.py"):
        shutil.copy(ROOT / file, made / file)
    git(made, "init", "-q")
    git(made, "config", "user.name", "A Maintainer")
    git(made, "add", ".")
    git(made, "commit", "-qm", "first")
    return made


@pytest.fixture(scope="module")
def runner(tree):
    return Runner(tree.parent / "runs", tree)


@pytest.fixture(scope="module")
def serving(runner):
    with Serving(runner) as process:
        yield process


def update(serving, root, *words, alter=(), options=(), reports=None):
    """Run the verb `baseline`."""
    given = ("--grid", "tiny", "--baselines", str(root), "--reports", str(reports or root.parent / "reports"))
    reason = () if "--reason" in words else ("--reason", "a test")
    after = [*(f"--alter={change}" for change in alter), *options]
    return serving.verb("baseline", *given, *reason, *words, "--", *after)


@pytest.fixture(scope="module")
def recorded(runner, serving):
    """A store whose chunked programs hold some bytes more than the tree's."""
    run = update(serving, runner.store, "--reason", "the first", alter=["hungry=1000"])
    assert run.code == 0, run.text
    return runner.store


@pytest.fixture
def root(recorded, tmp_path):
    """A copy of it."""
    return shutil.copytree(recorded, tmp_path / "store", ignore=shutil.ignore_patterns(".lock"))


def folder_of(root):
    (folder,) = root.iterdir()
    return folder


def content(root):
    return {p: p.read_bytes() for p in root.rglob("*") if p.is_file() and p.name != ".lock"}


def found(root):
    backend, _, version = folder_of(root).name.partition("-jax")
    return baseline.find(root, {"backend": backend, "jax": version}, "tiny")


def its(root, identity):
    return found(root).records[identity]["extra_info"]


# What is refused


@pytest.mark.parametrize(
    ("alter", "options", "code", "said"),
    [
        (["hungry=1000", "noisy"], [], 2, "the machine is too noisy: a program against itself took x1.197"),
        (["hungry=1000"], ["-k", "dense"], 2, "the run was partial"),
        (["wrong"], [], 1, "not recorded: the run ended with 1"),
        (["hungry=9000"], [], 10, 'if that is meant, say why: --accept-slower "..."'),
        (["callback"], [], 10, "take callbacks and debug prints out of the layer"),
    ],
    ids=["noise", "partial", "wrong-numerics", "larger", "callback"],
)
def test_update_that_may_not_stand_is_refused_and_nothing_is_stored(
    serving, root, alter, options, code, said
):
    before = content(root)
    run = update(serving, root, alter=alter, options=options)
    assert run.code == code, run.text
    assert said in run.text
    assert "recorded " not in run.text.replace("not recorded ", "")
    assert content(root) == before


def test_update_of_a_dirty_tree_is_refused_unless_told(serving, tree, root):
    before, file = content(root), tree / "moe/chunked.py"
    text = file.read_text()
    file.write_text(text + "# Another line.\n")
    try:
        run = update(serving, root)
        assert run.code == 2
        assert "moe/chunked.py is not committed; commit first" in run.text
        assert "collected" not in run.text
        assert content(root) == before
        told = update(serving, root, "--only", DENSE, "--allow-dirty", alter=["hungry=1000"])
        assert told.code == 0, told.text
        assert found(root).history[-1]["uncommitted"] == ["moe/chunked.py"]
    finally:
        file.write_text(text)


def test_noise_does_not_go_away_by_resuming(serving, root):
    assert update(serving, root, alter=["hungry=1000", "noisy"]).code == 2
    again = update(serving, root, "--resume", alter=["hungry=1000"])
    assert again.code == 2, again.text
    assert "resumed 4 cells" in again.text
    assert "the machine is too noisy" in again.text
    assert "without --resume" in again.text


# What an update tells and keeps


def test_larger_programs_are_accepted_with_a_reason_and_the_history_has_it(serving, tree, root):
    words = ("--reason", "a buffer", "--accept-slower", "it is needed")
    before = found(root)
    run = update(serving, root, *words, alter=["hungry=9000"])
    assert run.code == 0, run.text
    assert "recorded " in run.text
    after = found(root)
    first, last = after.history
    assert (first["reason"], first["accept_slower"]) == ("the first", None)
    assert (last["by"], last["revision"], last["uncommitted"]) == (
        "A Maintainer",
        git(tree, "rev-parse", "HEAD"),
        [],
    )
    assert (last["reason"], last["accept_slower"], last["grid"]) == ("a buffer", "it is needed", "tiny")
    assert last["environment"]["jax"] == after.environment["jax"]
    changes = {change["id"]: change for change in last["changes"] if change["status"] == "regressed"}
    assert changes.keys() == HUNGRY
    for identity, change in changes.items():
        old, new = change["temp_bytes"]
        assert (old, new) == tuple(b.records[identity]["extra_info"]["temp_bytes"] for b in (before, after))
        assert new > old
        assert its(root, identity)["accepted"] == its(root, identity)["program"]
    assert store.verify(root) == ([], [])


def test_accepted_program_stays_over_an_equal_one_and_moves_with_an_improvement(serving, root):
    first = its(root, CHUNKED)["accepted"]
    assert update(serving, root, *ONLY, alter=["hungry=1008"]).code == 0
    assert its(root, CHUNKED)["program"] != first
    assert its(root, CHUNKED)["accepted"] == first
    run = update(serving, root, *ONLY)
    assert run.code == 0, run.text
    assert "1 improved" in run.text
    assert its(root, CHUNKED)["accepted"] == its(root, CHUNKED)["program"] != first
    assert found(root).program_path(first).is_file()


def test_creep_is_stopped_where_it_is_beyond_the_limit_of_what_was_accepted(serving, root):
    """Five times 4 %: each step alone is within 4 KiB of the one before, and so within the limit."""
    codes, sizes = [], [its(root, CHUNKED)["temp_bytes"]]
    for size in range(1000 + 1968, 1000 + 6 * 1968, 1968):
        run = update(serving, root, *ONLY, alter=[f"hungry={size}"])
        codes.append(run.code)
        sizes.append(its(root, CHUNKED)["temp_bytes"])
        if run.code:
            break
    assert codes == [0, 10]
    assert "temp_bytes" in run.text
    assert 0.039 < sizes[1] / sizes[0] - 1 < 0.041
    assert sizes[1] - sizes[0] < 4096
    assert sizes[2] == sizes[1]
    assert len(found(root).history) == 2


def test_only_keeps_the_other_records_byte_for_byte_with_their_revision(serving, tree, root):
    before = found(root)
    git(tree, "commit", "-q", "--allow-empty", "-m", "another")
    run = update(serving, root, "--only", "dense", alter=["hungry=1000"])
    assert run.code == 0, run.text
    after = found(root)
    assert after.records.keys() == before.records.keys() == MEASURED
    assert after.skipped == before.skipped == {SKIPPED: after.skipped[SKIPPED]}
    for identity in MEASURED - {DENSE}:
        assert json.dumps(after.records[identity]) == json.dumps(before.records[identity])
    was, now = (b.records[DENSE]["extra_info"]["revision"] for b in (before, after))
    assert (was, now) == (git(tree, "rev-parse", "HEAD~1"), git(tree, "rev-parse", "HEAD"))
    assert after.history[-1]["only"] == "dense"
    whole = serving.pytest(
        "--alter=hungry=1000", "--baselines", str(root), "--benchmark-compare", "--reports", str(root.parent)
    )
    assert whole.code == 0, whole.text
    assert "4 unchanged" in whole.text


def test_updates_name_the_file_of_their_own_run(serving, runner, root):
    """A verdict that another run left in the folder of reports is not taken for this one's."""
    reports = runner.folder / "others"
    reports.mkdir()
    (reports / "verdict.json").write_text('{"exit_code": 0, "baseline": "another", "cells": []}')
    run = update(serving, root, "--only", "dense", alter=["hungry=9000"], reports=reports)
    assert run.code == 0, run.text
    assert json.loads((reports / "verdict.json").read_text())["baseline"].startswith(str(root))


# Resuming


@pytest.fixture(scope="module")
def measured(serving, recorded, tmp_path_factory):
    """Folder of reports with the journal of a whole run, and the run's document."""
    folder = tmp_path_factory.mktemp("measured")
    words = ("--baselines", str(recorded), "--reports", str(folder), f"--benchmark-json={folder / 'a.json'}")
    run = serving.pytest("--alter=hungry=1000", *words, "--benchmark-compare")
    assert run.code == 0, run.text
    assert "resumed" not in run.text
    return folder


@pytest.mark.parametrize(
    ("alter", "compared", "replayed"),
    [
        (["hungry=1000"], True, MEASURED),
        (["hungry=1008"], True, MEASURED - HUNGRY),
        (["hungry=1000", "elsewhere"], True, set()),
        (["hungry=1000"], False, set()),
    ],
    ids=["equal", "another-program", "another-environment", "another-comparison"],
)
def test_resume_replays_what_is_equal_and_says_which(
    serving, recorded, measured, tmp_path, alter, compared, replayed
):
    shutil.copytree(measured / "journal", tmp_path / "journal")
    (earlier,) = (tmp_path / "journal").iterdir()
    words = ["--baselines", str(recorded), "--reports", str(tmp_path), "--benchmark-json=b.json"]
    words += [f"--alter={change}" for change in alter] + (["--benchmark-compare"] if compared else [])
    run = serving.pytest("--resume", *words, cwd=tmp_path)
    assert run.code == 0, run.text
    assert f"resumed {len(replayed)} cells from {earlier}; {4 - len(replayed)} ran" in run.text
    assert set(re.findall(r"  resumed: (\S+)", run.text)) == replayed
    before, after = (
        {e["extra_info"]["id"]: e["stats"]["data"] for e in json.loads(path.read_text())["benchmarks"]}
        for path in (measured / "a.json", tmp_path / "b.json")
    )
    assert after.keys() == MEASURED
    assert {i for i in MEASURED if after[i] == pytest.approx(before[i])} == replayed
    assert len(journal.read(max((tmp_path / "journal").iterdir()))) == 8 - len(replayed)


def test_resume_without_a_journal_says_so(serving, recorded, tmp_path):
    run = serving.pytest("--resume", "-k", "dense", "--reports", str(tmp_path))
    assert run.code == 0, run.text
    assert "resumed 0 cells from no journal: there is none; 1 ran" in run.text


def kill_while_it_measures(runner, words, seconds, cwd, **env):
    """Start python with these words, kill it and its children so long after the first cell began; what it said."""
    with subprocess.Popen(
        [sys.executable, *words],
        cwd=cwd,
        env=runner.env | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as running:
        text = ""
        for line in running.stdout:
            text += line
            if "::test_" in line:
                break
        time.sleep(seconds)
        os.killpg(running.pid, signal.SIGKILL)
        text += running.stdout.read()
    assert running.returncode == -signal.SIGKILL, text
    assert "::test_" in text
    return text


def test_a_killed_run_loses_at_most_the_cell_in_flight(runner, serving, root):
    chance, held = random.Random(3), set()
    reports = runner.folder / "reports"
    shutil.rmtree(reports, ignore_errors=True)
    compare = ("--baselines", str(root), "--benchmark-compare")
    words = ["-m", "pytest", *runner.options(), "-p", "tests.altered", "--alter=hungry=1000"]
    words += ["--alter=slept=0.4", "--resume", "-v", *compare]
    for _ in range(3):
        text = kill_while_it_measures(runner, words, chance.uniform(0, 1.2), runner.folder)
        began = set(re.findall(r"::test_\w+\[([^\]]+)\]", text)) - {SKIPPED}
        kept = {line.id for line in journal.read(max((reports / "journal").glob("*.jsonl"))).values()}
        assert held <= kept
        assert len(began - kept) <= 1
        held = kept
        assert store.verify(root) == ([], [])
    run = serving.pytest("--alter=hungry=1000", "--resume", *compare)
    assert run.code == 0, run.text
    assert f"resumed {len(held)} cells" in run.text
    assert "4 unchanged" in run.text
    assert held


def test_a_killed_update_leaves_the_store_and_is_resumed(runner, serving, root, tmp_path):
    chance, before = random.Random(4), content(root)
    words = ["-m", "tests.bench", "baseline", "--grid", "tiny", "--baselines", str(root), "--resume"]
    words += ["--reason", "killed", "--reports", str(tmp_path / "reports"), "--", "-v", "--alter=hungry=1000"]
    words += ["--alter=slept=0.4"]
    for _ in range(3):
        kill_while_it_measures(runner, words, chance.uniform(0, 1.2), runner.root, PYTEST_ADDOPTS=ADDOPTS)
        assert content(root) == before
        assert store.verify(root) == ([], [])
    run = update(serving, root, "--resume", alter=["hungry=1000"], reports=tmp_path / "reports")
    assert run.code == 0, run.text
    assert re.search(r"resumed [1-4] cells", run.text)
    assert store.verify(root) == ([], [])


def test_only_beside_records_of_another_machine_is_refused_before_anything_runs(serving, root):
    folder = folder_of(root)
    (record,) = folder.glob("*_tiny.json")
    document = json.loads(record.read_text())
    document["moe_bench"]["environment"]["cpu"] = "another"
    record.write_text(json.dumps(document))
    seal(folder)
    before = content(root)
    run = update(serving, root, "--only", DENSE)
    assert run.code == 2
    assert "keeps records of another cpu beside today's; record the whole grid" in run.text
    assert "collected" not in run.text
    assert content(root) == before


def test_a_second_grid_is_recorded_beside_the_first(serving, root):
    words = ("--grid", "single", "--baselines", str(root), "--reports", str(root.parent / "reports"))
    run = serving.verb("baseline", *words, "--reason", "another grid")
    assert run.code == 0, run.text
    names = {path.name for path in folder_of(root).glob("*.json")}
    assert names == {"0001_tiny.json", "0002_single.json"}
    assert store.verify(root) == ([], [])


# --changed-only


def test_changed_only_needs_something_to_compare_with(serving, tmp_path):
    run = serving.pytest("--changed-only", "--reports", str(tmp_path))
    assert run.code == 4, run.text
    assert "so it needs a stored one; add --benchmark-compare" in run.text


@pytest.mark.parametrize(
    ("alter", "ran"), [("hungry=1000", set()), ("hungry=1008", HUNGRY)], ids=["unchanged", "one-changed"]
)
def test_changed_only_runs_the_cells_of_changed_programs(serving, recorded, tmp_path, alter, ran):
    words = ("--baselines", str(recorded), "--reports", str(tmp_path), "-v", "--benchmark-compare")
    run = serving.pytest(f"--alter={alter}", "--changed-only", *words)
    assert run.code == 0, run.text
    said = f"changed only: {4 - len(ran)} cells did not run, their program is the stored one; {len(ran)} ran"
    assert said in run.text
    assert set(re.findall(r"\[(\S+)\] PASSED", run.text)) == ran
    assert "4 unchanged; 4 compared" in run.text
