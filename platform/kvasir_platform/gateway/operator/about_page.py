"""`GET /`: what this server is, and how to call it; and which version it has.

The page needs no key, so it names no model where keys are required.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib import metadata

import msgspec

from kvasir_platform.gateway.catalog.models import ModelTable
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.openai.schema.answers import VersionResponse
from kvasir_platform.gateway.tenants.caller import Caller

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:46rem;margin:3rem auto;padding:0 1rem}"
    "pre{overflow:auto}"
)
_DIGEST = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest())
_HEADERS = (
    b"content-type: text/html; charset=utf-8\r\n"
    b"content-security-policy: default-src 'none'; style-src 'sha256-%b'; base-uri 'none'; "
    b"form-action 'none'; frame-ancestors 'none'\r\n"
    b"referrer-policy: no-referrer\r\n"
    b"cache-control: no-cache\r\n"
) % _DIGEST
_PAGE = """\
<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>Kvasir</title><style>{style}</style></head>
<body>
<h1>Kvasir</h1>
<p>This server runs large language models. It speaks OpenAI's API, Anthropic's Messages API and
vLLM's additions to them.</p>
<pre>curl {url}/v1/{path}{key} \\
  -H 'Content-Type: application/json' \\
  -d '{body}'</pre>
<p>With OpenAI's client: <code>OpenAI(base_url="{url}/v1", api_key="{shown}")</code></p>
<p>{models}</p>
<ul>
<li><a href="/v1/models">/v1/models</a>: the models</li>
<li><a href="/openapi.json">/openapi.json</a>: every endpoint, for people and code generators</li>
<li><a href="/health/ready">/health/ready</a>: whether it serves</li>
<li><a href="/console">/console</a>: for operators</li>
</ul>
</body>
</html>
"""


class AboutPages:
    """The page, and the version. `keyed`: API keys are required; `secure`: the server speaks HTTPS."""

    def __init__(self, models: ModelTable, *, keyed: bool, secure: bool) -> None:
        self._models = models
        self._keyed = keyed
        self._scheme = "https" if secure else "http"
        self._version = msgspec.json.encode(VersionResponse(metadata.version("kvasir")))

    def about(self, exchange: Exchange) -> None:
        """GET /."""
        host = exchange.request.headers.get(b"host", b"localhost").decode("latin-1")
        first = self._models.first
        name = "MODEL" if self._keyed else first.name
        if self._keyed or first.capabilities.generates:
            path, text = "chat/completions", {"model": name, "messages": [{"role": "user", "content": "Hi"}]}
        else:
            path, text = "embeddings", {"model": name, "input": "Hi"}
        listed = ", ".join(f"<code>{html.escape(each)}</code>" for each in self._models.listed())
        page = _PAGE.format(
            style=_STYLE,
            url=html.escape(f"{self._scheme}://{host}"),
            path=path,
            key=" \\\n  -H 'Authorization: Bearer KEY'" if self._keyed else "",
            body=html.escape(json.dumps(text), quote=False),
            shown="KEY" if self._keyed else "-",
            models="An API key is required." if self._keyed else f"It serves {listed}.",
        )
        exchange.file(200, page.encode(), _HEADERS)

    def version(self, caller: Caller, exchange: Exchange) -> None:
        """GET /version, in vLLM's format: the version of Kvasir."""
        exchange.respond(200, self._version)
