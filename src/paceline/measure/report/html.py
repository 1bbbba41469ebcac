"""Building blocks of a page. Everything that comes from outside is escaped here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from paceline.measure.report.figures import Figure
from paceline.measure.report.style import CSS
from paceline.measure.verdict import Reason


@dataclass(frozen=True, slots=True)
class Cell:
    """A table cell: text, a smaller second line, a style class, an explanation on hovering."""

    text: str
    small: str = ""
    style: str = ""
    title: str = ""


Entry = str | Cell  # of a table; a string is a plain cell


class Tile(NamedTuple):
    name: str
    value: str
    more: str = ""


def page(title: str, body: Iterable[str]) -> str:
    """One self-contained document."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # Nothing may be fetched, whatever a server put into its name.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main>\n</body>\n</html>\n"
    )


def heading(text: str, level: int = 2) -> str:
    return f"<h{level}>{escape(text)}</h{level}>"


def paragraph(text: str, style: str = "") -> str:
    return f'<p class="{style}">{escape(text)}</p>' if style else f"<p>{escape(text)}</p>"


def verdict(outcome: str, headline: str) -> str:
    return f'<div class="verdict {outcome}"><b>{escape(outcome)}</b><span>{escape(headline)}</span></div>'


def reasons(found: Sequence[Reason]) -> str:
    rows = "".join(
        f'<li class="{reason.level}"><span class="tag">{escape(reason.level.upper())}</span> {escape(reason.text)}</li>'
        for reason in found
    )
    return f'<ul class="reasons">{rows}</ul>' if rows else ""


def tiles(entries: Iterable[Tile]) -> str:
    cells = "".join(
        f'<div class="tile"><div class="name">{escape(t.name)}</div><div class="value">{escape(t.value)}</div>'
        f'<div class="more">{escape(t.more)}</div></div>'
        for t in entries
    )
    return f'<div class="tiles">{cells}</div>'


def figures(found: Iterable[Figure]) -> str:
    cells = "".join(
        f"<figure><figcaption><b>{escape(figure.caption)}</b>{escape(figure.reading)}</figcaption>{figure.svg}</figure>"
        for figure in found
    )
    return f'<div class="figures">{cells}</div>' if cells else ""


def table(head: Sequence[Entry], rows: Iterable[Sequence[Entry]]) -> str:
    """A table."""
    top = "".join(_cell(entry, "th") for entry in head)
    body = "".join("<tr>" + "".join(_cell(entry) for entry in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(entry: Entry, tag: str = "td") -> str:
    if isinstance(entry, str):
        return f"<{tag}>{escape(entry)}</{tag}>"
    style = f' class="{entry.style}"' if entry.style else ""
    title = f' title="{escape(entry.title)}"' if entry.title else ""
    small = f"<small>{escape(entry.small)}</small>" if entry.small else ""
    return f"<{tag}{style}{title}>{escape(entry.text)}{small}</{tag}>"


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Names and values; rows without a value are left out."""
    inner = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in rows if value)
    return f"<dl>{inner}</dl>"


def details(summary: str, content: str) -> str:
    """Folded away until asked for; `content` is HTML."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def code(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"
