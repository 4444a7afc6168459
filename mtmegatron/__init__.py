"""MT-MegatronLM: hybrid-parallel training of transformers, with a proof for each layout that parallel equals serial."""

__version__ = "0.1.0"
