"""Nothing changes by itself: stories and op tapes as they were before the redesign.

On one machine the weights and optimizer states of all 559 stories were equal to the bit before and
after. What is stored was made on another, so here numbers are compared to 1e-5.
"""

import pytest
from golden_stories import STORIES
from golden_tapes import TAPES
from golden_tools import first_difference, packed, stored, surroundings, tape_difference, unpacked

STORED, MADE_WITH = stored("stories.json")
STORED_TAPES, _ = stored("tapes.json")


def elsewhere():
    """Where this is not what the stories were made with: bits may differ for that alone."""
    here = surroundings()
    odd = {k: f"{MADE_WITH[k]} then, {here[k]} now" for k in here if here[k] != MADE_WITH[k]}
    return f"\n(but mind: {odd})" if odd else ""


def test_the_stored_stories_are_those_that_are_run():
    assert list(STORED) == list(STORIES)
    assert list(STORED_TAPES) == list(TAPES)


@pytest.mark.parametrize("name", STORIES)
def test_story(name):
    found = first_difference(STORED[name], STORIES[name]())
    assert found is None, found + elsewhere()


@pytest.mark.parametrize("name", TAPES)
def test_tape(name):
    old, new = STORED_TAPES[name], TAPES[name]()
    assert new["reads"] <= old["reads"], f"{old['host']} -> {new['host']}"
    scalars = "_local_scalar_dense"
    assert new["host"][scalars] <= old["host"][scalars], f"{old['host']} -> {new['host']}"
    difference = tape_difference(old["ops"], new["ops"])
    assert new["ops"] == old["ops"], f"{len(old['ops'])} -> {len(new['ops'])} ops\n{difference}"


# The comparison itself


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t["steps"][1].update(cause="NONE"), "steps[1].cause: 'OVERFLOW' != 'NONE'"),
        (lambda t: t["steps"][1].pop("cause"), "steps[1].cause: 'OVERFLOW' is missing"),
        (lambda t: t["steps"][0].update(more=1), "steps[0].more: 1 is new"),
        (lambda t: t["steps"][0].update(scale=8), "steps[0].scale: 8.0 != 8"),
        (lambda t: t["steps"][0].update(scale=8.001), "steps[0].scale: 8.0 != 8.001"),
        (lambda t: t["steps"][0].update(w="float32[3] ab"), "steps[0].w: 'float32[2] ab' != "),
        (lambda t: t["steps"][0].update(norm="0x1.1p+0"), "steps[0].norm: '0x1.0p+0' != "),
        (lambda t: t["steps"].pop(), "steps: 2 entries != 1, the first of the others: {"),
    ],
)
def test_the_first_difference_is_named(change, said):
    def told():
        first = {"scale": 8.0, "w": "float32[2] ab", "norm": "0x1.0p+0"}
        return {"steps": [first, {"scale": 4.0, "cause": "OVERFLOW"}]}

    processor = told()
    processor["steps"][0].update(scale=8.00001, w="float32[2] cd", norm="0x1.00001p+0")
    assert first_difference(told(), processor) is None
    changed = told()
    change(changed)
    assert first_difference(told(), told()) is None
    assert first_difference(told(), changed).startswith(said)


def test_what_is_packed_comes_out_again():
    line = {"text": "x" * 100, "list": [1, 2.5, None]}
    stories = {"a": {"steps": [line, line]}, "b": {"steps": [line, line], "more": [line]}}
    short, pool = packed(stories)
    assert len(pool) == 2
    assert {k: unpacked(v, pool) for k, v in short.items()} == stories
