"""The documentation page: made here from the OpenAPI document, with nothing to load from
elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

STYLE = """
:root{color-scheme:light dark;--line:#8884;--soft:#8881;--accent:#2a7f62}
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
h1{margin-bottom:0}h2{margin-top:2.5rem;border-bottom:1px solid var(--line)}
details{border:1px solid var(--line);border-radius:6px;margin:.5rem 0;padding:.4rem .8rem}
summary{cursor:pointer}details[open]>summary{margin-bottom:.6rem}
code,pre{font:13px/1.45 ui-monospace,monospace}
pre{background:var(--soft);padding:.7rem;overflow:auto;border-radius:6px}
.verb{display:inline-block;min-width:4.5em;font-weight:700;color:var(--accent)}
table{border-collapse:collapse;width:100%}
td,th{text-align:left;padding:.2rem .6rem .2rem 0;vertical-align:top}
tr+tr td{border-top:1px solid var(--soft)}.soft{opacity:.7}
"""


def render(document: dict[str, Any], guide: str) -> str:
    """A whole HTML page. `guide` is text put before the operations, as it is."""
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    sections = "".join(_sections(document)) + _types(document)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style>'
        f"<h1>{title}</h1><p>{escape(document['info'].get('description', ''))}"
        f' The machine-readable form is <a href="/openapi.json">/openapi.json</a>.</p>'
        f"<pre>{escape(guide)}</pre>{sections}</html>"
    )


def _sections(document: dict[str, Any]) -> Iterator[str]:
    groups: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for verb, operation in operations.items():
            tag = operation.get("tags", ["other"])[0]
            groups.setdefault(tag, []).append(_operation(document, path, verb, operation))
    for tag, items in groups.items():
        yield f"<h2>{escape(tag)}</h2>{''.join(items)}"


def _operation(document: dict[str, Any], path: str, verb: str, operation: dict[str, Any]) -> str:
    text = operation.get("description", "")
    parts = [_parameters(operation.get("parameters", []))]
    if body := operation.get("requestBody"):
        parts.append(_content(document, "Body", body["content"]))
    for status, response in operation["responses"].items():
        if status.isdigit() and response.get("content"):
            parts.append(_content(document, f"Answer, {status}", response["content"]))
    head = f'<span class="verb">{verb.upper()}</span> <code>{escape(path)}</code>'
    return (
        f"<details><summary>{head} <span class=soft>{escape(text)}</span></summary>"
        f"{''.join(parts)}</details>"
    )


def _types(document: dict[str, Any]) -> str:
    items = [
        f"<details><summary><code>{escape(name)}</code> "
        f"<span class=soft>{escape(schema.get('description', ''))}</span></summary>"
        f"{_fields(schema)}</details>"
        for name, schema in sorted(document["components"]["schemas"].items())
    ]
    return f"<h2>types</h2>{''.join(items)}"


def _parameters(parameters: list[dict[str, Any]]) -> str:
    rows = [
        (p["name"], p["in"], _kind(p.get("schema", {})), "required" if p.get("required") else "")
        for p in parameters
    ]
    return _table(("parameter", "in", "type", ""), rows) if rows else ""


def _content(document: dict[str, Any], title: str, content: dict[str, Any]) -> str:
    parts = [f"<p><b>{escape(title)}</b>: <code>{escape(' or '.join(content))}</code></p>"]
    if schema := content.get("application/json", {}).get("schema"):
        parts.append(_fields(_resolve(document, schema)))
    return "".join(parts)


def _fields(schema: dict[str, Any]) -> str:
    required = set(schema.get("required", ()))
    rows = [
        (name, _kind(field), "required" if name in required else _default(field))
        for name, field in schema.get("properties", {}).items()
    ]
    return _table(("field", "type", ""), rows) if rows else ""


def _table(head: tuple[str, ...], rows: list[Any]) -> str:
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        f"<tr>{''.join(f'<td><code>{escape(cell)}</code></td>' for cell in row)}</tr>"
        for row in rows
    )
    return f"<table><tr>{cells}</tr>{body}</table>"


def _default(field: dict[str, Any]) -> str:
    return f"default {field['default']!r}" if field.get("default") not in (None, {}, "") else ""


def _kind(schema: dict[str, Any]) -> str:
    if ref := schema.get("$ref"):
        return str(ref).rsplit("/", 1)[-1]
    if choices := schema.get("enum"):
        return " | ".join(str(choice) for choice in choices)
    if options := schema.get("anyOf"):
        return " | ".join(_kind(option) for option in options)
    if schema.get("type") == "array":
        return f"[{_kind(schema.get('items', {}))}]"
    low, high = schema.get("minimum"), schema.get("maximum")
    span = f" {low}…{high}" if low is not None and high is not None else ""
    return f"{schema.get('type', 'any')}{span}"


def _resolve(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    if ref := schema.get("$ref"):
        found: dict[str, Any] = document["components"]["schemas"][ref.rsplit("/", 1)[-1]]
        return found
    return schema
