"""What a newcomer meets first, on whichever system."""

from __future__ import annotations

import asyncio
import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap

import pytest

from jspec.bench import report
from serving import server

ROOT = pathlib.Path(__file__).parent.parent
# Windows has none of these.
POSIX_MODULES = ("resource", "fcntl", "pwd", "grp", "termios", "tty", "pty", "readline", "syslog")
POSIX_NAMES = {
  "os": ("getloadavg", "sched_getaffinity", "geteuid", "getuid", "getgid", "fork", "setsid", "nice",
         "killpg", "getpgid", "uname", "sysconf", "statvfs", "chown", "mkfifo", "O_DIRECTORY"),
  "signal": ("SIGKILL", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGPIPE", "SIGCHLD",
             "alarm", "setitimer", "pthread_sigmask"),
  "socket": ("SO_REUSEPORT", "AF_UNIX", "socketpair", "send_fds"),
}
# All modules are imported twice: at first with what they import from elsewhere, which is not
# ours to judge, then themselves alone, without what is not everywhere.
IMPORTS = textwrap.dedent("""
    import importlib, pathlib, sys
    modules, names = {modules!r}, {names!r}
    ours = [".".join(path.with_suffix("").parts).removesuffix(".__init__")
            for folder in ("jspec", "serving", "training")
            for path in sorted(pathlib.Path(folder).rglob("*.py")) if path.stem != "__main__"
            and "configs" not in path.parts]
    for name in ours:
      importlib.import_module(name)
    for name in [name for name in sys.modules if name.partition(".")[0] in
                 ("jspec", "serving", "training") and not name.endswith("_pb2")]:
      del sys.modules[name]
    for name in modules:
      sys.modules[name] = None
    for module, attributes in names.items():
      for attribute in attributes:
        vars(importlib.import_module(module)).pop(attribute, None)
    for name in ours:
      importlib.import_module(name)
    print(len(ours))
""")


def test_all_modules_can_be_imported_without_what_only_posix_has():
  done = subprocess.run(
      [sys.executable, "-c", IMPORTS.format(modules=POSIX_MODULES, names=POSIX_NAMES)], cwd=ROOT,
      capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
  assert done.returncode == 0, done.stderr
  assert int(done.stdout) > 100


def test_no_module_uses_what_only_posix_has_unasked():
  """getattr with a default, or an import where it is caught, is how to ask."""
  uses = re.compile("|".join(rf"\b{module}\.(?:{'|'.join(names)})\b"
                             for module, names in POSIX_NAMES.items()))
  found = [f"{path}: {hit.group()}" for folder in ("jspec", "serving", "training")
           for path in sorted((ROOT / folder).rglob("*.py"))
           for hit in uses.finditer(path.read_text(encoding="utf-8"))]
  assert not found


def test_a_benchmark_does_without_load_and_memory_where_the_system_does_not_tell(monkeypatch):
  assert report.peak_memory_mib() > 1 and report.environment(["jspec"])["machine"]["load_average"]
  monkeypatch.delattr(os, "getloadavg")
  monkeypatch.setitem(sys.modules, "resource", None)
  assert report.peak_memory_mib() is None
  assert report.environment(["jspec"])["machine"]["load_average"] is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_hears_signals_where_asyncio_takes_none(number):
  before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}

  async def main():
    def refuse(*_):
      raise NotImplementedError

    asyncio.get_running_loop().add_signal_handler = refuse
    stop = server.on_signal()
    assert not stop.is_set()
    signal.raise_signal(number)
    await asyncio.wait_for(stop.wait(), 30)

  try:
    asyncio.run(main())
  finally:
    for n, handler in before.items():
      signal.signal(n, handler)


def test_nobody_is_told_to_install_another_project():
  """PyPI's jspec is not this one."""
  kinds = (".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".tf", "Makefile", "Dockerfile")
  files = [path for folder in ("jspec", "serving", "training", "scripts")
           for path in (ROOT / folder).rglob("*")] + list(ROOT.glob("*"))
  files = [path for path in files if path.is_file() and path.name.endswith(kinds)]
  wrong = re.compile(r"\binstall\s+(?:-\S+\s+)*[\\\"']*jspec(?![\w/-])")
  for text in ('pip install "jspec[serve]"', "uv pip install -U jspec\n", "pip install jspec==1"):
    assert wrong.search(text)
  assert not wrong.search("pip install '.[serve]' in jspec's folder")
  assert len(files) > 100
  assert not [f"{path}: {hit.group()}" for path in files
              for hit in wrong.finditer(path.read_text(encoding="utf-8"))]
