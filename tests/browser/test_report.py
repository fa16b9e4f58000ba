"""The report's page: its charts, tables, marks and limits."""

import math

import pytest
from browser.runs import OVERFLOWS, PHONE, SHARES, training

from gradlift import Cause, Verdict, report
from gradlift.analysis.diagnosis import Finding
from gradlift.journal import Event, Run, Sample, Step
from gradlift.report import page as _html

HOSTILE = "</script><img src=x onerror=alert(1)>"
LINK = '<a href="javascript:alert(1)">&lt;b>x</a>'  # markup that plotly knows


def test_charts_have_marks(visit):
    seen = visit(training(), [Finding("warning", "Look", "at this", (5,), ("a.weight",), "do it")])
    assert seen.count("#scale .scatterlayer .point") == len(OVERFLOWS)
    for chart in ("scale", "headroom", "norm", "loss"):
        lines = seen.page.locator(f"#{chart} .scatterlayer .js-line").all()
        boxes = [box for line in lines if (box := line.bounding_box())]
        left, right = min(b["x"] for b in boxes), max(b["x"] + b["width"] for b in boxes)
        assert right - left > 850  # from the first step to the last
    # Before and after scaling: 4 exponents from -30 to 1 drawn as 32 bars each; 8 window bars.
    assert seen.count("#histogram .barlayer .point") == 32 + 32 + 8
    assert seen.count("#heat .heatmaplayer image") == 0  # folded
    seen.unfold("Layer by step")
    seen.page.locator("#heat .heatmaplayer image").wait_for()
    assert seen.count(".finding.warning") == 1
    assert seen.count("#events tbody tr") == len(OVERFLOWS) + 1


def test_hover_tells_step_scale_cause_and_culprit(visit):
    seen = visit(training())
    seen.page.locator("#scale .scatterlayer .point").last.hover(force=True)
    label = seen.page.locator("#scale .hoverlayer .hovertext")
    label.wait_for()
    said = label.text_content()
    for words in ("step 40", "overflow, skip", "layer40.weight"):
        assert words in said
    assert "216" in said.replace("\u200b", "")  # 2 and a raised 16


def test_sorting_sorts_and_search_filters(visit):
    seen = visit(training())
    sampled = [n for n in seen.names() if not n.startswith("layer")]
    assert sampled == ["c.bias", "b.weight", "a.weight"]  # worst first: 100 %, 50 %, 0 % lost
    seen.sort_by("flushed")
    assert seen.names()[:3] == ["b.weight", "c.bias", "a.weight"]
    seen.sort_by("flushed")
    assert seen.names()[:3] == ["a.weight", "c.bias", "b.weight"]
    assert seen.names()[3:] == ["layer5.weight", "layer6.weight", "layer40.weight"]  # not known
    seen.sort_by("parameter")
    assert seen.names()[:3] == ["a.weight", "b.weight", "c.bias"]
    seen.page.locator("#search").fill("WEIGHT")
    assert "c.bias" not in seen.names()
    assert seen.page.locator("#shown").inner_text() == "5 of 6"
    seen.page.locator("#search").fill("")
    assert len(seen.names()) == 6


def test_a_name_shows_its_histogram_and_buttons_change_the_heatmap(visit):
    seen = visit(training())
    seen.unfold("Layer by step")
    seen.page.locator("#parameters a", has_text="c.bias").click()
    assert seen.page.locator("#which option:checked").inner_text() == "c.bias"
    assert seen.count("#histogram .barlayer .point") == 1 + 1 + 8
    colour = "document.getElementById('heat').data[0].z[1][0]"
    seen.until("document.getElementById('heat').data")
    assert seen.page.evaluate(colour) == 1  # b.weight's median
    seen.page.locator(".modes[data-of=heat] button", has_text="smallest").click()
    assert seen.page.evaluate(colour) == -30
    assert seen.page.locator(".modes[data-of=heat] [aria-pressed=true]").inner_text() == "smallest"


def test_charts_over_steps_zoom_together(visit):
    seen = visit(training())
    seen.page.evaluate("Plotly.relayout('scale', {'xaxis.range[0]': 10, 'xaxis.range[1]': 20})")
    for chart in ("headroom", "norm", "loss"):
        seen.until(f"String(document.getElementById('{chart}').layout.xaxis.range) == '10,20'")


def test_phone_has_no_horizontal_scroll(visit):
    wide = "module.with.a.very.long.name." * 6
    run = training()
    run.samples.append(Sample(59, {wide: {**SHARES, "elements": 1, "exponents": {"0": 1}}}))
    finding = Finding("broken", wide, wide, (1, 2), (wide,), wide)
    seen = visit(run, [finding], viewport=PHONE, is_mobile=True, has_touch=True)
    seen.unfold("Layer by step")
    seen.page.locator("#heat .main-svg").first.wait_for()
    assert seen.page.evaluate("innerWidth") == 390
    assert seen.fits()
    for chart in ("scale", "histogram", "heat"):
        box = seen.page.locator(f"#{chart} .main-svg").first.bounding_box()
        assert 250 < box["width"] <= 390


def test_dark_mode_is_dark_and_paper_is_white(visit):
    seen = visit(training())
    background = "getComputedStyle(document.body).backgroundColor"
    line = "document.getElementById('loss').data[0].line.color"
    light = seen.page.evaluate(background), seen.page.evaluate(line)
    seen.page.emulate_media(color_scheme="dark")
    seen.until(f"{line} != '{light[1]}'")
    dark = seen.page.evaluate(background)
    assert dark != light[0]
    assert max(map(int, dark.removeprefix("rgb(").rstrip(")").split(","))) < 64
    seen.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert seen.page.evaluate(line) == light[1]
    seen.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert seen.page.evaluate(line) != light[1]


@pytest.mark.parametrize("name", [HOSTILE, LINK], ids=["script", "link"])
def test_a_name_with_markup_is_shown_as_text(visit, name):
    bad = {"verdict": Verdict.SKIP, "cause": Cause.OVERFLOW, "nonfinite": True}
    shares = {**SHARES, "elements": 4, "exponents": {"-3": 4}}
    run = Run(
        header={"rule": name, "parameters": {name: 4}},
        steps=[Step(0, 8.0, 4.0, **bad, culprits=(name,), key=name), Step(1, 4.0, 4.0, 1.0)],
        samples=[Sample(0, {name: shares}), Sample(1, {name: shares})],
        events=[Event(0, "note", {"text": name})],
    )
    seen = visit(run, [Finding("hint", name, name, (), (name,), name)])
    assert seen.names() == [name]
    assert seen.count("img, main a:not([href^='#'])") == 0
    seen.unfold("Layer by step")
    seen.page.locator("#scale .scatterlayer .point").last.hover(force=True)
    label = seen.page.locator("#scale .hoverlayer .hovertext")
    label.wait_for()
    assert name in label.text_content()
    assert seen.page.locator("#heat .ytick text").first.text_content().endswith(name[-13:])
    assert seen.count("img, svg a") == 0


def test_the_page_refuses_foreign_scripts_and_requests(visit):
    seen = visit(training())
    image = '<img src="data:," onerror="pwned = 1">'
    seen.page.evaluate(f"document.body.insertAdjacentHTML('beforeend', '{image}')")
    asked = seen.page.evaluate("fetch('https://example.com').then(() => 'sent', () => 'refused')")
    assert asked == "refused"
    seen.page.wait_for_timeout(100)
    assert seen.page.evaluate("typeof pwned") == "undefined"
    assert any("Content Security Policy" in line for line in seen.trouble)
    seen.trouble.clear()  # the browser's own complaints about the two attempts
    seen.requests[:] = [u for u in seen.requests if not u.startswith("https://example.com")]


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (Run(), "Nothing was recorded"),
        (Run(steps=[Step(0, 8.0, 8.0)]), "1 step"),
        (Run(steps=[Step(i, 8.0, 8.0, loss=math.nan) for i in range(9)]), "9 steps"),
        (Run(steps=[Step(i, 0.0, math.inf) for i in range(3)]), "3 steps"),
        (Run(samples=[Sample(0, {"w": {"elements": 0, "exponents": {}}})]), "Nothing was recorded"),
    ],
    ids=["empty", "one step", "no number", "no scale", "empty sample"],
)
def test_a_poor_run_has_a_page_all_the_same(visit, run, words):
    seen = visit(run)
    assert words in seen.page.locator("#verdict").inner_text()
    assert seen.fits()


def test_several_losses_have_a_line_each(visit):
    steps = [
        Step(i, 2.0**k, 2.0**k, 1.0, loss=float(k), key=key)
        for i in range(9)
        for k, key in enumerate(("generator", "critic"), 3)
    ]
    seen = visit(Run(steps=steps))
    assert seen.count("#scale .scatterlayer .js-line") == 2
    assert seen.page.locator("#loss .legendtext").all_text_contents() == ["generator", "critic"]


def test_the_public_function_gives_this_page():
    assert report.html(training()) == _html.report(training(), _html.diagnose(training()))
