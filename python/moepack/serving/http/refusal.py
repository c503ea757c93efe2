"""Reports every failure as an OpenAI error object: refusals of this server, errors of the framework, and defects.

Invariant: every failure is answered with `{"error": {"message", "type", "param", "code"}}`; Anthropic's endpoints add
their `"type": "error"` and use their types. Only a defect of the server
has status 500; it is raised again after the response, so that the server logs its traceback.
"""

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

__all__ = ["Refusal", "defect", "report_errors"]

_ANTHROPIC = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error",
              503: "overloaded_error"}  # fmt: skip
"""Anthropic's error types by status."""

LONGEST = 500
"""Maximum characters of a message or a field's name. Both may quote client input of megabytes."""


class Refusal(Exception):
    """An error response in OpenAI's format.

    Args:
        status: HTTP status.
        message: message for the user.
        code: error code for programs.
        kind: OpenAI's error type.
        param: the field at fault as the client wrote it, or None.
        headers: headers of the response.
        details: for Anthropic's clients: what they may do instead.
    """

    def __init__(
        self, status: int, message: str, code: str, kind: str = "invalid_request_error", param: str | None = None,
        headers: dict[str, str] | None = None, details: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self._details = status, {} if details is None else {"details": details}
        name = None if param is None else _printable(param)
        self.content: dict[str, Any] = {
            "error": {"message": _printable(message), "type": kind, "param": name, "code": code}
        }
        self.headers = {"Retry-After": "1"} if status in (429, 503) else headers

    @property
    def anthropic(self) -> dict[str, Any]:
        """The content in Anthropic's form, which has all fields of OpenAI's."""
        kind = _ANTHROPIC.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {**self.content["error"], "type": kind, **self._details}}

    @property
    def ollama(self) -> dict[str, Any]:
        """The content in ollama's form."""
        return {"error": self.content["error"]["message"]}

    def response(self, path: str = "") -> JSONResponse:
        """Return the HTTP response to a request of a path, in the form of its protocol."""
        forms = {"/v1/messages": self.anthropic, "/api/": self.ollama}
        content = next((form for start, form in forms.items() if path.startswith(start)), self.content)
        return JSONResponse(content, self.status, self.headers)


def defect() -> Refusal:
    """Return the response for a defect of the server."""
    return Refusal(500, "internal server error; see the server's log", "internal_error", "server_error")


def report_errors(app: FastAPI) -> None:
    """Install handlers that report every failure in OpenAI's format."""

    @app.exception_handler(Refusal)
    async def refusal(request: Request, error: Refusal) -> JSONResponse:
        return error.response(request.scope["path"])

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> JSONResponse:
        path, code = request.scope["path"], HTTPStatus(error.status_code).name.lower()
        message = {404: f"there is no {path}", 405: f"{path} does not take {request.method}"}
        said = message.get(error.status_code, str(error.detail))
        headers = dict(error.headers) if error.headers else None
        return Refusal(error.status_code, said, code, headers=headers).response(path)

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> JSONResponse:
        return defect().response(request.scope["path"])


def _printable(text: str) -> str:
    """Return the text without lone surrogates, which JSON cannot carry, and cut to `LONGEST`."""
    return text[:LONGEST].encode("utf-8", "backslashreplace").decode()
