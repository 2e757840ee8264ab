"""kvasir_platform.apps.common."""
