"""Tensor parallelism: single layers are cut over ranks, which compute slices of their outputs.

Words of this folder.

column   a linear layer whose outputs are cut: each rank has rows of its weight
row      a linear layer whose inputs are cut: each rank has columns of its weight, and the ranks'
         outputs are summed
slice    what a rank holds of a cut parameter
part     one of several matrices that are fused in a weight (query, key and value)
rule     which parameters are cut, and how
plan     all cuts of a model, before anything has changed
head     of an attention; the output layer of a language model is called its output layer
"""
