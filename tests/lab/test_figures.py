import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from matplotlib.image import imread

from codd_lab.report import figures
from codd_lab.report.figures import COLOURS, INK, Chart, Curve, Look, Panel, inline, write_png
from codd_lab.report.quality import Estimate

CURVES = [
    Curve(
        "alone",
        [(8.0, Estimate(40.0, 35.0, 45.0)), (16.0, Estimate(50.0, 45.0, 55.0)), (64.0, Estimate(60.0, 55.0, 65.0))],
        Look(6, 0, 0, wide=True),
    ),
    Curve("trained", [(8.0, Estimate(50.0)), (16.0, Estimate(60.0)), (64.0, Estimate(61.0))], Look(0, 1, 1)),
]
CHART = Chart(
    "frontier-x",
    "x: right against cost",
    [Panel("calls", "right (%)", CURVES, ratio_axis=True), Panel("s", "%", CURVES)],
)


def svg(chart: Chart) -> str:
    return "\n".join(figures.svg(chart))


def parts(chart: Chart) -> list[ET.Element]:
    return [ET.fromstring(each) for each in figures.svg(chart)]


def test_each_panel_is_well_formed_and_named():
    found = parts(CHART)
    assert len(found) == 2
    for element, y in zip(found, ("right (%)", "%"), strict=True):
        title = element.find("{*}title")
        assert title is not None
        assert title.text == element.get("aria-label")
        assert element.get("role") == "img"
        assert y in (title.text or "")
    words = {text.text for text in found[0].iter() if text.tag.endswith("text")}
    assert {"calls", "right (%)", "alone", "trained", "8", "16", "32"} <= words, "text stays text, costs double"


def test_ids_are_unique_over_figures_and_all_references_are_there():
    text = svg(CHART) + svg(replace(CHART, name="another"))
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(ids) == len(set(ids)) > 20
    used = {*re.findall(r'href="#([^"]*)"', text), *re.findall(r"url\(#([^)]*)\)", text)}
    assert used
    assert used <= set(ids)


def test_nothing_from_outside_no_time_and_the_same_bytes_again():
    text = svg(CHART)
    assert text == svg(CHART)
    assert "http" not in text.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert "<style" not in text, "it would be a style for the whole page"
    assert "metadata" not in text
    assert "20" + "26-" not in text


def test_text_and_axes_take_the_colour_of_the_page():
    text = svg(CHART)
    assert INK not in text
    assert "stroke: currentColor" in text
    assert "#ffffff" not in text
    assert "#000000" not in text
    assert COLOURS[0] in text


def test_curves_differ_in_colour_dash_and_marker():
    [element, _] = parts(CHART)
    body = ET.tostring(element, encoding="unicode")
    assert "stroke-dasharray" in body
    markers = {use.get("href") for use in element.iter() if use.tag.endswith("use")}
    assert len(markers) >= 4, "two ticks and two markers"


def test_hostile_labels_are_text():
    evil = '</svg><script>alert(1)</script>\x1b[31m\u202e $x$ & "q" \'id="a"\''
    chart = Chart("e", evil, [Panel(evil, evil, [replace(CURVES[0], label=evil)])])
    text = svg(chart)
    assert "<script" not in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    [element] = parts(chart)
    words = [each.text or "" for each in element.iter() if each.tag.endswith("text")]
    assert any("<script>alert(1)</script>" in word and "$x$" in word and "\\x1b" in word for word in words)


def test_a_glyph_that_the_font_lacks_is_no_error(tmp_path):
    chart = Chart("g", "漢字", [Panel("漢字", "y", CURVES)])
    assert "漢字" in svg(chart)
    write_png(chart, tmp_path / "g.png")


def test_pngs_are_pictures_on_white(tmp_path):
    path = tmp_path / "new" / "frontier.png"
    write_png(CHART, path)
    pixels = imread(path)
    height, width = pixels.shape[:2]
    assert width == pytest.approx(2 * 4.6 * 150, abs=2)
    assert 450 < height < 700
    assert pixels[0, 0].tolist() == [1, 1, 1, 1]
    assert pixels.std() > 0.01
    again = tmp_path / "again.png"
    write_png(CHART, again)
    assert path.read_bytes() == again.read_bytes()


def test_bands_need_both_ends_of_every_point():
    whole = CURVES[0]
    assert whole.intervals == ([35.0, 45.0, 55.0], [45.0, 55.0, 65.0])
    assert replace(whole, points=[*whole.points, (70.0, Estimate(60.0, 55.0))]).intervals is None
    assert CURVES[1].intervals is None
    banded = Chart("b", "t", [Panel("x", "y", [whole], bands=True)])
    assert "fill-opacity: 0.18" in svg(banded)
    assert "fill-opacity: 0.18" not in svg(Chart("b", "t", [Panel("x", "y", [CURVES[1]], bands=True)]))


def test_inline_takes_a_prefix_that_is_no_markup():
    text = inline('<?xml?>\n<svg width="1"><g id="a"/><use xlink:href="#a"/></svg>', 'a"><b>', "t")
    assert 'id="a---b--a"' in text
    assert 'href="#a---b--a"' in text
