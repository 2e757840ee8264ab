"""Ports: the Protocols between decisions and I/O. Each third-party library is behind one of them."""
