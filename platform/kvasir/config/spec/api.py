"""What clients of the API may ask for, beyond what is safe to allow everybody."""

from __future__ import annotations

from kvasir.config.spec.base import Spec


class ApiSpec(Spec):
    """What the API takes from its clients."""

    trust_chat_templates: bool = False
    """Let clients send a `chat_template` of their own. A template is code: it runs in a sandbox and reaches
    nothing outside it, but it can run for ever and holds the gateway while it does."""
