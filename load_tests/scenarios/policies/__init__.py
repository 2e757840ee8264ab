"""Kvasir's routing policy compared with those of other systems, in virtual time."""
