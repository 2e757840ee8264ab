"""Engines behind the port `kvasir.ports.engine.Engine`."""
