"""How the gRPC door is reached: address, keys, TLS, and what connections may do."""

from __future__ import annotations

import dataclasses
import pathlib
import ssl
from collections.abc import Sequence

import grpc

from jspec.serving.auth import Tokens

PINGS_EVERY = 5_000  # milliseconds, at most as often; clients are told that ten seconds are fine
HANDSHAKE = 20_000  # milliseconds for TLS and HTTP/2 to begin


@dataclasses.dataclass(frozen=True)
class Options:
  """How the door is reached.

  Args:
    port: 0 takes a free one. tokens: bearer tokens, one of which each call must bring; none: open.
    ssl_certfile, ssl_keyfile: PEM files, the server's certificate with its chain, and its key.
    ssl_ca_certs: PEM file of those who sign clients' certificates, which are then required.
    max_message_bytes: of a request; longer ones are refused before they are read.
    max_connections: more are closed at once. keep_alive: seconds after which a connection without
      calls is closed; its client opens another one by itself.
  """

  host: str = "127.0.0.1"
  port: int = 50051
  tokens: Sequence[str] = dataclasses.field(default=(), repr=False)
  ssl_certfile: str | pathlib.Path | None = None
  ssl_keyfile: str | pathlib.Path | None = None
  ssl_ca_certs: str | pathlib.Path | None = None
  max_message_bytes: int = 4 << 20
  max_connections: int = 2048
  keep_alive: float = 600.0

  def __post_init__(self):
    Tokens(self.tokens)
    if not 0 <= self.port <= 65535:
      raise ValueError(f"port must be in 0..65535, got {self.port}")
    for name in ("max_message_bytes", "max_connections"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
    if not 1 <= self.keep_alive <= 1e6:
      raise ValueError(f"keep_alive must be in 1..1e6 seconds, got {self.keep_alive}")
    if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
      raise ValueError("ssl_certfile and ssl_keyfile go together, got "
                       f"{self.ssl_certfile} and {self.ssl_keyfile}")
    if self.ssl_ca_certs is not None and self.ssl_certfile is None:
      raise ValueError("ssl_ca_certs needs ssl_certfile and ssl_keyfile: clients show their "
                       "certificates over TLS only")
    self.credentials()

  def channel(self) -> list[tuple[str, int]]:
    """What gRPC is told, in its own words (grpc/impl/channel_arg_names.h)."""
    return [
        ("grpc.so_reuseport", 0),  # else two servers could share a port, each unaware
        # A client that vanished without a word is noticed after both times, and its requests end.
        ("grpc.keepalive_time_ms", 60_000), ("grpc.keepalive_timeout_ms", 20_000),
        # Clients may ping, streams or not; those that ping more often are sent away.
        ("grpc.keepalive_permit_without_calls", 1), ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", PINGS_EVERY),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE),
        ("grpc.max_connection_idle_ms", round(1000 * self.keep_alive)),
        ("grpc.max_allowed_incoming_connections", self.max_connections),
        ("grpc.max_receive_message_length", self.max_message_bytes)]

  def credentials(self) -> grpc.ServerCredentials | None:
    """What the files hold, None without any; ValueError where they cannot be used."""
    if self.ssl_certfile is None or self.ssl_keyfile is None:
      return None
    certificate = _read("ssl_certfile", self.ssl_certfile)
    key = _read("ssl_keyfile", self.ssl_keyfile)
    # gRPC would accept anything here and refuse every client later.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
      context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
      raise ValueError(f"ssl_certfile={self.ssl_certfile} and ssl_keyfile={self.ssl_keyfile} must "
                       "be a certificate and its key, in PEM without a passphrase: "
                       f"{error}") from None
    if self.ssl_ca_certs is None:
      return grpc.ssl_server_credentials([(key, certificate)])
    signers = _read("ssl_ca_certs", self.ssl_ca_certs)
    try:
      context.load_verify_locations(self.ssl_ca_certs)
    except ssl.SSLError as error:
      raise ValueError(f"ssl_ca_certs={self.ssl_ca_certs} must hold certificates in PEM: "
                       f"{error}") from None
    return grpc.ssl_server_credentials([(key, certificate)], signers, require_client_auth=True)


def _read(name: str, path: str | pathlib.Path) -> bytes:
  try:
    return pathlib.Path(path).read_bytes()
  except OSError as error:
    raise ValueError(f"{name}={path} cannot be read: {error.strerror}") from None
