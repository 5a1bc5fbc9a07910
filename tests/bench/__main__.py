"""The verbs: `python -m tests.bench VERB`."""

import argparse
import sys

from . import aa, power, published, recording, roofline, verify
from .peers import verb as peers

VERBS = {
    "baseline": (recording.add_arguments, recording.run, "record the grid as the new baseline"),
    "verify": (verify.add_arguments, verify.run, "check every stored file against its manifest"),
    "aa": (aa.add_arguments, aa.run, "count the gate's alarms on identical code"),
    "power": (power.add_arguments, power.run, "count the gate's catches of injected faults"),
    "peers": (peers.add_arguments, peers.run, "race ours with other people's layers"),
    "roofline": (roofline.add_arguments, roofline.run, "how near chunked comes to its bound"),
    "published": (published.add_arguments, published.run, "compare a run with the published results"),
    "import-published": (
        published.add_import_arguments,
        published.run_import,
        "turn the published results file into a file of the store",
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; returns its exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}", description="The suite beside pytest.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, (add_arguments, run, text) in VERBS.items():
        verb = verbs.add_parser(name, help=text, description=text)
        add_arguments(verb)
        verb.set_defaults(run=run)
    chosen = parser.parse_args(arguments)
    return chosen.run(chosen)


if __name__ == "__main__":
    sys.exit(main())
