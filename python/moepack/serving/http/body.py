"""Parses the body of a request into checked fields, or raises a refusal that names the field.

JSON is parsed strictly, because parsers differ in what RFC 8259 leaves open. Duplicate names, NaN and Infinity,
numbers beyond a float, strings with a lone surrogate, nesting deeper than `DEEPEST` and encodings other than UTF-8 are
rejected. A number without a fraction is an integer in any notation (`2.0`, `2e0`).
"""

import asyncio
import json
import math
from collections import Counter
from typing import Any, NoReturn, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from moepack.serving.http.refusal import Refusal

__all__ = ["read"]

JSON_TYPE = "application/json"
DEEPEST = 64
"""Maximum nesting of lists and objects. Supported fields need four levels."""

SENTENCES = {
    "string_pattern_mismatch": ("invalid_value", "must be 1 to 64 letters, digits, dots, dashes or underscores"),
    "missing": ("missing_required_parameter", "is required"),
    "extra_forbidden": ("unsupported_parameter", "is not supported"),
    "string_type": ("invalid_type", "must be a string"),
    "bool_type": ("invalid_type", "must be true or false"),
    "int_type": ("invalid_type", "must be an integer"),
    "float_type": ("invalid_type", "must be a finite number"),
    "list_type": ("invalid_type", "must be a list"),
    "dict_type": ("invalid_type", "must be an object"),
    "model_type": ("invalid_type", "must be an object"),
    "literal_error": ("invalid_value", "must be {expected}"),
    "greater_than": ("invalid_value", "must be above {gt}"),
    "greater_than_equal": ("invalid_value", "must be at least {ge}"),
    "less_than": ("invalid_value", "must be below {lt}"),
    "less_than_equal": ("invalid_value", "must be at most {le}"),
    "too_short": ("invalid_value", "must not be empty"),
    "too_long": ("invalid_value", "must have at most {max_length} elements"),
    "invalid_value": ("invalid_value", "{sentence}"),
}
"""Maps pydantic's error types to OpenAI's error code and the message that follows the field's name."""

_CHECKED = (str, list, dict)

_BROWSERS = {"origin", "sec-fetch-site"}
"""Headers of browsers' requests, which pages cannot change."""

Fields = TypeVar("Fields", bound=BaseModel)


async def read(request: Request, fields: type[Fields]) -> Fields:
    """Return the fields of a request's body.

    The content type must be JSON. Browsers then send a CORS preflight before a page of another site may post a body,
    and this server permits only the origins of `--cors-origin`. Programs may omit the type; a browser that does names
    the origin of the page.

    Raises:
        Refusal: the content type is not JSON, the body is not JSON, or it has an unsupported field.
    """
    kind, _, parameters = request.headers.get("content-type", "").lower().partition(";")
    charset = parameters.strip().removeprefix("charset=").strip('"')
    is_program = "content-type" not in request.headers and not _BROWSERS & {*request.headers.keys()}
    if (kind.strip() != JSON_TYPE and not is_program) or charset not in ("", "utf-8"):
        raise Refusal(415, f"the content-type must be {JSON_TYPE}, in UTF-8", "content_type")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise Refusal(
            415, "the content-encoding must be identity: compressed bodies are not supported", "content_encoding"
        )
    return await asyncio.to_thread(_checked, await request.body(), fields)  # parsing megabytes would block the loop


def _checked(data: bytes, fields: type[Fields]) -> Fields:
    """Parse and validate a body."""
    try:
        return fields.model_validate(_parsed(data))
    except ValidationError as error:
        raise _refusal(error) from error


def _parsed(data: bytes) -> dict[str, Any]:
    """Parse a body into a dict."""
    if not data:
        raise Refusal(400, "the body is empty; it must be a JSON object", "invalid_json")
    try:
        content = json.loads(
            data.decode(),
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_float=_float,
        )
    except UnicodeDecodeError as error:
        raise Refusal(400, f"the body is not UTF-8: byte {error.start} is invalid", "invalid_json") from error
    except json.JSONDecodeError as error:
        raise Refusal(400, f"the body is not JSON: {error}", "invalid_json") from error
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:  # Python limits integers to 4300 digits
        raise Refusal(400, "the body has a number with too many digits", "invalid_json") from error
    if not isinstance(content, dict):
        raise Refusal(400, "the body must be a JSON object", "invalid_json")
    _check_strings(content)
    return content


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a dict. Reject duplicate names, because all values but the last would be ignored."""
    content = dict(pairs)
    if len(content) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise Refusal(400, f"{twice} is given twice", "invalid_json", param=twice)
    return content


def _constant(name: str) -> NoReturn:
    raise Refusal(400, f"the body is not JSON: it has the number {name}", "invalid_json")


def _float(digits: str) -> int | float:
    number = float(digits)
    if not math.isfinite(number):
        raise Refusal(400, f"the body has a number that is too large: {digits}", "invalid_json")
    return int(number) if number.is_integer() else number


def _check_strings(content: dict[str, Any]) -> None:
    """Reject strings that are not Unicode text, and nesting that is too deep."""
    left: list[tuple[Any, tuple[str | int, ...]]] = [(content, ())]
    while left:
        value, place = left.pop()
        if len(place) > DEEPEST:
            raise _too_deep()
        if isinstance(value, str):
            _check_string(value, place)
        elif isinstance(value, list):
            left += [(item, (*place, i)) for i, item in enumerate(value) if type(item) in _CHECKED]
        elif isinstance(value, dict):
            for name, item in value.items():
                _check_string(name, (*place, name))
                left.append((item, (*place, name)))


def _check_string(text: str, place: tuple[str | int, ...]) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"{_written(place)} is not Unicode text: it has a lone surrogate at character {error.start}"
        raise Refusal(400, message, "invalid_value", param=_written(place)) from error


def _too_deep() -> Refusal:
    return Refusal(400, f"the body has more than {DEEPEST} levels of lists and objects", "invalid_json")


def _refusal(error: ValidationError) -> Refusal:
    """Return the refusal for pydantic's first error, naming the field as the client wrote it."""
    first = error.errors(include_url=False, include_input=False)[0]
    code, sentence = SENTENCES.get(first["type"], ("invalid_value", "is not valid"))
    facts = {name: f"{fact:g}" if isinstance(fact, float) else fact for name, fact in first.get("ctx", {}).items()}
    field = _written(first["loc"])
    return Refusal(400, f"{field} {sentence.format(**facts)}", code, param=field)


def _written(place: tuple[str | int, ...]) -> str:
    """Return the path of a field as clients write it: `messages[0].content`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")
