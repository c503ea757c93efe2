"""The systemd unit of a server, for `moepack serve --print-unit`."""

import re
from collections.abc import Sequence

__all__ = ["unit"]

_PLAIN = re.compile(r"[\w@+=:,./-]+", re.ASCII)

_UNIT = """\
# A service that runs `moepack serve`. Written by `moepack serve ... --print-unit`:
#     moepack serve ... --print-unit | sudo tee /etc/systemd/system/moepack.service
#     sudo systemctl daemon-reload
#     sudo systemctl enable --now moepack
# An API key belongs into /etc/moepack.env, which only root can read: MOEPACK_API_KEY=...

[Unit]
Description=moepack serves {name}
Wants=network-online.target
After=network-online.target

[Service]
Type=notify
ExecStart={command}
EnvironmentFile=-/etc/moepack.env
Environment=XDG_CACHE_HOME=%C/moepack HF_HOME=%C/moepack/huggingface
Restart=on-failure
RestartSec=5
# Loading a large model takes minutes; the unit is ready once the server listens.
TimeoutStartSec=infinity
# Running answers have {drain} s to end (--drain).
TimeoutStopSec={stop}
LimitNOFILE=65536
OOMPolicy=stop

DynamicUser=yes
CacheDirectory=moepack
RuntimeDirectory=moepack
UMask=0077
CapabilityBoundingSet=
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
{devices}
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectProc=invisible
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM

[Install]
WantedBy=multi-user.target
"""
# MemoryDenyWriteExecute is missing because torch compiles code at run time.

MARGIN = 15
"""Seconds after the drain in which connections are closed and the model is released, before the process is killed."""


def unit(command: Sequence[str], name: str, drain: float, has_gpu: bool) -> str:
    """Return the unit.

    Args:
        command: program (an absolute path) and arguments.
        name: name of the model, for the description.
        drain: seconds that running answers have to end.
        has_gpu: whether the server needs the machine's devices.
    """
    devices = "# The GPU's device files are needed: PrivateDevices stays off." if has_gpu else "PrivateDevices=yes"
    return _UNIT.format(
        command=" ".join(map(_quoted, command)),
        name=" ".join(name.replace("%", "%%").split()),
        drain=f"{drain:g}",
        stop=f"{drain + MARGIN:g}",
        devices=devices,
    )


def _quoted(argument: str) -> str:
    """Quote an argument of ExecStart, where `%` and `$` are special inside of quotes, too."""
    if _PLAIN.fullmatch(argument):
        return argument
    escaped = argument.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return '"' + escaped.replace("%", "%%").replace("$", "$$") + '"'
