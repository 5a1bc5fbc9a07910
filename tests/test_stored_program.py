"""Stored programs: the same program when read again, the same bytes wherever it is written, and nothing else read.

Exports that the suite would never write are made by hand: foreign calls, other platforms, malformed ones.
"""

import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.experimental
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from tests.bench import baseline, manifest, program, stored_program
from tests.bench.cell import Cell
from tests.bench.errors import BaselineError
from tests.bench.gate import examine, vet
from tests.bench.grid import CHUNKED, DENSE
from tests.bench.stored_program import MAGIC, StoredProgram, Unstorable
from tests.running import ROOT

pytestmark = pytest.mark.xdist_group("stored program")
WHERE = "folder/it.bin"
SPEC = jax.ShapeDtypeStruct((4,), jnp.float32)


def tiny(**changes):
    values: dict[str, Any] = {"suite": "layer", "impl": CHUNKED, "dtype": "float32", "tokens": 16}
    values |= {"experts": 4, "top_k": 2, "op": "forward", "d_model": 8, "d_hidden": 16}
    return Cell(**values | changes)


FORWARD, DONATED = tiny(), tiny(impl=DENSE, op="train_step_donated")


@pytest.fixture(scope="module")
def forward():
    """The stored program of FORWARD, and its file's bytes."""
    stored = stored_program.export(program.flat(FORWARD))
    return stored, stored.pack()


@pytest.fixture(scope="module")
def exported(forward):
    """Its export, as JAX reads it."""
    return jax.export.deserialize(bytearray(forward[0].export))


def by_hand(exported, platform="cpu", donated=0, **changes):
    """A stored program that is what its header says, whatever it holds."""
    return StoredProgram(
        stored_program._digest(stored_program.text_of(exported), donated),
        jax.__version__,
        platform,
        donated,
        tuple(map(stored_program._name, exported.in_avals)),
        bytes(exported.serialize()),
        **changes,
    )


def unchecked(function, platform="cpu"):
    """An export that JAX let through whatever it calls."""
    every = jax.export.DisabledSafetyCheck.custom_call("ALL")
    return jax.export.export(jax.jit(function), platforms=[platform], disabled_checks=[every])(SPEC)


def flat_of(function):
    """A function as a cell's, for export."""
    return program.Flat(FORWARD, jax.jit(function), 0, (SPEC,), [])


# The same program again


@pytest.mark.parametrize("cell", [FORWARD, DONATED], ids=lambda cell: cell.op)
def test_a_stored_program_is_the_cells_own(cell):
    """Bytes, alias and flops are equal, and so is every bit of two runs, each on what the one before left."""
    flat = program.flat(cell)
    stored = stored_program.export(flat)
    today = flat.compile()
    assert stored.donated == flat.donated
    again = stored_program.compile_stored(stored_program.unpack(stored.pack(), WHERE), WHERE)
    assert again.bytes == today.bytes
    assert (again.bytes.alias > 0) == (cell.op == "train_step_donated")
    assert again.flops == today.flops is not None
    left, right = program.arguments_of(cell), program.arguments_of(cell)
    for _ in range(2):
        pairs = list(zip(left.run(today.run), right.run(again.run), strict=True))
        assert pairs
        assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
    # What is exported after a compilation is the same, too.
    assert stored_program.export(flat) == stored


@pytest.mark.parametrize("donated", [0, 1])
def test_donation_is_applied_again(donated):
    """The export itself does not keep it: the header's count says what is given away."""
    doubled = by_hand(unchecked(lambda x: [2 * x]), donated=donated)
    compiled = stored_program.compile_stored(doubled, WHERE)
    assert compiled.bytes.alias == 16 * donated
    first = jnp.ones(4)
    arguments = program.Arguments([first], donated)
    arguments.run(compiled.run)
    (last,) = arguments.run(compiled.run)
    assert first.is_deleted() == bool(donated)
    assert last.tolist() == [2.0 + 2 * donated] * 4


@pytest.mark.parametrize("size", [1, 2, 3, 100, 8297])
@pytest.mark.parametrize("kind", ["zeros", "random", "text"])
def test_a_file_holds_what_was_packed(size, kind):
    content = {"zeros": bytes(size), "random": random.Random(size).randbytes(size), "text": b"abc " * size}
    stored = StoredProgram("d" * 64, "0.10.2", "tpu", 1, ("float32[1,2]", "int32[]"), content[kind])
    assert stored_program.unpack(stored.pack(), WHERE) == stored


# What the digest depends on

ELSEWHERE = """
import hashlib, json
import moe
from tests.bench import program, stored_program
from tests.bench.cell import Cell
import json, sys
flat = program.flat(Cell(**json.loads(sys.argv[1])))
data = stored_program.export(flat).pack()
print(json.dumps([moe.__file__, stored_program.__file__, data.hex()]))
"""


def test_comments_lines_and_folders_change_no_byte(tmp_path, forward):
    """The same source with comments added, at another place, in another process, called from other lines."""
    checkout = tmp_path / "another checkout (2), ü"
    for name in ("moe", "tests/bench"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    (checkout / "tests/__init__.py").touch()
    for path in checkout.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        path.write_text("# A comment that moves every line.\n\n" + text + "\n# Another.\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, json.dumps(dataclasses.asdict(FORWARD))],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": str(checkout), "PYTHONHASHSEED": "7", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    *modules, data = json.loads(done.stdout.splitlines()[-1])
    assert all(module.startswith(str(checkout)) for module in modules)
    assert bytes.fromhex(data) == forward[1]


@pytest.mark.parametrize("cell", [FORWARD, DONATED], ids=lambda cell: cell.op)
def test_no_path_stands_in_a_file(cell):
    flat = program.flat(cell)
    flat.jitted.lower(*flat.specs)  # As measuring does, with the paths.
    stored = stored_program.export(flat)
    header = stored.pack()[len(MAGIC) :].partition(b"\n")[0]
    for part in (str(ROOT).encode(), os.path.sep.join(("tests", "bench")).encode(), b".py", b"site-packages"):
        assert part not in stored.export + header


@pytest.mark.parametrize(
    "change",
    [{"impl": DENSE}, {"tokens": 32}, {"top_k": 1}, {"d_hidden": 24}, {"dtype": "bfloat16"}],
    ids=str,
)
def test_another_program_has_another_digest(forward, change):
    assert stored_program.export(program.flat(tiny(**change))).digest != forward[0].digest


def test_donation_is_part_of_the_digest():
    kept, given = (
        stored_program.export(program.flat(tiny(op=f"train_step{end}"))) for end in ("", "_donated")
    )
    assert kept.digest != given.digest


def test_export_leaves_jaxs_configuration_as_it_was():
    flags: Any = jax.config
    before = flags.jax_traceback_in_locations_limit
    try:
        jax.config.update("jax_traceback_in_locations_limit", 7)
        with pytest.raises(Unstorable):
            stored_program.export(flat_of(printing))
        assert flags.jax_traceback_in_locations_limit == 7
    finally:
        jax.config.update("jax_traceback_in_locations_limit", before)


@pytest.mark.parametrize("note", [" loc(", ' "', " loc(x", "#loc1", ") loc((("], ids=repr)
def test_what_looks_like_a_location_in_a_string_hides_nothing(note):
    """All that stands between two such strings is still there."""

    def calls(value, between):
        value = jax.ffi.ffi_call("tpu_custom_call", SPEC)(value, note=note)
        value = value * between
        return jax.ffi.ffi_call("tpu_custom_call", SPEC)(value, note=")")

    texts = [stored_program.text_of(unchecked(lambda x, n=n: calls(x, n), "tpu")) for n in (2.0, 3.0)]
    assert texts[0] != texts[1]
    assert all(text.count("stablehlo.custom_call") == 2 and "multiply" in text for text in texts)
    assert "#loc =" not in texts[0]


# Files that are damaged


def header_of(data):
    return json.loads(data[len(MAGIC) :].partition(b"\n")[0])


def with_header(change):
    """A file whose header is what `change(header)` returns."""

    def made(data):
        packed = data[len(MAGIC) :].partition(b"\n")[2]
        changed = change(header_of(data))
        head = changed if isinstance(changed, bytes) else json.dumps(changed).encode()
        return MAGIC + head + b"\n" + packed

    return made


def having(**fields):
    return with_header(lambda header: header | fields)


DAMAGE = {
    "empty": lambda data: b"",
    "magic alone": lambda data: MAGIC,
    "magic of another version": lambda data: data.replace(b"program 1", b"program 2"),
    "another kind of file": lambda data: b"PK\x03\x04" + data,
    "header alone": lambda data: data.partition(b"}")[0] + b"}\n",
    "cut in its header": lambda data: data[: len(MAGIC) + 40],
    "cut in its middle": lambda data: data[: len(data) // 2],
    "cut by one byte": lambda data: data[:-1],
    "a byte more": lambda data: data + b"\0",
    "twice": lambda data: data + data,
    "in lines of another system": lambda data: data.replace(b"\n", b"\r\n"),
    "zeros": lambda data: bytes(len(data)),
    "header of no field": with_header(lambda header: {}),
    "header is a list": with_header(lambda header: [header]),
    "header is null": with_header(lambda header: None),
    "header is not JSON": with_header(lambda header: b"{'digest': 1}"),
    "header is not UTF-8": with_header(lambda header: b'{"digest": "\xff"}'),
    "header without end": with_header(lambda header: b"[" * 100_000),
    "a field less": with_header(lambda header: {k: v for k, v in header.items() if k != "jax"}),
    "a field more": having(notes="none"),
    "digest is a number": having(digest=5),
    "jax is null": having(jax=None),
    "platform is unknown": having(platform="quantum"),
    "platform is a list": having(platform=["cpu"]),
    "donated is true": having(donated=True),
    "donated is text": having(donated="0"),
    "donated is negative": having(donated=-1),
    "donated is more than there are": having(donated=6),
    "donated is enormous": having(donated=10**12),
    "inputs is a number": having(inputs=7),
    "inputs is text": having(inputs="float32[1]"),
    "inputs are numbers": having(inputs=[1, 2]),
    "size is text": having(export="8296"),
    "size is a fraction": having(export=8296.0),
    "size is zero": having(export=0),
    "size is negative": having(export=-1),
    "size is enormous": having(export=10**30),
    "size is one too large": with_header(lambda header: header | {"export": header["export"] + 1}),
    "size is one too small": with_header(lambda header: header | {"export": header["export"] - 1}),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_file_is_refused_by_name(forward, damage):
    with pytest.raises(BaselineError, match=r"folder/it\.bin is no stored program \(.+restore it"):
        stored_program.unpack(damage(forward[1]), WHERE)


@pytest.fixture(scope="module")
def bomb():
    """Bytes that unpack to a thousand times as many."""
    packer = zlib.compressobj(9)
    return b"".join(packer.compress(bytes(2**20)) for _ in range(128)) + packer.flush()


@pytest.mark.parametrize("said", [100, 2**20, stored_program.LARGEST, stored_program.LARGEST + 1, 2**31])
def test_no_more_is_unpacked_than_a_header_says(forward, bomb, said):
    header = header_of(forward[1]) | {"export": said}
    tracemalloc.start()
    try:
        with pytest.raises(BaselineError, match=WHERE):
            stored_program.unpack(MAGIC + json.dumps(header).encode() + b"\n" + bomb, WHERE)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Where it is over LARGEST nothing is unpacked at all.
    assert most < 2**21 + (2 * said if said <= stored_program.LARGEST else 0)


def test_a_flipped_bit_is_refused_or_changes_nothing(forward, exported, monkeypatch):
    """Every bit of the header, and many of the rest. The version of JAX alone is not known otherwise."""
    stored, data = forward
    head = data.index(b"\n", len(MAGIC)) + 1
    places = [*range(8 * head), *random.Random(0).sample(range(8 * head, 8 * len(data)), 3000)]
    # Nothing but the header differs where a file is read at all: read its content once.
    text = stored_program.text_of(exported)
    monkeypatch.setattr(jax.export, "deserialize", lambda blob: exported)
    monkeypatch.setattr(stored_program, "text_of", lambda exported: text)
    refused = harmless = 0
    for place in places:
        damaged = bytearray(data)
        damaged[place // 8] ^= 1 << place % 8
        try:
            found = stored_program.unpack(bytes(damaged), WHERE)
            assert found.export == stored.export
            stored_program.read(found, WHERE)
        except BaselineError as fault:
            refused += WHERE in str(fault)
        else:
            assert dataclasses.replace(found, jax=stored.jax) == stored
            harmless += 1
    assert refused + harmless == len(places)
    assert harmless < 0.02 * len(places)


# Programs that are not what their header says


@pytest.mark.parametrize(
    "changes",
    [
        {"digest": "0" * 64},
        {"digest": ""},
        {"donated": 1},
        {"platform": "cuda"},
        {"inputs": ()},
        {"inputs": ("float32[8,4]",)},
    ],
    ids=str,
)
def test_a_header_that_says_otherwise_is_refused(forward, changes):
    other = dataclasses.replace(forward[0], **changes)
    with pytest.raises(BaselineError, match=rf"{WHERE} holds another program than its header says"):
        stored_program.read(other, WHERE)


def test_contents_that_were_swapped_are_refused(forward):
    other = stored_program.export(program.flat(DONATED))
    for head, body in ((forward[0], other), (other, forward[0])):
        swapped = stored_program.unpack(dataclasses.replace(head, export=body.export).pack(), WHERE)
        with pytest.raises(BaselineError, match=rf"{WHERE} holds another program"):
            stored_program.read(swapped, WHERE)


def future(exported):
    """As a later JAX might write it: an operation of a version that is not there yet."""
    code = exported.mlir_module_serialized
    assert b"return_v1" in code
    later = code.replace(b"return_v1", b"return_v9")
    return bytes(dataclasses.replace(exported, mlir_module_serialized=later).serialize())


@pytest.mark.parametrize(
    "content",
    [
        future,
        lambda exported: b"nothing that JAX wrote",
        lambda exported: bytes(1000),
        lambda exported: bytes(exported.serialize())[:40],
        lambda exported: bytes(dataclasses.replace(exported, out_avals=()).serialize()),
    ],
    ids=["a later JAX's", "text", "zeros", "its beginning", "no outputs"],
)
def test_a_program_that_this_jax_cannot_read_is_refused(forward, exported, content):
    unreadable = dataclasses.replace(forward[0], jax="0.99.0", export=content(exported))
    with pytest.raises(BaselineError) as caught:
        stored_program.compile_stored(stored_program.unpack(unreadable.pack(), WHERE), WHERE)
    for words in (f"{WHERE} cannot be", f"by JAX {jax.__version__}", "written by 0.99.0", "record again"):
        assert words in str(caught.value)


@pytest.mark.parametrize("platform", ["cuda", "rocm", "tpu"])
def test_a_program_for_another_platform_is_read_and_not_compiled(platform):
    flat = program.flat(FORWARD)
    foreign = by_hand(jax.export.export(flat.jitted, platforms=[platform])(*flat.specs), platform)
    assert stored_program.read(foreign, WHERE).platforms == (platform,)
    with pytest.raises(BaselineError, match=rf"{WHERE} cannot be compiled.*platforms.*{platform}"):
        stored_program.compile_stored(foreign, WHERE)


@pytest.mark.parametrize(
    "changes", [{"nr_devices": 2}, {"module_kept_var_idx": (0,)}], ids=["for two devices", "an argument less"]
)
def test_a_program_that_cannot_be_compiled_is_refused(exported, changes):
    """All that the header can say of it is right."""
    malformed = by_hand(dataclasses.replace(exported, **changes))
    stored_program.read(malformed, WHERE)
    with pytest.raises(BaselineError, match=rf"{WHERE} cannot be compiled"):
        stored_program.compile_stored(malformed, WHERE)


# Foreign calls


def printing(x):
    jax.debug.print("x is {}", x)
    return x


def calling_python(x):
    return jax.pure_callback(lambda value: np.asarray(value), SPEC, x)


def calling_python_in_order(x):
    return jax.experimental.io_callback(lambda value: np.asarray(value), SPEC, x, ordered=True)


def decomposing(x):
    return jnp.linalg.svd(x.reshape(2, 2))[1]


def foreign(*targets):
    def calls(x):
        for target in targets:
            x = jax.ffi.ffi_call(target, SPEC)(x)
        return x

    return calls


@pytest.mark.parametrize("function", [printing, calling_python, calling_python_in_order, decomposing])
def test_a_layer_that_calls_the_host_is_not_stored(function):
    with pytest.raises(Unstorable, match=r"cannot be stored|calls lapack") as caught:
        stored_program.export(flat_of(function))
    assert FORWARD.id in str(caught.value)


@pytest.mark.parametrize(
    ("platform", "targets", "named"),
    [
        ("cpu", ["xla_python_cpu_callback"], "xla_python_cpu_callback"),
        ("cpu", ["xla_ffi_python_cpu_callback"], "xla_ffi_python_cpu_callback"),
        ("cpu", ["tpu_custom_call"], "tpu_custom_call"),
        ("cpu", ["a name with spaces"], "unknown form"),
        ("cpu", ["odd.name"], r"odd\.name"),
        ("cuda", ["mosaic_gpu_v2", "xla_ffi_python_gpu_callback"], "xla_ffi_python_gpu_callback"),
        ("tpu", ["tpu_custom_call", "first", "second"], "first, second"),
        ("rocm", ["mosaic_gpu_v2"], "mosaic_gpu_v2"),
    ],
)
def test_a_program_that_calls_what_it_may_not_is_refused_when_read(platform, targets, named):
    made = by_hand(unchecked(foreign(*targets), platform), platform)
    with pytest.raises(BaselineError, match=rf"{WHERE} calls .*{named}.*record again"):
        stored_program.read(stored_program.unpack(made.pack(), WHERE), WHERE)


def test_a_call_between_two_strings_is_seen():
    def hidden(x):
        x = jax.ffi.ffi_call("tpu_custom_call", SPEC)(x, note=" loc(")
        x = jax.ffi.ffi_call("evil", SPEC)(x)
        return jax.ffi.ffi_call("tpu_custom_call", SPEC)(x, note=")")

    with pytest.raises(BaselineError, match=f"{WHERE} calls evil"):
        stored_program.read(by_hand(unchecked(hidden, "tpu"), "tpu"), WHERE)


@pytest.mark.parametrize(
    ("platform", "target"),
    [(p, target) for p, known in stored_program.CUSTOM_CALLS.items() for target in sorted(known)],
)
def test_a_kernel_that_comes_with_the_program_may_be_called(platform, target):
    made = by_hand(unchecked(foreign(target), platform), platform)
    assert stored_program.read(made, WHERE).platforms == (platform,)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("%0 = stablehlo.custom_call @evil(%arg0) : (tensor<4xf32>) -> tensor<4xf32>", "evil"),
        ('"stablehlo.custom_call"(%0) {call_target_name = "evil"} : () -> ()', "evil"),
        ('"stablehlo.custom_call"(%0) <{call_target_name="evil", x = 1}> : () -> ()', "evil"),
        ('"stablehlo.custom_call"(%0) : () -> ()', "unknown form"),
        ("stablehlo.custom_call @mosaic_gpu_v2(%0)\nstablehlo.custom_call {}", "unknown form"),
        ('"stablehlo.send"(%0, %1) : () -> ()', "stablehlo.send"),
        ('%1 = "stablehlo.recv"(%0) : () -> ()', "stablehlo.recv"),
        ('%1 = "stablehlo.infeed"(%0) : () -> ()', "stablehlo.infeed"),
        ('"stablehlo.outfeed"(%0, %1) : () -> ()', "stablehlo.outfeed"),
        ("stablehlo.custom_call @mosaic_gpu_v2(%0)", None),
        ("%1 = stablehlo.dot_general %0, %0", None),
        ("", None),
    ],
)
def test_each_form_of_a_call_is_seen(text, named):
    if named is None:
        stored_program.check_calls(text, "cuda", WHERE)
        return
    with pytest.raises(Unstorable, match=rf"{WHERE} calls .*{named}"):
        stored_program.check_calls(text, "cuda", WHERE)


def test_effects_on_the_host_are_refused(forward, exported, monkeypatch):
    """No export that JAX writes has them without a call; one that does is not run."""
    effect = dataclasses.replace(exported, unordered_effects=("an effect",))
    monkeypatch.setattr(jax.export, "deserialize", lambda blob: effect)
    with pytest.raises(BaselineError, match=f"{WHERE} has effects on the host"):
        stored_program.read(forward[0], WHERE)


def test_a_platform_without_a_list_of_calls_stores_nothing(monkeypatch):
    monkeypatch.setattr(jax.export, "default_export_platform", lambda: "metal")
    with pytest.raises(Unstorable, match="platform=metal"):
        stored_program.export(program.flat(FORWARD))


# The child that reads first

CHILD = """
import json, os, sys, time
for line in sys.stdin:
    name = json.loads(line).rpartition("/")[2]
    if name == "crash":
        os.abort()
    if name == "garble":
        print("half a li", end="", flush=True)
        os._exit(1)
    if name == "hang":
        time.sleep(3600)
    print(json.dumps(None if name == "sound" else name + " is faulty"), flush=True)
"""


@pytest.fixture
def vetter(monkeypatch, tmp_path):
    """A vetter with a child of the test's own; `started` counts them."""
    popen, started = subprocess.Popen, []

    def start(words, **more):
        started.append(words)
        return popen([sys.executable, "-c", CHILD], **more)

    fake = SimpleNamespace(Popen=start, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr(vet, "subprocess", fake)
    with vet.Vetter() as vetter:
        yield SimpleNamespace(check=lambda name: vetter.check(tmp_path / name), own=vetter, started=started)


def test_vetter_asks_one_child_about_all_files(vetter):
    vetter.check("sound")
    with pytest.raises(BaselineError, match=r"^damaged is faulty$"):
        vetter.check("damaged")
    vetter.check("sound")
    assert len(vetter.started) == 1


@pytest.mark.parametrize("end", ["crash", "garble"])
def test_vetter_outlives_a_reader_that_crashes(vetter, end):
    with pytest.raises(BaselineError, match=rf"/{end} crashes the process that reads it; restore"):
        vetter.check(end)
    vetter.check("sound")
    with pytest.raises(BaselineError, match=rf"/{end} crashes"):
        vetter.check(end)
    assert len(vetter.started) == 2


def test_vetter_ends_a_reader_that_hangs(vetter, monkeypatch):
    vetter.check("sound")
    with monkeypatch.context() as short:
        short.setattr(vetter.own, "_limit_s", 0.01)
        with pytest.raises(BaselineError, match=r"/hang is not read within 0\.01 s; restore"):
            vetter.check("hang")
    vetter.check("sound")
    assert len(vetter.started) == 2


def test_vetter_takes_a_child_that_is_gone_for_a_fault(vetter):
    """It was killed between two files, for memory perhaps."""
    vetter.check("sound")
    vetter.own._child.kill()
    vetter.own._child.wait()
    with pytest.raises(BaselineError, match="/sound crashes"):
        vetter.check("sound")
    vetter.check("sound")


def test_real_child_reads_files(tmp_path, monkeypatch, forward, exported):
    """One child for all: sound, damaged, absent, malformed in ways that may end it, and sound again."""
    stored, data = forward
    files = {
        "sound.bin": data,
        "cut.bin": data[:-1],
        "later.bin": dataclasses.replace(stored, export=future(exported)).pack(),
        "calls.bin": by_hand(unchecked(foreign("xla_ffi_python_cpu_callback"))).pack(),
        "other.bin": dataclasses.replace(stored, digest="0" * 64).pack(),
    }
    dice = random.Random(3)
    for number in range(6):  # Flips within the export, packed anew: nothing but reading can tell.
        flipped = bytearray(stored.export)
        for place in dice.sample(range(8 * len(flipped)), 20):
            flipped[place // 8] ^= 1 << place % 8
        files[f"flipped{number}.bin"] = dataclasses.replace(stored, export=bytes(flipped)).pack()
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    with vet.Vetter() as vetter:
        for name in [*files, "absent.bin"]:
            if name != "sound.bin":
                with pytest.raises(BaselineError, match=name):
                    vetter.check(tmp_path / name)
        # A path that holds where the tests run, not where the child does.
        vetter.check(Path("sound.bin"))


# Within a run


@pytest.fixture(scope="module")
def measured():
    return program.program(FORWARD)


@pytest.fixture
def examined(tmp_path, monkeypatch, measured):
    """What is seen of FORWARD where the baseline's program of it is in this file."""
    # The child's answer is tested above; here it lets everything through.
    monkeypatch.setattr(vet.Vetter, "check", lambda self, path: None)
    monkeypatch.setattr(examine, "CONTROL_SHARE", 0.001)
    environment = {"jax": jax.__version__}

    def see(digest, data, tripped=False):
        path = tmp_path / manifest.program_name(digest)
        path.parent.mkdir()
        path.write_bytes(data)
        values = {"id": FORWARD.id, "program": digest, "gemm_fraction": 1.0}
        records = {FORWARD.id: {"extra_info": values}}
        stored = baseline.Baseline(tmp_path / "0001_default.json", environment, records, {})
        examiner = examine.Examiner(stored, environment, cells=1, budget_s=0.05)
        try:
            return examiner.examine(FORWARD, measured, {"gemm_fraction": 0.1 if tripped else 1.0}), str(path)
        finally:
            examiner.close()

    return see


def test_a_changed_program_is_compiled_and_raced(examined):
    other = stored_program.export(program.flat(tiny(impl=DENSE)))
    seen, _ = examined(other.digest, other.pack())
    assert (seen.fault, seen.asked_by, seen.against) == (None, "code", other.digest)
    assert seen.pairs is not None
    assert seen.figures.keys() == {"temp_bytes", "argument_bytes", "output_bytes", "alias_bytes", "flops"}


def test_like_is_raced_with_like(examined, forward, monkeypatch, measured):
    """Two exports where the program changed; the call as it is where only what is around the program can have."""
    raced = []
    monkeypatch.setattr(
        examine,
        "race",
        lambda today, stored, **_: raced.append(today) or examine.Pairs((0.0,) * 12, "equal", 1),
    )
    other = stored_program.export(program.flat(tiny(impl=DENSE)))
    for digest, data, tripped in ((other.digest, other.pack(), False), (forward[0].digest, forward[1], True)):
        seen, path = examined(digest, data, tripped)
        assert seen.pairs is not None
        shutil.rmtree(Path(path).parent)
    # Each run begins with a null control: the call itself.
    assert [today == measured.call for today in raced] == [True, False, True, True]


@pytest.mark.parametrize("again", ["equal", "slower"])
def test_an_unchanged_program_has_to_be_slower_twice(examined, forward, monkeypatch, again):
    ends = ["equal", "slower", again]  # The first is the null control's.
    monkeypatch.setattr(examine, "race", lambda *_, **__: examine.Pairs((0.2,) * 12, ends.pop(0), 1))
    seen, _ = examined(forward[0].digest, forward[1], tripped=True)
    assert (seen.pairs.end, ends) == (again, [])


def test_a_program_of_other_arguments_is_not_raced(examined):
    seen, _ = examined(*from_hand(unchecked(lambda x: x * 2)))
    assert seen.figures["argument_bytes"] == 16
    assert (seen.pairs, seen.not_paired) == (None, "the two programs take other arguments")


@pytest.mark.parametrize(
    "made",
    [
        lambda stored, exported: ("f" * 64, stored.pack()),
        lambda stored, exported: ("f" * 64, b""),
        lambda stored, exported: ("f" * 64, dataclasses.replace(stored, digest="f" * 64).pack()),
        lambda stored, exported: from_hand(unchecked(foreign("evil"))),
        lambda stored, exported: from_hand(unchecked(lambda x: x * 2, "tpu"), "tpu"),
        lambda stored, exported: from_hand(dataclasses.replace(unchecked(lambda x: x * 2), nr_devices=2)),
    ],
    ids=["swapped", "empty", "forged", "foreign call", "another platform", "for two devices"],
)
def test_a_program_that_cannot_be_trusted_is_the_cells_fault(examined, forward, exported, made):
    """It is told as such, with the file's name, and ends no run."""
    seen, path = examined(*made(forward[0], exported))
    assert path in seen.fault
    assert (seen.pairs, seen.figures) == (None, None)


def from_hand(exported, platform="cpu"):
    made = by_hand(exported, platform)
    return made.digest, made.pack()
