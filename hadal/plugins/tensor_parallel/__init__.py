"""Tensor parallelism: layers are cut over ranks, which compute slices of their outputs.

Words of this folder.

column   a linear layer whose outputs are cut: each rank has rows of its weight
row      a linear layer whose inputs are cut: each rank has columns, and outputs are summed
slice    the part of a cut parameter that a rank holds
part     one of several matrices that are fused in a weight (query, key and value)
rule     which parameters are cut, and how
plan     all cuts of a model, made before anything changes
head     an attention head; a language model's head is called its output layer
"""
