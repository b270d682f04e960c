"""The demo of a server reads streams as clients should."""

from __future__ import annotations

import io
import pathlib
import runpy

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts/serve_demo.py"


def test_comments_in_a_stream_are_no_events(monkeypatch):
  stream = b': queued\n\ndata: {"id": "a"}\n\n: queued\n\ndata: {"id": "b"}\n\ndata: [DONE]\n\n'
  monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: io.BytesIO(stream))
  events = runpy.run_path(str(SCRIPT))["events"]
  assert list(events("http://localhost", {})) == [{"id": "a"}, {"id": "b"}]
