"""Decides which requests start, which wait and which are refused."""

from kvasir_router.admission.admission import Admission
from kvasir_router.admission.contract import (
    UNLIMITED,
    AdmissionRules,
    AdmissionTicket,
    BrownoutRules,
    BrownoutStep,
)

__all__ = ["UNLIMITED", "Admission", "AdmissionRules", "AdmissionTicket", "BrownoutRules", "BrownoutStep"]
