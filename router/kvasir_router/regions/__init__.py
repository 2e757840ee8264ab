"""Decisions among cells: which cell serves a request, what tenants may use in each, and where a new revision
goes next.

A cell is a complete deployment in one region. Cells exchange a report once a second, and each decides for the
requests that reach it. Everything here is pure: times are arguments, and messages are sent by the caller.
"""
