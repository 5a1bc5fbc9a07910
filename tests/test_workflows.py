"""The workflow and action files: what they may do, and what their shell steps do in a folder with fake tools."""

import configparser
import json
import re
import shlex
from fnmatch import fnmatch

import pytest

from tests.bench import comment
from tests.workflows import FILES, ROOT, Runner, load

WORKFLOWS = [name for name in FILES if "/workflows/" in name]
OWN = {"event__pull_request__number": 7, "event__pull_request__head__repo__full_name": "o/r"}
FORK = OWN | {"event__pull_request__head__repo__full_name": "stranger/r"}
BOT = {"login": "github-actions[bot]"}


def steps():
    """(file, step) of every step."""
    found = []
    for name in FILES:
        file = load(name)
        for job, its in file.get("jobs", {"": file.get("runs")}).items():
            for number, step in enumerate(its["steps"]):
                identity = f"{name.removeprefix('.github/')}-{job}{number}"
                found.append(pytest.param(name, step, id=identity))
    return found


# The files


def test_lint_checks_every_file():
    told = (ROOT / "tox.ini").read_text("utf-8")
    for name in FILES:
        schema = "vendor.github-workflows" if name in WORKFLOWS else "vendor.github-actions"
        assert re.search(rf"check-jsonschema --builtin-schema {schema} .*{re.escape(name)}", told)


@pytest.mark.parametrize(("name", "step"), steps())
def test_actions_are_pinned_by_hash_with_their_version_beside_it(name, step):
    used = step.get("uses", "./")
    if not used.startswith("./"):
        (line,) = {line.strip() for line in (ROOT / name).read_text().splitlines() if f"uses: {used}" in line}
        assert re.search(r"@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line)
    elif used != "./":
        assert (ROOT / used / "action.yml").is_file()


@pytest.mark.parametrize(("name", "step"), steps())
def test_shell_steps_hold_no_expression(name, step):
    text = step.get("run", "").replace("${{ matrix.check }}", "")  # Ours, not a stranger's.
    assert "${{" not in text


@pytest.mark.parametrize("name", WORKFLOWS)
def test_what_a_job_tells_the_suite_passes_tox(name):
    """tox hides every variable that is not named: a browser that is required would be optional again."""
    file = configparser.ConfigParser(interpolation=None)
    file.read(ROOT / "tox.ini", encoding="utf-8")
    passed = file["testenv"]["pass_env"].split()
    given = {one for job in load(name)["jobs"].values() for one in job.get("env", {})}
    ours = {one for one in given if one.startswith("MOE_")}
    assert all(any(fnmatch(one, pattern) for pattern in passed) for one in ours)
    assert ours == ({"MOE_BENCH_BROWSER"} if name.endswith("/ci.yml") else set())


@pytest.mark.parametrize("name", WORKFLOWS)
def test_only_the_job_that_comments_may_write(name):
    found = load(name)
    assert found["permissions"] == {"contents": "read"}
    writing = {
        job: {what for what, how in its.get("permissions", {}).items() if how == "write"}
        for job, its in found["jobs"].items()
    }
    expected = {"pull-requests"} if name.endswith("/ci.yml") else set()
    assert writing.pop("comment", set()) == expected
    assert not any(writing.values())


def test_inputs_that_a_workflow_gives_are_the_actions_own():
    for _, step in (param.values for param in steps()):
        if step.get("uses", "").startswith("./"):
            known = load(f"{step['uses'].removeprefix('./')}/action.yml")["inputs"]
            assert step.get("with", {}).keys() <= known.keys()


def test_gate_sees_the_commits_of_the_change():
    checkout, gate = load(".github/workflows/ci.yml")["jobs"]["bench"]["steps"]
    assert checkout["with"]["fetch-depth"] == 0
    assert gate["uses"] == "./.github/actions/gate"


# The gate's steps


def changed(runner, *messages):
    """A repository whose branch has commits with these messages, and origin/main before them."""
    runner.git("init", "-q", "-b", "main")
    runner.git("commit", "-q", "--allow-empty", "-m", "before\n\nAccept-slower: another change's")
    runner.git("update-ref", "refs/remotes/origin/main", "HEAD")
    for message in messages:
        runner.git("commit", "-q", "--allow-empty", "-m", message)
    runner.env["GITHUB_BASE_REF"] = "main"


def addopts(runner):
    return shlex.split((runner.fakes / "addopts.txt").read_text())


def label(name, event="labeled", **more):
    return {"event": event, "label": {"name": name}} | more


def test_gate_runs_tox_with_the_inputs(tmp_path):
    runner = Runner(tmp_path)
    changed(runner, "a change")
    ended = runner.action("gate", grid="smoke", baselines="my baselines", tox_env="bench-cpu")
    assert ended.code == 0, ended.text
    assert runner.calls("tox") == ["run -e bench-cpu"]
    assert addopts(runner) == [
        "--grid=smoke",
        "--baselines=my baselines",
        "--reports=reports",
        "--junitxml=reports/junit.xml",
        "--benchmark-json=reports/benchmark.json",
    ]
    assert runner.calls("gh") == []  # No pull request: nobody is asked for labels.


@pytest.mark.parametrize("code", [0, 10, 13])
def test_gates_exit_code_is_the_steps_and_is_kept(tmp_path, code):
    runner = Runner(tmp_path)
    changed(runner, "a change")
    runner.env["TOX_ENDS_WITH"] = str(code)
    assert runner.action("gate").code == code
    assert runner.context["steps.gate.outputs.exit-code"] == str(code)
    assert (runner.repository / "reports/exit-code.txt").read_text() == f"{code}\n"


def test_gate_runs_the_callers_command_in_its_place(tmp_path):
    runner = Runner(tmp_path)
    changed(runner, "a change")
    (runner.repository / "tests").mkdir()
    (runner.repository / "tests/__init__.py").touch()  # A caller's own package of that name.
    runner.context["env.PYTEST_ADDOPTS"] = "-x"
    ended = runner.action(
        "gate", command='tox "a b" > said.txt; echo "$PYTEST_ADDOPTS" > given.txt', grid="aa"
    )
    assert ended.code == 0, ended.text
    assert runner.calls("tox") == [r"a\ b"]
    assert (runner.repository / "given.txt").read_text().startswith("-x --grid=aa --reports=reports ")


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (["a\n\nAccept-slower: half the memory"], "half the memory"),
        (["a\n\naccept-slower: one\n two", "b\n\nAccept-slower: three"], "one two; three"),
        (["a\n\nAccept-slower: same", "b\n\nAccept-slower: same"], "same"),
        (['a\n\nAccept-slower: it\'s $(x) `y` "z"'], 'it\'s $(x) `y` "z"'),
        (["a\n\nAccept-slower:"], None),
        (["a\n\nAccept-slower: in the middle\n\nof the message"], None),
        (["Accept-slower: in the subject"], None),
    ],
)
def test_trailer_of_the_changes_own_commits_accepts(tmp_path, messages, reason):
    runner = Runner(tmp_path)
    changed(runner, *messages)
    ended = runner.action("gate")
    assert ended.code == 0, ended.text
    given = [word for word in addopts(runner) if word.startswith("--accept-slower")]
    assert given == ([] if reason is None else [f"--accept-slower={reason}"])


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([label("accept-slower", actor={"login": "ada"})], "label accept-slower on pull request #7 by ada"),
        ([label("accept-slower", actor=None)], "label accept-slower on pull request #7 by unknown"),
        ([label("accept-slower"), label("accept-slower", "unlabeled")], None),
        ([label("bug", actor={"login": "ada"}), {"event": "renamed"}], None),
        ([], None),
    ],
)
def test_label_accepts_and_names_who_set_it(tmp_path, events, reason):
    runner = Runner(tmp_path, **OWN)
    changed(runner, "a change")
    # A page behind the other, as gh prints them.
    runner.answers("events", "".join(json.dumps([event]) for event in events))
    ended = runner.action("gate")
    assert ended.code == 0, ended.text
    assert runner.calls("gh") == ["api --paginate repos/o/r/issues/7/events"]
    given = [word for word in addopts(runner) if word.startswith("--accept-slower")]
    assert given == ([] if reason is None else [f"--accept-slower={reason}"])


def test_trailer_says_more_than_a_label(tmp_path):
    runner = Runner(tmp_path, **OWN)
    changed(runner, "a\n\nAccept-slower: a reason")
    runner.answers("events", json.dumps([label("accept-slower", actor={"login": "ada"})]))
    assert runner.action("gate").code == 0
    assert "--accept-slower=a reason" in addopts(runner)


def test_nothing_is_accepted_where_the_caller_says_so(tmp_path):
    runner = Runner(tmp_path, **OWN)
    changed(runner, "a\n\nAccept-slower: a reason")
    assert runner.action("gate", accept="false").code == 0
    assert runner.calls("gh") == []
    assert not any(word.startswith("--accept-slower") for word in addopts(runner))


def test_labels_that_cannot_be_read_are_a_warning(tmp_path):
    runner = Runner(tmp_path, **OWN)
    changed(runner, "a change")
    runner.fake("gh", '#!/bin/sh\necho \'{"message": "Forbidden"}\'\nexit 1\n')
    ended = runner.action("gate")
    assert ended.code == 0
    assert "::warning title=moe bench::the pull request's labels cannot be read" in ended.text


def test_shallow_checkout_is_a_warning_with_the_way_out(tmp_path):
    runner = Runner(tmp_path)
    runner.git("init", "-q")
    runner.git("commit", "-q", "--allow-empty", "-m", "a\n\nAccept-slower: a reason")
    runner.env["GITHUB_BASE_REF"] = "main"
    ended = runner.action("gate")
    assert ended.code == 0
    assert "fetch-depth: 0" in ended.text
    assert not any(word.startswith("--accept-slower") for word in addopts(runner))


@pytest.mark.parametrize("known", [True, False])
def test_push_accepts_by_the_trailers_of_what_was_pushed(tmp_path, known):
    runner = Runner(tmp_path)
    changed(runner, "a\n\nAccept-slower: a reason")
    del runner.env["GITHUB_BASE_REF"]
    before = runner.git("rev-parse", "origin/main").strip() if known else "0" * 40
    event = tmp_path / "event.json"
    event.write_text(json.dumps({"before": before}))
    runner.env["GITHUB_EVENT_PATH"] = str(event)
    ended = runner.action("gate")
    assert ended.code == 0
    assert ("--accept-slower=a reason" in addopts(runner)) is known
    assert ("::warning" in ended.text) is not known


# The comment's steps


def reports(runner, **verdicts):
    """What downloaded artifacts hold."""
    for name, text in verdicts.items():
        folder = runner.temp / "moe-bench" / f"moe-bench-{name}"
        folder.mkdir(parents=True)
        (folder / "exit-code.txt").write_text("10\n")
        if text is not None:
            (folder / "verdict.md").write_text(text)


def sent(runner):
    return json.loads((runner.fakes / "sent.json").read_text())["body"]


def test_one_comment_is_created_and_then_updated(tmp_path):
    runner = Runner(tmp_path, **OWN, event__pull_request__head__sha="0123456789abcdef")
    reports(runner, one="## Unchanged: 3 unchanged\n\n3 compared\n")
    others = [{"id": 1, "user": {"login": "ada"}, "body": "nice"}]
    runner.answers("comments", json.dumps(others))
    ended = runner.action("comment")
    assert ended.code == 0, ended.text
    assert runner.calls("gh") == [
        "api --paginate repos/o/r/issues/7/comments",
        f"api --silent --method POST repos/o/r/issues/7/comments --input {runner.temp}/comment.json",
    ]
    first = sent(runner)
    assert first.startswith(
        f"{comment.MARKER}\n\n## Unchanged: 3 unchanged\n\n3 compared\n\nCommit 0123456789ab;"
    )
    assert "https://github.com/o/r/actions/runs/99" in first
    assert (runner.fakes / "token.txt").read_text() == "secret"

    (runner.fakes / "calls.txt").unlink()
    (runner.temp / "moe-bench/moe-bench-one/verdict.md").write_text("## Regressed: 1 regressed\n")
    # On the second page, behind one by a stranger who wrote the marker.
    forged = {"id": 2, "user": {"login": "mallory"}, "body": first}
    runner.answers(
        "comments", json.dumps([*others, forged]) + json.dumps([{"id": 17, "user": BOT, "body": first}])
    )
    assert runner.action("comment").code == 0
    assert runner.calls("gh")[1:] == [
        f"api --silent --method PATCH repos/o/r/issues/comments/17 --input {runner.temp}/comment.json"
    ]
    assert "## Regressed: 1 regressed" in sent(runner)
    assert "Unchanged" not in sent(runner)


@pytest.mark.parametrize("context", [FORK, {}], ids=["fork", "push"])
def test_fork_gets_no_comment_and_no_request(tmp_path, context):
    runner = Runner(tmp_path, **context)
    assert runner.action("comment").code == 0
    assert runner.calls("gh") == []


def test_workflow_leaves_a_fork_out_before_its_token_is_made(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "fork").mkdir()
    when = load(".github/workflows/ci.yml")["jobs"]["comment"]["if"]
    own = Runner(tmp_path / "own", event_name="pull_request", **OWN)
    own.context["github.event_name"] = "pull_request"
    fork = Runner(tmp_path / "fork", **FORK)
    fork.context["github.event_name"] = "pull_request"
    assert own.value(when)
    assert not fork.value(when)
    own.context["github.event_name"] = "push"
    assert not own.value(when)


def test_comment_that_cannot_be_posted_fails_the_step(tmp_path):
    runner = Runner(tmp_path, **OWN)
    runner.fake("gh", '#!/bin/sh\necho \'{"message": "Forbidden"}\'\nexit 1\n')
    assert runner.action("comment").code == 1


def test_comment_has_each_run_under_its_name(tmp_path):
    runner = Runner(tmp_path, **OWN)
    reports(runner, **{"Python 3.13": "## Unchanged: 1 unchanged\n", "Python 3.11": None})
    text = comment.body(runner.temp / "moe-bench", {})
    assert re.findall("^## .*", text, re.MULTILINE) == [
        "## Python 3.11: No verdict",
        "## Python 3.13: Unchanged: 1 unchanged",
    ]
    assert "(exit code 10)" in text


def test_comment_of_nothing_says_so(tmp_path):
    assert "it left no report" in comment.body(tmp_path, {})


def test_comment_fits_and_closes_what_it_cuts(tmp_path):
    runner = Runner(tmp_path, **OWN)
    rows = "| a cell | x |\n" * 4000
    long = f"## Regressed\n\n<details><summary>s</summary>\n\n{rows}\n</details>\n"
    reports(runner, a=long, b=long, c="## Unchanged\n")
    text = comment.body(runner.temp / "moe-bench", {"GITHUB_RUN_ID": "1"})
    assert 40_000 < len(text) <= comment.MOST
    assert text.count("<details>") == text.count("</details>") == 2
    assert text.count("*and more, in the job's summary*") == 2
    assert "## c: Unchanged" in text


@pytest.mark.parametrize("given", ["oops", '{"message": "Not Found"}', "[1]"])
def test_answer_that_is_no_list_of_comments_is_a_fault(tmp_path, given):
    runner = Runner(tmp_path, **OWN)
    runner.answers("comments", given)
    ended = runner.action("comment")
    assert ended.code == 2
    assert ended.text.startswith("error: standard input ")
