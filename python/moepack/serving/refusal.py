"""Answers that say what is wrong, in OpenAI's form: our own refusals and those of FastAPI."""

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

__all__ = ["Refusal", "report_errors"]


class Refusal(Exception):
    """An answer of OpenAI's form that says what is wrong."""

    def __init__(self, status: int, message: str, code: str, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status = status
        self.content = {"error": {"message": message, "type": kind, "param": None, "code": code}}

    def response(self) -> JSONResponse:
        """The answer over HTTP."""
        headers = {"Retry-After": "1"} if self.status in (429, 503) else None
        return JSONResponse(self.content, self.status, headers)


def report_errors(app: FastAPI) -> None:
    """Let every refusal have OpenAI's form, FastAPI's own included."""

    @app.exception_handler(Refusal)
    async def refusal(request: Request, error: Refusal) -> JSONResponse:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if part != "body" and first["type"] != "json_invalid")
        message = f"{place}: {first['msg']}" if place else first["msg"]
        return Refusal(400, message, first["type"]).response()

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> JSONResponse:
        return Refusal(error.status_code, str(error.detail), "http_error").response()
