"""Lists the files of a model on the Hub, and reads ranges of them over HTTP.

Requests use huggingface_hub's client, so that `HF_ENDPOINT`, tokens, proxies and offline mode apply. A failed
request is repeated after the time that the server asks for (`Retry-After`), or after growing pauses. A broken stream
continues at the first missing byte. huggingface_hub's own downloads do not continue after the process was killed.

Ranges have no checksum. Instead, every answer is compared with the listing: the commit (`X-Repo-Commit`) and the
SHA-256 (`X-Linked-Etag`, `ETag`) as far as the server names them, the place and the length of the range, and the size
of the file. The entity tag of a file must be the same in all answers of a host, as RFC 9110 (15.3.7.3) requires of
ranges that are combined.

Invariant: a stream yields exactly the requested bytes of the listed commit, or raises. Bytes that a server sends under
the right headers are not verified here.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
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

STOPPED = "the download was stopped"

_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_SHA256 = re.compile("[0-9a-f]{64}")


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

    def download(self, name: str) -> Path:
        """Download a file into the Hub's cache with huggingface_hub, which uses hf_xet if it is installed.

        Raises:
            DownloadError: the file cannot be downloaded.
        """
        import huggingface_hub
        from huggingface_hub import constants

        try:
            return Path(huggingface_hub.hf_hub_download(self.model, self.files[name].name, revision=self.commit))
        except Exception as cause:  # hf_xet raises exceptions of its own
            uses_xet = find_spec("hf_xet") is not None and not constants.HF_HUB_DISABLE_XET
            advice = "; HF_HUB_DISABLE_XET=1 downloads without hf_xet" if uses_xet else ""
            raise DownloadError(f"cannot be downloaded: {hub_reason(cause)}{advice}", file=name) from cause


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
            digest = known.etag if known.etag and _SHA256.fullmatch(known.etag) else None
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
        self._tags: dict[tuple[str, str], str] = {}
        self._stopped = threading.Event()

    def stop(self) -> None:
        """End the streams that have begun: they raise before their next piece or attempt."""
        stopped, self._stopped = self._stopped, threading.Event()
        stopped.set()

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return the bytes from `start` to `stop` of a file; raises as `stream`."""
        return b"".join(self.stream(name, start, stop))

    def filled(self, name: str, start: int, stop: int) -> bytearray:
        """Return what `read` does without a second copy in memory."""
        data, position = bytearray(stop - start), 0
        for piece in self.stream(name, start, stop):
            data[position : position + len(piece)] = piece
            position += len(piece)
        return data

    def stream(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        """Yield the bytes from `start` to `stop` of a file, in pieces of at most 1 MiB.

        Raises:
            DownloadError: the server denies access, does not answer repeatedly, or sends something else; or `stop` was
                called.
        """
        position, failures, stopped = start, 0, self._stopped
        while position < stop:
            known = self._locations.get(name)
            try:
                for piece in self._attempt(name, known, position, stop):
                    position, failures = position + len(piece), 0
                    yield piece
                    if stopped.is_set():
                        raise self._error(name, STOPPED)
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
                if stopped.wait(wait):
                    raise self._error(name, STOPPED) from cause

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
            self._check_version(name, response)
            skip = self._check_place(name, response, start)
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

    def _check_version(self, name: str, response: Any) -> None:
        """Check that an answer, and the redirects that led to it, are about the listed file.

        Raises:
            DownloadError: the server names another commit or SHA-256, or another entity tag than before.
        """
        listed = self.listing.files[name].sha256
        for answer in (*response.history, response):
            commit = answer.headers.get("X-Repo-Commit", self.listing.commit)
            if commit != self.listing.commit:
                raise self._error(name, f"the server sent commit {commit} instead of {self.listing.commit}")
            # The tag of a redirect is not that of the file. Other hosts have tags of their own, compared below.
            own = answer.headers.get("ETag") if _is_hub(str(answer.url)) else None
            tag = _bare_tag(answer.headers.get("X-Linked-Etag") or own)
            if listed is not None and _SHA256.fullmatch(tag) and tag != listed:
                raise self._error(name, f"the server has the SHA-256 {tag}, but the Hub lists {listed}")
        if tag := _bare_tag(response.headers.get("ETag")):
            before = self._tags.setdefault((name, response.url.host), tag)
            if tag != before:
                raise self._error(name, f"the file changed during the download: its tag was '{before}' and is '{tag}'")

    def _check_place(self, name: str, response: Any, start: int) -> int:
        """Check the place and length of an answer and the size of the file; return the bytes before `start` in it."""
        size, length = self.listing.files[name].size, response.headers.get("Content-Length", "")
        total, skip = length, start
        if response.status_code == 206:
            place = response.headers.get("Content-Range", "")
            match = _RANGE.fullmatch(place)
            if match is None or int(match[1]) != start or int(match[2]) < start:
                raise self._error(name, f"the server sent the range '{place}' instead of that from {start}")
            if length.isdigit() and int(length) != int(match[2]) + 1 - start:
                raise self._error(name, f"the server sent {length} bytes as the range '{place}'")
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise self._error(name, "the server sent a range of compressed content")
            total, skip = match[3], 0
        if total not in ("*", "", str(size)):
            raise self._error(name, f"the server has {total} bytes, but the Hub lists {size}")
        return skip

    def _error(self, name: str, reason: str) -> DownloadError:
        return DownloadError(f"cannot be downloaded: {reason}", file=f"{self.listing.model}/{name}")


def _bare_tag(tag: str | None) -> str:
    """Return an entity tag without the mark of a weak one and quotes; "" for None."""
    return (tag or "").removeprefix("W/").strip('"')


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
