"""The page at `/`: a chat in the browser, in plain HTML, CSS and JavaScript.

Invariants: the page loads nothing from elsewhere and runs no inline script or style. Its Content-Security-Policy
enforces both, and forbids the scripts to create markup from strings (trusted types). The files hold no secrets, so they
need no API key; everything they request does. All files together have at most `LARGEST` bytes.
"""

import hashlib
from importlib.resources import files

from fastapi import FastAPI, Request
from fastapi.responses import Response

__all__ = ["LARGEST", "PATHS", "add_page"]

LARGEST = 60_000
"""Maximum size of the page in bytes."""

_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "style.css": "text/css; charset=utf-8",
    **dict.fromkeys(
        ("api.js", "app.js", "dom.js", "markdown.js", "store.js", "theme.js"), "text/javascript; charset=utf-8"
    ),
}

PATHS = tuple("/" if name == "index.html" else f"/page/{name}" for name in _TYPES)
"""The paths of the page and its files."""

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
"""`no-cache` lets a browser keep a file but ask whether it has changed, so all files are of one version."""


def add_page(app: FastAPI) -> None:
    """Serve the page and its files."""
    for path, (name, kind) in zip(PATHS, _TYPES.items(), strict=True):
        _add(app, path, files(__package__).joinpath(name).read_bytes(), kind)


def _add(app: FastAPI, path: str, content: bytes, kind: str) -> None:
    """Serve one file; answer 304 to a browser that has it already."""
    headers = {**_HEADERS, "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}

    @app.api_route(path, methods=["GET", "HEAD"])
    async def file(request: Request) -> Response:
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if headers["ETag"] in known or "*" in known:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=kind)
