"""Names of test modules: pytest imports them by their base names."""

from collections import Counter

from places import ROOT


def test_no_two_test_modules_share_a_name() -> None:
    counts = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in counts.items() if count > 1] == []
