"""Two revisions side by side: each from its own tree, what both have compared, what cannot be tested said so."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.running import ROOT

pytestmark = pytest.mark.gate

SHAPE = "float32-t512-e8-k2-s0.0-d128-h256-forward"
CELLS = [f"{impl}-{SHAPE}" for impl in ("capacity:auto:sorted", "dropless:chunked:sorted")]
CAPACITY, CHUNKED = CELLS
WRONG = ("moe/capacity.py", "return weight[:, None] * out", "return 1.1 * weight[:, None] * out")
BROKEN = ("moe/capacity.py", "import jax\n", "import jax_that_is_not_there\n")
FAILING = ("moe/capacity.py", "    size = slots(tokens, config)\n", "    raise KeyError('slots')\n")
NEW_CELLS = ("tests/bench/grid.py", "tokens=(512, 1024)", "tokens=(512, 256)")
ELSEWHERE = ("tests/bench/lowered.py", "str(moe.__file__)", "'/elsewhere/moe/__init__.py'")
SPELLED = ("moe/capacity.py", "import functools\n", "import functools  # the same program\n")


class Repo:
    """A repository with this tree as its first commit."""

    def __init__(self, root):
        self.root = root
        ignored = shutil.ignore_patterns("__pycache__")
        for name in ("moe", "tests/bench"):
            shutil.copytree(ROOT / name, root / name, ignore=ignored)
        for name in ("pyproject.toml", "tests/__init__.py"):
            shutil.copy(ROOT / name, root / name)
        self.git("init", "-q", "-b", "main")
        self.commit("first")
        self.git("tag", "first")

    def git(self, *words):
        named = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(
            ["git", *named, *words], cwd=self.root, check=True, capture_output=True, text=True
        )

    def commit(self, message):
        self.git("add", "-A")
        self.git("commit", "-qm", message)

    def change(self, *changes):
        """Edit the working tree."""
        for path, old, new in changes:
            text = (self.root / path).read_text("utf-8")
            assert text.count(old) >= 1
            (self.root / path).write_text(text.replace(old, new, 1), "utf-8")

    def ab(self, *words, **environment):
        """(exit code, verdict, what was said)."""
        command = [sys.executable, "-m", "tests.bench", "ab", *words, "--grid", "aa", "--gate-seconds", "1"]
        reports = self.root / "reports"
        shutil.rmtree(reports, ignore_errors=True)
        inherited = {name: value for name, value in os.environ.items() if name != "GITHUB_BASE_REF"}
        done = subprocess.run(
            command, cwd=self.root, env=inherited | environment, capture_output=True, text=True, timeout=300
        )
        assert self.git("worktree", "list").stdout.count("\n") == 1
        file = reports / "ab.json"
        verdict = json.loads(file.read_text("utf-8")) if file.exists() else None
        return done.returncode, verdict, done.stdout + done.stderr


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return Repo(tmp_path_factory.mktemp("repo"))


@pytest.fixture
def repo(shared):
    """The repository, back at its first commit."""
    shared.git("checkout", "-qf", "-B", "main", "first")
    shared.git("clean", "-qfdx")
    return shared


def statuses(verdict):
    return {cell["id"]: cell["status"] for cell in verdict["cells"]}


def test_a_revision_against_itself_is_unchanged(repo):
    code, verdict, said = repo.ab("HEAD", "HEAD")
    assert code == 0, said
    assert set(statuses(verdict).values()) == {"unchanged"}
    assert verdict["compared"] == 32
    assert not verdict["partial"]


def test_the_working_tree_counts_with_its_uncommitted_changes(repo):
    repo.change(
        (
            "moe/capacity.py",
            "y.astype(x.dtype), Aux(counts, dropped)",
            "(y + jnp.sort(y) * 1e-30).astype(x.dtype), Aux(counts, dropped)",
        )
    )
    code, verdict, said = repo.ab("HEAD", "--only", SHAPE)
    assert code == 10, said
    assert {i: s for i, s in statuses(verdict).items() if s != "unchanged"} == {CAPACITY: "regressed"}
    (reasons,) = (cell["reasons"] for cell in verdict["cells"] if cell["id"] == CAPACITY)
    assert reasons[0].startswith("flops 32,842,376 -> ")


def test_wrong_numbers_end_with_1_and_the_other_cells_are_compared(repo):
    repo.change(WRONG)
    repo.commit("wrong")
    code, verdict, said = repo.ab("HEAD~1", "HEAD", "--only", SHAPE)
    assert code == 1, said
    assert statuses(verdict)[CAPACITY] == "wrong"
    assert statuses(verdict)[CHUNKED] == "unchanged"
    assert "rel_err_out=1.0" in said


def test_a_cell_that_raises_is_wrong_with_its_reason(repo):
    repo.change(FAILING)
    code, verdict, said = repo.ab("HEAD", "--only", SHAPE)
    assert code == 1
    assert statuses(verdict)[CAPACITY] == "wrong"
    assert "cannot be lowered: KeyError: 'slots'" in said


def test_a_cell_that_the_base_cannot_run_is_listed_as_not_compared(repo):
    repo.change(FAILING)
    repo.commit("failing")
    repo.git("checkout", "-q", "HEAD~1", "--", "moe/capacity.py")
    code, verdict, said = repo.ab("HEAD", "--only", SHAPE)
    assert code == 0, said
    assert verdict["partial"]
    assert CAPACITY not in statuses(verdict)
    assert (
        f"not compared: {CAPACITY}, since HEAD cannot run it: {CAPACITY} cannot be lowered: KeyError" in said
    )


def test_without_a_base_it_is_the_merge_base(repo):
    repo.git("checkout", "-qb", "topic")
    repo.change(SPELLED)
    repo.commit("topic")
    code, verdict, said = repo.ab("--only", SHAPE)
    assert code == 0, said
    assert verdict["baseline"] == repo.git("rev-parse", "main").stdout.strip()


def test_what_only_one_revision_has_is_listed(repo):
    repo.change(NEW_CELLS)
    code, verdict, said = repo.ab("HEAD", "--only", "capacity*float32*forward")
    assert code == 0, said
    assert verdict["partial"]
    assert [cell["id"] for cell in verdict["cells"]] == [CAPACITY]
    only_ours, only_theirs = (f"{CAPACITY.replace('512', tokens, 1)}" for tokens in ("256", "1024"))
    assert f"only HEAD has {only_theirs}" in verdict["notes"]
    assert f"only . has {only_ours}" in verdict["notes"]


def test_without_a_common_cell_nothing_was_compared(repo):
    repo.change(NEW_CELLS)
    code, verdict, said = repo.ab("HEAD", "--only", "capacity*float32-t1024*forward")
    assert code == 11, said
    assert verdict["compared"] == 0
    assert verdict["partial"]
    assert any(
        note.startswith("only HEAD has capacity:auto:sorted-float32-t1024") for note in verdict["notes"]
    )


@pytest.fixture(scope="module")
def untestable(shared):
    """The repository with a branch for each fault that no cell survives."""
    for branch, change in (("no-suite", None), ("broken", BROKEN), ("elsewhere", ELSEWHERE)):
        shared.git("checkout", "-qfb", branch, "first")
        shared.git("clean", "-qfdx")
        if change:
            shared.change(change)
        else:
            shared.git("rm", "-rq", "tests/bench")
        shared.commit(branch)
    return shared


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing"], "git knows no revision 'nothing'"),
        (["HEAD", "nothing"], "git knows no revision 'nothing'"),
        (["HEAD^{tree}"], "git knows no revision 'HEAD^{tree}'"),
        (["no-suite"], "no-suite has no tests/bench that lowers its cells"),
        (["broken"], "broken does not build: its cells cannot be lowered: ModuleNotFoundError"),
        (["HEAD", "broken"], "broken does not build: its cells cannot be lowered: ModuleNotFoundError"),
        (["elsewhere"], "elsewhere was lowered with moe from /elsewhere/moe/__init__.py"),
    ],
)
def test_a_revision_that_cannot_be_tested_is_skipped_by_a_bisection(untestable, repo, words, said):
    code, verdict, output = repo.ab(*words, "--cell", CAPACITY)
    assert code == 125
    assert verdict is None
    assert said in output


def test_without_a_merge_base_it_asks_for_the_base(repo):
    code, verdict, said = repo.ab(GITHUB_BASE_REF="absent")
    assert code == 125
    assert verdict is None
    assert "there is no merge base of HEAD with origin/absent; name the base" in said


def test_three_revisions_are_refused(repo):
    code, verdict, said = repo.ab("HEAD", "HEAD", "HEAD")
    assert code == 2
    assert verdict is None
    assert "3 revisions are given" in said


def test_a_cell_that_no_grid_has_compares_nothing(repo):
    code, _, said = repo.ab("HEAD", "HEAD", "--cell", "none")
    assert code == 2
    assert "--cell=none is in neither revision's grid aa" in said
