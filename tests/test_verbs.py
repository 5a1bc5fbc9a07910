"""The verbs' own help: what each takes, examples that parse, exit codes."""

import os
import shlex

import pytest

from tests.bench.__main__ import CODES, VERBS, main, parser, spelled
from tests.bench.gate.verdict import INCONCLUSIVE, INTEGRITY, NO_BASELINE, REGRESSED


def said(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main([*words])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_help_of_a_verb_has_examples_that_parse_and_exit_codes(capsys, verb):
    text = said(capsys, verb.name, "--help")
    assert verb.examples
    assert f"exit codes: {verb.codes}" in text
    assert "--no-color" in text
    for example in verb.examples:
        assert f"  python -m tests.bench {verb.name} {example}".rstrip() in text
        words = shlex.split(example.partition(" < ")[0])
        chosen = parser([verb.name]).parse_args(spelled([verb.name, *words]))
        assert chosen.verb == verb.name
        assert callable(chosen.run)


def test_help_lists_the_verbs_and_the_exit_codes(capsys):
    text = said(capsys, "--help")
    assert all(f"\n    {verb.name}" in text for verb in VERBS)
    assert CODES in text
    assert all(f"\n  {code}  " in CODES for code in (0, 1, REGRESSED, INTEGRITY, INCONCLUSIVE, NO_BASELINE))


def test_each_verb_is_there_once():
    assert len({verb.name for verb in VERBS}) == len(VERBS)


def test_no_color_holds_for_what_a_verb_starts(monkeypatch, tmp_path):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(["verify", "--baselines", str(tmp_path), "--no-color"]) in (0, 11)
    assert os.environ.pop("NO_COLOR") == "1"


@pytest.mark.parametrize("words", [[], ["no-such-verb"]], ids=["none", "unknown"])
def test_another_verb_is_a_usage_error(capsys, words):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "VERB" in capsys.readouterr().err
