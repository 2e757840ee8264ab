"""Fits the performance model to a live deployment: which loads are measured, and the fit of coefficients.

The driver that sends the loads is in `kvasir_platform.cli.calibrate`; nothing here does I/O but `files`.
"""
