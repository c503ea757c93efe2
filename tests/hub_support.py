"""A simulated cache of the hub."""

import hashlib
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def cached(cache: Path, name: str, model: Path, commit: str = COMMIT, revision: str = "main") -> Path:
    """Arrange a model like the hub's cache: blobs, a snapshot of links to them, a reference. Returns the snapshot."""
    root = cache / f"models--{name.replace('/', '--')}"
    snapshot = root / "snapshots" / commit
    for folder in (root / "blobs", root / "refs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    (root / "refs" / revision).write_text(commit)
    for file in model.iterdir():
        content = file.read_bytes()
        blob = root / "blobs" / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        (snapshot / file.name).symlink_to(Path("../..") / "blobs" / blob.name)
    return snapshot
