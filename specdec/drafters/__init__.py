"""Drafters: where drafted tokens come from."""

from specdec.drafters.draft_vocab import ReducedModel
from specdec.drafters.dynamic_tree import Dynamic
from specdec.drafters.eagle import Eagle
from specdec.drafters.empty import Empty
from specdec.drafters.hybrid import Hybrid
from specdec.drafters.lookup import Lookup
from specdec.drafters.lookup_tree import LookupTree
from specdec.drafters.medusa import Medusa, MedusaParams
from specdec.drafters.model import Model
from specdec.drafters.ngram import Ngram, NgramLaws
from specdec.drafters.protocol import Drafter
from specdec.drafters.simulated import Simulated

__all__ = [
    'Drafter', 'Dynamic', 'Eagle', 'Empty', 'Hybrid', 'Lookup', 'LookupTree', 'Medusa', 'MedusaParams', 'Model',
    'Ngram', 'NgramLaws', 'ReducedModel', 'Simulated']
