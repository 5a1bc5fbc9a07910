"""The store of baselines: what is found, what is refused, and that a save is all or nothing."""

import copy
import errno
import json
import multiprocessing
import os
import subprocess
import sys

import pytest

from tests.bench import atomic, baseline, environment, store
from tests.bench.errors import BaselineError, BenchError, EnvironmentFault, NoBaseline
from tests.stores import HERE, NAME, changed, document, files, put, save, seal

# Finding


def test_the_newest_file_of_the_grid_is_found(tmp_path):
    for number, grid in enumerate(("default", "default", "published"), start=1):
        save(tmp_path, document("a", "b", f"only{number}", grid=grid), grid)
    found = baseline.find(tmp_path, HERE, "default")
    assert found.path.name == "0002_default.json"
    assert set(found.records) == {"a", "b", "only2"}
    assert found.records["a"]["stats"]["median"] == 0.01
    assert found.skipped == {"c": "tokens x experts is over dense_limit"}
    assert found.environment == HERE


def test_numbers_are_compared_as_numbers(tmp_path):
    put(tmp_path, "9999_default.json", document("old"))
    put(tmp_path, "10000_default.json", document("new"))
    seal(tmp_path / NAME)
    assert set(baseline.find(tmp_path, HERE, "default").records) == {"new"}
    assert save(tmp_path, document(), "default").name == "10001_default.json"


def test_smoke_is_compared_with_the_file_of_default(tmp_path):
    path = save(tmp_path, document(), "default")
    assert baseline.find(tmp_path, HERE, "smoke").path == path


def test_a_baseline_serves_under_another_python(tmp_path):
    path = save(tmp_path, document(), "default")
    assert baseline.find(tmp_path, HERE | {"python": "3.14.0"}, "default").path == path


@pytest.mark.parametrize("other", [{"backend": "gpu"}, {"jax": "0.12.0.1"}], ids=["backend", "jax"])
def test_no_baseline_at_all_lists_what_exists_and_how_to_record(tmp_path, other):
    save(tmp_path, document(), "default")
    put(tmp_path, "0001_published.json", document(), folder="published")
    with pytest.raises(NoBaseline, match=r"there is cpu-jax0\.10\.2; record one with: tox run -e baseline"):
        baseline.find(tmp_path, HERE | other, "default")


def test_no_store_at_all_says_so(tmp_path):
    with pytest.raises(NoBaseline, match="there is none at all"):
        baseline.find(tmp_path / "nowhere", HERE, "default")


def test_a_grid_without_file_is_damage_not_a_new_machine(tmp_path):
    save(tmp_path, document(), "default")
    with pytest.raises(BaselineError, match=r"no baseline of grid models in .*: there is default") as caught:
        baseline.find(tmp_path, HERE, "models")
    assert not isinstance(caught.value, NoBaseline)


def _set(*path_and_value):
    *path, last, value = path_and_value

    def change(made):
        for step in path:
            made = made[step]
        made[last] = value

    return change


DAMAGED = {
    "truncated": (json.dumps(document())[:-100], "is truncated or not JSON"),
    "empty": ("", "is truncated or not JSON"),
    "not-json": ("version https://git-lfs.github.com/spec/v1", "is truncated or not JSON"),
    "nested-too-deep": ("[" * 100_000, "is truncated or not JSON"),
    "array": ("[]", "holds a JSON list, not a benchmark file"),
    "not-ours": (changed(lambda made: made.pop("moe_bench")), "has no moe_bench block"),
    "schema": (changed(_set("moe_bench", "schema", 2)), "is of schema 2, this suite reads 1"),
    "schema-gone": (changed(lambda made: made["moe_bench"].pop("schema")), "is of schema None"),
    "entry-schema": (changed(_set("benchmarks", 1, "extra_info", "schema", 2)), "holds b in schema 2"),
    "no-environment": (changed(_set("moe_bench", "environment", None)), "does not say on which backend"),
    "backend": (
        changed(_set("moe_bench", "environment", HERE | {"backend": "gpu"})),
        "for another backend or JAX",
    ),
    "jax": (changed(_set("moe_bench", "environment", HERE | {"jax": "0.9.0"})), "for another backend or JAX"),
    "empty-list": (changed(_set("benchmarks", [])), "holds no benchmarks"),
    "list-gone": (changed(lambda made: made.pop("benchmarks")), "holds no benchmarks"),
    "duplicate": (document("a", "b", "a"), "holds the cell a twice"),
    "duplicate-skip": (document("a", "c"), "holds the cell c twice"),
    "entry-not-an-object": (changed(_set("benchmarks", 0, "text")), r"has no cell id in benchmarks\[0\]"),
    "no-id": (
        changed(lambda made: made["benchmarks"][1]["extra_info"].pop("id")),
        r"no cell id in benchmarks\[1\]",
    ),
    "no-statistics": (changed(lambda made: made["benchmarks"][0].pop("stats")), "holds no statistics of a"),
    "nan": (
        changed(_set("benchmarks", 0, "stats", "stddev", float("nan"))),
        "stats.stddev=nan for a, not finite",
    ),
    "infinity": (
        changed(_set("benchmarks", 1, "stats", "max", float("inf"))),
        "stats.max=inf for b, not finite",
    ),
    "overflow": (json.dumps(document()).replace("0.012", "1e999", 1), "stats.max=inf for a, not finite"),
    "nan-figure": (
        changed(_set("benchmarks", 0, "extra_info", "rel_err_out", float("nan"))),
        "extra_info.rel_err_out=nan for a, not finite",
    ),
    "statistic-gone": (
        changed(lambda made: made["benchmarks"][0]["stats"].pop("q3")),
        "q3=None for a, not a number",
    ),
    "statistic-text": (
        changed(_set("benchmarks", 0, "stats", "median", "0.01")),
        "median='0.01' for a, not a number",
    ),
    "statistic-bool": (
        changed(_set("benchmarks", 0, "stats", "median", True)),
        "median=True for a, not a number",
    ),
}


@pytest.mark.parametrize(("content", "message"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_newest_file_is_an_error_and_no_reason_to_use_an_older_one(tmp_path, content, message):
    put(tmp_path, "0001_default.json", document())
    path = put(tmp_path, "0002_default.json", content)
    seal(path.parent)
    with pytest.raises(BaselineError, match=message) as caught:
        baseline.find(tmp_path, HERE, "default")
    assert str(path) in str(caught.value)
    assert "tox run -e baseline" in str(caught.value)
    assert not isinstance(caught.value, NoBaseline)


def test_an_unreadable_file_is_an_error(tmp_path):
    put(tmp_path, "0001_default.json", document())
    (tmp_path / NAME / "0002_default.json").mkdir()  # Permissions would not stop root.
    seal(tmp_path / NAME)
    with pytest.raises(BaselineError, match="cannot be read"):
        baseline.find(tmp_path, HERE, "default")


def test_text_that_is_not_unicode_is_an_error(tmp_path):
    put(tmp_path, "0001_default.json", "").write_bytes(b"\xff\xfe\x00{")
    seal(tmp_path / NAME)
    with pytest.raises(BaselineError, match="is truncated or not JSON"):
        baseline.find(tmp_path, HERE, "default")


def test_a_baseline_is_frozen(tmp_path):
    found = baseline.load(save(tmp_path, document(), "default"))
    with pytest.raises(AttributeError):
        found.path = found.path  # type: ignore[misc]


# Saving


def test_what_was_saved_is_loaded_without_raw_rounds(tmp_path):
    made = document()
    before = copy.deepcopy(made)
    path = save(tmp_path, made, "default")
    assert made == before
    assert files(tmp_path) == ["cpu-jax0.10.2/0001_default.json"]
    for item in before["benchmarks"]:
        del item["stats"]["data"]
    assert json.loads(path.read_text()) == before


def test_numbers_go_on_across_grids(tmp_path):
    names = [save(tmp_path, document(grid=g), g).name for g in ("default", "published", "default")]
    assert names == ["0001_default.json", "0002_published.json", "0003_default.json"]


@pytest.mark.parametrize("grid", ["smoke", "", "../default", "a b", "a.b"])
def test_a_grid_that_find_would_not_find_is_refused(tmp_path, grid):
    with pytest.raises(BaselineError, match="grid="):
        save(tmp_path, document(grid=grid), grid)
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    "change",
    [
        _set("benchmarks", []),
        _set("benchmarks", 0, "stats", "mean", float("nan")),
        _set("benchmarks", 0, "extra_info", "id", "b"),
        _set("benchmarks", 0, "extra_info", "value", object()),
        _set("machine_info", {"speed": float("inf")}),
    ],
    ids=["empty", "nan", "duplicate", "not-json", "infinity-outside-the-cells"],
)
def test_a_run_that_could_not_be_loaded_is_not_saved(tmp_path, change):
    with pytest.raises(BaselineError):
        save(tmp_path, changed(change), "default")
    assert files(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_an_error_before_any_work(tmp_path):
    (tmp_path / "cpu-jax0.10.2").write_text("a file in the folder's place")
    with pytest.raises(BaselineError, match="cannot write to"):
        store.check_writable(tmp_path, HERE)
    with pytest.raises(BaselineError, match="cannot write to"):
        save(tmp_path, document(), "default")
    assert files(tmp_path) == ["cpu-jax0.10.2"]


def test_the_look_at_the_folder_leaves_nothing(tmp_path):
    folder = store.check_writable(tmp_path, HERE)
    assert folder == tmp_path / "cpu-jax0.10.2"
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), (BaselineError, "no space left")),
        (OSError(errno.EIO, "Input/output error"), (BaselineError, "cannot write to")),
        (KeyboardInterrupt(), (KeyboardInterrupt, None)),
    ],
    ids=["disk-full", "broken-disk", "interrupt"],
)
def test_a_save_that_fails_leaves_the_old_whole_and_nothing_new(tmp_path, monkeypatch, fault, expected):
    old = save(tmp_path, document(), "default")
    before = old.read_bytes()

    def fail(_):
        raise fault

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(expected[0], match=expected[1]):
        save(tmp_path, document(), "default")
    with pytest.raises(expected[0], match=expected[1]):
        atomic.write(old, b"other")
    assert files(tmp_path) == ["cpu-jax0.10.2/0001_default.json"]
    assert old.read_bytes() == before


def _save_some(root, name, barrier, count):
    barrier.wait()
    for number in range(count):
        save(root, document(f"{name}-{number}"), reason=f"{name}-{number}")


def test_processes_that_save_at_once_lose_nothing(tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    processes = [context.Process(target=_save_some, args=(tmp_path, name, barrier, 10)) for name in "xy"]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    stored = [baseline.load(tmp_path / name) for name in files(tmp_path)]
    wanted = sorted(f"{name}-{number}" for name in "xy" for number in range(10))
    assert sorted(identity for one in stored for identity in one.records) == wanted
    told = baseline.find(tmp_path, HERE, "default").history
    assert sorted(update["reason"] for update in told) == wanted
    assert [update["file"] for update in told] == [f"{number:04}_default.json" for number in range(1, 21)]
    assert store.verify(tmp_path) == ([], [])


# Others' tools


def stock(storage, *arguments, cwd):
    command = [sys.executable, "-m", "pytest_benchmark", "--storage", str(storage), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=120, check=False)


def test_stock_pytest_benchmark_lists_and_compares_the_store(tmp_path):
    storage = tmp_path / "baselines"
    paths = [save(storage, document(), "default") for _ in range(2)]
    listed = stock(storage, "list", cwd=tmp_path)
    assert (listed.returncode, listed.stdout.split()) == (0, [str(path) for path in paths]), listed.stderr
    compared = stock(storage, "compare", "--group-by=fullname", "--columns=median,iqr,rounds", cwd=tmp_path)
    assert compared.returncode == 0, compared.stderr
    for identity in ("a", "b"):
        for number in ("0001", "0002"):
            assert f"test_layer[{identity}] ({number}_default)" in compared.stdout
    between = stock(storage, "compare", "--between=median", cwd=tmp_path)
    assert between.returncode == 0, between.stderr
    assert "ERROR" not in between.stdout


# The environment


def test_the_environment_has_every_field_and_can_be_stored():
    described = environment.describe()
    assert set(described) == {
        *("jax", "jaxlib", "backend", "devices", "python", "device_kind", "gpu", "driver", "gpu_memory_gb"),
        *("torch", "torch_cuda", "cpu", "cores", "xla_flags", "x64", "matmul_precision"),
    }
    assert json.loads(json.dumps(described)) == described
    assert described["devices"][0] == f"{described['backend']}:0"
    assert described["cores"] >= 1
    assert described["cpu"]


def test_the_key_names_backend_and_jax_alone():
    assert environment.key(HERE) == environment.key(HERE | {"python": "3.14.0"}) == "cpu-jax0.10.2"


def test_describing_the_environment_does_not_import_torch(tmp_path, monkeypatch):
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('torch was imported')")
    (package / "version.py").write_text(
        "__version__ = '2.14.1+cu130'\ndebug = False\ncuda: str | None = '13.0'\n"
    )
    (tmp_path / "torch-2.14.1.dist-info").mkdir()
    (tmp_path / "torch-2.14.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.14.1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    described = environment.describe()
    assert (described["torch"], described["torch_cuda"]) == ("2.14.1+cu130", "13.0")


def test_a_torch_built_for_the_cpu_has_no_cuda(tmp_path, monkeypatch):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(
        "__version__ = '2.14.1+cpu'\ncuda: str | None = None\nhip = '7'\n"
    )
    (tmp_path / "torch-2.14.1.dist-info").mkdir()
    (tmp_path / "torch-2.14.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.14.1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    described = environment.describe()
    assert (described["torch"], described["torch_cuda"]) == ("2.14.1+cpu", None)


@pytest.mark.parametrize(
    ("answer", "gpu", "memory"),
    [
        ("NVIDIA GeForce RTX 3090, 615.78.08, 24576\n", "NVIDIA GeForce RTX 3090", 24.0),
        ("Two, 615.78.08, 81920\nOther, 615.78.08, 1024\n", "Two", 80.0),
        ("Name, with comma, 615.78.08, 24576", "Name, with comma", 24.0),
        ("NVIDIA GB10, 615.78.08, [N/A]", "NVIDIA GB10", None),
    ],
    ids=["one", "two", "comma", "shared-memory"],
)
def test_nvidia_smi_is_read(answer, gpu, memory):
    assert environment.parse_nvidia_smi(answer) == {
        "gpu": gpu,
        "driver": "615.78.08",
        "gpu_memory_gb": memory,
    }


@pytest.mark.parametrize("answer", ["", "No devices were found"])
def test_nvidia_smi_without_gpu_is_none(answer):
    assert environment.parse_nvidia_smi(answer) is None


def test_a_backend_that_is_not_there_says_how_to_install_it(monkeypatch):
    import jax

    def fail():
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(jax, "default_backend", fail)
    with pytest.raises(EnvironmentFault, match=r"Unable to initialize.*pip install \"jax\[cuda12\]\""):
        environment.describe()


def test_one_family_of_errors():
    assert issubclass(NoBaseline, BaselineError)
    assert all(issubclass(kind, BenchError) for kind in (BaselineError, EnvironmentFault))
