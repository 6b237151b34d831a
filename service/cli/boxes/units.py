"""Units for systemd: they start a head or a box when its machine starts, and again when it is killed."""

import sys
from pathlib import Path

_UNIT = """\
# Put this into ~/.config/systemd/user/windlass.service, then:
#   systemctl --user daemon-reload && systemctl --user enable --now windlass
#   loginctl enable-linger    # so that it runs without a login
[Unit]
Description=windlass in {home_text}
StartLimitIntervalSec=0

[Service]
Type=exec
Environment={environment}
ExecStart={python} -m windlass.service supervisor
# Only the supervisor: Ray and the jobs outlive it, and the next start takes them up again.
KillMode=process
Restart=always
RestartSec=5
TimeoutStopSec=30
UMask=0077

[Install]
WantedBy=default.target
"""


def unit_of(home: Path, *, cluster_host: str | None, cluster_port: int | None, port: int | None) -> str:
    """Returns a systemd user unit that serves a home, with the options that `windlass up` was given."""
    given = {
        "WINDLASS_HOME": str(home),
        "WINDLASS_PORT": port,
        "WINDLASS_CLUSTER_HOST": cluster_host,
        "WINDLASS_CLUSTER_PORT": cluster_port,
    }
    environment = " ".join(_quoted(f"{name}={value}") for name, value in given.items() if value is not None)
    return _UNIT.format(home_text=str(home).replace("%", "%%"), environment=environment, python=_quoted(sys.executable))


def _quoted(text: str) -> str:
    """Quotes a word for systemd, which expands % and reads backslashes."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'
