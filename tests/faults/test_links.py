"""Links inside a model's directory and in the hub's cache are treated as files; links that lead out are not
followed."""

import shutil
from pathlib import Path

import pytest

import moepack
from moepack import MoepackWarning
from moepack.format.regular import leads_out


def snapshot(directory: Path, cache: Path) -> Path:
    """The directory in the layout of the hub's cache: a snapshot of links to blobs."""
    place, blobs = cache / "models--a--b" / "snapshots" / "0123", cache / "models--a--b" / "blobs"
    place.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(directory.iterdir())):
        shutil.copy(file, blobs / str(number))
        (place / file.name).symlink_to(Path("../../blobs") / str(number))
    return place


def test_a_file_of_a_packed_directory_that_links_out_is_a_fault(packed: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(packed, tmp_path / "packed"))
    for name in ("tokenizer.json", "model-00001-of-00003.safetensors"):
        (directory / name).rename(tmp_path / name)
        (directory / name).symlink_to(tmp_path / name)
        fault, *more = moepack.verify(directory).faults
        assert (fault.file, fault.what, more) == (
            name, f"is a link out of the directory, to {tmp_path / name}", []
        )  # fmt: skip
        (directory / name).unlink()
        (tmp_path / name).rename(directory / name)
    assert moepack.verify(directory).ok


def test_the_links_of_the_hubs_cache_stay_in_the_model(packed: Path, mixtral: Path, tmp_path: Path) -> None:
    assert moepack.verify(snapshot(packed, tmp_path / "one")).ok
    report = moepack.compress(snapshot(mixtral, tmp_path / "two"), tmp_path / "out", method="ternary")
    assert (
        not report.skipped
        and (report.path / "tokenizer.json").read_bytes() == (mixtral / "tokenizer.json").read_bytes()
    )


@pytest.mark.parametrize("inside_cache", [False, True])
def test_a_small_file_that_links_out_is_not_copied(inside_cache: bool, mixtral: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of this machine")
    model = (
        snapshot(mixtral, tmp_path / "cache") if inside_cache else Path(shutil.copytree(mixtral, tmp_path / "model"))
    )
    (model / "LICENSE").symlink_to(secret)
    (model / "NOTICE").symlink_to("config.json")
    with pytest.warns(MoepackWarning, match=r"LICENSE: links out of the model's directory, to .*secret; it is not cop"):
        report = moepack.compress(model, tmp_path / "out", method="ternary")
    assert report.skipped == ("LICENSE",) and not (report.path / "LICENSE").exists()
    assert (report.path / "NOTICE").is_file() and not (report.path / "NOTICE").is_symlink()
    assert moepack.verify(report.path).ok


def test_chains_of_links_count_by_their_end(tmp_path: Path) -> None:
    inside, outside = tmp_path / "model", tmp_path / "other"
    inside.mkdir()
    outside.write_text("")
    (inside / "a").symlink_to("b")
    (inside / "b").symlink_to(outside)
    (inside / "c").symlink_to("../model/d")
    (inside / "d").write_text("")
    assert [leads_out(inside / name) for name in "abcd"] == [True, True, False, False]
