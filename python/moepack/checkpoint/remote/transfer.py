"""Lists the files of a model on the Hub, and reads ranges of them over HTTP.

Requests use huggingface_hub's client, so that `HF_ENDPOINT`, tokens, proxies and offline mode apply. A failed
request is repeated after the time that the server asks for (`Retry-After`), or after growing pauses. A broken stream
continues at the first missing byte. huggingface_hub's own downloads do not continue after the process was killed.

Invariant: a stream yields exactly the requested bytes of the listed commit, or raises.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moepack.checkpoint.resolve import hub_failures, hub_reason
from moepack.errors import DownloadError

__all__ = ["Listing", "RemoteFile", "Transfer", "list_model"]

CHUNK = 1 << 20
"""Bytes that are passed on at a time."""

ATTEMPTS = 6
"""Consecutive attempts without a new byte before a transfer fails."""

TIMEOUT = 30.0
"""Seconds to wait for an answer of the Hub."""

PAUSE = 1.0
"""Seconds before a broken stream continues for the first time; the pause doubles up to `LONGEST`."""

LONGEST = 16.0

PATIENCE = 300.0
"""Longest pause in seconds that a server can ask for."""


@dataclass(frozen=True)
class RemoteFile:
    """A file of a model on the Hub: its path in the repository, size in bytes, and SHA-256 if the Hub knows it."""

    name: str
    size: int
    sha256: str | None


@dataclass(frozen=True)
class Listing:
    """The files of one commit of a model.

    Attributes:
        model: `ORGANIZATION/NAME`.
        revision: the requested branch, tag or commit; None for the default branch.
        commit: the commit.
        files: the files by name; in a folder (`within`), by their names in it.
    """

    model: str
    revision: str | None
    commit: str
    files: Mapping[str, RemoteFile]

    def within(self, folder: str) -> Listing:
        """Return the files of a folder; "" is the repository's root."""
        inside = {name: file for name, file in self.files.items() if name.rpartition("/")[0] == folder}
        return replace(self, files={name.rpartition("/")[2]: file for name, file in inside.items()})

    def stamp(self, name: str) -> str:
        """Return a text that changes with the content of a file."""
        return f"{self.files[name].size} {self.files[name].sha256 or self.commit}"

    def cached(self, name: str) -> Path | None:
        """Return a file in the Hub's cache of this machine; None if it is not there."""
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.model, self.files[name].name, revision=self.commit)
        return Path(found) if isinstance(found, str) else None


def list_model(model: str, revision: str | None) -> Listing:
    """Return the files of a model.

    Raises:
        DownloadError: the Hub has no such model or revision, denies access, or cannot be reached.
    """
    attempt = 0
    while True:
        try:
            return _listed(model, revision)
        except hub_failures() as cause:
            wait, attempt = _wait(cause, attempt), attempt + 1
            unreachable = getattr(cause, "response", None) is None and attempt > 1
            if wait is None or unreachable or attempt == ATTEMPTS:
                of = "" if revision is None else f" at revision '{revision}'"
                message = f"neither a directory nor a model{of} that can be downloaded from the Hub"
                raise DownloadError(f"{message}: {hub_reason(cause)}", file=model) from cause
            time.sleep(wait)


def _listed(model: str, revision: str | None) -> Listing:
    """Return the files of a model; raises an exception of `hub_failures`."""
    import huggingface_hub
    from huggingface_hub import constants

    api = huggingface_hub.HfApi()
    asked = revision or constants.DEFAULT_REVISION
    found = api.model_info(model, revision=asked, files_metadata=True, timeout=TIMEOUT)
    commit, files = str(found.sha), {}
    for each in found.siblings or ():
        files[each.rfilename] = RemoteFile(each.rfilename, int(each.size or 0), getattr(each.lfs, "sha256", None))
    for name, file in files.items():
        if name.endswith((".safetensors", ".bin", ".gguf")) and not file.size:  # a mirror may list names only
            url = huggingface_hub.hf_hub_url(model, name, revision=commit, endpoint=constants.ENDPOINT)
            known = huggingface_hub.get_hf_file_metadata(url, timeout=TIMEOUT)
            digest = known.etag if known.etag and re.fullmatch("[0-9a-f]{64}", known.etag) else None
            files[name] = RemoteFile(name, known.size or 0, digest)
    return Listing(model, revision, commit, files)


class Transfer:
    """Reads ranges of the files of a listing. Threads may share it."""

    def __init__(self, listing: Listing) -> None:
        import huggingface_hub

        self.listing = listing
        headers = huggingface_hub.utils.build_hf_headers()  # type: ignore[attr-defined]
        self._headers = {**headers, "Accept-Encoding": "identity"}
        self._locations: dict[str, str] = {}

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return the bytes from `start` to `stop` of a file; raises as `stream`."""
        return b"".join(self.stream(name, start, stop))

    def stream(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        """Yield the bytes from `start` to `stop` of a file, in pieces of at most 1 MiB.

        Raises:
            DownloadError: the server denies access, does not answer repeatedly, or sends something else.
        """
        position, failures = start, 0
        while position < stop:
            known = self._locations.get(name)
            try:
                for piece in self._attempt(name, known, position, stop):
                    position, failures = position + len(piece), 0
                    yield piece
                if position < stop:
                    raise OSError("the connection ended early")
            except hub_failures() as cause:
                self._locations.pop(name, None)
                failures += 1
                wait = _wait(cause, failures - 1)
                if wait is None and known is not None and not isinstance(cause, DownloadError):
                    wait = 0.0  # the signature of the address may have expired
                if wait is None or failures >= ATTEMPTS:
                    raise self._error(name, hub_reason(cause)) from cause
                time.sleep(wait)

    def _attempt(self, name: str, known: str | None, start: int, stop: int) -> Iterator[bytes]:
        """Yield bytes of one response, maybe fewer than requested; `known` is where the last redirect led."""
        import huggingface_hub
        from huggingface_hub import constants
        from huggingface_hub.utils import get_session, hf_raise_for_status  # type: ignore[attr-defined]

        url = known or huggingface_hub.hf_hub_url(
            self.listing.model,
            self.listing.files[name].name,
            revision=self.listing.commit,
            endpoint=constants.ENDPOINT,
        )
        # A redirect usually leads to a signed address at another host, which must not see the token.
        headers = dict(self._headers) if _is_hub(url) else {"Accept-Encoding": "identity"}
        headers["Range"] = f"bytes={start}-{stop - 1}"
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream("GET", url, headers=headers, timeout=timeout, follow_redirects=True) as response:
            hf_raise_for_status(response)
            skip = self._check(name, response, start)
            if response.history:
                self._locations[name] = str(response.url)
            left = stop - start
            for piece in response.iter_bytes(CHUNK):
                kept = piece[skip:][:left]
                skip, left = max(skip - len(piece), 0), left - len(kept)
                if kept:
                    yield kept
                if not left:
                    return

    def _check(self, name: str, response: Any, start: int) -> int:
        """Check the size of the file and the place of the response; return the number of bytes before `start`."""
        size = self.listing.files[name].size
        if response.status_code == 206:
            place, _, total = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("/")
            if place.partition("-")[0] != str(start):
                raise self._error(name, f"the server sent the range '{place}' instead of that from {start}")
        else:
            total = response.headers.get("Content-Length", "*")
            start, whole = 0, start
        if total not in ("*", "", str(size)):
            raise self._error(name, f"the server has {total} bytes, but the Hub lists {size}")
        return 0 if response.status_code == 206 else whole

    def _error(self, name: str, reason: str) -> DownloadError:
        return DownloadError(f"cannot be downloaded: {reason}", file=f"{self.listing.model}/{name}")


def _is_hub(url: str) -> bool:
    """Return whether an address is at the Hub itself."""
    from huggingface_hub import constants

    return url.startswith(f"{constants.ENDPOINT}/")


def _wait(cause: Exception, failures: int) -> float | None:
    """Return the seconds to wait before another attempt; None if it would fail in the same way."""
    if isinstance(cause, DownloadError):
        return None
    pause = min(PAUSE * 2.0**failures, LONGEST)
    response = getattr(cause, "response", None)
    if response is None:
        offline = type(cause).__name__ in ("OfflineModeIsEnabled", "LocalTokenNotFoundError", "HFValidationError")
        return None if offline else pause
    refused = response.status_code < 500 and response.status_code not in (408, 429)
    if refused and _is_hub(str(response.url)):
        return None  # another host refuses expired addresses
    # The Hub names the seconds until the end of a limit as `t` in `RateLimit`, other servers in `Retry-After`.
    limit = re.search(r"\bt=(\d+)", response.headers.get("RateLimit", ""))
    asked = limit[1] if limit and response.status_code == 429 else response.headers.get("Retry-After", "")
    return max(pause, min(float(asked), PATIENCE)) if asked.isdigit() else pause
