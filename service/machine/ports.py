"""The listening ports of a home's processes, and the protection of each."""

from collections.abc import Iterable

import psutil

from windlass.service.installation import (
    ProcessId,
    Settings,
    find_process,
    find_serving,
    is_loopback,
    link_host_of,
    same_address,
    with_descendants,
)
from windlass.service.machine.doctor import Finding
from windlass.service.machine.ray_cluster import RayCluster

_MODULE = "windlass.service"


def check_ports(settings: Settings) -> list[Finding]:
    """Lists the addresses at which this home's processes listen. One that others reach needs a protection."""
    serving = find_serving(settings.home)
    ray = [found for pid in RayCluster(settings.home).pids if (found := find_process(pid)) is not None]
    roots = [*([] if serving is None else [serving.process]), *ray]
    return [_finding(settings, host, port, role) for (host, port), role in sorted(_listening(roots).items())]


def _listening(roots: Iterable[ProcessId]) -> dict[tuple[str, int], str]:
    """Returns the role of the process that listens, by address and port."""
    found: dict[tuple[str, int], str] = {}
    for process in with_descendants(roots):
        try:
            command = psutil.Process(process.pid)
            role, connections = _role_of(command.cmdline()), command.net_connections(kind="inet")
        except psutil.Error:
            continue  # it has ended, or belongs to another user
        for connection in connections:
            if connection.status == psutil.CONN_LISTEN:
                address = (connection.laddr.ip, connection.laddr.port)
                # The supervisor holds the sockets of its servers, too.
                if found.get(address) in (None, "supervisor"):
                    found[address] = role
    return found


def _role_of(command: list[str]) -> str:
    if _MODULE in command[:-1]:
        return command[command.index(_MODULE) + 1]
    return "ray"


def _finding(settings: Settings, host: str, port: int, role: str) -> Finding:
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    is_here_only = is_loopback(host)
    what, remedy = f"port {place}", None
    if role == "cluster":
        return Finding(what=what, found="boxes call it: TLS 1.3, with a certificate of each box")
    if role == "api":
        tls = "" if settings.tls_certificate is None else ", TLS"
        if is_here_only:
            return Finding(what=what, found=f"the API: this machine only{tls}")
        if not tls and not settings.trusted_proxies:
            remedy = "API keys cross the network in clear text; set tls_certificate and tls_key (docs/access.md)"
        return Finding(what=what, found=f"the API: API keys{tls}", remedy=remedy)
    name = "Ray" if role == "ray" else f"the {role}"
    if is_here_only:
        return Finding(what=what, found=f"{name}: this machine only" + (", a token" if role == "ray" else ""))
    if (link_host := link_host_of(settings)) is not None and same_address(host, link_host):
        protected = "TLS 1.3, with a certificate of each box, and a secret of each attempt"
        return Finding(what=what, found=f"the other boxes of a job call it: {protected}")
    return Finding(
        what=what,
        found=f"{name}: other machines reach it",
        remedy="windlass opens no such port; start windlass again, and block the port in the firewall if it stays",
    )
