"""A user's own implementation is asserted and measured under its id; each way to fail fails its cell alone."""

import json
import re
import textwrap
import tomllib

import pytest

from tests.bench import own, own_grids, trial
from tests.bench.cell import Cell
from tests.bench.errors import GridError
from tests.running import ROOT, Runner

EXAMPLE = ROOT / "examples/equinox_layer"
SHAPE = "float32-t64-e4-k2-s0.0-d32-h48-forward"
MODULE = """
import itertools
import os
import time

import jax
import jax.numpy as jnp
import moe

def good(params, x, config):
    return moe.apply(params, x, config, impl="dense:auto:sorted")

def plain(params, x, config, chunk=None):
    return good(params, x, config).y, None

def raises(params, x, config):
    raise RuntimeError("out of ideas")

def shape(params, x, config):
    return x[:-1], None

def dtype(params, x, config):
    return x.astype(jnp.bfloat16), None

def bare(params, x, config):
    return x

def nan(params, x, config):
    return plain(params, x, config)[0] * jnp.nan, None

def wrong(params, x, config):
    return 1.01 * plain(params, x, config)[0], None

def prints(params, x, config):
    print("hello")
    return plain(params, x, config)

def debugs(params, x, config):
    jax.debug.print("sum {}", x.shape[0])
    return plain(params, x, config)

precisions = itertools.cycle(("highest", "float32"))

def retraces(params, x, config):
    jax.config.update("jax_default_matmul_precision", next(precisions))
    return plain(params, x, config)

def crashes(params, x, config):
    os._exit(7)

def leaves(params, x, config):
    raise SystemExit(3)

def forever(params, x, config):
    while True:
        time.sleep(1)

def two(params, x):
    return x, None
"""
FAULTS = {
    "raises": "raises RuntimeError: out of ideas",
    "shape": r"returns y of shape \(63, 32\); it must be that of x, \(64, 32\)",
    "dtype": "returns y of dtype bfloat16; it must be that of x, float32",
    "bare": r"returns .*; it must return \(y, aux\)",
    "nan": "rel_err_out=nan is not finite",
    "wrong": "rel_err_out=1.00e-02 is over",
    "prints": r"prints 'hello\\nhello'; take print",
    "debugs": r"prints 'sum 64\\nsum 64'; take print and jax.debug.print out",
    "retraces": "was traced 2 times for one shape",
    "crashes": "its process ended with 7",
    "leaves": "raises SystemExit: 3",
    "forever": "did not return within --cell-limit=8 seconds and was stopped",
}
GOOD = ("good", "plain")
WHOLE = pytest.mark.xdist_group("own")


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    runner = Runner(tmp_path_factory.mktemp("own"))
    (runner.folder / "plugins/mine.py").write_text(MODULE)
    return runner


# Whole runs


@pytest.fixture(scope="module")
def ended(runner):
    words = ["--impls", ",".join(f"mine:{name}" for name in (*GOOD[:1], *FAULTS, *GOOD[1:]))]
    words += ["--suites=layer", "--dtypes=float32", "--ops=forward", "--tokens=64", "--experts=4", "--skew=0"]
    words += ["--d-model=32", "--d-hidden=48", "--cell-limit=8"]
    return runner.pytest(*words, "--benchmark-json=run.json", "-rf", grid="default")


@pytest.mark.gate
@WHOLE
def test_a_bad_function_fails_its_cell_and_the_rest_goes_on(ended):
    assert ended.code == 1
    assert re.search(rf"{len(FAULTS)} failed, {len(GOOD)} passed", ended.text)


@pytest.mark.gate
@WHOLE
@pytest.mark.parametrize("name", FAULTS)
def test_its_reason_is_told(ended, name):
    (line,) = re.findall(rf"^own:mine:{name}-{SHAPE}: (.*)", ended.text, re.MULTILINE)
    assert re.search(FAULTS[name], line)
    assert f"own:mine:{name}-" not in line  # Its id stands in front, once.


@pytest.mark.gate
@WHOLE
def test_what_is_right_is_stored_under_its_id(ended, runner):
    stored = json.loads((runner.folder / "run.json").read_text())["benchmarks"]
    assert [b["extra_info"]["id"] for b in stored] == [f"own:mine:{name}-{SHAPE}" for name in GOOD]
    assert all(b["extra_info"]["rel_err_out"] < 1e-6 for b in stored)


@pytest.mark.gate
@WHOLE
def test_the_example_passes_in_forward_and_train_step(tmp_path):
    runner = Runner(tmp_path)
    (runner.folder / "plugins/equinox_layer.py").write_text((EXAMPLE / "equinox_layer.py").read_text())
    ended = runner.pytest(
        "--impls=equinox_layer:layer", "--suites=layer", "--tokens=64", "--experts=4", "--d-model=32",
        "--d-hidden=48", "--skew=0", grid="default",
    )  # fmt: skip
    assert ended.code == 0, ended.text
    assert re.search(r"\d+ passed", ended.text)
    assert "failed" not in ended.text


# The function, and its name


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "mine_here.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    own.load.cache_clear()
    return "own:mine_here"


def test_an_id_and_a_name_mean_the_same():
    assert own.whole_id("a.b:c") == own.whole_id("own:a.b:c") == "own:a.b:c"
    assert own.whole_id("a.b") is None
    assert own.whole_id("a-b:c") is None


def test_an_installed_package_names_its_function_by_an_entry_point(tmp_path, monkeypatch):
    folder = tmp_path / "theirs-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (folder / "entry_points.txt").write_text(f"[{own.GROUP}]\nfast = theirs.moe:layer\n")
    monkeypatch.syspath_prepend(tmp_path)
    own.installed.cache_clear()
    try:
        assert own.whole_id("fast") == "own:theirs.moe:layer"
    finally:
        own.installed.cache_clear()
    monkeypatch.undo()
    assert own.whole_id("fast") is None


def test_a_trial_that_does_not_start_says_why(monkeypatch):
    cell = Cell("layer", "own:mine:good", "float32", 64, 4, 2, "forward")
    start = trial.subprocess.Popen
    dying = [trial.sys.executable, "-c", "raise SystemExit('no jax here')"]
    monkeypatch.setattr(trial.subprocess, "Popen", lambda _, **how: start(dying, **how))
    with pytest.raises(trial.Failed, match="does not start: its process ended with 1: no jax here"):
        trial.Trial(5).check(cell, numerics=True, timed=False)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none", "cannot be imported (AttributeError: "),
        ("two", "takes (params, x); it must take (params, x, config)"),
    ],
)
def test_what_is_no_such_function_is_refused_before_the_run(module, name, said):
    with pytest.raises(GridError, match=re.escape(said)):
        own.load(f"{module}:{name}")


def test_a_module_that_is_not_there_is_refused():
    with pytest.raises(GridError, match=re.escape("--impls=nowhere:layer cannot be imported")):
        own.load("own:nowhere:layer")


def test_the_examples_adapter_is_short():
    text = (EXAMPLE / "equinox_layer.py").read_text()
    assert text.partition("def layer")[2].count("\n") < 30


# A project's grids


def grids(tmp_path, text):
    path = tmp_path / "pyproject.toml"
    path.write_text(textwrap.dedent(text))
    return own_grids.read(path)


def test_the_examples_grid_is_read():
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())
    (source,) = own_grids.read(EXAMPLE / "pyproject.toml")["mine"]
    assert source.impls == ("own:equinox_layer:layer",)
    assert list(source.tokens) == project["tool"]["moe-bench"]["grids"][0]["tokens"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('name = "default"', "name='default' must be letters"),
        ('name = "mine"\ntoken = [1]', "has the key 'token'; there are: name, suites"),
        ('name = "mine"\ntokens = 1', "tokens=1 must be a list of integers"),
        ('name = "mine"\nops = ["sideways"]', "sideways"),
        ("tokens = [1]", "name=None must be letters"),
    ],
)
def test_a_grid_that_cannot_be_is_refused(tmp_path, text, said):
    with pytest.raises(GridError, match=re.escape(said)):
        grids(tmp_path, f"[[tool.moe-bench.grids]]\n{text}\n")


def test_without_a_project_there_are_the_suites_grids(tmp_path):
    assert own_grids.read(None).keys() == grids(tmp_path, "").keys()
