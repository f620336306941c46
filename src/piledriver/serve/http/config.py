"""Settings of the HTTP server."""

from __future__ import annotations

from dataclasses import dataclass

from piledriver.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where and how the server listens."""

    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 for every interface."""
    port: int = 8000
    """Port to listen at; 0 for any free one."""
    model_name: str = ""
    """Name of the model for clients; the folder's name if empty."""
    api_key: str = ""
    """Key that every request must send as `Authorization: Bearer KEY`; none if empty."""
    max_body_bytes: int = 4 << 20
    """Largest request body; a larger one is answered with 413."""
    max_queue: int = 1024
    """Most requests that are being served or wait; more are answered with 429."""
    ignore_unknown_fields: bool = False
    """Ignore fields that this server does not know instead of rejecting the request."""
    chat_template: str = ""
    """Jinja file to use instead of the model folder's chat template."""
    drain_seconds: int = 30
    """Time for running requests to finish after SIGTERM or Ctrl-C."""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port is {self.port}", fix="give a port from 1 to 65535, or 0 for any free one")
        for name in ("max_body_bytes", "max_queue"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}", fix="give a whole number from 1 up")
        if self.drain_seconds < 0:
            raise ConfigError(f"drain_seconds is {self.drain_seconds}", fix="give 0 or more seconds")
