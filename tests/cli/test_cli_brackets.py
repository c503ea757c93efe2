"""Help, messages and tables print brackets verbatim instead of interpreting them as Rich markup."""

import inspect as python_inspect
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, get_args, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from moepack.cli import app, compare, evaluate, inspect, main
from moepack.cli.compress import interrupted
from moepack.cli.console import plain_console
from moepack.cli.literal import LiteralCommand, LiteralGroup
from moepack.comparison.measure import Point
from moepack.progress.display import Bar, Lines
from moepack.report.contents import MatrixRow, Row

NAMES = ["[red]x[/red]", "[ray]", "x[/]", "[link=y]z", "[0]", r"a\[b]", ":smile:", "[@click=f]"]
WIDE = {"COLUMNS": "2000", "TERMINAL_WIDTH": "2000", "NO_COLOR": "1", "TERM": "dumb"}
names = pytest.mark.parametrize("name", NAMES)


def flat(text):
    """Words with one space between them, without the frames of panels."""
    return " ".join(text.translate(dict.fromkeys(map(ord, "│╭╮╰╯─"), " ")).split())


def shown(*arguments, of=app):
    result = CliRunner().invoke(of, list(map(str, arguments)), env=WIDE)
    return flat(result.output)


def sources(function):
    """The help of a command's options as in the source."""
    for hint in get_type_hints(function, include_extras=True).values():
        for about in get_args(hint)[1:]:
            if getattr(about, "help", None) and not about.hidden:
                yield about.help


COMMANDS = {info.name: info for info in app.registered_commands}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_prints_every_text_as_the_source_has_it(name):
    command, help_text = COMMANDS[name], shown(name, "--help")
    texts = [*sources(command.callback), command.callback.__doc__, command.epilog or ""]
    assert len(texts) > 2
    for text in texts:
        for paragraph in python_inspect.cleandoc(text).split("\n\n"):
            assert flat(paragraph) in help_text


def test_the_list_of_commands_and_its_options_too():
    listed = shown("--help")
    for text in [app.info.help, *sources(app.registered_callback.callback)]:
        assert flat(text) in listed
    for command in COMMANDS.values():
        assert flat(python_inspect.cleandoc(command.callback.__doc__).split("\n\n")[0]) in listed


@pytest.mark.parametrize("name", [name for name in NAMES if name != ":smile:"])  # typer has no way to keep emoji codes
def test_every_part_of_a_help_keeps_its_brackets(name):
    made = typer.Typer(cls=LiteralGroup, help=f"About {name}.")
    option = typer.Option(help=f"Option {name}.", show_default=f"default {name}")

    @made.command("one", cls=LiteralCommand, epilog=f"Below {name}.", help=f"Does {name}.\n\nAnd {name}.")
    def one(given: Annotated[str, option] = "", path: Annotated[str, typer.Argument(help=f"At {name}.")] = "") -> None:
        pass

    made.command("two", cls=LiteralCommand, help="Nothing.")(lambda: None)
    for twice in range(2):
        helped = shown("one", "--help", of=made)
        for text in ("Option {}.", "default {}", "At {}.", "Below {}.", "Does {}.", "And {}."):
            assert text.format(name) in helped, twice
    listed = shown("--help", of=made)
    assert f"About {name}." in listed and f"Does {name}." in listed


@names
def test_errors_print_names_verbatim(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = name.replace("/", "")
    for arguments in (["verify", given], ["inspect", given], ["generate", given, "--prompt", "a"]):
        with pytest.raises(SystemExit):
            main(arguments)
        assert given in capsys.readouterr().err
    (tmp_path / given).write_bytes(b"\xff")
    for arguments in (
        ["generate", "m", "--prompt-file", f"{given}.txt"],
        ["generate", "m", "--prompt-file", given],
        ["compress", "m", "out", "--device", name],
        ["compare", "m", "--text", given, "--methods", name],
        ["verify", f"--{name.partition('=')[0]}"],
    ):
        printed = shown(*arguments).replace(r"\\", "\\")  # typer quotes names of files
        assert arguments[-1] in printed, arguments


@pytest.fixture
def wide(monkeypatch):
    for variable, value in WIDE.items():
        monkeypatch.setenv(variable, value)


@names
def test_tables_print_names_verbatim(name, wide, capsys):
    evaluate._print_tasks(Path(name), {name: {f"acc{name}": 0.5}}, as_json=False)
    assert {name, f"acc{name}"} <= set(capsys.readouterr().out.split())
    matrices = (MatrixRow(2, 1.0, None, 0.1),)
    row = Row(f"layer{name}", f"up{name}", "experts", f"form{name}", (2, 3), 4.0, 0.5, None, 24, 12, matrices)
    pair = {"before": 24, "after": 12}
    totals = {"weights": 6, "linears": {"weights": 0}, "dense": 1, "directory": pair}
    settings = {"roles": f"roles{name}"}
    manifest = SimpleNamespace(architecture=f"Net{name}", method="rate", settings=settings, version="1")
    inspect._print(manifest, [row], totals | {"experts": pair | {"bits_per_weight": 4.0}})
    inspect._print_matrices([row])
    printed = capsys.readouterr().out
    for text in ("layer{}", "up{}", "form{}", "Net{}: rate", "(roles roles{})", "layer{0}.up{0} 0"):
        assert text.format(name) in printed


@names
def test_a_comparison_prints_the_names_of_its_texts(name, wide, tmp_path, monkeypatch, capsys):
    text = tmp_path / (name.replace("/", "") + ".txt")
    text.write_text("a")
    point = Point("rate", 5, 5, {"a": 0.1}, None, None, 0, 0.0, 0)
    made = SimpleNamespace(size=10, points=lambda *arguments: [point])
    monkeypatch.setattr("moepack.comparison.Comparison", lambda *arguments: made)
    compare.compare_command("m", [text], sizes="5B", methods="rate")
    assert text.stem in capsys.readouterr().out.splitlines()[0]


@names
@pytest.mark.parametrize("terminal", [True, False])
def test_progress_prints_names_verbatim(name, terminal):
    file = io.StringIO()
    console = plain_console(file=file, force_terminal=terminal, width=300)
    progress = Bar(console) if terminal else Lines(console)
    progress.prepare(f"reads {name}")
    progress.start(10, 0)
    progress.stage(f"stage {name}")
    progress.advance(3, 1000)
    progress.finish()
    assert f"reads {name}" in file.getvalue() and f"stage {name}" in file.getvalue()


@names
def test_an_interruption_prints_the_directory(name, tmp_path):
    file = io.StringIO()
    out = tmp_path / name
    out.with_name(out.name + ".partial").mkdir(parents=True)
    interrupted(plain_console(file=file, width=300), out)
    assert str(out) in file.getvalue()
