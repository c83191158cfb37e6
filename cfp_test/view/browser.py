"""Asks headless Chromium how a page comes out: what is cut, overlaps, or is loaded."""

import json
import re
import shutil
import subprocess
from html import escape as html_escape
from html import unescape as html_unescape
from pathlib import Path
from typing import Any

from cfp_test.support.waiting import GUARD_SECONDS

# Looks at a page from inside, which its own policy would not let anything do.
_LOOK = """
<script>
addEventListener("load", () => {
  const faults = [];
  const wide = innerWidth;
  const name = (e) => e.tagName + " " + e.textContent.trim().slice(0, 60);
  if (document.documentElement.scrollWidth > wide)
    faults.push("the page is " + document.documentElement.scrollWidth + " wide");
  const hidden = (e) => e.closest(".hidden, .skip, thead") && getComputedStyle(
    e.closest(".hidden, .skip, thead")).position === "absolute";
  const leaves = [...document.querySelectorAll(".cfp *")].filter((e) =>
    [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()) &&
    !["STYLE", "SCRIPT", "title"].includes(e.tagName) && !hidden(e));
  const boxes = [];
  for (const e of leaves) {
    const range = document.createRange();
    for (const n of e.childNodes) {
      if (n.nodeType !== 3 || !n.data.trim()) continue;
      range.selectNodeContents(n);
      for (const r of range.getClientRects()) {
        if (r.width < 1 || r.height < 1) continue;
        if (r.left < -0.5 || r.right > wide + 0.5) faults.push("cut: " + name(e));
        boxes.push([r, e]);
      }
    }
    if (e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).overflow !== "visible")
      faults.push("clipped: " + name(e));
  }
  for (const text of document.querySelectorAll("svg text")) {
    const r = text.getBoundingClientRect();
    const s = text.closest("svg").getBoundingClientRect();
    if (r.left < s.left - 0.5 || r.right > s.right + 0.5 || r.bottom > s.bottom + 0.5)
      faults.push("outside of its drawing: " + name(text));
  }
  for (const cell of document.querySelectorAll("td[data-label]"))
    if (getComputedStyle(cell).display === "grid" &&
        getComputedStyle(cell, "::before").whiteSpace === "nowrap")
      faults.push("a heading cannot wrap: " + name(cell));
  boxes.sort((a, b) => a[0].top - b[0].top);
  for (let i = 0; i < boxes.length; i++)
    for (let j = i + 1; j < boxes.length; j++) {
      const [a, e] = boxes[i], [b, f] = boxes[j];
      if (b.top > a.bottom) break;
      const w = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const h = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (w > 1 && h > 0.45 * Math.min(a.height, b.height))
        faults.push("overlap: " + name(e) + " | " + name(f));
    }
  const found = document.createElement("pre");
  found.id = "found";
  const drawn = document.querySelectorAll("svg").length;
  found.textContent = JSON.stringify({faults, width: wide, drawn,
    scheme: getComputedStyle(document.querySelector(".cfp")).backgroundColor,
    text: document.querySelector(".cfp").innerText});
  parent.document.body.append(found);
});
</script>
"""

# Where Chromium looks for accounts, updates and dictionaries in spite of all.
_OWN = (
    "https://accounts.google.com/",
    "https://www.google.com/async/",
    "https://redirector.gvt1.com/",
    "https://update.googleapis.com/",
    "http://update.googleapis.com/",
    "http://clients2.google.com/",
    "https://clients2.google.com/",
    "file:",
    "data:",
)


def chromium() -> str:
    """The browser's command.

    Raises:
        FileNotFoundError: there is none.
    """
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        raise FileNotFoundError("no chromium: install the package of that name")
    return found


def _run(page: Path, width: int, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            chromium(),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--enable-logging=stderr",
            f"--user-data-dir={page.parent / 'profile'}",
            f"--window-size={max(width, 500)},1200",
            # What Chromium asks for of its own accord is no page's affair.
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--no-first-run",
            "--disable-default-apps",
            *more,
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=GUARD_SECONDS,
        check=True,
    )


def looked_at(html: str, folder: Path, width: int, *, dark: bool) -> dict[str, Any]:
    """Lists faults in a page's layout, all of it unfolded.

    Returns:
        ``faults`` as text, the ``width`` in pixels, how many drawings are ``drawn``,
        the background as ``scheme``, and the page's ``text``.
    """
    open_html = html.replace("<details", "<details open")
    policy = re.search(r"<meta http-equiv=[^>]*>", open_html)
    assert policy is not None, "the page has a policy"
    page = folder / f"look-{width}-{dark}.html"
    looking = open_html.replace(policy[0], "").replace("</body>", _LOOK + "</body>")
    # Chromium's windows have a least width; frames have none.
    page.write_text(
        '<!DOCTYPE html><meta charset="utf-8"><body style="margin:0">'
        f'<iframe style="width:{width}px;height:1200px;border:0" '
        f'srcdoc="{html_escape(looking)}"></iframe></body>'
    )
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    dom = _run(page, width, "--dump-dom", scheme).stdout
    found = re.search(r'<pre id="found">(.*?)</pre>', dom, re.DOTALL)
    assert found is not None, "the script has run"
    return json.loads(html_unescape(found[1]))


def console_and_requests(html: str, folder: Path) -> tuple[list[str], list[str]]:
    """Lists what a page writes to the console, and the addresses it asks for."""
    page, log = folder / "plain.html", folder / "net.json"
    page.write_text(html)
    done = _run(page, 1440, "--dump-dom", f"--log-net-log={log}")
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    asked = set(re.findall(r'"url":"([^"]+)"', log.read_text()))
    return console, sorted(u for u in asked if not u.startswith(_OWN))
