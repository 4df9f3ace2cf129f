"""Accept rules by name."""

from specdec.accept.block import Block
from specdec.accept.coupled import Coupled
from specdec.accept.multiround import Multiround
from specdec.accept.rejection import Rejection
from specdec.accept.typical import Typical

RULES = {rule.name: rule for rule in (Rejection(), Block(), Multiround(), Coupled(), Typical())}
