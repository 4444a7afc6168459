"""From text to training samples: readers and tokenizers -> indexed files -> sample index and blend -> datasets.

Notable: a sample is a pure function of (files, sequence length, seed, position), so nothing here has a state to save:
a resumed run, another number of ranks or another number of loader workers sees the same samples in the same order.
"""
