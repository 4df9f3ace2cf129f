"""Drafters: where drafted tokens come from."""

from specdec.drafters.empty import Empty
from specdec.drafters.hybrid import Hybrid
from specdec.drafters.lookup import Lookup
from specdec.drafters.lookup_tree import LookupTree
from specdec.drafters.medusa import Medusa, MedusaParams
from specdec.drafters.model import Model
from specdec.drafters.protocol import Drafter
from specdec.drafters.simulated import Simulated

__all__ = ['Drafter', 'Empty', 'Hybrid', 'Lookup', 'LookupTree', 'Medusa', 'MedusaParams', 'Model', 'Simulated']
