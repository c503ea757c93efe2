"""Every failure as OpenAI's error object: refusals of this server, errors of the framework, and defects.

Invariant: whatever fails, the answer is `{"error": {"message", "type", "param", "code"}}`. Only a defect of the server
is a 500; it is raised again after the answer, so that the server logs its traceback.
"""

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

__all__ = ["Refusal", "defect", "report_errors"]

LONGEST = 500
"""Characters of a message or a field's name. Both may quote what a client sent, up to megabytes."""


class Refusal(Exception):
    """An answer of OpenAI's form that says what is wrong.

    Args:
        status: of HTTP.
        message: a sentence for the user.
        code: a word for programs.
        kind: OpenAI's type of the error.
        param: the field at fault, as the client wrote it; None where no field is.
        headers: of the answer.
    """

    def __init__(
        self, status: int, message: str, code: str, kind: str = "invalid_request_error", param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status = status
        name = None if param is None else _printable(param)
        self.content: dict[str, Any] = {
            "error": {"message": _printable(message), "type": kind, "param": name, "code": code}
        }
        self.headers = {"Retry-After": "1"} if status in (429, 503) else headers

    def response(self) -> JSONResponse:
        """Return the answer over HTTP."""
        return JSONResponse(self.content, self.status, self.headers)


def defect() -> Refusal:
    """Return the answer to a request that met a defect of the server."""
    return Refusal(500, "the server failed; its log says where", "internal_error", "server_error")


def report_errors(app: FastAPI) -> None:
    """Let every failure have OpenAI's form."""

    @app.exception_handler(Refusal)
    async def refusal(request: Request, error: Refusal) -> JSONResponse:
        return error.response()

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> JSONResponse:
        path, code = request.scope["path"], HTTPStatus(error.status_code).name.lower()
        message = {404: f"there is no {path}", 405: f"{path} does not take {request.method}"}
        said = message.get(error.status_code, str(error.detail))
        headers = dict(error.headers) if error.headers else None
        return Refusal(error.status_code, said, code, headers=headers).response()

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> JSONResponse:
        return defect().response()


def _printable(text: str) -> str:
    """The text as JSON can carry it: without lone surrogates, and not too long."""
    return text[:LONGEST].encode("utf-8", "backslashreplace").decode()
