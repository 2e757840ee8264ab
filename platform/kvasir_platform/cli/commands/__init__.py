"""kvasir_platform.cli.commands."""
