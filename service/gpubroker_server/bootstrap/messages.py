"""What the person who starts and stops the service reads."""

import os

from gpubroker_server.settings.loading import Settings, default_data_dir


def greeting(settings: Settings, url: str | None) -> list[str]:
    """What the person who started the service reads first. `url`: of a gateway."""
    if url is None:
        return ["gpubroker broker is up; it speaks to its database and to Ray alone"]
    lines = [
        f"gpubroker listens on {url}",
        f"  address and token for this machine: {settings.data_dir / 'client.json'}",
        "  try: gpubroker gpus",
    ]
    if settings.triton.grpc_port is not None:
        lines.insert(1, f"  clients of Triton over gRPC: port {settings.triton.grpc_port}")
    if settings.data_dir != default_data_dir():
        lines.append(f"  clients find it with: export GPUBROKER_DATA_DIR={settings.data_dir}")
    if not settings.entrypoints:
        lines.append("  note: no entrypoint is allowed yet; set entrypoints, such as myteam.*:*")
    if os.geteuid() != 0:
        lines.append("  note: the scopes tasks:code and tasks:command equal a shell as this user")
    else:
        lines.append(
            "  warning: the service is root, so the scopes tasks:code and tasks:command equal a root shell; "
            "task_user keeps accidents from that, not attackers"
        )
    return lines


def farewell(settings: Settings, runs: int, stop_cluster: bool) -> str:
    """What the person who stopped the service reads last: a stop ends neither runs nor Ray."""
    if stop_cluster or settings.engine != "ray":
        return "gpubroker stopped"
    ray = "Ray" if settings.ray.address else "the local Ray"
    who = f"{runs} {'run' if runs == 1 else 'runs'} and {ray} go on" if runs else f"{ray} goes on"
    return f"gpubroker stopped; {who} and will be found again at the next start; `gpubroker down` ends them"
