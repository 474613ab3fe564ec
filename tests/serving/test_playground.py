"""The playground in a real browser, with the real server and the bundled model behind it."""

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import codd
from codd.cli import sampling
from tests.support.browser import Relay, Server, Visit, launched, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Route

FOLDER = Path(codd.__file__).parent / "serving" / "playground"
PROMPT = "Tom has 12 apples. He buys 7 more. How many apples does he have now?"
SHORT = {"prompt": PROMPT, "gen_length": "32", "steps": "4", "sampler": "any_order"}
PATTERN = r"\d{1,3} apples"
SHORTER = {"prompt": PROMPT, "gen_length": "16", "steps": "2"}
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True}
LINK = "#prompt=Ann+has+5+pears.+She+eats+2.&gen_length=16&steps=2&temperature=0.7&seed=11&sampler=latent&chat=on"


# Module scope: a browser that stayed open would keep an event loop running under other tests.
@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    with launched() as found:
        yield found


@pytest.fixture(scope="module")
def server(browser: "Browser") -> Iterator[Server]:
    with serving() as found:
        yield found


@pytest.fixture
def visit(browser: "Browser", server: Server, request: pytest.FixtureRequest) -> Iterator[Visit]:
    """A fresh page; ``indirect`` parameters are those of the browser's context."""
    yield from visiting(browser, server.url, getattr(request, "param", {}))


def visiting(browser: "Browser", url: str, context: dict[str, Any]) -> Iterator[Visit]:
    with browser.new_context(**{"viewport": {"width": 1280, "height": 860}, **context}) as opened:
        found = Visit(opened.new_page(), url)
        found.listen()
        yield found
        found.check()


def asked(url: str, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def test_two_columns_fill_and_say_what_the_server_says(visit: Visit) -> None:
    page = visit.open()
    assert "640 states" in page.inner_text("#model")
    visit.fill(**SHORT)
    assert "8 tokens per step" in page.inner_text("#pace")
    page.click("#run")
    # Both at once, asked in one go: between two questions a run may come to its end.
    page.wait_for_selector("#right:has(.cell.fresh):has(.cell.masked)")
    texts = visit.finish()
    for text, sampler in zip(texts, ("factorized", "any_order"), strict=True):
        body = {"prompt": PROMPT, "gen_length": 32, "steps": 4, "sampler": sampler, "stream": False}
        assert text == asked(visit.url, "/v1/denoise", body)["done"]["text"]
    assert texts[0] != texts[1]
    assert visit.count(".cell.masked") == 0
    assert "Tom has 12 apples" in page.inner_text("#left .text")
    figures = page.locator("#right .figures dd").all_inner_texts()
    assert figures[0] == "4"
    assert figures[3] == "4"
    assert float(figures[1]) > 0
    assert page.locator("#left .figures dd").all_inner_texts()[3] == "0"
    assert "done after 4 network calls" in page.inner_text("#status")


def test_begins_with_the_servers_defaults_and_says_what_to_expect(visit: Visit) -> None:
    requests: list[Any] = []
    page = visit.open()
    with urllib.request.urlopen(f"{visit.url}/v1/models") as answer:
        [card] = json.load(answer)["data"]
    assert page.inner_text("#about") == card["about"] == sampling.ABOUT
    for name in ("steps", "threshold", "gen_length", "block_length", "temperature", "seed"):
        usual = card["defaults"][name]
        assert page.input_value(f"#{name}") == ""
        assert page.get_attribute(f"#{name}", "placeholder") == ("none" if usual is None else f"{usual:g}")
    for name in ("remasking", "sampler"):
        assert page.input_value(f"#{name}") == card["defaults"][name]
    assert f"{card['defaults']['gen_length']} masks" in page.inner_text("#pace")
    page.on("request", lambda request: requests.append(request.post_data_json) if "denoise" in request.url else None)
    page.click("#run")
    page.wait_for_selector("#right .cell.fresh")
    page.click("#stop")
    page.wait_for_selector("#right .state:has-text('stopped')")
    said = {"prompt": page.input_value("#prompt"), "remasking": card["defaults"]["remasking"], "stream": True}
    assert requests == [{**said, "sampler": sampler} for sampler in ("factorized", card["defaults"]["sampler"])]


def test_goes_back_and_forth_in_both_columns(visit: Visit) -> None:
    page = visit.open()
    visit.fill(**SHORT)
    visit.run()
    last = visit.text("left"), visit.text("right")
    assert page.inner_text("#where") == "step 4 of 4"

    page.locator("#left-title").click()  # the focus is nowhere: keys are the player's
    page.keyboard.press("ArrowLeft")
    assert page.inner_text("#where") == "step 3 of 4"
    assert visit.count("#left .cell.fresh") == visit.count("#right .cell.fresh") == 8
    page.keyboard.press("Home")
    assert page.inner_text("#where") == "step 0 of 4"
    assert visit.count("#left .cell.masked") == visit.count("#right .cell.masked") == 32
    page.locator("#slider").fill("2")
    assert visit.count("#left .cell.masked") == visit.count("#right .cell.masked") == 16
    page.click("#back")
    assert visit.count("#left .cell.masked") == 24
    page.locator("#left-title").click()
    page.keyboard.press("End")
    assert (visit.text("left"), visit.text("right")) == last
    page.click("#play")
    page.wait_for_selector("#play[aria-label='Pause']")
    page.wait_for_selector("#play[aria-label='Play']")
    assert page.inner_text("#where") == "step 4 of 4"


def test_pointing_shows_both_beliefs_and_the_ties(visit: Visit) -> None:
    page = visit.open()
    visit.fill(**SHORT)
    visit.run()
    page.locator("#slider").fill("1")
    questions: list[Any] = []
    page.on("request", lambda request: questions.append(request.post_data_json) if "inspect" in request.url else None)
    cell = page.locator("#right .cell.masked.active").first
    cell.hover()
    page.wait_for_selector("#panel .bars")
    (question,) = questions
    answer = asked(visit.url, "/v1/inspect", question)
    row = answer["positions"].index(int(cell.get_attribute("data-position") or -1))
    for side in ("network", "joint"):
        likeliest = f"{100 * answer[side][row][0]['probability']:.1f}%"
        assert likeliest in page.locator(f"#panel .bar.{side} .number").all_inner_texts()
        assert visit.count(f"#panel .bar.{side} .fill") >= 2
    ties = sorted((nats for nats in answer["mutual_information"][row] if nats >= 0.005), reverse=True)
    assert visit.count("#right .arcs path") == min(12, len(ties)) > 0
    assert visit.count("#left .arcs path") == 0
    assert page.locator("#panel .ties-list .number").first.inner_text() == f"{ties[0]:.2f}"

    page.locator("#right .cell.masked.active").nth(1).hover()  # of the same step: the answer is known
    page.wait_for_selector("#panel .bars")
    page.locator("#right .cell.fresh").first.hover()  # of the step before
    page.wait_for_selector("#panel .chosen")
    assert len(questions) == 2
    assert questions[1]["ids"].count(1) == 32
    assert "step 1 of 4" in page.inner_text("#panel .facts")
    page.mouse.move(5, 5)
    page.wait_for_selector("#panel", state="hidden")
    assert visit.count(".arcs path") == 0


def test_a_link_gives_the_same_texts(visit: Visit) -> None:
    page = visit.open(LINK)
    first = visit.finish()
    assert page.input_value("#seed") == "11"
    assert page.input_value("#sampler") == "latent"
    assert page.input_value("#prompt") == "Ann has 5 pears. She eats 2."
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click("#copy")
    page.wait_for_selector("#copy:has-text('Copied')")
    copied = page.evaluate("navigator.clipboard.readText()")
    page.goto("about:blank")
    page.goto(copied)
    assert visit.finish() == first
    visit.fill(seed="12")
    assert visit.run() != first
    assert "seed=12" in page.url


def test_masks_in_the_prompt_are_filled_in_place(visit: Visit) -> None:
    page = visit.open()
    visit.fill(prompt="Once upon a time there was a", gen_length="0", steps="2")
    page.locator("#prompt").press("End")
    for _ in range(4):
        page.click("#mask")
    page.keyboard.type(" who lived.")
    assert visit.count("#left .cell.masked") == 4
    visit.run()
    shown = page.locator("#right .text")
    assert re.match(r"Once upon a time there was a.+ who lived\.", shown.inner_text())
    assert shown.locator(".cell.written").count() == 4


@pytest.mark.parametrize("visit", [{"viewport": {"width": 360, "height": 740}, "has_touch": True}], indirect=True)
def test_fits_a_phone(visit: Visit) -> None:
    page = visit.open()
    assert visit.overflow() <= 0
    visit.fill(**{**SHORTER, "prompt": f"{PROMPT} {'w' * 90}"}, seed="3", constraint="guided_choice")
    assert page.is_visible("#pattern")
    visit.run()
    assert visit.overflow() <= 0
    left, right = (page.locator(f"#{name}").bounding_box() for name in ("left", "right"))
    assert left is not None
    assert right is not None
    assert right["y"] >= left["y"] + left["height"]
    page.locator("#slider").fill("1")
    cell = page.locator("#right .cell.masked").nth(5)
    cell.tap()
    page.wait_for_selector("#panel .bars")
    sheet, token = page.locator("#panel").bounding_box(), cell.bounding_box()
    assert sheet is not None
    assert token is not None
    assert (sheet["x"], sheet["width"], round(sheet["y"] + sheet["height"])) == (0, 360, 740)
    assert token["y"] + token["height"] <= sheet["y"]
    assert visit.overflow() <= 0
    page.click("#panel .close")
    page.wait_for_selector("#panel", state="hidden")


SCROLLED = """async (text, top) => {
  const frame = () => new Promise(requestAnimationFrame);
  await frame(); await frame();  // what the slider changed is laid out
  text.scrollIntoView({ block: top ? "start" : "end", behavior: "instant" });
  await frame(); await frame();
  const box = element => { const { y, height } = element.getBoundingClientRect(); return { y, height }; };
  return [box(text), box(document.querySelector("#player"))];
}"""
"""Scrolls to a text, and gives its box and the player's, of one and the same frame."""


@pytest.mark.parametrize("visit", [PHONE], indirect=True)
def test_the_player_of_a_phone_covers_no_answer(visit: Visit) -> None:
    page = visit.open()
    visit.fill(prompt=PROMPT, gen_length="96", steps="3")
    visit.run()
    page.locator("#slider").fill("0")  # nothing but masks: longer than any text
    for name in ("left", "right"):
        for top in (True, False):
            text, player = page.locator(f"#{name} .text").evaluate(SCROLLED, top)
            assert player["y"] + player["height"] <= text["y"] or text["y"] + text["height"] <= player["y"]
            edge = text["y"] if top else text["y"] + text["height"]
            assert -1 <= edge <= 845


def test_can_be_read_in_light_and_dark(visit: Visit) -> None:
    page = visit.open()
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(LIGHTNESS) < 0.2
    page.emulate_media(color_scheme="light")
    lightness = page.evaluate(LIGHTNESS)
    assert lightness > 0.8
    visit.fill(**SHORTER)
    visit.run()
    page.locator("#slider").fill("1")
    page.locator("#right .cell.fresh").first.hover()
    page.wait_for_selector("#panel .bars")
    for _ in range(2):
        assert {text: ratio for text, ratio in page.evaluate(CONTRASTS).items() if ratio < 4.5} == {}
        page.click("#theme")
        page.locator("#right .cell.fresh").first.hover()
        page.wait_for_selector("#panel .bars")
    page.click("#theme")
    assert abs(page.evaluate(LIGHTNESS) - lightness) > 0.5
    page.reload()
    assert abs(page.evaluate(LIGHTNESS) - lightness) > 0.5


def test_works_by_keyboard_alone(visit: Visit) -> None:
    page = visit.open()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.keyboard.press("Control+A")
    page.keyboard.type(PROMPT)
    for value in ("2", "", "16"):  # steps, threshold, length
        page.keyboard.press("Tab")
        page.keyboard.press("Control+A")
        page.keyboard.type(value)
    page.keyboard.press("Control+Enter")
    visit.finish()
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.matches('#left .cell')"):
            break
    first = page.evaluate("Number(document.activeElement.dataset.position)")
    page.wait_for_selector("#panel .bars")
    assert page.evaluate("document.activeElement.getAttribute('aria-describedby')") == "panel"
    page.keyboard.press("ArrowRight")
    assert page.evaluate("Number(document.activeElement.dataset.position)") == first + 1
    page.keyboard.press(",")
    assert page.inner_text("#where") == "step 1 of 2"
    assert page.evaluate("Number(document.activeElement.dataset.position)") == first + 1
    page.keyboard.press("Escape")
    page.wait_for_selector("#panel", state="hidden")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.matches('#right .cell')")
    assert page.evaluate("getComputedStyle(document.activeElement.firstElementChild).outlineStyle") == "solid"


def test_markup_is_only_text(visit: Visit) -> None:
    page = visit.open()
    prompt = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    visit.fill(**{**SHORTER, "prompt": prompt, "chat": "off"})
    visit.run()
    assert page.inner_text("#left .text").startswith(prompt)
    assert visit.count("img") == 0
    assert visit.count("body script") == 0


def test_says_when_the_server_is_gone_and_back(browser: "Browser", server: Server) -> None:
    relay = Relay(server.url)
    for visit in visiting(browser, relay.open(), {}):
        visit.refused = True
        page = visit.open()
        visit.fill(**SHORTER)
        texts = visit.run()
        relay.close()
        page.click("#run")
        page.wait_for_selector("#notice:has-text('The server does not answer')")
        assert (visit.text("left"), visit.text("right")) == texts
        relay.open()
        page.wait_for_selector("#notice:has-text('The server is back')")
    relay.close()


def test_waits_while_the_server_is_busy(visit: Visit) -> None:
    visit.refused = True
    page = visit.open()
    visit.fill(**SHORTER)
    refusals = iter([True, True])

    def answer(route: "Route") -> None:
        if next(refusals, False):
            error = {"message": "the queue is full", "type": "rate_limit_error", "param": None, "code": None}
            route.fulfill(status=429, headers={"Retry-After": "1"}, json={"error": error})
        else:
            route.continue_()

    page.route("**/v1/denoise", answer)
    page.click("#run")
    page.wait_for_selector("#notice:has-text('busy, trying again in 1 s')")
    assert "again in 1 s" in page.inner_text("#left .state")
    visit.finish()
    assert not page.is_visible("#notice")


def test_stops_a_wait(visit: Visit) -> None:
    visit.refused = True
    page = visit.open()
    page.route("**/v1/denoise", lambda route: route.fulfill(status=429, headers={"Retry-After": "30"}, json={}))
    page.click("#run")
    page.wait_for_selector("#notice:has-text('trying again in')")
    page.keyboard.press("Escape")
    page.wait_for_selector("#left .state:has-text('stopped')")
    page.wait_for_selector("#stop", state="hidden")
    assert not page.is_visible("#notice")


def test_marks_the_field_that_is_refused(visit: Visit) -> None:
    visit.refused = True
    page = visit.open()
    visit.fill(**SHORTER, temperature="0")
    for name, value in [("steps", "0"), ("steps", "many"), ("temperature", "-1"), ("gen_length", "999")]:
        right = page.input_value(f"#{name}")
        visit.fill(**{name: value})
        page.click("#run")
        page.wait_for_selector(f"#{name}[aria-invalid=true]:focus")
        assert page.inner_text("#notice-text")
        assert visit.count("[aria-invalid]") == 1
        assert page.locator(".state").all_inner_texts() == ["refused", "refused"]
        visit.fill(**{name: right})
    visit.run()
    assert visit.count("[aria-invalid]") == 0


def test_asks_for_a_key_and_sends_it(visit: Visit) -> None:
    visit.refused = True
    page = visit.page

    def answer(route: "Route") -> None:
        if route.request.headers.get("authorization") == "Bearer sesame":
            route.continue_()
        else:
            route.fulfill(status=401, json={"error": {"message": "no", "type": "authentication_error"}})

    page.route("**/v1/*", answer)
    page.goto(f"{visit.url}/{LINK}")
    page.wait_for_selector("#key:focus")
    page.keyboard.type("sesame")
    page.keyboard.press("Enter")
    visit.finish()
    assert page.evaluate("[sessionStorage.length, localStorage.length]") == [1, 0]
    assert "sesame" not in page.url


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (503, {"error": {"message": "come back later"}}, "shutting down"),
        (504, {"error": {"message": "too late"}}, "deadline"),
        (500, {"error": {"message": "something broke"}}, "something broke"),
        (200, 'event: error\ndata: {"error": {"message": "too late", "type": "timeout"}}\n\n', "deadline"),
        (200, ": nothing\n\n", "does not answer"),
    ],
)
def test_says_what_went_wrong(visit: Visit, status: int, body: Any, words: str) -> None:
    visit.refused = True
    page = visit.open()
    text = body if isinstance(body, str) else json.dumps(body)
    page.route("**/v1/denoise", lambda route: route.fulfill(status=status, body=text))
    page.click("#run")
    page.wait_for_selector(f"#notice.wrong:has-text('{words}')")


def test_stop_leaves_what_was_written(visit: Visit) -> None:
    page = visit.open()
    visit.fill(prompt=PROMPT, gen_length="128", steps="128")
    page.click("#run")
    page.wait_for_selector("#right .cell.fresh")
    page.click("#stop")
    page.wait_for_selector("#right .state:has-text('stopped')")
    assert visit.count("#right .cell.masked") > 0
    assert visit.count("#right .cell.written") > 0


def test_the_text_follows_the_pattern_and_what_it_excludes_is_struck_out(visit: Visit) -> None:
    page = visit.open()
    assert not page.is_visible("#pattern")
    visit.fill(**SHORTER, constraint="guided_regex", pattern=PATTERN)
    page.wait_for_selector("#pattern-state:has-text('states')")
    facts = asked(visit.url, "/v1/constraint", {"guided_regex": PATTERN})
    for fact in (f"{facts['states']} states", f"{facts['shortest']} tokens"):
        assert fact in page.inner_text("#pattern-state")
    for text in visit.run():
        assert re.fullmatch(PATTERN, text)
    assert "pattern=" in page.url
    page.locator("#slider").fill("0")
    visit.fill(constraint="")  # the panel is about the run that is shown, whatever the form says now
    with page.expect_response("**/v1/inspect") as response:
        page.locator("#right .cell.masked.active").first.hover()
    page.wait_for_selector("#panel .bars")
    answer = response.value.json()
    impossible = {each["piece"].strip() for each in answer["network"][0] if not each["allowed"]}
    struck = page.locator("#panel .excluded .token")
    assert struck.count() > 0
    assert {text.strip("␣") for text in struck.all_inner_texts()} <= impossible
    assert {style(struck.nth(i), "textDecorationLine") for i in range(struck.count())} == {"line-through"}
    assert page.locator("#panel .excluded .bar.joint .number").all_inner_texts() == ["excluded"] * struck.count()
    possible = page.locator("#panel .bars li:not(.excluded) .candidate").first
    assert style(struck.first, "color") != style(possible, "color")
    assert "the constraint excludes it" in page.inner_text("#panel")
    assert "not computed under a constraint" in page.inner_text("#panel .ties")
    assert visit.count(".arcs path") == 0
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert {text: ratio for text, ratio in page.evaluate(CONTRASTS).items() if ratio < 4.5} == {}


def test_says_what_is_wrong_with_a_pattern(visit: Visit) -> None:
    visit.refused = True
    page = visit.open()
    visit.fill(**SHORTER, constraint="guided_regex", pattern="[0-9")
    page.wait_for_selector("#pattern-state.wrong:has-text('unterminated character set')")
    assert page.get_attribute("#pattern", "aria-describedby") == "pattern-state"
    assert page.get_attribute("#pattern-state", "role") == "status"
    assert page.get_attribute("#pattern", "aria-invalid") == "true"
    page.emulate_media(color_scheme="dark")
    assert {text: ratio for text, ratio in page.evaluate(CONTRASTS).items() if ratio < 4.5} == {}
    page.click("#run")
    page.wait_for_selector("#pattern[aria-invalid=true]:focus")
    assert "unterminated character set" in page.inner_text("#notice-text")
    visit.fill(constraint="guided_json")
    page.wait_for_selector("#pattern-state.wrong:has-text('no JSON')")
    visit.fill(constraint="guided_choice", pattern="many\n\nfew")
    page.wait_for_selector("#pattern-state:has-text('states')")
    assert page.get_attribute("#pattern", "aria-invalid") is None
    assert set(visit.run()) <= {"many", "few"}
    visit.fill(pattern="")
    assert page.inner_text("#pattern-state") == ""


def style(element: "Locator", name: str) -> str:
    found: str = element.evaluate("(element, name) => getComputedStyle(element)[name]", name)
    return found


def test_failed_questions_are_told(visit: Visit) -> None:
    visit.refused = True
    page = visit.open()
    visit.fill(**SHORTER)
    visit.run()
    page.route("**/v1/inspect", lambda route: route.abort())
    page.locator("#left .cell.written").first.hover()
    page.wait_for_selector("#panel .wrong:has-text('does not answer')")


LIGHTNESS = """() => {
  const [r, g, b] = getComputedStyle(document.documentElement).backgroundColor.match(/[\\d.]+/g).map(Number);
  return (r + g + b) / 765;
}"""

CONTRASTS = """() => {
  const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const parse = (colour) => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data];
  };
  const luminance = ([r, g, b]) => {
    const part = (v) => ((v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const found = parse(getComputedStyle(at).backgroundColor);
      if (found[3] === 255) return found;
    }
  };
  const found = {};
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const text = walker.currentNode.textContent.trim();
    if (!text || !element.checkVisibility({ visibilityProperty: true })) continue;
    if (element.closest("kbd, option, :disabled")) continue;
    const [a, b] = [parse(getComputedStyle(element).color), ground(element)].map(luminance);
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    found[`${element.className || element.tagName} ${text}`] = ratio;
  }
  return found;
}"""
