"""What the playground's files hold, and what its pure modules compute."""

import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import codd
from tests.support.browser import launched

if TYPE_CHECKING:
    from playwright.sync_api import Route

FOLDER = Path(codd.__file__).parent / "serving" / "playground"
INSERTS_MARKUP = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|setHTML"
    r"|ContextualFragment|srcdoc|\beval\(|new Function"
)
OUTSIDE = re.compile(r"(?:https?:)?//(?!www\.w3\.org/2000/svg)[\w-]+\.\w+|@import|url\(")
Evaluate = Callable[..., Any]


class Elements(HTMLParser):
    """All elements of a page with their attributes, and what stands inside of scripts and styles."""

    def __init__(self, text: str):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.inline = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.cdata_elem is not None:
            self.inline += data


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_nothing_is_inserted_as_markup_and_nothing_comes_from_outside(path: Path) -> None:
    assert path.suffix in (".html", ".css", ".js")
    text = path.read_text()
    assert not INSERTS_MARKUP.search(text)
    assert not OUTSIDE.search(text)


def test_the_page_obeys_its_policy() -> None:
    page = Elements((FOLDER / "index.html").read_text())
    assert page.inline.strip() == ""
    for tag, attributes in page.found:
        assert tag != "style"
        assert "style" not in attributes
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href"):
            address = attributes.get(name) or "#"
            assert address.startswith(("#", "data:image/")) or (FOLDER.parent / address).is_file()


def test_every_control_has_a_name() -> None:
    page = Elements((FOLDER / "index.html").read_text())
    labels = {attributes["for"] for tag, attributes in page.found if tag == "label"}
    for tag, attributes in page.found:
        if tag in ("input", "select", "textarea"):
            assert attributes["id"] in labels or attributes.get("aria-label")


@pytest.fixture(scope="module")
def evaluate() -> Iterator[Evaluate]:
    """Calls a function of the page's modules: no server, the files are answered from their folder."""
    kinds = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}

    def answer(route: "Route") -> None:
        path = FOLDER / (route.request.url.rsplit("/", 1)[1] or "index.html")
        if path.is_file():
            route.fulfill(body=path.read_text(), content_type=kinds[path.suffix])
        else:
            route.fulfill(status=503)

    with launched() as browser:
        page = browser.new_page()
        page.route("**/*", answer)
        page.goto("http://127.0.0.1/")

        def call(module: str, expression: str, argument: Any = None) -> Any:
            code = f"async (given) => {{ const it = await import('/playground/{module}'); {expression} }}"
            return page.evaluate(code, argument)

        yield call


EVENTS = ': here\n\nevent: start\ndata: {"a":\ndata: "né"}\n\n'
EVENTS += 'event:step\r\ndata:{"b": 2}\r\n\r\ndata: {"c": 3}\n\ndata: {"cut'


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_read_in_chunks_of_any_size(evaluate: Evaluate, size: int) -> None:
    chunks = [EVENTS[i : i + size] for i in range(0, len(EVENTS), size)]
    code = "const found = []; given.forEach(it.parser((e) => found.push([e.event, e.data]))); return found;"
    assert evaluate("sse.js", code, chunks) == [["start", {"a": "né"}], ["step", {"b": 2}], ["message", {"c": 3}]]


@pytest.mark.parametrize(
    ("piece", "parts"),
    [
        (" the", [(" ", "gap"), ("the", "plain")]),
        ("  ", [("  ", "space")]),
        (".\n\n", [(".", "plain"), ("\n", "line"), ("\n", "line")]),
        ("\ufffd\ufffd", [("\ufffd\ufffd", "broken")]),
        ("<|eos|>", [("eos", "special")]),
        ("", [("∅", "special")]),
        ("<b>", [("<b>", "plain")]),
    ],
)
def test_what_would_vanish_is_made_visible(evaluate: Evaluate, piece: str, parts: list[tuple[str, str]]) -> None:
    assert evaluate("run.js", "return it.visible(given).map(({text, look}) => [text, look])", piece) == [
        *map(list, parts)
    ]


START = {"prompt_length": 2, "ids": [5, 6, 0, 0, 0, 0], "pieces": ["a", "b", None, None, None, None], "options": {}}
STEPS = [
    {"positions": [3, 2], "tokens": [7, 8], "pieces": ["c", "d"], "scores": [0.9, 0.5], "window": [2, 4], "length": 6},
    {"positions": [4], "tokens": [9], "pieces": ["e"], "scores": [0.1], "window": [4, 6], "length": 5},
]
RUN = "const run = new it.Run(given.start); given.steps.forEach((step) => run.add(step)); "


def test_states_of_a_run(evaluate: Evaluate) -> None:
    given = {"start": START, "steps": STEPS}
    assert evaluate("run.js", RUN + "return [0, 1, 2, 9].map((k) => run.idsAt(k))", given) == [
        [5, 6, 0, 0, 0, 0],
        [5, 6, 8, 7, 0, 0],
        [5, 6, 8, 7, 9],
        [5, 6, 8, 7, 9],
    ]
    cells = evaluate("run.js", RUN + "return run.cellsAt(1)", given)
    assert [cell["kind"] for cell in cells] == ["given"] * 2 + ["written"] * 2 + ["masked"] * 2
    assert [cell["fresh"] for cell in cells] == [False, False, True, True, False, False]
    assert [cell["active"] for cell in cells] == [False, False, False, False, True, True]
    assert [cell["score"] for cell in cells[2:4]] == [0.5, 0.9]


def test_the_share_of_positions_that_came_from_the_cache(evaluate: Evaluate) -> None:
    code = RUN + "return run.figures.cached"
    steps = [{**STEPS[0], "computed": 6, "cached": 0}, {**STEPS[1], "computed": 2, "cached": 4}]
    assert evaluate("run.js", code, {"start": START, "steps": steps[:1]}) is None
    assert evaluate("run.js", code, {"start": START, "steps": steps}) == 4 / 12


def test_an_edited_token_is_shown_as_it_was_in_each_state(evaluate: Evaluate) -> None:
    edit = {**STEPS[0], "positions": [2], "tokens": [4], "pieces": ["f"], "scores": [0.7], "edited": 1}
    given = {"start": START, "steps": [STEPS[0], edit]}
    shown = evaluate("run.js", RUN + "return [0, 1, 2].map((k) => run.cellsAt(k)[2])", given)
    assert [(cell["piece"], cell["score"], cell["step"]) for cell in shown] == [
        (None, None, None),
        ("d", 0.5, 0),
        ("f", 0.7, 1),
    ]
    assert evaluate("run.js", RUN + "return [run.pieceAt(2), run.idsAt(2)[2], run.question(2, 2).state]", given) == [
        "f",
        4,
        0,
    ]


def test_a_token_is_asked_about_as_it_was_before_it_was_written(evaluate: Evaluate) -> None:
    given = {"start": START, "steps": STEPS}
    ask = RUN + "return [[2, 0], [2, 2], [2, 4], [1, 4], [0, 4]].map(([k, position]) => run.question(k, position))"
    nothing, first, second, masked, early = evaluate("run.js", ask, given)
    assert nothing is None
    assert first == {"state": 0, "written": True, "window": [2, 4], "ids": START["ids"]}
    assert second == {"state": 1, "written": True, "window": [4, 6], "ids": [5, 6, 8, 7, 0, 0]}
    assert masked == {**second, "written": False}
    assert early == {"state": 0, "written": False, "window": [4, 6], "ids": START["ids"]}


def test_a_link_holds_every_setting(evaluate: Evaluate) -> None:
    settings = {name: f"{name} &#=+\n✓ <|mask|>" for name in evaluate("settings.js", "return it.FIRST")}
    assert evaluate("settings.js", "return it.fromHash(it.toHash(given))", settings) == settings
    assert evaluate("settings.js", "return it.fromHash('#steps=3')") is None
    first = evaluate("settings.js", "return it.FIRST")
    assert evaluate("settings.js", "return it.fromHash(it.toHash(given))", first) == first
    assert evaluate("settings.js", "return it.toHash({...it.FIRST, prompt: 'x'})") == "#prompt=x"


def test_a_request_leaves_out_what_is_empty(evaluate: Evaluate) -> None:
    code = "return it.toRequest({...it.FIRST, ...given}, 'latent')"
    body = evaluate("settings.js", code, {"threshold": "0.9", "steps": "", "seed": "x", "chat": "off", "cache": "none"})
    assert body["threshold"] == 0.9
    assert "steps" not in body
    assert body["seed"] == "x"
    assert body["chat"] is False
    assert body["cache"] is None
    assert evaluate("settings.js", code, {"cache": "dual"})["cache"] == "dual"
    assert "cache" not in evaluate("settings.js", code, {})
    assert body["sampler"] == "latent"


def test_a_request_says_what_the_text_must_be(evaluate: Evaluate) -> None:
    code = "return it.toRequest({...it.FIRST, ...given}, '')"
    for name, pattern, value in [
        ("guided_regex", " a\nb ", " a\nb "),
        ("guided_json", '{"type": "integer"}', '{"type": "integer"}'),
        ("guided_choice", "yes\n\n no\n", ["yes", " no"]),
    ]:
        body = evaluate("settings.js", code, {"constraint": name, "pattern": pattern})
        assert {key: body[key] for key in body if "guided" in key} == {name: value}
    for untold in ({"constraint": "guided_regex"}, {"pattern": "a"}):
        assert not [key for key in evaluate("settings.js", code, untold) if "guided" in key]


BY_DEFAULT = "each call writes every token of the block and the next at least 0.97 probable, and at least 5 on average"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, f"100 masks; {BY_DEFAULT}"),
        ({"temperature": "0", "sampler": "any_order"}, f"100 masks; {BY_DEFAULT}"),
        ({"temperature": "0.7"}, "100 masks; how many a call fills is left to the server"),
        ({"sampler": "latent"}, "100 masks; how many a call fills is left to the server"),
        ({"steps": "20"}, "100 masks in 20 steps: 5 tokens per step"),
        ({"threshold": "0.9", "gen_length": "8"}, "8 masks; each call writes every token at least 0.9 probable"),
    ],
)
def test_the_pace_in_words(evaluate: Evaluate, settings: dict[str, str], said: str) -> None:
    rule = {"steps": None, "threshold": 0.97, "min_tokens": 5, "blocks": "sliding"}
    defaults = {"gen_length": 100, **rule, "temperature": 0, "sampler": "any_order"}
    code = "return it.pace({...it.FIRST, ...given[0]}, given[1], '[M]')"
    assert evaluate("settings.js", code, [settings, defaults]) == said


def test_candidates_of_both_lists_are_paired(evaluate: Evaluate) -> None:
    def listed(probabilities: dict[int, float]) -> list[dict[str, Any]]:
        return [{"token": token, "piece": str(token), "probability": p} for token, p in probabilities.items()]

    given = [listed({1: 0.6, 2: 0.3, 3: 0.0001}), listed({2: 0.9, 4: 0.05})]
    rows = evaluate("panel.js", "return it.paired(...given, 3)", given)
    assert [(row["token"], row["network"], row["joint"]) for row in rows] == [
        (2, 0.3, 0.9),
        (1, 0.6, None),
        (4, None, 0.05),
        (3, 0.0001, None),  # chosen, and shown however improbable
    ]
