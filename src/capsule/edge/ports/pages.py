"""What those are told who reach no program: E2B's words as JSON, which its SDKs look for, and a
page that says what to do for whoever reads it in a browser.
"""

from __future__ import annotations

from html import escape

from starlette.types import Receive, Scope, Send

from capsule.edge.errors import encode, sentence
from capsule.errors import CapsuleError

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 40em; margin: 15vh auto; padding: 0 1em;
        color: #222; background: #fff; }}
code {{ background: #f0f0f0; padding: .1em .3em; border-radius: 3px; }}
small {{ color: #777; }}
@media (prefers-color-scheme: dark) {{
  body {{ color: #ddd; background: #16181c; }} code {{ background: #2a2d33; }}
}}
</style>
<h1>{title}</h1>
<p>{advice}</p>
<p><small>Capsule, sandbox <code>{id}</code>, port {port}</small></p>
</html>
"""
_POLICY = b"default-src 'none'; style-src 'unsafe-inline'"


class PortError(Exception):
    """Instead of the program's answer. `message` is for programs, `title` and `advice` (HTML) for
    people.
    """

    def __init__(self, status: int, message: str, *, title: str, advice: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.title = title
        self.advice = advice


def not_found(*, known_caller: bool) -> PortError:
    """The same whether it does not exist, does not run, or is not theirs. Who shows a key of ours
    is answered as by the rest of the API, everybody else as by E2B.
    """
    return PortError(
        404 if known_caller else 502,
        "The sandbox was not found",
        title="No such sandbox",
        advice="It may have ended or be paused, or its ports are private: then send a key of its "
        "owner in the header <code>X-API-Key</code>, or create it with "
        "<code>ports: public</code>.",
    )


def no_token() -> PortError:
    return _secured("Token header 'e2b-traffic-access-token' is missing")


def wrong_token() -> PortError:
    return _secured("Provided token is invalid.")


def _secured(problem: str) -> PortError:
    return PortError(
        403,
        f"Sandbox is secured with traffic access token. {problem}",
        title="This sandbox asks for a token",
        advice="Send it in the header <code>e2b-traffic-access-token</code>. Whoever created the "
        "sandbox was given it.",
    )


def may_not_run() -> PortError:
    return PortError(
        403,
        "The key has not the scope run",
        title="This key may not use the sandbox",
        advice="To reach what runs in a sandbox a key needs the scope <code>run</code>.",
    )


def closed(port: int) -> PortError:
    return PortError(
        502,
        "The sandbox is running but port is not open",
        title=f"Nothing listens at port {port}",
        advice=f"The sandbox runs. Start a server in it that listens on "
        f"<code>0.0.0.0:{port}</code>, then load this page again.",
    )


def no_port(port: int) -> PortError:
    return PortError(
        400,
        f"{port} is no port, allowed: 1 to 65535",
        title="No such port",
        advice="Ports are numbers from 1 to 65535.",
    )


def bad_request(problem: str) -> PortError:
    return PortError(400, problem, title="Not a request", advice=escape(problem))


def no_answer(problem: str) -> PortError:
    return PortError(
        502,
        f"The program in the sandbox {problem}",
        title="The program gave no answer",
        advice=f"It {escape(problem)}. Its output may say why.",
    )


def silent(seconds: float) -> PortError:
    return PortError(
        504,
        f"The program in the sandbox has not answered for {seconds:g} seconds",
        title="The program does not answer",
        advice="It has taken the request, and said nothing since.",
    )


def of(error: CapsuleError) -> PortError:
    """What Capsule could not do."""
    text = sentence(error)
    return PortError(error.http_status, text, title="Not reachable now", advice=escape(text))


async def answer(
    error: PortError, id: str, port: int, scope: Scope, receive: Receive, send: Send
) -> None:
    if scope["type"] == "http" and _reads_html(scope):
        kind, body = b"text/html; charset=utf-8", _page(error, id, port)
    else:
        told = {"sandboxId": id[:64], "message": error.message, "port": port, "code": error.status}
        kind, body = b"application/json", encode(told)
    headers = [
        (b"content-type", kind),
        (b"content-length", b"%d" % len(body)),
        (b"cache-control", b"no-store"),
        (b"content-security-policy", _POLICY),
    ]
    prefix = "websocket.http.response" if scope["type"] == "websocket" else "http.response"
    await send({"type": f"{prefix}.start", "status": error.status, "headers": headers})
    await send({"type": f"{prefix}.body", "body": body})


def _page(error: PortError, id: str, port: int) -> bytes:
    told = {"title": escape(error.title), "advice": error.advice, "id": escape(id[:64])}
    return _PAGE.format(**told, port=port).encode("utf-8", "replace")


def _reads_html(scope: Scope) -> bool:
    return any(n == b"accept" and b"text/html" in v.lower() for n, v in scope["headers"])
