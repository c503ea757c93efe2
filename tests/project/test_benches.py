"""The benchmarks and what is written about them: every path exists, and `benches/README.md` lists every script."""

import re
from pathlib import Path

import pytest

from places import BENCHES, ROOT

ROOMS = ("cpu", "gpu", "quality", "studies", "tools")
RESULTS = {file.name for file in (BENCHES / "results").iterdir()}
PATH = re.compile(r"\bbenches/[\w/.*-]*\w")
MODULE = re.compile(r"\bbenches\.(?:" + "|".join(ROOMS) + r")\.\w+")
COMMAND = re.compile(r"\bpython\d? (?:\./)?benches/")
RESULT = re.compile(r"`([\w*-]+\.jsonl?)`")
MEASURED = re.compile(r"`([\w*-]+-(?:zen|xeon|h100|h200)[\w*-]*\.jsonl?)`")


def texts() -> dict[str, str]:
    """Return the files that may mention a benchmark, by path relative to the checkout."""
    files = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "Makefile", BENCHES / "README.md"]
    files += [*(ROOT / "docs").rglob("*.md"), *(BENCHES / "results").iterdir()]
    for place in ("python", "benches", "tests", ".ci"):
        files += (ROOT / place).rglob("*.py")
    return {str(file.relative_to(ROOT)): file.read_text("utf-8") for file in files if file != Path(__file__)}


def missing(text: str) -> list[str]:
    """Return the paths and modules of benchmarks that `text` names and that do not exist."""
    paths = [found for found in PATH.findall(text) if not any(ROOT.glob(found))]
    names = [found for found in MODULE.findall(text) if not (ROOT / f"{found.replace('.', '/')}.py").is_file()]
    return paths + names


def test_every_path_of_a_benchmark_exists() -> None:
    assert {name: found for name, text in texts().items() if (found := missing(text))} == {}


@pytest.mark.parametrize("text", ["`benches/offload.py`", "benches/results/no-*.json", "python -m benches.cpu.hull"])
def test_a_benchmark_that_does_not_exist_is_found(text: str) -> None:
    assert missing(text)


def test_every_command_runs_a_module() -> None:
    assert [name for name, text in texts().items() if COMMAND.search(text)] == []


def test_the_readme_lists_every_script_in_the_table_of_its_room() -> None:
    _, *sections = (BENCHES / "README.md").read_text("utf-8").split("\n## ")
    assert [section.split("\n")[0] for section in sections] == list(ROOMS)
    for room, section in zip(ROOMS, sections, strict=True):
        expected = {f"benches.{room}.{file.stem}" for file in (BENCHES / room).glob("*.py")}
        assert set(re.findall(rf"benches\.{room}\.\w+", section)) == expected


def test_the_readme_lists_every_result_and_no_other() -> None:
    found = set(RESULT.findall((BENCHES / "README.md").read_text("utf-8")))
    assert found == RESULTS


def test_the_pages_name_only_results_that_exist() -> None:
    """Pages also name results without their folder. Such a name ends in a machine."""
    names = {name for file in (ROOT / "docs").rglob("*.md") for name in MEASURED.findall(file.read_text("utf-8"))}
    assert names and names <= RESULTS


def test_the_sections_that_the_readme_names_exist() -> None:
    """A row names headings, or paragraphs that start in bold or italics."""
    page = re.compile(r"\[[^\]]+\]\(\.\./(docs/[\w/-]+\.md)\)([^;|]*)")
    for path, rest in page.findall((BENCHES / "README.md").read_text("utf-8")):
        text = (ROOT / path).read_text("utf-8")
        for section in re.findall(r'"([^"]+)"', rest):
            assert re.search(rf"^(?:#+ |\*+){re.escape(section)}", text, re.MULTILINE), f"{path}: {section}"
