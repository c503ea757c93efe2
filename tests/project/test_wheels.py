"""Wheels contain nothing that depends on the build machine: `.ci/wheels.py` removes it."""

import importlib.util
import json
import uuid
import zipfile
from pathlib import Path

from places import ROOT

SPEC = importlib.util.spec_from_file_location("wheels", ROOT / ".ci" / "wheels.py")
assert SPEC and SPEC.loader
wheels = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(wheels)
INFO = "some-1.dist-info"
LIST = f"{INFO}/sboms/some.cyclonedx.json"


def built(root: Path, minute: int, content: bytes = b"code") -> bytes:
    """A wheel as built in the folder `root` and processed by `.ci/wheels.py`."""
    component = {"bom-ref": f"path+{root.as_uri()}/rust"}
    metadata = {"timestamp": f"2026-01-01T00:{minute}:00Z", "component": component}
    crates = {"serialNumber": uuid.uuid4().urn, "metadata": metadata}
    files = {"some/code.py": content, LIST: json.dumps(crates).encode()}
    record = "".join(wheels.record_line(name, data) for name, data in files.items()) + f"{INFO}/RECORD,,\n"
    root.mkdir(parents=True)
    with zipfile.ZipFile(root / "built.whl", "w") as wheel:
        for name, data in {**files, f"{INFO}/RECORD": record.encode()}.items():
            wheel.writestr(zipfile.ZipInfo(name, (2026, 1, 1, 0, minute, 0)), data)
    wheels.normalize(root / "built.whl", root / "normal.whl", root)
    return (root / "normal.whl").read_bytes()


def test_two_builders_make_the_same_wheel(tmp_path: Path) -> None:
    assert built(tmp_path / "here", 1) == built(tmp_path / "somewhere" / "else", 2)
    assert built(tmp_path / "other", 3, b"other code") != built(tmp_path / "again", 3)


def test_the_record_matches_the_wheel(tmp_path: Path) -> None:
    built(tmp_path / "here", 1)
    with zipfile.ZipFile(tmp_path / "here" / "normal.whl") as wheel:
        record = wheel.read(f"{INFO}/RECORD").decode().splitlines()
        names = wheel.namelist()
        lines = [wheels.record_line(name, wheel.read(name)).strip() for name in ("some/code.py", LIST)]
        assert record == [*lines, f"{INFO}/RECORD,,"]
        crates = json.loads(wheel.read(LIST))
    assert names[-1] == f"{INFO}/RECORD" and str(tmp_path) not in json.dumps(crates)
    assert uuid.UUID(crates["serialNumber"]) and "timestamp" not in crates["metadata"]
