"""Accept rules by name."""

from specdec.accept.coupled import Coupled
from specdec.accept.rejection import Rejection

RULES = {rule.name: rule for rule in (Rejection(), Coupled())}
