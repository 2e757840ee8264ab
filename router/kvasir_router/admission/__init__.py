"""Which requests begin, which wait and which are refused."""

from kvasir_router.admission.admission import Admission
from kvasir_router.admission.contract import UNLIMITED, BrownoutRules, BrownoutStep, Rules, Ticket

__all__ = ["UNLIMITED", "Admission", "BrownoutRules", "BrownoutStep", "Rules", "Ticket"]
