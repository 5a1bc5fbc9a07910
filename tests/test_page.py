"""The report: what it says of empty, partial and full runs, and in a real Chromium that it shows and works."""

import dataclasses
import functools
import os
import re
import shutil
from html import unescape
from xml.etree import ElementTree

import pytest

from tests.bench import drawn, page, story, verdict_json
from tests.bench.gate.verdict import Timing
from tests.bench.growth import Point
from tests.bench.past import Update
from tests.verdicts import cell, record, verdict_of

WHERE = {"jax": "0.10.2", "backend": "cpu", "cpu": "a <processor>", "xla_flags": None}
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")


def identity(impl, tokens, op="forward"):
    return f"{impl}-float32-t{tokens}-e8-k2-s0.0-d512-h1024-{op}"


def rich():
    """A story with data for each section; two cells changed."""
    cells = []
    for impl, word in (
        ("dropless:chunked:sorted", "chunked"),
        ("dense:auto:sorted", "auto"),
        ("capacity:auto:sorted", "auto"),
    ):
        routing = impl.partition(":")[0]
        for tokens in (1024, 4096):
            its = identity(impl, tokens)
            changes = {
                "id": its,
                "routing": routing,
                "impl": word,
                "tokens": tokens,
                "median_ms": tokens / 30,
            }
            status, timing = "unchanged", None
            if (routing, tokens) == ("dropless", 1024):
                status, timing = "regressed", Timing(1.21, 1.17, 1.25, 48, 9.0, 1.2)
            if (routing, tokens) == ("capacity", 4096):
                status, timing = "improved", Timing(0.8, 0.78, 0.83, 24, 9.0)
            why = ("time x1.21 is over 5 % <script>alert(1)</script>",) if status == "regressed" else ()
            cells.append(cell(its, status, *why, timing=timing, **changes))
    for chunk in (64, 128, 256, 512):
        its = f"chunk/{identity('dropless:chunked:sorted', 1024)}-chunk{chunk}"
        cells.append(
            cell(its, "unchanged", id=its, suite="chunk", chunk=chunk, median_ms=30 + abs(chunk - 256) / 50)
        )
    told = story.tell(verdict_of(*cells, environment=WHERE), 10)
    records = {c.id: c.stored for c in cells}
    updates = tuple(
        Update(
            n,
            f"000{n}_default.json",
            f"2026-0{n}-01T00:00:00",
            "ada",
            "0" * 40,
            f"reason {n}",
            "",
            "",
            {},
            records,
        )
        for n in (1, 2)
    )
    pasts = tuple(story.Past(i, ((1, r), (2, r)), r) for i, r in records.items())
    points = tuple(
        Point(identity("dropless:chunked:sorted", n), n, n / 40, n / 41, 1.0, 1.0, 9 * 2**20, 7)
        for n in (4096, 8192)
    )
    return dataclasses.replace(told, updates=updates, pasts=pasts, growth=story.Beside(points, "JAX 0.10.2"))


EMPTY = story.Story()
PARTIAL = story.tell(verdict_of("unchanged", "skipped", partial=True), 0)
STORIES = {"empty": lambda: EMPTY, "partial": lambda: PARTIAL, "rich": rich}


@functools.cache
def text_of(name):
    return page.html(STORIES[name]())


# What it says


@pytest.mark.parametrize("name", STORIES)
def test_every_section_is_there_and_says_why_it_is_empty(name):
    text = text_of(name)
    titles = [unescape(title) for title in re.findall("<h2>(.*?)</h2>", text)]
    assert titles[0] == "Cells"
    assert titles[-2:] == ["Updates of the baseline", "Environment"]
    drawings = drawn.all_of(STORIES[name]())
    assert titles[1:-2] == [its.title for its in drawings]
    assert all(its.text.endswith(".") or its.svg for its in drawings)
    assert text.count("<svg") == sum(its.svg is not None for its in drawings)


def test_an_empty_run_says_that_nothing_was_compared():
    assert '<h1 id="verdict" class="bad">Nothing was compared</h1>' in text_of("empty")
    assert "<svg" not in text_of("empty")


def test_a_partial_run_says_so():
    assert "PARTIAL" in text_of("partial")


def test_the_verdict_comes_first_and_text_is_escaped():
    text = text_of("rich")
    assert text.index("Regressed: 1 regressed, 1 improved, 8 unchanged") < text.index("<h2>")
    assert "<script>alert" not in text
    assert "a &lt;processor&gt;" in text


def test_it_needs_nothing_from_elsewhere():
    found = re.findall(r'(?:src|href)="([^"#]+)"', text_of("rich"))
    assert all(link.startswith("data:") for link in found)
    assert not re.search(r"@import|url\((?!#)", text_of("rich"))


def test_drawings_do_not_share_ids_and_take_the_pages_ink():
    text = text_of("rich")
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'href="#([^"]+)"', text)) | set(re.findall(r"url\(#([^)]+)\)", text))
    assert used <= set(ids)
    assert "currentColor" in text
    for its in drawn.all_of(rich()):
        if its.svg:
            ElementTree.fromstring(its.svg)


def test_a_verdict_that_was_written_is_read_back(tmp_path):
    verdict = dataclasses.replace(rich().verdict, accepted="half the memory")
    verdict_json.write(tmp_path / "verdict.json", verdict, 10)
    found, code = verdict_json.read(tmp_path / "verdict.json")
    assert code == 10
    assert found.accepted == "half the memory"
    assert {c.id: (c.status, c.timing) for c in found.cells} == {
        c.id: (c.status, c.timing) for c in verdict.cells
    }


def test_a_report_beside_it_that_is_damaged_is_a_fault_of_the_page(tmp_path):
    (tmp_path / "growth.json").write_text("{")
    told = story.tell(verdict_of("unchanged"), 0, reports=tmp_path)
    assert "growth.json is not what growth writes" in page.html(told)


def test_the_verb_writes_the_page_and_its_figures(tmp_path, capsys):
    from tests.bench.__main__ import main

    verdict_json.write(tmp_path / "verdict.json", rich().verdict, 10)
    words = [
        "report",
        "--reports",
        str(tmp_path),
        "--baselines",
        str(tmp_path),
        "--figures",
        str(tmp_path / "f"),
    ]
    assert main(words) == 0
    assert "Regressed" in (tmp_path / "index.html").read_text()
    written = sorted(path.name for path in (tmp_path / "f").iterdir())
    assert written == ["map.svg", "memory.svg", "ratios.svg", "sweeps.svg", "tokens.svg"]
    for path in (tmp_path / "f").iterdir():
        ElementTree.parse(path)
    (tmp_path / "verdict.json").write_text("{}")
    assert main(words) == 2
    assert "is no verdict of this suite" in capsys.readouterr().err


# In a browser


@pytest.fixture(scope="module")
def browser():
    if not (BROWSER and DRIVER):
        reason = "there is no Chromium with its driver (Debian: apt-get install chromium chromium-driver)"
        if os.environ.get("MOE_BENCH_BROWSER") == "required":
            pytest.fail(reason)
        pytest.skip(reason)
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(params=[(width, scheme) for width in (390, 1280) for scheme in ("light", "dark")], ids=str)
def shown(request, browser, tmp_path_factory):
    width, scheme = request.param
    path = tmp_path_factory.mktemp("page") / "index.html"
    path.write_text(text_of("rich"))
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False},
    )
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    browser.get_log("browser")
    browser.get(path.as_uri())
    folder = os.environ.get("MOE_BENCH_SCREENSHOTS")
    if folder:
        browser.get_screenshot_as_file(f"{folder}/{width}-{scheme}.png")
    return browser


@pytest.mark.xdist_group("browser")
def test_it_shows_without_errors_or_overflow_and_every_figure_is_drawn(shown):
    assert shown.get_log("browser") == []
    assert shown.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    sizes = shown.execute_script(
        "return [...document.querySelectorAll('figure svg')].map(s => [s.getBoundingClientRect().width, "
        "s.getBoundingClientRect().height])"
    )
    assert len(sizes) == text_of("rich").count("<svg") == 7
    assert all(width > 200 and height > 100 for width, height in sizes)


@pytest.mark.xdist_group("browser")
def test_ink_and_paper_differ_in_each_scheme(shown):
    ink, paper = shown.execute_script(
        "const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]"
    )
    light = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (ink, paper)]
    assert abs(light[0] - light[1]) > 400


@pytest.mark.xdist_group("browser")
def test_sorting_and_filtering_work(shown):
    rows = "#cells tbody tr:not([hidden])"
    column = f"return [...document.querySelectorAll('{rows} td:nth-child(%d)')].map(c => c.textContent)"
    heads = shown.find_elements("css selector", "#cells th button")
    heads[1].click()
    ids = shown.execute_script(column % 2)
    assert ids == sorted(ids)
    assert len(ids) == 10
    heads[1].click()
    assert shown.execute_script(column % 2) == ids[::-1]
    heads[4].send_keys("\n")
    keys = shown.execute_script(
        "return [...document.querySelectorAll('#cells tbody td:nth-child(5)')].map(c => +c.dataset.key)"
    )
    assert keys == sorted(keys)
    shown.find_element("id", "words").send_keys("capacity T4096")
    assert shown.execute_script(column % 2) == [identity("capacity:auto:sorted", 4096)]
    assert shown.find_element("id", "shown").text == "1 of 10"
    shown.find_element("id", "words").clear()
    shown.find_element("id", "words").send_keys(" ")
    shown.find_element("css selector", "#status option:nth-child(2)").click()
    assert shown.execute_script(column % 1) == ["regressed"]


def test_a_record_by_hand_has_what_the_page_reads():
    assert {"suite", "op", "xla_temp_mb", "median_ms", "gemm_fraction"} <= record().keys()
