"""The options with which a command names certificates for a gateway over HTTPS."""

from __future__ import annotations

import argparse


def add_tls_options(parser: argparse._ActionsContainer) -> None:
    """Add --cacert, --cert and --key."""
    parser.add_argument(
        "--cacert", metavar="FILE", help="its certificate authorities (PEM), in place of the system's"
    )
    parser.add_argument("--cert", metavar="FILE", help="your certificate (PEM), if it requires one")
    parser.add_argument("--key", metavar="FILE", help="its key; by default in the same file")
