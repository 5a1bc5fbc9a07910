"""The stored program: a cell's StableHLO as data, its digest, what may stand in it, and how it is compiled again.

A file holds one line of magic, one of JSON (the header: all that the export itself loses) and the compressed
export. Reading one executes nothing: no pickle, no code outside XLA, and only the custom calls of CUSTOM_CALLS.
"""

import contextlib
import dataclasses
import hashlib
import json
import re
import time
import zlib
from typing import Any

import jax
import jax.export

from .errors import BaselineError, BenchError
from .program import Compiled, Flat, analysed

MAGIC = b"moe-bench program 1\n"
LARGEST = 64 * 2**20
"""Bytes of an export, unpacked: ours take 5 to 40 KB."""
CUSTOM_CALLS: dict[str, frozenset[str]] = {
    "cpu": frozenset(),
    "cuda": frozenset({"__gpu$xla.gpu.triton", "mosaic_gpu_v2"}),
    "rocm": frozenset({"__gpu$xla.gpu.triton"}),
    "tpu": frozenset({"tpu_custom_call"}),
}
"""Targets that a program may call, by platform: kernels that come within the program, never code of the host."""
_CALL = re.compile(r'custom_call\s+@([\w$.]+)|call_target_name\s*=\s*"([^"]*)"')
_HOST = re.compile(r"stablehlo\.(send|recv|infeed|outfeed)\b")
_STRING = r'"(?:[^"\\]|\\.)*"'
_PLAIN = rf'[^()"]|{_STRING}'
_NESTED = rf"(?:{_PLAIN}|\((?:{_PLAIN}|\((?:{_PLAIN}|\((?:{_PLAIN})*\))*\))*\))*"
_LOCATION = re.compile(rf"({_STRING})|^#loc.*\n| loc\({_NESTED}\)", re.MULTILINE)
"""A string, which stays whatever it says, or a location."""


class Unstorable(BenchError):
    """A program calls what a stored program may not: back into Python, most often."""


@dataclasses.dataclass(frozen=True)
class StoredProgram:
    """A program as data.

    Attributes:
      digest: SHA-256 of its text without locations, and of what else decides how it is compiled.
      jax: the version that lowered it.
      platform: what it is lowered for: cpu, cuda, rocm or tpu.
      donated: how many first arguments are given away; the export itself does not keep it.
      inputs: shape and dtype of each argument.
      export: the serialized export.
    """

    digest: str
    jax: str
    platform: str
    donated: int
    inputs: tuple[str, ...]
    export: bytes

    def pack(self) -> bytes:
        """The file's bytes."""
        header = dataclasses.asdict(self) | {"export": len(self.export)}
        return MAGIC + json.dumps(header).encode() + b"\n" + zlib.compress(self.export, 9)


def export(flat: Flat) -> StoredProgram:
    """Lower a cell's function to data. Raises Unstorable where it calls the host."""
    platform = jax.export.default_export_platform()
    if platform not in CUSTOM_CALLS:
        raise Unstorable(
            f"{flat.cell.id} cannot be stored for platform={platform}; there are: {', '.join(CUSTOM_CALLS)}"
        )
    allowed = [jax.export.DisabledSafetyCheck.custom_call(name) for name in CUSTOM_CALLS[platform]]
    try:
        with _without_paths():
            exported = jax.export.export(flat.jitted, platforms=[platform], disabled_checks=allowed)(
                *flat.specs
            )
            data = bytes(exported.serialize())
    except (NotImplementedError, ValueError) as error:
        raise Unstorable(
            f"{flat.cell.id} cannot be stored ({error}); take callbacks and debug prints out of the layer"
        ) from error
    text = text_of(exported)
    check_calls(text, platform, flat.cell.id)
    inputs = tuple(_name(spec) for spec in flat.specs)
    return StoredProgram(_digest(text, flat.donated), jax.__version__, platform, flat.donated, inputs, data)


def unpack(data: bytes, where: str) -> StoredProgram:
    """Read a file's bytes; nothing of the program itself is looked at. Raises BaselineError naming `where`."""
    try:
        if not data.startswith(MAGIC):
            raise ValueError("another kind of file, or another version of it")
        head, _, packed = data[len(MAGIC) :].partition(b"\n")
        header = json.loads(head)
        size = header["export"]
        if not _whole(size, range(1, LARGEST + 1)):
            raise ValueError(f"export={size} is not 1..{LARGEST} bytes")
        unpacker = zlib.decompressobj()
        content = unpacker.decompress(packed, size)
        if len(content) != size or unpacker.unconsumed_tail or unpacker.unused_data or not unpacker.eof:
            raise ValueError("its size is not what its header says")
        known = {field.name for field in dataclasses.fields(StoredProgram)}
        if set(header) != known:
            raise ValueError("its header has other fields")
        program = StoredProgram(**header | {"export": content, "inputs": tuple(header["inputs"])})
        texts = (program.digest, program.jax, program.platform, *program.inputs)
        if not isinstance(header["inputs"], list) or not all(isinstance(text, str) for text in texts):
            raise ValueError("its header has values of other types")
        donations = range(len(program.inputs) + 1)
        if program.platform not in CUSTOM_CALLS or not _whole(program.donated, donations):
            raise ValueError(f"platform={program.platform!r}, donated={program.donated!r}")
    except (ValueError, KeyError, TypeError, RecursionError, zlib.error) as error:
        raise BaselineError(f"{where} is no stored program ({error}); restore it or record again") from error
    return program


def read(program: StoredProgram, where: str) -> Any:
    """The export, deserialized and checked: digest, inputs, platform, calls.

    What is read may be malformed in ways that end the process or never end: `gate.vet` reads it in a child first.

    Raises:
      BaselineError: this JAX cannot read it, it is not what its header says, or it calls what it may not.
    """
    try:
        exported = jax.export.deserialize(bytearray(program.export))
        text = text_of(exported)
    except Exception as error:  # The reader has no errors of its own: it fails wherever it happens to.
        raise BaselineError(_unusable(program, where, "read", error)) from error
    try:
        check_calls(text, program.platform, where)
    except Unstorable as fault:
        raise BaselineError(f"{fault}; restore it or record again") from fault
    if exported.ordered_effects or exported.unordered_effects:
        raise BaselineError(f"{where} has effects on the host; restore it or record again")
    said = (program.digest, program.inputs, (program.platform,))
    found = (_digest(text, program.donated), tuple(map(_name, exported.in_avals)), tuple(exported.platforms))
    if said != found:
        raise BaselineError(f"{where} holds another program than its header says; restore it or record again")
    return exported


def compile_stored(program: StoredProgram, where: str) -> Compiled:
    """Compile a stored program, donation applied again.

    Raises:
      BaselineError: as `read`, or it cannot be compiled here: it is for another platform, say.
    """
    exported = read(program, where)
    start = time.perf_counter()
    jitted = jax.jit(exported.call, donate_argnums=tuple(range(program.donated)))
    specs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in exported.in_avals]
    try:
        executable = jitted.lower(*specs).compile()
    except Exception as error:  # JAX checks much of an export only here, with errors of many kinds.
        raise BaselineError(_unusable(program, where, "compiled", error)) from error
    return analysed(executable, time.perf_counter() - start)


def text_of(exported: Any) -> str:
    """The program's text without the locations in the source, which move with every edit."""
    return _LOCATION.sub(lambda found: found[1] or "", exported.mlir_module())


def check_calls(text: str, platform: str, where: str) -> None:
    """Raise Unstorable (a BaselineError is its caller's matter) where a program calls what it may not."""
    found = [plain or quoted for plain, quoted in _CALL.findall(text)]
    foreign = sorted(set(found) - CUSTOM_CALLS[platform])
    # A call that the pattern does not see is refused too.
    if not foreign and (len(found) < len(re.findall(r"\bcustom_call\b", text))):
        foreign = ["custom calls of an unknown form"]
    foreign += sorted({f"stablehlo.{name}" for name in _HOST.findall(text)})
    if foreign:
        allowed = ", ".join(sorted(CUSTOM_CALLS[platform])) or "none"
        raise Unstorable(f"{where} calls {', '.join(foreign)}; a program for {platform} may call: {allowed}")


def _unusable(program: StoredProgram, where: str, what: str, error: Exception) -> str:
    return (
        f"{where} cannot be {what} by JAX {jax.__version__} (it was written by {program.jax}): "
        f"{type(error).__name__}: {error}; record again with this JAX"
    )


def _digest(text: str, donated: int) -> str:
    return hashlib.sha256(f"{donated}\n{text}".encode()).hexdigest()


def _whole(value: Any, among: range) -> bool:
    """Whether a value of a header is a whole number among these (which True is not)."""
    return type(value) is int and value in among


def _name(spec: Any) -> str:
    return f"{spec.dtype}[{','.join(map(str, spec.shape))}]"


@contextlib.contextmanager
def _without_paths() -> Any:
    """Lower without the source's paths: they differ between machines, and are nobody's business."""
    flags: Any = jax.config  # Its attributes are made at run time, so type checkers do not know them.
    before = flags.jax_traceback_in_locations_limit
    jax.config.update("jax_traceback_in_locations_limit", 0)
    try:
        yield
    finally:
        jax.config.update("jax_traceback_in_locations_limit", before)
