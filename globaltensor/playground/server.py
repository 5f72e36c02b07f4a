"""The playground's server, on the loopback only, and the same as pages that need no server.

    /            the page            /show?...     what a setting does, as HTML
    /examples    the examples, which need no script

It listens at 127.0.0.1, and answers its own page only. Browsers let any page send requests here, so two are refused:
one whose Host is not the loopback's (a page from elsewhere could have its own name point here, and read the reply), and
one that a page of another origin makes (it could not read the reply, and yet keep the server busy). A link from
elsewhere to the page itself is followed. There is nothing to change, so there is nothing but GET.
"""
from __future__ import annotations

import json
import threading
from dataclasses import asdict
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from globaltensor.pictures.markup import STYLE
from globaltensor.playground.tryout import EXAMPLES, MOST_RANKS, Tryout, read_tryout, show_tryout, told_error

HOST = "127.0.0.1"
_POLICY = ("default-src 'none'; connect-src 'self'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
           "img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'")
_one_at_a_time = threading.Lock()                    # the ranks of this process do one thing at a time


def make_server(port: int = 0) -> ThreadingHTTPServer:
    """A server at the loopback; at a free port where none is named. Raises OSError where the port is taken."""
    server = ThreadingHTTPServer((HOST, port), _Handler)
    server.daemon_threads = True
    return server


class _Handler(BaseHTTPRequestHandler):
    """Answers GET."""

    server_version = "globaltensor"
    sys_version = ""
    timeout = 30

    @property
    def port(self) -> int:
        """Where this server listens."""
        assert isinstance(self.server, ThreadingHTTPServer)
        return self.server.server_port

    def _is_from_here(self) -> bool:
        """Does the request come from this server's page, from a link to it, or from no browser at all?"""
        own = [f"{name}:{self.port}" for name in (HOST, "localhost")]
        if self.headers.get("Host", "") not in own:
            return False
        if self.headers.get("Origin", f"http://{own[0]}") not in [f"http://{one}" for one in own]:
            return False
        followed = self.headers.get("Sec-Fetch-Dest") == "document" and urlsplit(self.path).path in ("/", "/examples")
        return followed or self.headers.get("Sec-Fetch-Site", "none") in ("none", "same-origin")

    def do_GET(self) -> None:
        if not self._is_from_here():
            self._reply(HTTPStatus.FORBIDDEN, "text/plain",
                        f"this server is at http://{HOST}:{self.port} only, and for its own page\n")
            return
        asked = urlsplit(self.path)
        pages = {"/": ("text/html", page_text), "/play.js": ("text/javascript", lambda: _text_of_file("play.js")),
                 "/style.css": ("text/css", lambda: STYLE + _text_of_file("play.css")),
                 "/examples": ("text/html", examples_page)}
        if asked.path == "/show":
            with _one_at_a_time:
                self._reply(HTTPStatus.OK, "text/html", answer_to(dict(parse_qsl(asked.query, max_num_fields=16))))
        elif asked.path in pages:
            kind, text = pages[asked.path]
            with _one_at_a_time:
                self._reply(HTTPStatus.OK, kind, text())
        else:
            self._reply(HTTPStatus.NOT_FOUND, "text/plain", "there is no such page\n")

    def _reply(self, status: HTTPStatus, kind: str, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        for key, value in (("Content-Type", f"{kind}; charset=utf-8"), ("Content-Length", str(len(data))),
                           ("Content-Security-Policy", _POLICY), ("X-Content-Type-Options", "nosniff"),
                           ("Cross-Origin-Resource-Policy", "same-origin"), ("X-Frame-Options", "DENY"),
                           ("Cache-Control", "no-store"), ("Referrer-Policy", "no-referrer")):
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        """Says nothing: the terminal shows where the page is, and errors are on it."""


def answer_to(query: dict[str, str]) -> str:
    """What a setting does, or why not: a mistake of the visitor is an answer."""
    try:
        return show_tryout(read_tryout(query))
    except (ValueError, RuntimeError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        return told_error(error)


def _text_of_file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _setting(of: Tryout) -> dict[str, Any]:
    """As the page has it."""
    fields = asdict(of)
    return fields | {name: ", ".join(map(str, fields[name])) for name in ("x_shape", "y_shape")}


def page_text() -> str:
    """The page."""
    examples = {title: _setting(of) for title, of in EXAMPLES.items()}
    setting = next(iter(examples.values())) | {"most": MOST_RANKS, "examples": examples}
    options = "".join(f"<option>{escape(title)}</option>" for title in examples)
    return _text_of_file("play.html").replace("EXAMPLES", options).replace(
        "SETTING", json.dumps(setting).replace("<", "\\u003c"))


def examples_page() -> str:
    """All examples on one page, without script."""
    parts = [f"<h1>{escape(title)}</h1>{show_tryout(of)}" for title, of in EXAMPLES.items()]
    return _static_page("Layouts and boxings by example", "<hr>".join(parts))


def _static_page(title: str, body: str) -> str:
    return ('<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="color-scheme" content="light dark">'
            f"<title>{escape(title)}</title><style>{STYLE}{_text_of_file('play.css')}</style></head>"
            f'<body class="gt-picture">{body}</body></html>\n')


def export_examples(folder: Path) -> list[Path]:
    """The examples as pages without script, one each, and an index; the files that were written."""
    folder.mkdir(parents=True, exist_ok=True)
    written, entries = [], []
    for nth, (title, of) in enumerate(EXAMPLES.items(), 1):
        path = folder / f"example-{nth}.html"
        path.write_text(_static_page(title, f"<h1>{escape(title)}</h1>{show_tryout(of)}"), encoding="utf-8")
        written.append(path)
        entries.append(f'<li><a href="{path.name}">{escape(title)}</a>: <code>{escape(of.expression)}</code></li>')
    index = folder / "index.html"
    body = f"<h1>Layouts and boxings by example</h1><ul>{''.join(entries)}</ul>"
    index.write_text(_static_page("Layouts and boxings by example", body), encoding="utf-8")
    return [*written, index]
