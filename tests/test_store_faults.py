"""What can befall a store of baselines: damage, edits, kills, full disks. Nothing of it may pass as sound."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from tests.bench import atomic, baseline, history, manifest, store
from tests.bench.__main__ import main
from tests.bench.errors import BaselineError, NoBaseline
from tests.running import ROOT
from tests.stores import HERE, NAME, document, entry, files, put, save, seal

DIGESTS = [character * 64 for character in "abc"]
PROGRAMS = {digest: digest.encode() * 10 for digest in DIGESTS}
RECORD, OLDER = "0002_default.json", "0001_default.json"
FIRST, SECOND = (manifest.program_name(digest) for digest in DIGESTS[:2])


def run_of(*programs, accepted=None):
    """A run of one cell a program."""
    made = document()
    cells = [entry(f"cell{number}", program=digest) for number, digest in enumerate(programs)]
    cells[0]["extra_info"]["accepted"] = accepted
    return made | {"benchmarks": cells}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Two updates: the first names programs a and b, the second a and c, and b as accepted."""
    root = tmp_path_factory.mktemp("whole")
    a, b, c = DIGESTS
    store.save(root, run_of(a, b), "default", {a: PROGRAMS[a], b: PROGRAMS[b]}, {"reason": "first"})
    store.save(root, run_of(a, c, accepted=b), "default", {c: PROGRAMS[c]}, {"reason": "second"})
    return root


@pytest.fixture
def folder(whole, tmp_path):
    """A copy of it, to damage."""
    return shutil.copytree(whole / NAME, tmp_path / NAME)


def test_a_whole_store_is_found_and_verifies(folder):
    found = baseline.find(folder.parent, HERE, "default")
    assert (found.path, found.folder) == (folder / RECORD, folder)
    assert found.programs == set(DIGESTS)
    assert {digest: found.program_path(digest).read_bytes() for digest in DIGESTS} == PROGRAMS
    assert found.history == (
        {"reason": "first", "file": OLDER},
        {"reason": "second", "file": RECORD},
    )
    assert store.verify(folder.parent) == ([], [])


# Damage


def truncate(name):
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - 40)


def empty(name):
    return lambda folder: os.truncate(folder / name, 0)


def remove(name):
    return lambda folder: (folder / name).unlink()


def flip(name):
    """One bit, in the middle."""

    def damage(folder):
        data = bytearray((folder / name).read_bytes())
        data[len(data) // 2] ^= 1
        (folder / name).write_bytes(data)

    return damage


def swap(name, other):
    def damage(folder):
        first, second = (folder / name).read_bytes(), (folder / other).read_bytes()
        (folder / name).write_bytes(second)
        (folder / other).write_bytes(first)

    return damage


def edit(name, old, new):
    def damage(folder):
        data = (folder / name).read_bytes()
        assert old in data
        (folder / name).write_bytes(data.replace(old, new, 1))

    return damage


def forge(old, new):
    """An edit of the manifest's body by someone who restates its checksum."""

    def damage(folder):
        edit(manifest.FILE, old, new)(folder)
        head, body = (folder / manifest.FILE).read_bytes().split(b'"\n', 1)
        line = b'digest = "' + manifest.sha256(body).encode()
        (folder / manifest.FILE).write_bytes(head.rpartition(b"digest")[0] + line + b'"\n' + body)

    return damage


def record_anew(change):
    """A record that is wrong, in a store that is otherwise sound."""

    def damage(folder):
        made = baseline.read(folder / RECORD)
        change(made["benchmarks"])
        put(folder.parent, RECORD, made)
        seal(folder)

    return damage


def manifest_of_another_backend(folder):
    other = save(folder.parent, document(where=HERE | {"backend": "gpu"})).parent
    save(folder.parent, document(where=HERE | {"backend": "gpu"}))
    shutil.copy(other / manifest.FILE, folder / manifest.FILE)
    shutil.rmtree(other)


def whole_folder_of_another_jax(folder):
    made = baseline.read(folder / RECORD)
    made["moe_bench"]["environment"]["jax"] = "0.9.0"
    put(folder.parent, RECORD, made)
    seal(folder)


def too_large(name):
    return lambda folder: os.truncate(folder / name, atomic.LIMIT_BYTES + 1)  # Sparse: it takes no room.


FAULTS = {
    "record-truncated": (truncate(RECORD), RECORD, "was changed or damaged"),
    "record-empty": (empty(RECORD), RECORD, "was changed or damaged"),
    "record-flipped": (flip(RECORD), RECORD, "was changed or damaged"),
    "record-swapped": (swap(RECORD, OLDER), RECORD, "was changed or damaged"),
    "record-missing": (remove(RECORD), RECORD, "cannot be read"),
    "record-too-large": (too_large(RECORD), RECORD, "over the limit of 67108864"),
    "duplicate-cell": (
        record_anew(lambda cells: cells.append(cells[0])),
        RECORD,
        "holds the cell cell0 twice",
    ),
    "nan": (record_anew(lambda cells: cells[0]["stats"].update(mean=float("nan"))), RECORD, "stats.mean=nan"),
    "program-no-digest": (
        record_anew(lambda cells: cells[0]["extra_info"].update(program="../x")),
        RECORD,
        "program='../x' for cell0, not a digest",
    ),
    "program-truncated": (truncate(FIRST), FIRST, "was changed or damaged"),
    "program-empty": (empty(FIRST), FIRST, "was changed or damaged"),
    "program-flipped": (flip(FIRST), FIRST, "was changed or damaged"),
    "programs-swapped": (swap(FIRST, SECOND), FIRST, "was changed or damaged"),
    "program-missing": (remove(FIRST), FIRST, "cannot be read"),
    "program-unlisted": (
        forge(FIRST.encode(), manifest.program_name("d" * 64).encode()),
        FIRST,
        "is not listed in manifest.toml",
    ),
    "accepted-missing": (remove(SECOND), SECOND, "cannot be read"),
    "program-too-large": (too_large(FIRST), FIRST, "over the limit of 67108864"),
    "manifest-missing": (remove(manifest.FILE), manifest.FILE, "cannot be read"),
    "manifest-empty": (empty(manifest.FILE), manifest.FILE, "is truncated or was edited by hand"),
    "manifest-truncated": (truncate(manifest.FILE), manifest.FILE, "is truncated or was edited by hand"),
    "manifest-flipped": (flip(manifest.FILE), manifest.FILE, "is truncated or was edited by hand"),
    "manifest-too-large": (too_large(manifest.FILE), manifest.FILE, "over the limit of 67108864"),
    "cell-removed": (edit(manifest.FILE, b'    "cell1",\n', b""), manifest.FILE, "was edited by hand"),
    "cell-removed-and-forged": (
        forge(b'    "cell1",\n', b""),
        manifest.FILE,
        f"has 1 cells of grid default, {RECORD} 2; they differ in cell1",
    ),
    "skip-removed-and-forged": (forge(b'    "c",\n', b""), manifest.FILE, "has 0 skipped of grid default"),
    "checksum-replaced": (
        edit(manifest.FILE, f'"{RECORD}" = "'.encode(), f'"{RECORD}" = "0'.encode()),
        manifest.FILE,
        "was edited by hand",
    ),
    "outside-and-forged": (forge(f'"{OLDER}"'.encode(), b'"../x"'), manifest.FILE, "neither a record nor a"),
    "field-gone-and-forged": (forge(b"\nbytes = ", b"\nbites = "), manifest.FILE, "lacks a field or garbles"),
    "manifest-schema": (edit(manifest.FILE, b"schema = 1", b"schema = 2"), manifest.FILE, "is of schema 2"),
    "manifest-of-another-backend": (manifest_of_another_backend, RECORD, "was changed or damaged"),
    "records-of-another-jax": (
        whole_folder_of_another_jax,
        RECORD,
        "for another backend or JAX, cpu-jax0.9.0",
    ),
    "history-edited": (edit(history.FILE, b"first", b"worst"), history.FILE, "was changed or damaged"),
    "history-truncated": (truncate(history.FILE), history.FILE, "was changed or damaged"),
    "history-missing": (remove(history.FILE), history.FILE, "cannot be read"),
}


@pytest.mark.parametrize(("damage", "name", "message"), FAULTS.values(), ids=FAULTS)
def test_damage_is_found_and_named(folder, damage, name, message):
    damage(folder)
    with pytest.raises(BaselineError) as caught:
        baseline.find(folder.parent, HERE, "default")
    said = str(caught.value)
    assert message in said
    assert str(folder / name) in said
    assert f"git checkout -- {folder}" in said
    assert "record again: tox run -e baseline" in said
    assert not isinstance(caught.value, NoBaseline)
    faults, _ = store.verify(folder.parent)
    assert said in faults


def test_damage_of_an_older_record_is_a_fault_of_the_store_alone(folder):
    flip(OLDER)(folder)
    assert baseline.find(folder.parent, HERE, "default").path.name == RECORD
    (fault,), notes = store.verify(folder.parent)
    assert str(folder / OLDER) in fault
    assert notes == []


def test_what_the_manifest_does_not_list_is_ignored_and_noted(folder):
    left = put(folder.parent, "0003_default.json", document())
    with (folder / history.FILE).open("a") as file:
        file.write('{"reason": "half an upd')
    assert baseline.find(folder.parent, HERE, "default").path.name == RECORD
    faults, notes = store.verify(folder.parent)
    assert faults == []
    assert len(notes) == 2
    assert str(left) in notes[0]
    assert str(folder / history.FILE) in notes[1]


@pytest.mark.parametrize("name", [manifest.FILE, history.FILE])
def test_nothing_is_committed_on_top_of_damage(folder, name):
    flip(name)(folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(BaselineError, match=name):
        save(folder.parent, document())
    assert {path: path.read_bytes() for path in before} == before
    assert len(list(folder.glob("*.json"))) == 2


# Programs


def test_a_named_program_must_be_passed_or_stored(folder):
    before = files(folder)
    with pytest.raises(BaselineError, match=f"names {manifest.program_name('d' * 64)}, which is neither"):
        store.save(folder.parent, run_of("d" * 64), "default", {}, {})
    remove(FIRST)(folder)
    with pytest.raises(BaselineError, match=f"names {FIRST}, which is neither"):
        store.save(folder.parent, run_of(DIGESTS[0]), "default", {}, {})
    with pytest.raises(BaselineError, match=r"programs/\.\./x\.bin is no program's name"):
        store.save(folder.parent, run_of(None), "default", {"../x": b""}, {})
    assert files(folder) == [name for name in before if name != FIRST]


def test_a_stored_program_is_kept_and_a_damaged_one_replaced(folder):
    flip(FIRST)(folder)
    kept = (folder / SECOND).stat().st_mtime_ns
    store.save(folder.parent, run_of(*DIGESTS), "default", PROGRAMS, {})
    assert (folder / SECOND).stat().st_mtime_ns == kept
    assert (folder / FIRST).read_bytes() == PROGRAMS[DIGESTS[0]]
    assert store.verify(folder.parent) == ([], [])


def test_leftovers_are_used_replaced_or_removed_by_the_next_update(folder):
    equal, torn, other = (manifest.program_name(character * 64) for character in "def")
    programs = {"d" * 64: b"whole", "e" * 64: b"whole"}
    for name, content in ((equal, "whole"), (torn, "who"), (other, "whole"), (".x.json.17.tmp", "{")):
        put(folder.parent, name, content)
    put(folder.parent, "0003_default.json", document())
    with (folder / history.FILE).open("a") as file:
        file.write("torn")
    kept = (folder / equal).stat().st_ino
    path = store.save(folder.parent, run_of(*programs), "default", programs, {"reason": "third"})
    assert path.name == "0004_default.json"
    assert (folder / equal).stat().st_ino == kept
    assert (folder / torn).read_bytes() == b"whole"
    assert files(folder) == sorted(
        [OLDER, RECORD, path.name, equal, torn, *map(manifest.program_name, DIGESTS)]
    )
    assert [update["reason"] for update in baseline.find(folder.parent, HERE, "default").history] == [
        "first",
        "second",
        "third",
    ]
    assert store.verify(folder.parent) == ([], [])


# Kills

CHILD = """
    import os, sys
    from pathlib import Path
    from tests.bench import store
    from tests.stores import document, entry

    def update(root, number, cells):
        programs = {f"{number:032}{cell:032}": os.urandom(2000) for cell in range(cells)}
        made = document() | {"benchmarks": [entry(digest, program=digest) for digest in programs]}
        store.save(root, made, "default", programs, {"reason": str(number)})

    root = Path(sys.argv[1])
"""


def child(root, code):
    """A process that runs this code, which may call `update`; close it with `with`."""
    command = [sys.executable, "-c", textwrap.dedent(CHILD) + textwrap.dedent(code), str(root)]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def updates(root, cells):
    """How many updates the store holds; raises unless each file is sound and the baseline is a whole one."""
    assert store.verify(root)[0] == []
    try:
        found = baseline.find(root, HERE, "default")
    except NoBaseline:
        return 0
    assert len(found.records) == len(found.programs) == cells
    (number,) = {int(identity[:32]) for identity in found.records}
    assert [int(update["reason"]) for update in found.history] == list(range(1, number + 1))
    return number


def test_a_kill_at_any_moment_leaves_the_old_or_the_new_baseline(tmp_path):
    chance, held = random.Random(1), 0
    for _ in range(20):
        code = f"print('on', flush=True)\nfor number in range({held + 1}, 999): update(root, number, 20)"
        with child(tmp_path, code) as updating:
            assert updating.stdout.readline() == "on\n"
            time.sleep(chance.uniform(0, 0.1))
            updating.kill()
        assert updating.returncode == -signal.SIGKILL
        before, held = held, updates(tmp_path, 20)
        assert held >= before
    assert held > 0
    with child(tmp_path, f"update(root, {held + 1}, 20)") as updating:
        assert updating.wait() == 0
    assert updates(tmp_path, 20) == held + 1
    assert store.verify(tmp_path) == ([], [])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks a process for each step")
@pytest.mark.parametrize("whole", [0, 1], ids=["first-update", "second-update"])
def test_a_kill_at_each_step_leaves_the_old_or_the_new_baseline(tmp_path, whole):
    """Step by step: a process that dies at its nth call of fsync or of replace, n from 0 until it survives."""
    code = """
        def update_or_die(root, number, steps):
            def counted(call):
                def counting(*args):
                    nonlocal steps
                    steps -= 1
                    if steps < 0:
                        os._exit(9)
                    return call(*args)
                return counting
            os.fsync, os.replace = counted(os.fsync), counted(os.replace)
            update(root, number, 3)
            os._exit(0)

        for steps in range(999):
            store_root = root / f"{steps:03}"
            for number in range(WHOLE):
                update(store_root, number + 1, 3)
            pid = os.fork() or update_or_die(store_root, WHOLE + 1, steps)
            if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0:
                break
    """
    with child(tmp_path, code.replace("WHOLE", str(whole))) as updating:
        assert updating.wait() == 0
    held = [updates(root, 3) for root in sorted(tmp_path.iterdir())]
    assert len(held) > 3 * 6  # Three programs, the record, the history and the manifest.
    assert held == sorted(held)
    assert set(held) == {whole, whole + 1}


def test_a_first_update_that_was_interrupted_is_no_baseline_and_no_damage(tmp_path):
    left = put(tmp_path, "0001_default.json", document())
    (left.parent / manifest.FILE).write_bytes(manifest.render(manifest.Manifest(left.parent)))
    with pytest.raises(NoBaseline, match="there is none at all"):
        baseline.find(tmp_path, HERE, "default")
    assert save(tmp_path, document()).name == "0002_default.json"
    assert files(left.parent) == ["0002_default.json"]


# Disks and folders


def refusal(folder):
    """What an update says when it fails; nothing when it succeeds."""
    try:
        store.save(folder.parent, run_of("d" * 64), "default", {"d" * 64: b"d"}, {})
    except BaselineError as fault:
        return str(fault)
    return ""


@pytest.mark.parametrize("call", ["fsync", "replace", "open"])
def test_a_full_disk_at_each_step_leaves_the_old_or_the_new_baseline(folder, monkeypatch, call):
    before, real = files(folder), getattr(os, call)
    for steps in range(999):
        left = steps

        def full(*args, **kwargs):
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(os, call, full)
            said = refusal(folder)
        assert store.verify(folder.parent)[0] == []
        found = baseline.find(folder.parent, HERE, "default")
        if found.path.name != RECORD:
            break  # Done, or the manifest was there whole when its folder could not be forced to disk.
        assert said.startswith("no space left in ")
        assert files(folder) == before
    assert steps > 3


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES], ids=["mount", "permission"])
def test_a_read_only_store_is_read_and_not_written(folder, monkeypatch, number):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(atomic.Path, "write_bytes", refuse)
    monkeypatch.setattr(os, "replace", refuse)
    assert len(baseline.find(folder.parent, HERE, "default").records) == 2
    assert store.verify(folder.parent) == ([], [])
    with pytest.raises(BaselineError, match=r"cannot write to .*make it writable or choose another root"):
        save(folder.parent, document())
    with pytest.raises(BaselineError, match="cannot write to"):
        store.check_writable(folder.parent, HERE)
    monkeypatch.undo()
    assert store.verify(folder.parent) == ([], [])


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_without_write_permission(folder):
    folder.chmod(0o555)
    try:
        with pytest.raises(BaselineError, match="cannot write to"):
            save(folder.parent, document())
        with pytest.raises(BaselineError, match="cannot write to"), atomic.lock(folder):
            pass
    finally:
        folder.chmod(0o755)


@pytest.mark.parametrize("name", ["bäse line", "a b/ç ' d"])
def test_a_folder_of_any_name(tmp_path, name):
    path = save(tmp_path / name, document("é", 'quote"d', "back\\slash", "new\nline", "\x7f", "😀"))
    assert baseline.find(tmp_path / name, HERE, "default").path == path
    assert store.verify(tmp_path / name) == ([], [])
    truncate(path.name)(path.parent)
    with pytest.raises(BaselineError, match=r"git checkout -- '"):
        baseline.find(tmp_path / name, HERE, "default")


# One at a time


def test_an_update_waits_for_another_and_says_so_once(tmp_path, capfd):
    code = """
        from tests.bench import atomic
        with atomic.lock(root), atomic.lock(root):
            print("held", flush=True)
            sys.stdin.read()
    """
    with child(tmp_path / NAME, code) as other:
        assert other.stdout.readline() == "held\n"
        with child(tmp_path, "update(root, 1, 1)") as waiting:
            with pytest.raises(subprocess.TimeoutExpired):
                waiting.wait(1)
            other.kill()
            assert waiting.wait(60) == 0
    assert updates(tmp_path, 1) == 1
    assert capfd.readouterr().err == f"waiting for another update of {tmp_path / NAME}\n"


def test_who_holds_the_lock_may_save(tmp_path):
    with atomic.lock(tmp_path / NAME):
        save(tmp_path, document())
        save(tmp_path, document())
    assert store.verify(tmp_path) == ([], [])


# The verb


def test_verify_tells_faults_and_notes_and_counts_them(folder, capsys):
    put(folder.parent, "0001_published.json", document(), folder="published")
    words = ["verify", "--baselines", str(folder.parent)]
    assert main(words) == 0
    assert capsys.readouterr().out == f"{folder.parent}: faults 0, notes 0\n"
    flip(FIRST)(folder)
    flip(RECORD)(folder)
    left = put(folder.parent, "0003_default.json", document())
    put(folder.parent, "0001_published.json", "{", folder="published")
    assert main(words) == 11
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 5
    for line, path in zip(said, (folder / FIRST, folder / RECORD, "0001_published.json", left), strict=False):
        assert str(path) in line
    assert said[-1] == f"{folder.parent}: faults 3, notes 1"


def test_verify_of_no_folder_is_a_fault(tmp_path, capsys):
    assert main(["verify", "--baselines", str(tmp_path / "typo")]) == 11
    assert "typo is not a folder" in capsys.readouterr().out


def test_the_committed_baselines_are_sound():
    assert store.verify(baseline.ROOT) == ([], [])
