"""Where a run took place: what says whether two records may be compared, and the baselines' folder."""

import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

from .errors import EnvironmentFault

NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader,nounits")


def describe() -> dict[str, Any]:
    """Returns the environment: the published `device` fields, then what else a comparison depends on.

    Every field is always there; what this machine does not have is None. `gpu_memory_gb` is in GiB, as
    published. Imports jax and starts its backend: so pin the process first.

    Raises:
      EnvironmentFault: JAX cannot start the backend that was asked for.
    """
    import jax
    import jaxlib.version

    try:
        backend, devices = jax.default_backend(), jax.devices()
    except RuntimeError as error:
        raise EnvironmentFault(
            f"JAX cannot start its backend ({error}); drop --device and unset JAX_PLATFORMS to run on the CPU, or "
            'install the backend: pip install "jax[cuda12]", "jax[cuda13]" or "jax[tpu]"'
        ) from error
    flags: Any = jax.config  # Its attributes are made at run time, so type checkers do not know them.
    # JAX passes over a platform of a list whose plugin is not installed, and takes the next without a word.
    wanted = (flags.jax_platforms or backend).split(",")[0]
    if backend != ("gpu" if wanted in ("cuda", "rocm") else wanted):
        raise EnvironmentFault(
            f"JAX cannot start its backend '{wanted}', only {backend}; unset JAX_PLATFORMS to run on the CPU, "
            'or install the backend: pip install "jax[cuda12]", "jax[cuda13]" or "jax[tpu]"'
        )
    return {
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "backend": backend,
        "devices": [f"{device.platform}:{device.id}" for device in devices],
        "python": platform.python_version(),
        "device_kind": devices[0].device_kind,
        **_gpu(),
        **_torch(),
        "cpu": _cpu_model(),
        "cores": cores(),
        "xla_flags": os.environ.get("XLA_FLAGS") or None,
        "x64": bool(flags.jax_enable_x64),
        "matmul_precision": flags.jax_default_matmul_precision,
    }


def check_sources(root: Path) -> None:
    """Make sure that this tree's `moe` is measured, by the one jaxlib that there is.

    Raises EnvironmentFault where another copy of `moe` was imported than the one in `root` (if it has one), or
    jaxlib is on the path in two versions.
    """
    import moe

    own, imported = root / "moe/__init__.py", Path(moe.__file__).resolve()
    if own.is_file() and own.resolve() != imported:
        raise EnvironmentFault(
            f"moe is imported from {imported.parent}, not from {own.parent}; uninstall the one that is not meant, "
            "or take it off PYTHONPATH"
        )
    folders = {
        found.version: found.locate_file("") for found in importlib.metadata.distributions(name="jaxlib")
    }
    if len(folders) > 1:
        said = ", ".join(f"{version} in {folder}" for version, folder in folders.items())
        raise EnvironmentFault(f"there are {len(folders)} jaxlibs on the path: {said}; leave one")


def differing(today: dict[str, Any], stored: dict[str, Any], fields: tuple[str, ...]) -> list[str]:
    """Those of these fields in which two environments differ."""
    return [name for name in fields if today.get(name) != stored.get(name)]


def key(environment: dict[str, Any]) -> str:
    """The folder of the baselines that this environment compares with, such as `cpu-jax0.10.2`."""
    return f"{environment['backend']}-jax{environment['jax']}"


def cores() -> int:
    """How many logical cores this process may run on (its affinity, where the system has one)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _gpu() -> dict[str, Any]:
    """Name, driver and memory of the first NVIDIA GPU, by nvidia-smi: JAX may run on the CPU beside it."""
    missing = {"gpu": None, "driver": None, "gpu_memory_gb": None}
    try:
        answer = _output(NVIDIA_SMI)
    except (OSError, subprocess.SubprocessError):
        return missing
    return parse_nvidia_smi(answer) or missing


def _output(command: tuple[str, ...]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout


def parse_nvidia_smi(answer: str) -> dict[str, Any] | None:
    """The first line of nvidia-smi's CSV (name, driver, memory in MiB), or None where it is not one."""
    fields = [field.strip() for field in answer.strip().partition("\n")[0].rsplit(",", 2)]
    if len(fields) != 3:
        return None
    name, driver, memory = fields
    # Some devices share the host's memory and answer [N/A].
    gib = round(float(memory) / 1024, 2) if re.fullmatch(r"\d+(\.\d+)?", memory) else None
    return {"gpu": name, "driver": driver, "gpu_memory_gb": gib}


def _torch() -> dict[str, str | None]:
    """Version of torch and of the CUDA it was built for, from its files: an import would take seconds."""
    try:
        distribution = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        return {"torch": None, "torch_cuda": None}
    try:
        text = Path(str(distribution.locate_file("torch/version.py"))).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        text = ""
    version = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b[^=]*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    return {"torch": version[1] if version else distribution.version, "torch_cuda": cuda[1] if cuda else None}


def _cpu_model() -> str:
    """The processor's name; where the system does not tell (many Arm boards), its architecture."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    if found:
        return found[1].strip()
    if platform.system() == "Darwin":
        try:
            return _output(("sysctl", "-n", "machdep.cpu.brand_string")).strip()
        except (OSError, subprocess.SubprocessError):
            pass
    return platform.processor() or platform.machine()
