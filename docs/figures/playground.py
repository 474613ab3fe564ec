"""Take the pictures of the playground with Chromium: ``python -m docs.figures.playground [FOLDER]``, from the root."""

import sys
from pathlib import Path
from typing import Any

from tests.support.browser import Visit, launched, serving

WIDE: dict[str, Any] = {"viewport": {"width": 1280, "height": 860}}
PHONE: dict[str, Any] = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "device_scale_factor": 2}
SETTLED = 600
"""Milliseconds until nothing moves any more."""


def light(visit: Visit) -> None:
    """A run that has ended."""
    visit.run()
    visit.page.mouse.move(5, 5)


def constraint(visit: Visit) -> None:
    """What a pattern excludes."""
    visit.page.click(".chip:has-text('By a pattern')")
    visit.finish()
    visit.page.locator("#right .cell.written", has_text="There").hover()
    visit.page.wait_for_selector("#panel .excluded")
    visit.page.wait_for_selector("#pattern-state:has-text('states')")


def ties(visit: Visit) -> None:
    """The position that is tied most to another one."""
    page = visit.page
    visit.run()
    page.locator("#slider").fill("1")
    page.evaluate("document.activeElement.blur()")
    with page.expect_response("**/v1/inspect") as response:
        page.locator("#right .cell.masked.active").first.click()
    answer = response.value.json()
    strongest = [max(row) for row in answer["mutual_information"]]
    tied = answer["positions"][strongest.index(max(strongest))]
    page.click("#panel .close")
    cell = page.locator(f"#right .cell[data-position='{tied}']")
    cell.tap() if page.evaluate("navigator.maxTouchPoints") else cell.hover()
    page.wait_for_selector("#panel .bars")


PICTURES = {
    "playground-light": (WIDE, light),
    "playground-dark-ties": ({**WIDE, "color_scheme": "dark"}, ties),
    "playground-phone-ties": (PHONE, ties),
    "playground-constraint": ({"viewport": {"width": 1280, "height": 1080}}, constraint),
}

if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    with launched() as browser, serving() as server:
        for name, (context, show) in PICTURES.items():
            with browser.new_context(**context) as opened:
                visit = Visit(opened.new_page(), server.url)
                visit.listen()
                visit.open()
                show(visit)
                visit.check()
                visit.page.wait_for_timeout(SETTLED)
                visit.page.screenshot(path=folder / f"{name}.png")
