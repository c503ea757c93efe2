"""Runs the command line in this process."""

import pytest

from moepack.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Run the command line in this process; return exit code, standard output and standard error."""
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    code = caught.value.code
    return (code if isinstance(code, int) else 0), captured.out, captured.err
