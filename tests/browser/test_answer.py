"""The page: the answer on the first screen, links there and back, copies, other ways to read it."""

import re
from pathlib import Path

import axe_playwright_python
import pytest
from browser.runs import PHONE, SHARES, training

from gradlift.analysis.findings import Finding
from gradlift.journal import Call, Calls, Event, Probe, Run, Sample
from gradlift.report.page.comparison import comparison

AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
ORDER = ("zero_grad", "autocast", "scale", "backward", "clip_grad_norm_", "scaler.step", "update")
CODE = {str(n): f"    line {n}" for n in range(28, 40)}
OVERFLOW = Finding(
    *("warning", "The scale overflows at head", "It overflowed 3 times.", (5, 6, 40)),
    *(("a.weight",), "Start lower.", "overflows", "train.py:31", "likely"),
    "train.py:31\n-scaler = GradScaler()\n+scaler = GradScaler(init_scale=2**12)",
)


def looked_at():
    """The training, of which everything was looked at."""
    run = training()
    outputs = {"type": "Linear", "dtype": "float16", "amax": 9000.0, "zero": 0.0}
    weights = {"dtype": "bfloat16", "rms": 1.0, "update": 1e-3, "unchanged": 0.5}
    run.forwards.extend(Probe(i, {"body": outputs, "head": outputs}) for i in range(0, 60, 5))
    run.weights.extend(Sample(i, {"a.weight": weights, "c.bias": weights}) for i in range(0, 60, 5))
    order = tuple(Call(name, f"train.py:{30 + i}", "SGD") for i, name in enumerate(ORDER))
    run.calls.append(Calls(0, order, 60))
    run.events.append(Event(None, "source", {"file": "train.py", "lines": CODE}))
    return run


def of(kind, **more):
    facts = {
        "title": f"About {kind}",
        "evidence": "The numbers.",
        "steps": (5,),
        "advice": "Do it.",
    }
    return Finding("broken", **(facts | {"kind": kind, "parameters": ("c.bias",)} | more))


TWENTY = [OVERFLOW, *(of(f"kind-{i}", title=f"Finding {i}", steps=(i,)) for i in range(19))]
STATES = {
    "empty": (Run, []),
    "healthy": (looked_at, []),
    "one": (looked_at, [OVERFLOW]),
    "twenty": (looked_at, TWENTY),
}


# The first screen


def test_the_answer_is_on_the_first_screen(visit):
    seen = visit(looked_at(), TWENTY)
    first = seen.page.locator(".finding").first
    for text in ("overflows at head", "line 31", "init_scale=2**12", "Start lower", "likely"):
        box = first.get_by_text(text).first.bounding_box()
        assert box["y"] + box["height"] < 900, text
    chart = seen.page.locator("#answer-chart .main-svg").first.bounding_box()
    assert chart["y"] + chart["height"] < 900
    assert seen.page.locator(".finding details:not(.kind)[open]").count() == 0  # the other 19


@pytest.mark.parametrize(
    ("kind", "curve"),
    [
        ("overflows", "scale"),
        ("spike", "loss"),
        ("vanishing", "norm"),
        ("dead-relu", "body"),
        ("updates-lost", "c.bias"),
        ("dead-layer", "c.bias"),
    ],
)
def test_the_answer_has_the_chart_in_which_one_sees_it(visit, kind, curve):
    seen = visit(looked_at(), [of(kind)])
    assert seen.page.evaluate("document.getElementById('answer-chart').data.length") >= 1
    drawn = seen.page.evaluate("document.getElementById('answer-chart').data[0].y")
    assert any(value is not None for value in drawn)
    flags = seen.page.evaluate("document.getElementById('answer-chart').layout.annotations")
    assert ["finding " + kind] == [flag["name"] for flag in flags if "name" in flag]
    said = seen.page.locator(".seen").inner_text() + str(
        seen.page.evaluate("document.getElementById('answer-chart').data[0].name")
    )
    assert curve in said.lower().replace("gradient norm", "norm")


def test_no_flag_covers_another(visit):
    seen = visit(looked_at(), TWENTY)
    boxes = [b.bounding_box() for b in seen.page.locator("#scale .annotation .bg").all()]
    assert len(boxes) == 12
    for i, a in enumerate(boxes):
        for b in boxes[:i]:
            apart = (
                abs(a["x"] - b["x"]) >= a["width"] - 1 or abs(a["y"] - b["y"]) >= a["height"] - 1
            )
            assert apart, (a, b)
    assert seen.count("#answer-chart .annotation") == 1


def test_a_kind_unfolds_its_section(visit):
    seen = visit(looked_at(), [OVERFLOW])
    inside = seen.page.locator(".kind b", has_text="What to do").first
    assert not inside.is_visible()
    seen.page.locator(".kind summary").first.click()
    assert inside.is_visible()


# Links


def test_a_finding_links_to_its_step_and_the_mark_back(visit):
    seen = visit(looked_at(), [of("spike"), OVERFLOW])
    seen.page.locator(".finding summary", has_text="overflows at head").click()
    seen.page.locator(".finding .where a", has_text=re.compile("^40$")).click()
    seen.until("location.hash.includes('step=40')")
    lines = "document.getElementById('scale').layout.shapes.filter((s) => s.x0 === 40).length"
    seen.until(f"{lines} === 2")  # the finding's and that of the address
    assert "overflow" in seen.page.locator("#view-text").inner_text()
    seen.page.evaluate("document.querySelectorAll('.finding details').forEach(d => d.open = false)")
    mark = seen.page.locator("#scale .scatterlayer .point").last
    mark.scroll_into_view_if_needed()
    mark.click(force=True)
    seen.until("location.hash.includes('finding=overflows')")
    article = seen.page.locator("[data-finding=overflows]")
    assert article.locator("details").first.get_attribute("open") is not None
    assert article.evaluate("(e) => e === document.activeElement")


def test_an_address_restores_the_view(visit):
    seen = visit(looked_at(), [OVERFLOW], "#step=40&parameter=c.bias&module=head&zoom=20..50")
    assert seen.page.locator("#which option:checked").inner_text() == "c.bias"
    assert seen.page.locator("#module option:checked").text_content() == "head"
    assert seen.page.evaluate("document.getElementById('loss').layout.xaxis.range") == [20, 50]
    told = seen.page.locator("#view-text").inner_text()
    for text in ("step 40", "scale 2^16", "parameter c.bias", "module head"):
        assert text in told
    current = seen.page.locator("#parameters tr[aria-current]")
    assert current.locator("td").first.inner_text() == "c.bias"
    seen.page.keyboard.press("Escape")
    assert seen.page.evaluate("location.hash") == ""
    assert not seen.page.locator("#view").is_visible()
    seen.page.go_back()
    seen.until("location.hash.includes('step=40')")
    assert seen.page.locator("#view").is_visible()


@pytest.mark.parametrize(
    "place", ["#step=x&zoom=1", "#parameter=nobody", "#chart=%3Cb%3E&finding=no"]
)
def test_a_broken_address_is_left_alone(visit, place):
    seen = visit(looked_at(), [OVERFLOW], place)
    assert seen.count("#scale .main-svg") > 0


def test_it_can_be_used_by_keyboard_alone(visit):
    seen = visit(looked_at(), TWENTY)
    for _ in range(60):
        seen.page.keyboard.press("Tab")
        if seen.page.evaluate("document.activeElement.matches('.finding > details > summary')"):
            break
    seen.page.keyboard.press("Enter")
    assert seen.count(".finding details:not(.kind)[open]") == 1
    seen.page.keyboard.press("Tab")
    assert seen.page.evaluate("document.activeElement.closest('.finding') !== null")
    assert seen.page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"


# To take along


def saved(seen, label):
    with seen.page.expect_download() as waiting:
        seen.page.get_by_label(label, exact=True).click()
    download = waiting.value
    return download.suggested_filename, Path(download.path()).read_bytes()


def test_charts_and_tables_can_be_saved(visit):
    seen = visit(looked_at(), [OVERFLOW])
    name, png = saved(seen, "save loss as PNG")
    assert name == "loss.png"
    assert png.startswith(b"\x89PNG")
    assert len(png) > 5000
    name, svg = saved(seen, "save scale as SVG")
    assert name == "scale.svg"
    assert svg.lstrip().startswith(b"<svg")
    assert b"overflow, skip" in svg  # the legend of its marks
    name, csv = saved(seen, "save parameters as CSV")
    assert name == "parameters.csv"
    rows = csv.decode().splitlines()
    assert rows[0].startswith('"parameter","flushed"')
    assert rows[1].startswith('"c.bias",')
    assert len(rows) == 7


def test_a_saved_table_starts_no_formula(visit):
    run = training()
    shares = {**SHARES, "elements": 4, "exponents": {"-3": 4}}
    run.samples.append(Sample(59, {'=1+1,"x"': shares}))
    _, csv = saved(visit(run), "save parameters as CSV")
    assert '"\'=1+1,""x""",' in csv.decode()


def test_on_paper_all_is_unfolded_and_nothing_is_wider_than_the_sheet(visit):
    seen = visit(looked_at(), [OVERFLOW, of("spike")])
    pdf = seen.page.pdf(format="A4", print_background=True)
    assert pdf.startswith(b"%PDF")
    seen.page.emulate_media(media="print")
    seen.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert seen.count("details.section:not([open])") == 0
    assert seen.page.get_by_text("Do it.").is_visible()  # the second finding's advice
    assert not seen.page.get_by_text("What overflows means").is_visible()
    for chart in ("scale", "heat", "forward", "updates"):
        assert seen.page.evaluate(f"document.getElementById('{chart}').layout.width") == 660
    assert not seen.page.locator(".save").first.is_visible()
    seen.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert seen.count("details.section:not([open])") > 0


# For everybody


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_has_no_complaint(visit, state, scheme):
    make, findings = STATES[state]
    phone = {"viewport": PHONE} if scheme == "dark" else {}
    seen = visit(make(), findings, color_scheme=scheme, **phone)
    unfold = "document.querySelectorAll('details').forEach((d) => { d.open = true; })"
    seen.page.evaluate(unfold)
    seen.page.wait_for_timeout(200)
    assert seen.fits()
    seen.page.evaluate(AXE)
    found = seen.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    assert len(found["passes"]) >= 20
    assert [(v["id"], v["nodes"][0]["html"]) for v in found["violations"]] == []


# Two runs


def test_two_runs_on_one_page(visit):
    first, second = looked_at(), looked_at()
    second.steps[30:] = [s._replace(scale=s.scale / 2, loss=1.0) for s in second.steps[30:]]
    second.header["rule"] = "auto"
    seen = visit(comparison(first, second, ("a run", "b run")))
    assert "part at step 30" in seen.page.locator("#verdict").inner_text()
    for chart in ("scale", "loss"):
        names = f"[...new Set(document.getElementById('{chart}').data.map((d) => d.name))]"
        assert {"a run", "b run"} <= set(seen.page.evaluate(names))
    assert seen.page.locator("td", has_text=re.compile("^auto$")).is_visible()
    seen.page.locator("table a", has_text=re.compile("^30$")).first.click()
    seen.until("location.hash.includes('step=30')")
    seen.page.evaluate(AXE)
    found = seen.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    assert [(v["id"], v["nodes"][0]["html"]) for v in found["violations"]] == []
