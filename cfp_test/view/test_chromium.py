"""Pages in headless Chromium, at the widths of a laptop and of a phone."""

import pytest

from cfp.view.text import page_html
from cfp_test.view.browser import console_and_requests, looked_at
from cfp_test.view.reported import DEEP, HARMFUL, HOSTILE

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("plan", [DEEP, HOSTILE], ids=["deep", "hostile"])
@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_overlaps_or_is_cut(plan, width, dark, tmp_path):
    found = looked_at(page_html(plan), tmp_path, width, dark=dark)
    assert found["width"] == width
    assert found["faults"] == []
    assert found["drawn"] > 5
    assert found["scheme"] == ("rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)")
    assert "9.500 ms" in found["text"]
    if plan is HOSTILE:
        assert HARMFUL[0] in found["text"] and HARMFUL[2] in found["text"]


def test_nothing_is_loaded_and_nothing_complains(tmp_path):
    assert console_and_requests(page_html(HOSTILE), tmp_path) == ([], [])


def test_the_looks_see_what_is_wrong(tmp_path):
    page = (
        '<meta http-equiv="x"><body><div class="cfp">'
        '<p style="position:absolute;top:5px">one text</p>'
        '<p style="position:absolute;top:5px">two texts</p>'
        '<p style="width:900px">' + "word " * 90 + "</p>"
        '<svg viewBox="0 0 10 10" width="50"><text x="8" y="5">long</text></svg>'
        "</div></body>"
    )
    faults = " ".join(looked_at(page, tmp_path, 390, dark=False)["faults"])
    for fault in ("the page is", "cut: P word", "overlap: P one", "outside of its"):
        assert fault in faults
    bad = '<img src="http://127.0.0.1:9/x.png"><script>console.error("oh")</script>'
    console, asked = console_and_requests(bad, tmp_path)
    assert len(console) == 1 and asked == ["http://127.0.0.1:9/x.png"]
