"""The verbs: `python -m tests.bench VERB`."""

import argparse
import importlib
import sys

VERBS = {
    "baseline": ("recording", "", "record the grid as the new baseline"),
    "verify": ("verify", "", "check every stored file against its manifest"),
    "aa": ("aa", "", "count the gate's alarms on identical code"),
    "power": ("power", "", "count the gate's catches of injected faults"),
    "ab": ("ab", "", "compare two revisions, both lowered by this JAX"),
    "peers": ("peers.verb", "", "race ours with other people's layers"),
    "roofline": ("roofline", "", "how near chunked comes to its bound"),
    "growth": ("growth", "", "what a token costs chunked as tokens grow"),
    "sizes": ("sizes", "", "chunked's automatic sizes against fixed ones"),
    "published": ("published", "", "compare a run with the published results"),
    "import-published": ("published", "import", "turn the published results file into a file of the store"),
}
"""Verb -> its module, what its two functions have in their names besides `add_arguments` and `run`, its help."""


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}", description="The suite beside pytest.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, (module, kind, text) in VERBS.items():
        verb = verbs.add_parser(name, help=text, description=text)
        # One module alone: most import jax, and a verb that times pins its process before.
        if arguments[:1] == [name]:
            its = importlib.import_module(f".{module}", __package__)
            getattr(its, f"add_{kind}_arguments" if kind else "add_arguments")(verb)
            verb.set_defaults(run=getattr(its, f"run_{kind}" if kind else "run"))
    chosen = parser.parse_args(arguments)
    return int(chosen.run(chosen))


if __name__ == "__main__":
    sys.exit(main())
