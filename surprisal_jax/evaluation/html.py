"""Pages that load nothing: markup that escapes by construction, one style for light and dark, inline pictures.

There is no script, and a content security policy forbids whatever might still come in with a run's texts. Those
(tokens, prompts, strategies, the configuration) are escaped by construction: `tag` takes every string for text unless
it is `Html`.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from surprisal_jax.evaluation.report import COLOURS, FAINT, ink_on, shades_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEVELS = 20  # shares are shaded in steps of 1/20; a class for each keeps the page small
# What draw_curves draws, by what it is called in the style: matplotlib's colours do not know dark mode.
SVG_COLOURS = {colour.lower(): f"var(--curve-{i})" for i, colour in enumerate(COLOURS)} | {
    FAINT: "var(--faint)",
    "#ffffff": "var(--paper)",
    "#ebebeb": "var(--grid)",
    "#999999": "var(--edge)",
}

# Both themes: curve colours have a contrast of 3 with the paper, texts of 4.5.
LIGHT = {
    "paper": "#ffffff",
    "ink": "#1a1a1a",
    "faint": "#5a5f66",
    "grid": "#e4e6e9",
    "edge": "#9aa0a6",
    "card": "#f3f5f8",
    "warning": "#fff1d6",
    "focus": "#0b57d0",
    "curve-0": "#000000",
    "curve-1": "#0072b2",
    "curve-2": "#d55e00",
    "curve-3": "#008a64",
    "curve-4": "#b85c93",
    "curve-5": "#b07a00",
    "curve-6": "#2f8fc4",
}
DARK = {
    "paper": "#14171b",
    "ink": "#eceef1",
    "faint": "#a9b0b8",
    "grid": "#2c3138",
    "edge": "#6d757e",
    "card": "#1e2329",
    "warning": "#3d2f10",
    "focus": "#8ab8ff",
    "curve-0": "#f2f2f2",
    "curve-1": "#4aa3df",
    "curve-2": "#f0803c",
    "curve-3": "#2fbf93",
    "curve-4": "#d98fbb",
    "curve-5": "#e6a52e",
    "curve-6": "#8ccbf2",
}
_DARK_SHADES = {"blue": ("#20262e", "#17528c", "#4595da", "#a6d4ff"), "grey": ("#20262e", "#747c86")}

_STYLE = """
*{box-sizing:border-box}
html{color-scheme:light dark;-webkit-text-size-adjust:100%;text-size-adjust:100%}
body{margin:0 auto;padding:1rem 1rem 3rem;max-width:62rem;background:var(--paper);color:var(--ink);
font:1rem/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.75rem;line-height:1.2;margin:.5rem 0}
h2{font-size:1.25rem;margin:2.5rem 0 .5rem;padding-top:.75rem;border-top:1px solid var(--grid)}
h3{font-size:1rem;margin:1.25rem 0 .25rem}
p,ul{margin:.5rem 0}
ul{padding-left:1.25rem}
.faint{color:var(--faint)}
.small{font-size:.875rem}
.mono,.trace{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
.facts{display:flex;flex-wrap:wrap;gap:.25rem 1.5rem;margin:.5rem 0}
.facts div{display:flex;gap:.4rem}
dt{color:var(--faint)}
.facts dt{white-space:nowrap}
dd{margin:0}
.headline{display:flex;flex-wrap:wrap;gap:.75rem;margin:1rem 0}
.headline div{flex:1 1 16rem;background:var(--card);border-radius:.5rem;padding:.75rem 1rem}
.headline dd.value{font-size:2rem;font-weight:700;line-height:1.2;font-variant-numeric:tabular-nums}
.warnings{background:var(--warning);border-left:.3rem solid var(--curve-2);border-radius:.25rem;
padding:.5rem 1rem;margin:1rem 0}
.warnings h2{border:0;margin:0;padding:0;font-size:1rem}
.scroll{overflow-x:auto;max-width:100%}
.scroll:focus-visible,summary:focus-visible{outline:2px solid var(--focus);outline-offset:2px}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;overflow-wrap:normal}
caption{text-align:left;color:var(--faint);font-size:.875rem;padding-bottom:.25rem}
th,td{padding:.35rem .75rem .35rem 0;text-align:left;vertical-align:top}
tbody tr{border-top:1px solid var(--grid)}
thead th{color:var(--faint);font-size:.875rem;font-weight:600}
.number{text-align:right;white-space:nowrap}
.interval{white-space:nowrap}
.metrics{width:100%}
.metrics th small{display:block;font-weight:400;color:var(--faint);font-size:.875rem}
.shares{border-collapse:separate;border-spacing:.3rem;overflow-wrap:break-word}
.shares th,.shares td{padding:.5rem;text-align:center;vertical-align:middle}
.shares thead th{vertical-align:bottom;min-width:5.5rem;max-width:9rem;color:var(--ink)}
.shares tbody th{white-space:nowrap;text-align:left;padding-left:0;position:sticky;left:0;background:var(--paper)}
.shares td{border-radius:.25rem;min-width:5.5rem}
.shares td.mapped{outline:.2rem solid var(--ink);outline-offset:.05rem;font-weight:700}
.hidden{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);white-space:nowrap}
.panels{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:1rem 2rem}
.panels.wide{grid-template-columns:1fr;max-width:36rem}
.panels svg{display:block;width:100%;height:auto}
.panels svg *{stroke-linejoin:round}
.panels text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
.panels table{font-size:.875rem;width:100%}
.panels td,.panels th{padding:.15rem .5rem .15rem 0;font-weight:400}
.panels tbody th{padding-left:3rem;text-indent:-3rem}
.legend span+span{margin-left:.4rem}
.panels svg.swatch,.legend svg.swatch{display:inline-block;width:2.5rem;height:.7rem;margin-right:.5rem;
vertical-align:baseline}
.trace-title{white-space:pre-wrap}
.trace{position:relative;margin:.25rem 0 1.25rem}
.token{display:inline-block;max-width:100%;margin:0 .2rem .3rem 0;padding:.15rem .4rem;border-radius:.25rem;
border:1px solid var(--grid);text-align:center;vertical-align:top;line-height:1.3;cursor:default}
.token small{display:block;min-height:1rem;font-size:.75rem;line-height:1rem}
.token:focus{outline:2px solid var(--focus);outline-offset:1px}
.tip{position:absolute;display:block;left:0;right:0;margin-top:.5rem;padding:.35rem .75rem;border-radius:.25rem;
background:var(--ink);color:var(--paper);text-align:left;font:.875rem/1.4 system-ui,sans-serif;
opacity:0;pointer-events:none;z-index:1}
.token:focus .tip{opacity:1}
@media (hover:none){.token:hover .tip{opacity:1}}
.legend{display:flex;flex-wrap:wrap;align-items:center;gap:.3rem;margin:.5rem 0}
.legend .mono{padding:.15rem .5rem;border-radius:.25rem;border:1px solid var(--grid)}
summary{cursor:pointer;padding:.25rem 0}
@media (max-width:34rem){
.metrics .number,.metrics .interval{font-size:.875rem;line-height:1.7}
.metrics .interval{white-space:normal;min-width:4.5rem;padding-right:0}
.settings tbody th{min-width:6.5rem;max-width:8rem;font-size:.875rem}
.shares{border-spacing:.2rem;font-size:.875rem}
.shares th,.shares td,.shares thead th{padding:.5rem .2rem;min-width:3.25rem}
.shares thead th{font-size:.8125rem}
}
@media print{.trace,.panels>div,tr{break-inside:avoid}}
""".strip()


def document(title: str, parts: Iterable[Html | None]) -> str:
    """The whole file: the parts in order, those that are None left out."""
    head = (
        '<meta charset="utf-8">\n'
        # Nothing is loaded and nothing runs, whatever a text of the run may contain.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"{tag('title', title)}\n<style>\n{_style()}\n</style>"
    )
    main = tag("main", *lines(part for part in parts if part))
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{main}\n</body>\n</html>\n'


# ---- markup


class Html(str):
    """Markup. Any other string is text, to be escaped where it goes into markup."""


def escaped(content: object) -> Html:
    """The content as markup; characters that nobody sees, or that UTF-8 lacks, are spelt out."""
    if isinstance(content, Html):
        return content
    return Html(html.escape("".join(c if c.isprintable() else repr(c)[1:-1] for c in str(content))))


def tag(name: str, /, *content: object, **attributes: object) -> Html:
    """An element. Attributes that are None are left out; `class_` and `aria_label` stand for class and aria-label."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escaped(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{written}>{''.join(map(escaped, content))}</{name}>")


def lines(parts: Iterable[Html]) -> list[Html]:
    """The parts, each on a line of the file."""
    return [Html(f"\n{part}") for part in parts] + [Html("\n")]


def breakable(name: str) -> Html:
    """A name with underscores, which a narrow screen may break after one."""
    return Html(escaped(name).replace("_", "_<wbr>"))


def section(title: str, *content: Html) -> Html:
    return tag("section", *lines([tag("h2", title), *content]))


def paragraph(*content: object, look: str | None = None) -> Html:
    return tag("p", *content, class_=look)


def scrolling(table: Html, label: str) -> Html:
    """A wide table scrolls by itself, by keyboard too, so that the page never does."""
    return tag("div", table, class_="scroll", role="region", tabindex="0", aria_label=label)


def data_table(
    head: Sequence[Html], rows: Iterable[Sequence[Html]], look: str | None = None, caption: str = ""
) -> Html:
    top = [tag("caption", caption)] if caption else []
    body = [tag("tr", *row) for row in rows]
    return tag("table", *top, tag("thead", tag("tr", *head)), tag("tbody", *lines(body)), class_=look)


def column(*content: object, look: str | None = None) -> Html:
    return tag("th", *content, scope="col", class_=look)


def row_head(*content: object) -> Html:
    return tag("th", *content, scope="row")


# ---- style


def _style() -> str:
    light, dark = _theme(LIGHT, level_colours(dark=False)), _theme(DARK, level_colours(dark=True))
    return f"{light}\n@media (prefers-color-scheme:dark){{\n{dark}\n}}\n{_STYLE}"


def _theme(colours: Mapping[str, str], levels: Mapping[str, tuple[str, str]]) -> str:
    variables = ";".join(f"--{name}:{colour}" for name, colour in colours.items())
    shades = [f".{name}{{background:{paper};color:{ink}}}" for name, (paper, ink) in levels.items()]
    return "\n".join([f":root{{{variables}}}", *shades])


def level_colours(dark: bool) -> dict[str, tuple[str, str]]:
    """Class -> (shade, ink on it), for the levels of both maps: blue for shares, grey for what fits no strategy."""
    from matplotlib.colors import LinearSegmentedColormap, to_hex

    maps = {"blue": shades_of("Blues"), "grey": shades_of("Greys", 0.6)}
    if dark:
        maps = {name: LinearSegmentedColormap.from_list(name, _DARK_SHADES[name]) for name in maps}
    colours = {}
    for name, shades in maps.items():
        for level in range(LEVELS + 1):
            shade = shades(level / LEVELS)
            # Small text asks for more contrast with a middle shade than the pictures' softer black has.
            colours[f"{name}-{level}"] = to_hex(shade), "#ffffff" if ink_on(shade) == "white" else "#000000"
    return colours


def level_class(share: float, name: str = "blue") -> str:
    """The class of a share, which rounds half up and takes what is outside [0, 1] for the end it is nearer to."""
    return f"{name}-{math.floor(min(max(share, 0.0), 1.0) * LEVELS + 0.5)}" if math.isfinite(share) else f"{name}-0"


# ---- pictures


def inline_svg(draw: Callable[[Axes], None], size: tuple[float, float], label: str, salt: str) -> Html:
    """A picture as inline SVG, without what belongs to a file of its own, in the colours of the page's theme.

    Args:
      draw: draws on the axes it is given, in colours of `COLOURS`.
      size: width and height, inches.
      label: what a screen reader says of it.
      salt: of the picture, so that no two share an id.
    """
    import matplotlib
    from matplotlib.figure import Figure

    # Ids depend on the salt alone, and text stays text: small, and in the reader's font.
    with matplotlib.rc_context({"svg.hashsalt": salt, "svg.fonttype": "none"}):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.add_subplot())
        file = io.StringIO()
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=no_metadata, transparent=True)
    text = file.getvalue()
    view_box = re.search(r'viewBox="([^"]*)"', text)
    assert view_box is not None
    drawing = text[text.index(">", view_box.end()) + 1 : text.rindex("</svg>")]
    # The style element would hold for the whole page.
    drawing = re.sub(r"<style.*?</style>", "", drawing, flags=re.DOTALL)
    drawing = re.sub(r"font-family: [^;]*; ", "", drawing).replace("xlink:href", "href")
    drawing = re.sub(r"#[0-9a-f]{6}(?=[;\"])", lambda match: SVG_COLOURS.get(match[0], match[0]), drawing)
    # Groups are named alike in every figure; only the ids that something refers to matter.
    used = set(re.findall(r'url\(#(\w+)\)|href="#(\w+)"', drawing))
    names = {name for pair in used for name in pair if name}
    drawing = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in names else "", drawing)
    drawing = re.sub(r"\s*\n\s*", "\n", drawing).strip()
    return tag("svg", Html(drawing), viewBox=view_box[1], role="img", aria_label=label)
