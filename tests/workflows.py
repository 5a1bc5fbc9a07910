"""GitHub's workflow and action files, read, and as much of GitHub as their shell steps need to run here."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("workflows/*.yml", "actions/*/action.yml")
    for path in (ROOT / ".github").glob(pattern)
)
CONTEXT = re.compile(r"\b(?:github|inputs|steps|env|runner|matrix)(?:\.[\w-]+)+")
TEMPLATE = re.compile(r"\$\{\{(.*?)\}\}", re.DOTALL)

# Each fake writes down how it was called. gh answers from files named after what it is asked for.
FAKE = r"""#!/usr/bin/env bash
{ printf '%s' "$(basename "$0")"; printf ' %q' "$@"; echo; } >> "$FAKES/calls.txt"
"""
GH = (
    FAKE
    + r"""
printf '%s' "$GH_TOKEN" > "$FAKES/token.txt"
for word in "$@"; do
  case $word in repos/*) path=$word ;; --method) method=yes ;; esac
done
while (($#)); do [[ $1 == --input ]] && cp "$2" "$FAKES/sent.json"; shift; done
[[ -n ${method-} ]] || cat "$FAKES/$(basename "$path").json"
"""
)
TOX = FAKE + 'echo "$PYTEST_ADDOPTS" > "$FAKES/addopts.txt"\nexit "${TOX_ENDS_WITH-0}"\n'


def load(name: str) -> Any:
    """One of FILES."""
    return YAML(typ="safe").load((ROOT / name).read_text("utf-8"))


class Ended(NamedTuple):
    """How a step ended: its exit code, and what it printed."""

    code: int
    text: str


class Runner:
    """Runs the shell steps of a composite action, in order, in a repository of its own."""

    def __init__(self, folder: Path, **github: Any) -> None:
        """`github` is what expressions find under that name, dots written as two underscores."""
        self.folder, self.fakes, self.repository = folder, folder / "fakes", folder / "repository"
        self.temp = folder / "temp"
        for path in (self.fakes, self.repository, self.temp):
            path.mkdir()
        self.context = {f"github.{name.replace('__', '.')}": value for name, value in github.items()}
        self.context |= {"github.repository": "o/r", "github.token": "secret", "runner.temp": str(self.temp)}
        for name, text in (("gh", GH), ("tox", TOX)):
            self.fake(name, text)
        for name in ("python", "python3"):
            self.fake(name, f'#!/usr/bin/env bash\n[[ $2 == pip ]] || exec {sys.executable} "$@"\n')
        outputs = folder / "outputs.txt"
        outputs.touch()
        keep = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        self.env = keep | {
            "PATH": f"{self.fakes}{os.pathsep}{keep['PATH']}",
            "FAKES": str(self.fakes),
            "GITHUB_REPOSITORY": "o/r",
            "GITHUB_SERVER_URL": "https://github.com",
            "GITHUB_RUN_ID": "99",
            "GITHUB_OUTPUT": str(outputs),
            "RUNNER_TEMP": str(self.temp),
        }

    def fake(self, name: str, text: str) -> None:
        path = self.fakes / name
        path.write_text(text)
        path.chmod(0o755)

    def answers(self, what: str, text: str) -> None:
        """What gh prints for a path that ends in `what`."""
        (self.fakes / f"{what}.json").write_text(text)

    def git(self, *words: str) -> str:
        done = subprocess.run(
            ["git", "-c", "user.name=n", "-c", "user.email=e@x", *words],
            cwd=self.repository,
            env=self.env,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    def action(self, name: str, **inputs: str) -> Ended:
        """Run the steps of an action until one fails; those that `uses` another action are left out."""
        action = load(f".github/actions/{name}/action.yml")
        given = {key: value.get("default", "") for key, value in action["inputs"].items()}
        given |= {key.replace("_", "-"): value for key, value in inputs.items()}
        self.context["github.action_path"] = str(ROOT / ".github/actions" / name)
        self.context |= {f"inputs.{key}": self.filled(value) for key, value in given.items()}
        said = ""
        for step in action["runs"]["steps"]:
            if "run" not in step or not self.value(step.get("if", "true")):
                continue
            code, text = self._shell(step)
            said += text
            if code:
                return Ended(code, said)
        return Ended(0, said)

    def calls(self, name: str) -> list[str]:
        """How a fake was called."""
        file = self.fakes / "calls.txt"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line.removeprefix(f"{name} ") for line in lines if line.startswith(f"{name} ")]

    def filled(self, text: str) -> str:
        """The text with its expressions evaluated."""
        return TEMPLATE.sub(lambda found: str(self.value(found[1])), text)

    def value(self, expression: str) -> Any:
        """An expression, as far as ours go: contexts, strings, format, ==, !=, !, && and ||."""
        text = expression.strip().removeprefix("${{").removesuffix("}}").strip()
        names: list[Any] = []

        def look(found: re.Match[str]) -> str:
            names.append(self.context.get(found[0], ""))
            return f"names[{len(names) - 1}]"

        text = CONTEXT.sub(look, text).replace("&&", " and ").replace("||", " or ")
        text = re.sub(r"!(?!=)", " not ", text)
        functions = {"format": lambda form, *words: form.format(*words), "cancelled": lambda: False}
        return eval(text, {"names": names, "true": True, **functions})

    def _shell(self, step: dict[str, Any]) -> Ended:
        assert step["shell"] == "bash"
        assert "${{" not in step["run"], "a value that a stranger may choose would be run"
        before = Path(self.env["GITHUB_OUTPUT"]).read_text()
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=self.repository,
            env=self.env | {name: self.filled(str(value)) for name, value in step.get("env", {}).items()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        for line in Path(self.env["GITHUB_OUTPUT"]).read_text().removeprefix(before).splitlines():
            name, _, value = line.partition("=")
            self.context[f"steps.{step['id']}.outputs.{name}"] = value
        return Ended(done.returncode, done.stdout)
