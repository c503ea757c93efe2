"""What only some systems have is named in `moepack.system` alone, and text files have the same bytes everywhere."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import moepack.system
from moepack.system.names import is_portable, made_portable

PACKAGE = Path(moepack.system.__file__).parents[1]
SYSTEM = Path(moepack.system.__file__).parent

MODULES = {
    *("fcntl", "grp", "msvcrt", "posix", "pty", "pwd", "resource", "select", "signal", "syslog", "termios", "tty"),
    *("winreg", "winsound", "_winapi", "nt"),
}
"""Modules that some systems lack, or whose content depends on the system."""

ATTRIBUTES = {
    "os": {
        *("chmod", "chown", "execv", "execve", "execvp", "fchmod", "fdatasync", "fork", "forkpty", "fsync", "geteuid"),
        *("getloadavg", "getpgid", "getuid", "kill", "killpg", "link", "mkfifo", "name", "nice", "open", "pread"),
        *("preadv", "pwrite", "pwritev", "register_at_fork", "remove", "rename", "renames", "replace", "rmdir"),
        *("sendfile", "setsid", "statvfs", "symlink", "sync", "sysconf", "umask", "uname", "unlink", "wait", "waitpid"),
        *("O_BINARY", "O_CLOEXEC", "O_DIRECT", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK"),
    },
    "sys": {"platform", "getwindowsversion"},
    "socket": {"AF_UNIX", "SOCK_CLOEXEC", "SO_REUSEPORT"},
    "shutil": {"rmtree", "move"},
    "platform": {"processor", "release", "system"},
    "ctypes": {"CDLL", "OleDLL", "WinDLL", "WinError", "get_last_error", "windll"},
}
"""Names of modules that exist everywhere."""

PREFIXES = {"os": ("posix_", "sched_"), "mmap": ("MAP_", "MADV_", "PROT_")}

METHODS = {"hardlink_to", "madvise", "rename", "rmdir", "symlink_to", "unlink"}
"""Methods of paths and maps. `Path.replace` is told from `str.replace` by its single argument."""

FILES = ("/proc/", "/sys/", "/dev/")


def violations(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (f"import {each.name}" for each in names if each.name in MODULES)
            case ast.ImportFrom(module=str(module), names=names):
                if module in MODULES:
                    yield f"from {module}"
                yield from (f"{module}.{each.name}" for each in names if banned(module, each.name))
            case ast.Attribute(value=ast.Name(id=module), attr=name) if banned(module, name):
                yield f"{module}.{name}"
            case ast.Call(func=ast.Attribute(attr=name), args=args, keywords=keywords):
                is_path = name in METHODS or (name == "replace" and len(args) == 1 and not keywords)
                if is_path and not (isinstance(node.func.value, ast.Name) and node.func.value.id == "files"):
                    yield f".{name}()"
            case ast.Constant(value=str(text)) if text.startswith(FILES) and " " not in text:
                yield text


def banned(module: str, name: str) -> bool:
    return name in ATTRIBUTES.get(module, ()) or name.startswith(PREFIXES.get(module, "\0"))


def modules() -> list[Path]:
    found = [file for file in PACKAGE.rglob("*.py") if not file.is_relative_to(SYSTEM)]
    assert len(found) > 300
    return found


def test_no_other_module_names_what_only_some_systems_have():
    found = [
        f"{file.relative_to(PACKAGE)}:{each}"
        for file in modules()
        for each in violations(ast.parse(file.read_text(encoding="utf-8")))
    ]
    assert not found


@pytest.mark.parametrize(
    "code",
    [
        "import fcntl",
        "from resource import getrusage",
        "from os import sched_getaffinity",
        "os.preadv(1, [], 0)",
        "os.open(file, os.O_RDONLY)",
        "os.posix_fadvise(1, 0, 0, 0)",
        "mapping.madvise(mmap.MADV_HUGEPAGE)",
        "partial.replace(target)",
        "path.unlink(missing_ok=True)",
        "open('/proc/self/status')",
        "signal.SIGKILL if sys.platform == 'linux' else None",
    ],
)
def test_the_scan_finds(code):
    assert [*violations(ast.parse(code))]


def without_encoding(tree: ast.AST) -> Iterator[int]:
    """Lines that open a file as text in the encoding, or write it with the line ends, of the system."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        given = {each.arg for each in node.keywords}
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        is_method = isinstance(node.func, ast.Attribute)  # `textfile.read_text` is a function
        if (name == "write_text" and not {"encoding", "newline"} <= given) or (
            is_method and name == "read_text" and "encoding" not in given
        ):
            yield node.lineno
        if isinstance(node.func, ast.Name) and name == "open":
            mode = next((each.value for each in node.keywords if each.arg == "mode"), None)
            mode = mode or (node.args[1] if len(node.args) > 1 else ast.Constant("r"))
            text = isinstance(mode, ast.Constant) and "b" not in mode.value
            writes = text and "r" not in mode.value
            if text and ("encoding" not in given or (writes and "newline" not in given)):
                yield node.lineno


def test_text_files_are_utf_8_with_the_same_line_ends_everywhere():
    found = [
        f"{file.relative_to(PACKAGE)}:{line}"
        for file in PACKAGE.rglob("*.py")
        for line in without_encoding(ast.parse(file.read_text(encoding="utf-8")))
    ]
    assert not found


@pytest.mark.parametrize("code", ["open(f)", "open(f, 'w', encoding='utf-8')", "f.write_text(t)", "f.read_text()"])
def test_the_scan_of_text_files_finds(code):
    assert [*without_encoding(ast.parse(code))]


@pytest.mark.parametrize(
    "name", ["model.safetensors", "a/b.json", "con_figuration.json", "tokenizer (1).json", "ü.txt"]
)
def test_portable(name):
    assert is_portable(name)
    assert made_portable(name) == name.replace("/", "_")


@pytest.mark.parametrize(
    "name",
    ["aux", "NUL.json", "con .txt", "COM1.bin", "a:b", "C:x", "a\\b", "a?.json", "dot.", "a /b", "x\n", "", "a//b"],
)
def test_not_portable(name):
    assert not is_portable(name)
    assert is_portable(made_portable(name))
