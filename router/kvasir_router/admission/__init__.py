"""Which requests begin, which wait and which are refused."""

from kvasir_router.admission.admission import Admission
from kvasir_router.admission.contract import BrownoutRules, BrownoutStep, Rules, Ticket

__all__ = ["Admission", "BrownoutRules", "BrownoutStep", "Rules", "Ticket"]
