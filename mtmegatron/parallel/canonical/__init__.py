"""Canonical numerics: the same bits in every layout.

Notable: a sum of floats depends on its order, a sum of integers does not. So every sum that a layout cuts in parts (over ranks, micro-batches, tokens,
split dimensions) is made of integers: its addends are rounded to a fixed grid (`exact.py`) and added in any order, by any collective. What is rounded
is made by products of fixed shapes, blocks that no layout cuts, and by row-wise functions in double precision. No peer has this.
"""
