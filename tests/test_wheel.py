"""The built wheel in a fresh environment, in a project with a `tests` folder of its own."""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.running import ROOT

pytestmark = [pytest.mark.gate, pytest.mark.xdist_group("wheel")]
LAYER = """
import jax
import moe


def layer(params, x, config):
    return moe.apply(params, x, config, impl="dropless:blocked:sorted").y, None
"""
HUNGRY = LAYER.replace(
    "    return",
    "    x = x + 0 * jax.lax.sort(jax.numpy.resize(x.ravel(), (2**16,)))[0]\n    return",
)
PROJECT = """
[project]
name = "mine"
version = "1"

[[tool.moe-bench.grids]]
name = "mine"
impls = ["mymoe:layer"]
tokens = [64]
experts = [4]
d_model = 32
d_hidden = 48
dtypes = ["float32"]
ops = ["forward"]
"""
SUITE = ("-p", "moe_bench", "--pyargs", "moe_bench")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def project(wheel, tmp_path_factory):
    return Project(wheel, tmp_path_factory.mktemp("project"))


class Project:
    """A repository of a user's, and an environment with the wheel; packages it needs are those at hand."""

    def __init__(self, wheel: Path, folder: Path) -> None:
        self.folder = folder / "mine"
        venv.create(folder / "venv", with_pip=False)
        self.python = folder / "venv/bin/python"
        (site,) = (folder / "venv/lib").glob("python*/site-packages")
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(site)
        others = [path for path in sys.path if path.endswith("site-packages")]
        (site / "at_hand.pth").write_text("\n".join(others))
        (self.folder / "tests").mkdir(parents=True)
        (self.folder / "tests/__init__.py").write_text("MINE = True\n")
        (self.folder / "tests/test_mine.py").write_text(
            "import tests\n\ndef test_mine():\n    assert tests.MINE\n"
        )
        (self.folder / "pyproject.toml").write_text(PROJECT)
        (self.folder / ".gitignore").write_text("reports\n.benchmarks\n__pycache__\n.pytest_cache\n")
        (self.folder / "mymoe.py").write_text(LAYER)
        dropped = ("PYTEST_", "PYTHON", "GITHUB_", "CI", "COV_")
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        who = {"AUTHOR_NAME": "a", "AUTHOR_EMAIL": "a@b", "COMMITTER_NAME": "a", "COMMITTER_EMAIL": "a@b"}
        self.env |= {f"GIT_{name}": value for name, value in who.items()} | {"JAX_PLATFORMS": "cpu"}
        for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
            subprocess.run(["git", *words], cwd=self.folder, env=self.env, check=True)

    def python_m(self, *words: str, cwd: Path | None = None) -> tuple[int, str]:
        done = subprocess.run(
            [str(self.python), "-m", *words],
            cwd=cwd or self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        return done.returncode, done.stdout


def test_the_wheel_has_no_top_level_tests(wheel):
    with zipfile.ZipFile(wheel) as packed:
        top = {name.partition("/")[0] for name in packed.namelist()}
        names = packed.namelist()
    assert {name for name in top if not name.endswith(".dist-info")} == {"moe", "moe_bench"}
    assert "moe_bench/verdict.schema.json" in names
    assert "moe/py.typed" in names


def test_a_users_layer_is_recorded_compared_and_gated(project):
    code, said = project.python_m("moe_bench", "baseline", "--grid=mine", "--reason=first", "--allow-dirty")
    assert code == 0, said
    (stored,) = (project.folder / "baselines").glob("cpu-jax*/0001_mine.json")
    assert "own:mymoe:layer-float32-t64-e4-k2-s0.0-d32-h48-forward" in stored.read_text()

    code, said = project.python_m("pytest", *SUITE, "--grid=mine", "--benchmark-compare")
    assert code == 0, said
    assert "1 unchanged" in said

    (project.folder / "mymoe.py").write_text(HUNGRY)
    try:
        code, said = project.python_m("pytest", *SUITE, "--grid=mine", "--benchmark-compare")
    finally:
        (project.folder / "mymoe.py").write_text(LAYER)
    assert code == 10, said
    assert "temp_bytes" in said


def test_a_users_own_tests_run_without_the_suite(project):
    code, said = project.python_m("pytest", "-q")
    assert code == 0, said
    assert "1 passed" in said


def test_without_a_baseline_it_ends_with_13(project):
    code, said = project.python_m("pytest", *SUITE, "--grid=mine", "--baselines=none", "--benchmark-compare")
    assert code == 13, said
    assert "python -m moe_bench baseline" in said


def test_the_verbs_are_there_under_the_wheels_name(project):
    code, said = project.python_m("moe_bench", "--help")
    assert code == 0
    assert "python -m moe_bench" in said


def test_in_the_suites_own_repository_the_plugin_is_refused(project):
    code, said = project.python_m("pytest", "-p", "moe_bench", "tests/bench", cwd=ROOT)
    assert code == 4, said
    assert "leave -p out: pytest tests/bench" in said
