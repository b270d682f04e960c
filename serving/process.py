"""A `jspec serve` in a process of its own, for scripts and tests."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

READY = "ready: "


class ServerProcess:
  """Starts a server and waits until it is ready. As a context manager it leaves none behind.

  Args:
    flags: of `jspec serve`. Ports of 0 let several run at once.
    command: what to run with these flags.
    timeout: seconds to become ready, compilation included.

  Raises:
    RuntimeError: the server ended or was too slow; its own words are on stderr.
  """

  def __init__(self, flags: Sequence[str], *, timeout: float = 900.0,
               command: Sequence[str] = (sys.executable, "-m", "jspec", "serve"),
               environment: Mapping[str, str] | None = None):
    self._process = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True,
                                     env=environment)
    self.url = self.grpc = ""  # "http://127.0.0.1:8000" and "127.0.0.1:50051"
    watchdog = threading.Timer(timeout, self._process.kill)
    watchdog.start()
    try:
      self._find_addresses()
    except BaseException:
      self._process.kill()
      self._process.wait()
      raise
    finally:
      watchdog.cancel()

  def _find_addresses(self) -> None:
    assert self._process.stdout is not None
    for line in self._process.stdout:
      if line.startswith(READY):
        for address in line.removeprefix(READY).split(",")[0].split():
          if address.startswith("http"):
            self.url = address
          else:
            self.grpc = address.partition("://")[2]
        return
    raise RuntimeError(f"the server ended with exit code {self._process.wait()} before it was "
                       "ready")

  @property
  def pid(self) -> int:
    return self._process.pid

  def signal(self, number: signal.Signals) -> None:
    self._process.send_signal(number)

  def wait(self, timeout: float = 60.0) -> int:
    """The exit code; TimeoutExpired if the process goes on."""
    return self._process.wait(timeout)

  def stop(self, timeout: float = 60.0) -> int:
    """Asks it to drain; the exit code."""
    self.signal(signal.SIGTERM)
    return self.wait(timeout)

  def __enter__(self) -> ServerProcess:
    return self

  def __exit__(self, *_: object) -> None:
    if self._process.poll() is None:
      self._process.kill()
    self._process.wait()
    assert self._process.stdout is not None
    self._process.stdout.close()
