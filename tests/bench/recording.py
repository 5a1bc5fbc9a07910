"""The verb `baseline`: run the whole grid, and store it only if all of it passed."""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from . import baseline, environment
from .errors import BaselineError, BenchError

FOLDER = Path(__file__).parent


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("--reason", required=True, help="why the numbers change; kept in the file")
    parser.add_argument("--grid", default="default", help="default or published (default: default)")
    parser.add_argument("--baselines", type=Path, default=baseline.ROOT, help="folder of the baselines")


def run(args: argparse.Namespace) -> int:
    """Returns pytest's exit code where the run failed, 2 for a fault of the store, else 0."""
    try:
        if not args.reason.strip():
            raise BaselineError("--reason is empty; say why the numbers change")
        baseline.check_writable(args.baselines, environment.describe())
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "run.json"
            command = [sys.executable, "-m", "pytest", str(FOLDER), "--grid", args.grid]
            code = subprocess.run([*command, f"--benchmark-json={report}"], check=False).returncode
            if code:
                print(f"not recorded: the run ended with {code}", file=sys.stderr)
                return code
            document = baseline.read(report)
        if document.get("moe_bench", {}).get("partial", True):
            raise BaselineError("the run was partial; a baseline holds the whole grid")
        document["moe_bench"]["reason"] = args.reason
        print(f"recorded {baseline.save(args.baselines, document, args.grid)}")
    except BenchError as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2
    return 0
