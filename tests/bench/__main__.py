"""The verbs: `python -m tests.bench VERB`."""

import argparse
import dataclasses
import importlib
import os
import sys
from collections.abc import Sequence

from . import home

FAULT = "0 done, 2 a fault, which standard error names"
GATE = "1 wrong numbers, 10 regressed, 11 integrity, 12 inconclusive"


@dataclasses.dataclass(frozen=True)
class Verb:
    """One verb.

    Attributes:
      name: as it is typed.
      module: of this package; it is imported when its verb runs.
      kind: what the module's two functions have in their names besides `add_arguments` and `run`; mostly nothing.
      help: what it does, in a line.
      examples: words after the verb, each a command of its own.
      codes: its exit codes.
    """

    name: str
    module: str
    kind: str
    help: str
    examples: tuple[str, ...]
    codes: str = FAULT


VERBS = (
    Verb(
        "baseline",
        "recording",
        "",
        "record the grid as the new baseline",
        (
            '--reason "half the memory at 128 rows"',
            '--reason "..." --accept-slower "memory is worth 6 %"',
            '--reason "..." --only capacity',
        ),
        "0 recorded, 10 cells are refused, 2 another fault; where the run failed, the run's",
    ),
    Verb(
        "verify", "verify", "", "check every stored file against its manifest", ("",), "0 sound, 11 damaged"
    ),
    Verb(
        "aa",
        "aa",
        "",
        "count the gate's alarms on identical code",
        ("", "--runs 10 --load"),
        "0 no alarm, 1 an alarm, 2 a fault",
    ),
    Verb(
        "power",
        "power",
        "",
        "count the gate's catches of injected faults",
        ("", "--faults nan,copy --runs 2"),
        "0 all caught that have to be, 1 one was not, 2 a fault",
    ),
    Verb(
        "ab",
        "ab",
        "",
        "compare two revisions, both lowered by this JAX",
        ("", "v1.2", "HEAD~3 HEAD --only chunked", "v1.2 --cell ID"),
        f"0 nothing worse, {GATE}, 125 a revision cannot be tested, 2 another fault",
    ),
    Verb(
        "upgrade",
        "upgrade",
        "",
        "compare this source under two JAX versions, Pythons or sets of XLA flags",
        (
            "--from jax==0.10.2 --to jax==0.12.0.1 --to-python python3.13",
            "--xla-flags --xla_cpu_enable_fast_math=true --only chunked",
        ),
        f"0 safe, {GATE}, 2 what was asked cannot be had",
    ),
    Verb(
        "peers",
        "peers.verb",
        "",
        "race ours with other people's layers",
        ("--only t4096-e8-k2", "--rounds 5 --no-memory"),
    ),
    Verb(
        "roofline", "roofline", "", "how near chunked comes to its bound", ("", "--only float32 --rounds 5")
    ),
    Verb(
        "growth", "growth", "", "what a token costs chunked as tokens grow", ("", "--only forward --no-draw")
    ),
    Verb("sizes", "sizes", "", "chunked's automatic sizes against fixed ones", ("", "--only t4096-e8-k2")),
    Verb(
        "report",
        "page",
        "",
        "write the page of the last comparison again, with what roofline, growth and sizes found",
        ("", "--figures figures"),
    ),
    Verb(
        "explain",
        "explain",
        "",
        "print everything known about one cell",
        ("dropless:chunked:sorted-float32-t1024-e8-k2-s0.0-d512-h1024-forward",),
    ),
    Verb("published", "published", "", "compare a run with the published results", ("", "run.json")),
    Verb(
        "import-published",
        "published",
        "import",
        "turn the published results file into a file of the store",
        ("results.json",),
    ),
    Verb(
        "ci-options",
        "ci_options",
        "",
        "the pytest options of a run in CI, with what a label or a trailer accepts",
        ("--grid default --reports reports", "--number 7 < events.json"),
    ),
    Verb(
        "comment",
        "comment",
        "",
        "write the pull request's comment, and say by which request it is posted",
        ("--number 7 --body body.json < comments.json",),
    ),
)
CODES = f"""exit codes of a run that compares ({home.RUN} --benchmark-compare):
  0        right, compared, nothing worse, or accepted with a reason
  1        wrong numerics, or another failed test
  2 to 5   pytest's own: interrupted, internal error, usage error, no tests
  10       a cell regressed
  11       integrity: a declared cell or its baseline is missing or damaged, or nothing was compared
  12       inconclusive: time could not be told within its budget
  13       this backend and JAX have no baseline at all
Those of a verb stand in its own help."""


def parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The parser for these arguments: all verbs, and the arguments of the one that they name."""
    program = f"python -m {__package__}"
    out = argparse.ArgumentParser(
        prog=program,
        description=f"The suite beside pytest. {program} VERB --help shows a verb's arguments, with examples.",
        epilog=CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = out.add_subparsers(dest="verb", required=True, metavar="VERB")
    if home.INSTALLED and arguments and arguments[0] in home.REPOSITORY_ONLY:
        out.error(f"{arguments[0]} works on the suite's own sources: run it in a clone of its repository")
    for verb in VERBS:
        if home.INSTALLED and verb.name in home.REPOSITORY_ONLY:
            continue
        lines = [f"  {program} {verb.name} {words}".rstrip() for words in verb.examples]
        its = verbs.add_parser(
            verb.name,
            help=verb.help,
            description=f"{verb.help[0].upper()}{verb.help[1:]}.",
            epilog="\n".join(("examples:", *lines, "", f"exit codes: {verb.codes}")),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        its.add_argument(
            "--no-color", action="store_true", help="no colours, also in what it starts (NO_COLOR)"
        )
        # One module alone: most import jax, and a verb that times pins its process before.
        if list(arguments[:1]) == [verb.name]:
            module = importlib.import_module(f".{verb.module}", __package__)
            kind = f"_{verb.kind}" if verb.kind else ""
            getattr(module, f"add{kind}_arguments")(its)
            its.set_defaults(run=getattr(module, f"run{kind}"))
    return out


def spelled(arguments: Sequence[str]) -> list[str]:
    """The arguments with flags joined to their option: argparse takes what begins with dashes for an option."""
    out: list[str] = []
    for word in arguments:
        if out and out[-1].startswith("--") and out[-1].endswith("-flags"):
            out[-1] += f"={word}"
        else:
            out.append(word)
    return out


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    chosen = parser(arguments).parse_args(spelled(arguments))
    if chosen.no_color:
        os.environ["NO_COLOR"] = "1"  # What a verb starts, pytest above all, reads it too.
    return int(chosen.run(chosen))


if __name__ == "__main__":
    sys.exit(main())
