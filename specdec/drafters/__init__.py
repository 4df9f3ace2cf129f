"""Drafters: where drafted tokens come from."""

from specdec.drafters.empty import Empty
from specdec.drafters.lookup import Lookup
from specdec.drafters.model import Model
from specdec.drafters.protocol import Drafter
from specdec.drafters.simulated import Simulated

__all__ = ['Drafter', 'Empty', 'Lookup', 'Model', 'Simulated']
